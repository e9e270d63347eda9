"""What the site needs beyond its pages: the generated reference, and a check that no page loads anything external."""

import ast
import collections
import dataclasses
import html.parser
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import to_markdown

ROOT = Path(__file__).parents[2]
_LOADED = {"script": ("src",), "link": ("href",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src",)}
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # relations of a link that no browser follows by itself
_EXTERNAL = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)
_STYLE = re.compile(r"(?:@import\s+|url\()\s*['\"]?(?:https?:)?//[^)'\"\s]+", re.IGNORECASE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made from the code."""
    from mkdocs.structure.files import File

    pages = {
        "reference/cli.md": command_line(),
        "reference/configuration.md": configuration(),
        "benchmarks.md": benchmarks(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "tutorials/emails.md": to_markdown(ROOT / "notebooks" / "email_tour.ipynb"),
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

    from coowned.cli.main import app

    command = typer.main.get_command(app)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="coowned")


def configuration() -> str:
    """The reference of the configuration: the commented example, and the fields of every model and selector."""
    from coowned.selection.registry import CLASSES, selector_class
    from coowned.training.config import example
    from coowned.training.models.registry import MODELS, model_class

    kinds = [("[model] kind", {kind: model_class(kind) for kind in MODELS})]
    kinds += [("[selection] selector", {word: selector_class(word) for word in CLASSES})]
    text = f"# Configuration\n\n`coowned train --example` prints this file.\n\n```toml\n{example()}```\n"
    for title, classes in kinds:
        text += f"\n## `{title}`\n\n| word | keys |\n|---|---|\n"
        text += "".join(f"| `{word}` | {_keys(kind)} |\n" for word, kind in classes.items())
    return text


def _keys(kind: Any) -> str:
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return ", ".join(f"`{one.name}`" if one.default is missing else f"`{one.name} = {one.default!r}`" for one in fields)


def benchmarks() -> str:
    """What each benchmark measures, from its first line."""
    text = (
        "# Benchmarks\n\n`make bench` runs them all, `make bench ONLY=selection` one. Some read data in "
        "`../shared/data`. Speed is never a test: a benchmark prints ratios against a peer or a limit, measured in one "
        "process. Stored measurements are in [Choose a selector](choosing-a-selector.md), [A cluster](spark.md) and "
        "[Results](results.md); each names the command that made it.\n\n| benchmark | measures |\n|---|---|\n"
    )
    for file in sorted((ROOT / "benchmarks").glob("*.py")):
        described = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        if described and "python -m benchmarks." in described:
            text += f"| `{file.stem}` | {described.splitlines()[0]} |\n"
    return text


def api() -> dict[str, str]:
    """A page for every stage, with its public names."""
    import coowned

    stages: dict[str, list[str]] = collections.defaultdict(list)
    for name, home in coowned._HOME.items():
        stages[home.split(".")[1]].append(f"{home}.{name}")
    stages["torch"] = ["coowned.torch.model.TorchModel"]
    stages["torch"] += [f"coowned.torch.runs.{name}" for name in ("fit", "train", "batches", "load_trained")]
    return {
        stage: f"# {stage.capitalize()}\n\n" + "".join(f"::: {name}\n\n" for name in names)
        for stage, names in stages.items()
    }


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
