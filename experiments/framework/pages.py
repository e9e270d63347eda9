"""Puts pictures, tables and verdicts of stored rows into the documentation; rows are the only source of its numbers."""

import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import altair as alt

from coowned.progress import counted
from experiments.framework.graphs import FILES
from experiments.framework.rows import Points, read_rows
from experiments.framework.runner import SCALES, load, names, shares
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
        (root / PICTURES / f"{name}.svg").unlink(missing_ok=True)  # rows may have been withdrawn
        for picture, figure in figures(name).items():
            save(figure, root / PICTURES / f"{picture}.svg")
    save(draw_verdicts(all_verdicts()), root / PICTURES / "verdicts.svg")


def figures(name: str) -> dict[str, alt.TopLevelMixin]:
    """The pictures of an experiment by the name of their file; none where it has no rows."""
    module, rows = load(name), read_rows(name)
    if not rows:
        return {}
    return {name: module.draw(rows)} | (module.pictures(rows) if hasattr(module, "pictures") else {})


def sections() -> Iterator[tuple[Path, str, str]]:
    """(page, name of the section, its text) of everything that is made from rows, and the table of data."""
    yield RESULTS_PAGE, "data", data_table()
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
    diverged = sum(row.get("diverged") or 0 for row in rows)
    lost = f"; {counted(diverged, 'model')} diverged and count nowhere" if diverged else ""
    lines = [textwrap.fill(f"Run: {run}{cost}{lost}.", 116) if run else "", ""]
    if rows:
        question, _, source = first_line(module).partition(" (")
        lines += [f"![{question}]({PICTURES.name}/{name}.svg)", "", f"({source}", ""]
    for verdict in claims_of(name):
        lines += [_item(verdict, _evidence(name, module, verdict)), ""]
    return "\n".join(lines).strip()


def data_table() -> str:
    """Which experiment needs which real data, in Markdown."""
    users = {data: [f"`{name}`" for name in names() if data in getattr(load(name), "DATA", ())] for data in FILES}
    lines = ["| data | file | needed by |", "|---|---|---|"]
    lines += [f"| {data} | `{file}` | {', '.join(users[data])} |" for data, file in FILES.items()]
    rest = [f"`{name}`" for name in names() if not getattr(load(name), "DATA", ())]
    return "\n".join([*lines, f"| none | | {', '.join(rest)} |"])


def _evidence(name: str, module: ModuleType, verdict: Verdict) -> str:
    """What a verdict rests on, what the paper used, and how to get the rows."""
    if verdict.verdict == OPEN:
        scale = "paper" if module.GRID["paper"] else "small"
        return f"Command: `python -m experiments {name} --scale {scale}`."
    rows, points = read_rows(name), Points(module.GRID)
    if verdict.num_examples is not None:
        rows = [row for row in rows if row["num_examples"] == verdict.num_examples]
    run = [scale for scale in SCALES[1:] if points.rows_of(module.GRID[scale], rows)]
    seeds = f"seeds {verdict.seeds}" if verdict.seeds else "nothing random beside fixed seeds"
    paper = f" The paper: {module.PAPER}." if hasattr(module, "PAPER") else ""
    commands = " and ".join(f"`python -m experiments {name} --scale {scale}`" for scale in run)
    return f"Evidence: {counted(len(rows), 'row')}, {seeds}; {commands}.{paper}"


def _item(verdict: Verdict, evidence: str) -> str:
    """A verdict as an item of a list: the claim, what was found, why, and the evidence, each on lines of its own."""
    smaller = f", with {verdict.smaller}" if verdict.smaller else ""
    parts = [f"*{verdict.claim}* **{verdict.verdict.capitalize()}**{smaller}."]
    parts += [f"Found: {verdict.found.rstrip('. ')}."] if verdict.found else []
    parts += [verdict.why] if verdict.why else []
    parts += [evidence]
    wrapped = ("\n".join(textwrap.wrap(part, 112, break_long_words=False, break_on_hyphens=False)) for part in parts)
    return "- " + textwrap.indent("\n\n".join(wrapped), "    ").lstrip()


def claims_of(name: str) -> list[Verdict]:
    """The verdicts of an experiment; all open where it has no rows."""
    module, rows = load(name), read_rows(name)
    return module.claims(rows) if rows else [Verdict(claim=claim, verdict=OPEN, found="") for claim in module.CLAIMS]


def all_verdicts() -> list[Verdict]:
    """The paper's claims first, then ours."""
    return sorted((verdict for name in names() for verdict in claims_of(name)), key=lambda v: "(ours" in v.claim)


def first_line(module: ModuleType) -> str:
    """What an experiment asks."""
    return (module.__doc__ or "").strip().splitlines()[0].rstrip(".")


def draw_verdicts(verdicts: list[Verdict]) -> alt.LayerChart:
    """Every claim with its verdict; "smaller" where the rows are smaller than the paper's."""
    rows = [
        {
            "order": number,
            "claim": v.claim.rstrip("."),
            "verdict": v.verdict,
            "words": v.verdict + (", smaller" if v.smaller else ""),
        }
        for number, v in enumerate(verdicts)
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("order:O", axis=None))
    colour = alt.Color(
        "verdict:N", scale=alt.Scale(domain=list(COLOURS), range=list(COLOURS.values())), title=None, legend=None
    )
    dots = base.mark_circle(size=110, opacity=1).encode(x=alt.value(8), color=colour)
    words = base.mark_text(align="left", fontSize=11, fontWeight="bold").encode(
        x=alt.value(20), text="words:N", color=colour
    )
    text = base.mark_text(align="left", fontSize=11).encode(x=alt.value(155), text="claim:N")
    return (dots + words + text).properties(width=690, height=alt.Step(19)).configure_view(stroke=None)


def save(figure: alt.TopLevelMixin, file: Path) -> None:
    """An SVG on white, readable on dark pages too."""
    figure.properties(background="white").save(str(file))  # type: ignore[attr-defined]
