"""Self-contained HTML pages: one file, no network access, written atomically."""

import base64
import functools
import hashlib
import importlib.resources
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coowned import __version__
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.accounting.terms import OTHER_ADJACENCY
from coowned.errors import InputError, require
from coowned.files import whole_files
from coowned.progress import counted
from coowned.report import graph_figures
from coowned.report.figures import Figure, Mark, bundle, charts_json, shown
from coowned.report.run_page import gather
from coowned.runs.stored_run import StoredRun

if TYPE_CHECKING:
    from coowned.accounting.choices import Plan
    from coowned.audit.bob import Measured

REPORT, RELEASE = "report.html", "report-release.html"


def write_report(
    run_folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    release: bool = False,
    graph_statistics: bool = False,
    also: Sequence[str | os.PathLike[str]] = (),
    bob: "Sequence[Measured]" = (),
) -> Path:
    """Writes the page of a finished run and returns its path.

    Guarantees:
      - The file needs nothing else: no request leaves the page.   (test_self_contained, test_in_a_browser)
      - Text from a file or a run's name cannot become markup.   (test_text_is_escaped)
      - Every figure carries one of three marks.   (test_every_figure_has_a_mark)
      - With release, nothing that was computed from content is anywhere in the file.   (test_release_leaks_nothing)
      - Nor, unless requested, any figure of the graph: levels, counts of protected users, other choices.
        (test_release_has_no_figures_of_the_graph)
      - The counts of the graph that the claim rests on are shown and named.   (test_release_names_the_counts_it_shows)
      - How good the model is stands beside epsilon, marked; in a release only if it is covered.
        (test_quality_stands_beside_epsilon)
      - A run without a guarantee shows that instead of every epsilon.   (test_no_guarantee_shows_no_epsilon)
      - It appears whole or not at all; only its owner can read one that is not for release.   (test_whole_or_none)

    Cost: a few seconds, and the time to read the run's data and to plan with other contribution bounds.

    Args:
      run_folder: written by `coowned train`.
      output: by default report.html in that folder, or report-release.html.
      release: leave out what was computed from private content, and statistics of the graph that are not part of the
        claim.
      graph_statistics: keep the latter in a release; for a graph that may be known. Any other page has them.
      also: other finished runs to compare accuracies with; not in a release.
      bob: the Bob test, shown first; not in a release.
    """
    require("train", "a report")
    if release and (also or bob):
        raise InputError("a release leaves out comparisons with other runs; remove --compare or --release")
    with_graph = graph_statistics or not release
    run = StoredRun.open(run_folder)
    others = [StoredRun.open(path) for path in also]
    page = gather(run, others, bob, release=release, with_graph=with_graph)
    marks = {Mark.COVERED: run.claims, Mark.GRAPH: True, Mark.PRIVATE: not release}
    path = Path(run_folder) / (RELEASE if release else REPORT) if output is None else Path(output)
    text = _render("run", page.figures.values(), [mark for mark, used in marks.items() if used], page=page)
    _write(path, text, mode=0o644 if release else 0o600)
    return path


def write_plan(plan: "Plan", output: str | os.PathLike[str]) -> Path:
    """Writes the page of a plan: the same charts of the trade-off, with the best choice marked.

    Guarantees:
      - It holds statistics of the graph alone, with a mark for every choice of the plan.   (test_plan_page)
    """
    require("train", "a report")
    rows = [graph_figures.plan_row(choice) for choice in plan.choices]
    target = next((choice for choice in plan.choices if choice.best), plan.choices[0]).target
    figures = graph_figures.trade_off(
        [row for row in rows if row["batch_size"] == target.batch_size],
        chosen="the best predicted signal-to-noise",
        mean_users=target.population_mean_users_per_example,
    )
    cells = ("selector", "contribution_bound", "settings_text", "size_text", "distinct_text", "mean_text",
             "multiplier_text", "noise_text", "error_text", "signal_text", "other_text")  # fmt: skip
    text = _render(
        "plan",
        figures,
        [Mark.GRAPH],
        target=target,
        rows=[[*(shown(row[key]) for key in cells), "best" if row["chosen"] else row["note"]] for row in rows],
        best=next((row for row in rows if row["chosen"]), None),
        advice=[*plan.notes(), *plan.advice],
    )
    _write(Path(output), text, mode=0o644)
    return Path(output)


def _render(name: str, figures: Iterable[Figure], marks: Sequence[Mark], **values: Any) -> str:
    figures = list(figures)
    script = f"{bundle()}\n{_resource('page.js')}"
    if "</script" in script.lower():
        raise InputError("the chart bundle cannot be embedded in a page; install another version of vl-convert-python")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser itself refuses any request, and any script but this one.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template(f"{name}.html.jinja")
        .render(
            figures=figures,
            marks=marks,
            policy=policy,
            style=_resource("page.css"),
            script=script,
            charts=charts_json(figures),
            version=__version__,
            **values,
        )
    )


@functools.cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(up=rounded_up, down=rounded_down, shown=shown, counted=counted, cells=_cells)
    environment.globals.update(Mark=Mark, OTHER_ADJACENCY=OTHER_ADJACENCY)
    return environment


def _cells(figure: Figure) -> list[list[str]]:
    return [[shown(row.get(key)) for key, _ in figure.columns] for row in figure.rows]


def _resource(name: str) -> str:
    return importlib.resources.files("coowned.report").joinpath(name).read_text(encoding="utf-8")


def _write(path: Path, text: str, *, mode: int) -> None:
    with whole_files(path) as (temporary,):
        temporary.touch(mode=mode)
        temporary.write_text(text, encoding="utf-8")
