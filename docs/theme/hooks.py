"""What the site needs beyond its pages: the generated reference, and a check that no page loads anything external."""

import ast
import collections
import dataclasses
import html.parser
import json
import re
import sys
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import to_markdown

ROOT = Path(__file__).parents[2]
_LOADED = {"script": ("src",), "link": ("href",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src",)}
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # relations of a link that no browser follows by itself
_EXTERNAL = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)
_STYLE = re.compile(r"(?:@import\s+|url\()\s*['\"]?(?:https?:)?//[^)'\"\s]+", re.IGNORECASE)

_MEANINGS = {  # of the configuration's keys; those of [data] that the command line also has are described there
    "data.path": "The file or folder, relative to the configuration, or `sqlite:///file` with `query`. Required.",
    "data.shards": "A folder that `coowned select --shards` wrote, in place of the data and of [selection].",
    "data.splits": "Shares of train, validation and test, by a hash of the id. The default depends on the model.",
    "privacy.epsilon": 'The target; `"none"` trains without a guarantee. Give this or `noise_multiplier`.',
    "privacy.noise_multiplier": "The noise in units of the clip norm, instead of `epsilon`.",
    "privacy.delta": "The probability that the guarantee may fail. Far below 1 / users; required with a guarantee.",
    "privacy.adjacency": 'The adjacency that `epsilon` refers to: `"zero-out"` or `"replace"`. Both are reported.',
    "privacy.simulated_batch_size": "Calibrates the noise for another batch size (simulated epsilon).",
    "privacy.public": "The data are public: no guarantee, and the model may start a private run.",
    "privacy.allow_large_delta": "Allows a delta of 0.1 or more.",
    "mechanism.kind": "`dp-sgd`, `dp-mf` (a schedule), `cyclic-dp-mf` (groups in turn) or `random-allocation`.",
    "mechanism.batch_size": "The expected batch size, which is public: gradients are divided by it.",
    "mechanism.iterations": "The number of steps.",
    "mechanism.clip_norm": "The largest gradient norm of one copy. Required with a guarantee.",
    "mechanism.num_bands": "dp-mf: at most `min_separation`, the default. cyclic-dp-mf: the default is `num_groups`.",
    "mechanism.min_separation": "dp-mf: steps between two participations of a user. Default: the largest feasible.",
    "optimizer.learning_rate": "The peak learning rate.",
    "optimizer.name": "An optax optimizer that needs only a learning rate.",
    "optimizer.warmup": "Fraction of the steps over which the learning rate rises linearly.",
    "optimizer.decay": 'How the learning rate falls afterwards: `"constant"`, `"linear"` or `"cosine"`.',
    "optimizer.final_rate": "The fraction of the learning rate that remains at the end of the decay.",
    "optimizer.weight_decay": "Decoupled weight decay, as in AdamW.",
    "optimizer.momentum": "For `sgd` only.",
    "optimizer.average": "The released parameters: the last (`none`), the `tail` mean or an `exponential` average.",
    "optimizer.average_window": "Fraction of the steps that are averaged.",
    "optimizer.scale_gradients": "Scale-then-privatize. Not for linear models or dp-mf.",
    "run.seed": "For test runs only: noise and coins are then known, and there is no guarantee.",
    "run.checkpoint_every": "Steps between checkpoints. The default is a twentieth of the run.",
    "run.devices": "The number of devices that share a step.",
    "run.baseline": "Also train without privacy, for comparison. Not covered by the guarantee, never exported.",
    "report.name": "The title of the report.",
    "report.purpose": "What the model is for.",
    "report.owner": "Who is responsible for it.",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made from the code."""
    from mkdocs.structure.files import File

    pages = {
        "reference/cli.md": command_line(),
        "reference/configuration.md": configuration(),
        "benchmarks.md": benchmarks(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "tutorials/emails.md": to_markdown(ROOT / "notebooks" / "email_tour.ipynb"),
        "tutorials/mail-encoder.md": to_markdown(ROOT / "notebooks" / "mail_encoder.ipynb"),
        "tutorials/own-model.md": to_markdown(ROOT / "notebooks" / "own_model.ipynb"),
        **{f"reference/{stage}.md": text for stage, text in api().items()},
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_post_build(config: Any) -> None:
    """Fails the build where a page would make the browser ask another machine for something."""
    from mkdocs.exceptions import PluginError

    for page in sorted(Path(config.site_dir).rglob("*")):
        if page.suffix in (".html", ".css") and (found := external(page.read_text(encoding="utf-8"), page.suffix)):
            raise PluginError(f"{page}: loads {found[0]}")


def command_line() -> str:
    """The reference of the command line, from the help of every verb."""
    import typer.main
    from typer.cli import get_docs_for_click

    from coowned.cli.main import commands

    command = typer.main.get_command(commands())
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="coowned")


def configuration() -> str:
    """The configuration reference: a commented example, and the keys of every section, model and selector."""
    from coowned.models.registry import MODELS, model_class
    from coowned.runs import config
    from coowned.runs.settings import SECTIONS
    from coowned.selection.registry import CLASSES, selector_class

    text = (
        "# Configuration\n\n`coowned train CONFIG.toml -o RUN` reads this file. `[run]` and `[report]` are optional.\n"
    )
    text += f"`coowned train --example` prints a commented example:\n\n```toml\n{config.example()}```\n"
    for name in ("data", "privacy", "mechanism", "optimizer", "run", "report"):
        section = SECTIONS[name]
        text += f"\n## `[{name}]`\n\n{_first_line(section)}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        text += "".join(_key_row(name, field, section) for field in dataclasses.fields(section))
    kinds = [("model", "kind", {kind: model_class(kind) for kind in MODELS})]
    kinds += [("selection", "selector", {word: selector_class(word) for word in CLASSES})]
    for name, key, classes in kinds:
        text += f"\n## `[{name}]`\n\nThe keys depend on `{key}`. Keys in bold are required.\n\n"
        text += f"| `{key}` | purpose | keys |\n|---|---|---|\n"
        rows = ((word, _first_line(kind), _keys(kind)) for word, kind in classes.items())
        text += "".join(f"| `{word}` | {purpose} | {keys} |\n" for word, purpose, keys in rows)
    text += (
        "\n`[selection]` also has `seed = 0`, which is public, and in place of a selector `path`, an S that `coowned "
        "select --splits` chose before. Batch size, steps and separation of a schedule are in "
    )
    return text + "`[mechanism]`.\n"


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _key_row(name: str, field: dataclasses.Field[Any], section: type) -> str:
    """Key, type, default and meaning of one key, as a row of a table."""
    notes = getattr(typing.get_type_hints(section, include_extras=True)[field.name], "__metadata__", ())
    meaning = notes[0].help if notes else _MEANINGS.get(f"{name}.{field.name}", "")
    plain = typing.get_type_hints(section)[field.name]
    shown = (plain.__name__ if isinstance(plain, type) else str(plain)).replace(" | None", "").replace("|", "or")
    default = "required" if field.default is dataclasses.MISSING else f"`{_toml(field.default)}`"
    return f"| `{field.name}` | {shown} | {'' if field.default is None else default} | {meaning} |\n"


def _keys(kind: Any) -> str:
    """Required keys in bold, then the others with their defaults."""
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = dataclasses.MISSING
    required = [f"**`{one.name}`**" for one in fields if one.default is missing and one.default_factory is missing]
    optional = [f"`{one.name}`" for one in fields if one.default is None or one.default_factory is not missing]
    usual = [f"`{one.name} = {_toml(one.default)}`" for one in fields if one.default not in (missing, None)]
    return ", ".join(required + usual + optional)


def _toml(value: Any) -> str:
    return json.dumps(value)  # the same for the text, numbers, booleans and lists of our defaults


def benchmarks() -> str:
    """What each benchmark measures, from its first line."""
    text = (
        "# Benchmarks\n\n`make bench` runs all of them, `make bench ONLY=selection` runs one. Some read "
        "`../shared/data`. Speed is never a test: a benchmark prints ratios against a peer or a limit, measured "
        "in one process.\n\n## Recorded figures\n\nEach page names the command and the machine.\n\n"
        "| figures | page |\n|---|---|\n"
        "| size of S, proven bound and time of every selector on three graphs "
        "| [Choose a selector](choosing-a-selector.md#measured-on-three-real-graphs) |\n"
        "| time and memory to partition 8 million examples | [Choose a selector](choosing-a-selector.md#details) |\n"
        "| rounds, shuffled bytes and time on Spark | [A cluster](spark.md#measurements) |\n"
        "| a PyTorch step against Opacus | [PyTorch](pytorch.md#how-gradients-are-computed) |\n"
        "| processor seconds of every experiment | [Results](results.md) |\n\n"
        "## What each benchmark measures\n\n| benchmark | measures |\n|---|---|\n"
    )
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        described = ast.get_docstring(module)
        if described and any(getattr(entry, "name", "") == "run" for entry in module.body):
            text += f"| `{file.stem}` | {described.splitlines()[0]} |\n"
    return text


def api() -> dict[str, str]:
    """A page for every stage, with its public names."""
    import coowned

    stages: dict[str, list[str]] = collections.defaultdict(list)
    for name, home in coowned._homes().items():
        stages[home.split(".")[1]].append(f"{home}.{name}")
    for stage in ("torch", "spark"):
        stages[stage] = _imported(ROOT / "src" / "coowned" / stage / "__init__.py")
    stages["audit"] = ["coowned.audit.run_audit.audit_run", "coowned.audit.run_audit.audit_plan"]
    stages["audit"] += ["coowned.audit.run_audit.RunAudit", "coowned.audit.canaries.audit_with_canaries"]
    stages["testing"] = [f"coowned.testing.selector_checks.check_{kind}" for kind in ("selector", "schedule_selector")]
    stages["testing"] += ["coowned.testing.strategies.attribution_graphs"]
    titles = {"torch": "PyTorch (`coowned.torch`)", "spark": "Spark (`coowned.spark`)"}
    return {
        stage: f"# {titles.get(stage, stage.capitalize())}\n\n" + "".join(f"::: {name}\n\n" for name in names)
        for stage, names in stages.items()
    }


def _imported(file: Path) -> list[str]:
    """The names that a package's `__init__.py` exports, with the modules they come from."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (exported,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{name.name}" for node in imports for name in node.names if name.name in exported]


def external(text: str, suffix: str = ".html") -> list[str]:
    """What a page or style sheet loads from another machine; links that a reader may follow do not count."""
    if suffix == ".css":
        return _STYLE.findall(text)
    reader = _Reader()
    reader.feed(text)
    return reader.found


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and set((values.get("rel") or "").split()) <= _NOT_LOADED:
            return
        self.found += [values[name] or "" for name in _LOADED.get(tag, ()) if _EXTERNAL.match(values.get(name) or "")]
        self.found += _STYLE.findall(values.get("style") or "")
