"""One self-contained page: everything in one file, nothing from a network, nothing half-written."""

import base64
import hashlib
import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path

from coowned import __version__
from coowned.accounting.guarantee import OTHER_ADJACENCY, UNIT
from coowned.accounting.planning import Plan
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.report import charts, graph_figures
from coowned.report.contents import Mark, read_run
from coowned.report.elements import Html, element, join, table
from coowned.report.figures import Figure, charts_json, chip, shown
from coowned.report.sections import Section, hero, make_sections, tiles

REPORT, RELEASE = "report.html", "report-release.html"
_MEANING = {
    Mark.COVERED: "follows from what the guarantee covers; showing it costs no privacy.",
    Mark.GRAPH: "counted from who is part of what, which a fixed-graph guarantee does not hide. Publish it only where "
    "the graph may be known.",
    Mark.PRIVATE: "computed from the texts themselves without noise. Keep it to those who may see the data.",
}


def write_report(
    run_folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    release: bool = False,
    graph_statistics: bool = False,
    also: Sequence[str | os.PathLike[str]] = (),
    more: Sequence[Section] = (),
) -> Path:
    """Writes the page of a finished run and returns where it is.

    Guarantees:
      - The file needs nothing else: no request leaves the page.   (test_self_contained, test_in_a_browser)
      - Every figure carries one of three marks.   (test_every_figure_has_a_mark)
      - With release, nothing that was computed from content is anywhere in the file.   (test_release_leaks_nothing)
      - Nor, unless asked for, any figure of the graph: levels, counts of users, other choices.
        (test_release_has_no_graph_statistics)
      - A run without a guarantee shows that in place of every epsilon.   (test_no_guarantee_shows_no_epsilon)
      - It appears whole or not at all; only its owner can read one that is not for release.   (test_whole_or_none)

    Cost: a few seconds, most of it for the noise that other contribution bounds would need.

    Args:
      run_folder: made by `coowned train`.
      output: by default report.html in that folder, or report-release.html.
      release: leave out what was computed from private content, and statistics of the graph.
      graph_statistics: keep the latter in a release; for a graph that may be known. Any other page has them.
      also: other finished runs to compare accuracies with; not in a release.
      more: sections of one's own, shown first; not in a release.
    """
    if release and (also or more):
        raise InputError("other runs and further sections show what a release leaves out; leave them or release out")
    with_graph = graph_statistics or not release
    run = read_run(run_folder, release=release, with_statistics=with_graph)
    others = [read_run(path, release=False, with_statistics=False) for path in also]
    sections = [*more, *make_sections(run, others, release=release, with_graph=with_graph)]
    text = _page(
        title=f"Privacy report: {run.headline}",
        kicker="Privacy report" + (" for release" if release else ""),
        heading="What this model can reveal about one person",
        top=join(hero(run), tiles(run, with_graph=with_graph)),
        sections=sections,
        footer=f"{run.headline[0].upper()}{run.headline[1:]}. Written by coowned {__version__}."
        + ("" if with_graph else " Without graph statistics beyond those of the statement."),
        marks=[
            mark
            for mark, used in ((Mark.COVERED, run.claims), (Mark.GRAPH, with_graph), (Mark.PRIVATE, not release))
            if used
        ],
    )
    place = Path(run_folder) / (RELEASE if release else REPORT) if output is None else Path(output)
    _write(place, text, mode=0o644 if release else 0o600)
    return place


def write_plan(
    plan: Plan,
    output: str | os.PathLike[str],
    *,
    epsilon: float,
    delta: float,
    adjacency: str,
    batch_size: int,
    iterations: int,
) -> Path:
    """Writes the page of a plan: the same pictures of the trade-off, the least noise marked.

    Guarantees:
      - It holds statistics of the graph alone, with a mark for every choice of the plan.   (test_plan_page)
    """
    rows = graph_figures.plan_rows(plan.choices)
    mean = plan.choices[0].population_mean_users_per_example if plan.choices else 0.0
    terms = f"unit: {UNIT}; the bound on the axis; delta {delta:.12g}; adjacency: {adjacency}"
    figures = graph_figures.trade_off(rows, chosen="least noise", population_mean=mean)
    every = table(
        ["selector", "bound", "copies", "distinct", "users per copy", "noise multiplier", "effective noise",
         f"epsilon, {OTHER_ADJACENCY[adjacency]}", ""],
        [
            [row["selector"], shown(row["contribution_bound"]), row["size_text"], row["distinct_text"],
             row["mean_text"], row["multiplier_text"], row["noise_text"], row["other_text"],
             "least noise" if row["chosen"] else row["note"]]
            for row in rows
        ],
        caption=f"Every choice for epsilon {epsilon:g}, {adjacency}, and its epsilon under the other adjacency (unit: "
        f"{UNIT}; the row’s bound; delta {delta:.12g})",
    )  # fmt: skip
    body = join(
        element("div", [figure.html() for figure in figures], class_="figures three"),
        element("div", every, chip(Mark.GRAPH), class_="facts"),
        [element("p", line, class_="warning") for line in plan.advice],
    )
    best = next((row for row in rows if row["chosen"]), None)
    lead = (
        "No choice can be used; see the reasons below."
        if best is None
        else f"The least noise comes from {best['selector']} with contribution bound {best['contribution_bound']:,}: "
        f"{best['size_text']} copies, effective noise multiplier {best['noise_text']}."
    )
    text = _page(
        title="Plan of a private training",
        kicker="Plan",
        heading="What each contribution bound would cost",
        top=element(
            "div",
            element("p", lead, class_="lead"),
            element(
                "p",
                f"For a target of epsilon {epsilon:g} ({terms}), batches of {batch_size:,}, {iterations:,} steps. A "
                "plan promises nothing; it is made from the graph and public numbers, so choosing from it costs "
                "no privacy.",
            ),
            class_="hero",
        ),
        sections=[Section(name="trade-off", title="The trade-off", body=body, figures=tuple(figures))],
        footer=f"Written by coowned {__version__}.",
        marks=[Mark.GRAPH],
    )
    _write(Path(output), text, mode=0o644)
    return Path(output)


def _page(
    *, title: str, kicker: str, heading: str, top: Html, sections: Sequence[Section], footer: str, marks: list[Mark]
) -> str:
    figures: list[Figure] = [figure for section in sections for figure in section.figures]
    resources = importlib.resources.files("coowned.report")
    style = resources.joinpath("page.css").read_text(encoding="utf-8")
    script = f"{charts.bundle()}\n{resources.joinpath('page.js').read_text(encoding='utf-8')}"
    if "</script" in script.lower():
        raise InputError("the chart bundle cannot stand inside a page; install another vl-convert-python")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser itself refuses any request, and any script but this one.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = [
        element("li", element("a", section.short or section.title, href=f"#{section.name}")) for section in sections
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the content", href="#content", class_="skip"),
        element("header", element("p", kicker, class_="kicker"), element("h1", heading), class_="top"),
        element("nav", element("ul", links), aria_label="Sections") if len(links) > 1 else None,
        element(
            "main",
            element("section", element("h2", "In short", class_="quiet"), top, id="short"),
            [element("section", element("h2", section.title), section.body, id=section.name) for section in sections],
            id="content",
        ),
        element(
            "footer",
            element("h2", "What the marks mean"),
            element("dl", [[element("dt", chip(mark)), element("dd", _MEANING[mark])] for mark in marks]),
            element("p", footer),
        ),
        element("noscript", element("p", "Pictures need a script; the rows behind each are in its table.")),
        element("script", Html(charts_json(figures)), type="application/json", id="charts"),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _write(place: Path, text: str, *, mode: int) -> None:
    with whole_files(place) as (temporary,):
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
