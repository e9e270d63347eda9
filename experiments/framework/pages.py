"""Puts pictures, tables and verdicts of stored rows into the documentation; rows are the only source of its numbers."""

import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import altair as alt

from experiments.framework.rows import read_rows
from experiments.framework.runner import load, names, shares
from experiments.framework.verdicts import FAILS, HOLDS, OPEN, UNRESOLVED, Verdict

ROOT = Path(__file__).parents[2]
RESULTS_PAGE = Path("docs/results.md")
PICTURES = Path("docs/pictures")
COLOURS = {HOLDS: "#2a7f4f", FAILS: "#b5382a", UNRESOLVED: "#d9a21b", OPEN: "#b8b8b8"}


def render(root: Path = ROOT) -> None:
    """Writes every section between its markers, and every picture."""
    (root / PICTURES).mkdir(parents=True, exist_ok=True)
    for page, name, text in sections():
        file = root / page
        file.write_text(replace_section(file.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    for name in names():
        if rows := read_rows(name):
            save(load(name).draw(rows), root / PICTURES / f"{name}.svg")
    save(draw_verdicts(all_verdicts()), root / PICTURES / "verdicts.svg")


def sections() -> Iterator[tuple[Path, str, str]]:
    """(page, name of the section, its text) of everything that is made from rows."""
    for name in names():
        module, rows = load(name), read_rows(name)
        if hasattr(module, "table") and rows:
            yield Path(module.PAGE), name, module.table(rows)
        yield RESULTS_PAGE, f"{name} verdicts", verdict_section(name, module)


def replace_section(text: str, name: str, content: str) -> str:
    """The text with what is between `<!-- begin name -->` and `<!-- end name -->` replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def verdict_section(name: str, module: ModuleType) -> str:
    """Share of each grid that was run, picture, and verdicts, in Markdown."""
    rows = read_rows(name)
    run = "; ".join(f"`{scale}` {done} of {total} points" for scale, (done, total) in shares(name).items())
    seconds = [row["processor_seconds"] for row in rows if row.get("processor_seconds")]
    cost = (
        f"; a point took {float(f'{statistics.median(seconds):.2g}'):g} processor seconds (median)" if seconds else ""
    )
    lines = [f"Run: {run}{cost}." if run else "", ""]
    if rows:
        question, _, source = first_line(module).partition(" (")
        lines += [f"![{question}]({PICTURES.name}/{name}.svg)", "", f"({source}", ""]
    for verdict in claims_of(name):
        lines += [_item(verdict), ""]
    return "\n".join(lines).strip()


def _item(verdict: Verdict) -> str:
    """A verdict as an item of a list: the claim, what was found, and why, each on lines of its own."""
    parts = [f"*{verdict.claim}* **{verdict.verdict.capitalize()}.**"]
    parts += [f"Found: {verdict.found.rstrip('. ')}."] if verdict.found else []
    parts += [verdict.why] if verdict.why else []
    wrapped = ("\n".join(textwrap.wrap(part, 112, break_long_words=False, break_on_hyphens=False)) for part in parts)
    return "- " + textwrap.indent("\n\n".join(wrapped), "    ").lstrip()


def claims_of(name: str) -> list[Verdict]:
    """The verdicts of an experiment; all open where it has no rows."""
    module, rows = load(name), read_rows(name)
    return module.claims(rows) if rows else [Verdict(claim=claim, verdict=OPEN, found="") for claim in module.CLAIMS]


def all_verdicts() -> list[Verdict]:
    """The paper's claims first, then ours."""
    return sorted((verdict for name in names() for verdict in claims_of(name)), key=lambda v: "(ours)" in v.claim)


def first_line(module: ModuleType) -> str:
    """What an experiment asks."""
    return (module.__doc__ or "").strip().splitlines()[0].rstrip(".")


def draw_verdicts(verdicts: list[Verdict]) -> alt.LayerChart:
    """Every claim of the paper that was judged, with a colour for its verdict."""
    rows = [{"order": number, "claim": v.claim.rstrip("."), "verdict": v.verdict} for number, v in enumerate(verdicts)]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("order:O", axis=None))
    colour = alt.Color(
        "verdict:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), title=None, legend=None
    )
    dots = base.mark_circle(size=110, opacity=1).encode(x=alt.value(8), color=colour)
    words = base.mark_text(align="left", fontSize=11, fontWeight="bold").encode(
        x=alt.value(20), text="verdict:N", color=colour
    )
    text = base.mark_text(align="left", fontSize=11).encode(x=alt.value(105), text="claim:N")
    return (dots + words + text).properties(width=640, height=alt.Step(19)).configure_view(stroke=None)


def save(figure: alt.TopLevelMixin, file: Path) -> None:
    """An SVG on white, readable on dark pages too."""
    figure.properties(background="white").save(str(file))  # type: ignore[attr-defined]
