"""The data of a run's page, gathered from the run's folder."""

import dataclasses
import datetime
import importlib.metadata
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned import codec
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import Statement, rounded_down, rounded_up
from coowned.accounting.terms import OTHER_ADJACENCY
from coowned.errors import CoownedError, InputError
from coowned.report import graph_figures, run_figures
from coowned.report.figures import Figure, Mark, percent, shown
from coowned.report.summary import Quality, next_steps, qualities, sentences
from coowned.runs.records import GraphSummary
from coowned.runs.settings import ReportSettings
from coowned.runs.stored_run import StoredRun

if TYPE_CHECKING:
    from coowned.audit.bob import Measured

_PACKAGES = ("coowned", "jax", "numpy", "numba", "optax", "polars", "scipy")
_NO_GRAPH = (
    "a fixed-graph guarantee does not hide graph statistics, so a release has only those that the claim rests on, "
    "unless all are requested"
)
_WORLDS = {"zero-out": "all their texts are blank", "replace": "all their texts say something else"}

TableRow = tuple[str, ...]


class Tile(NamedTuple):
    """A count shown under the claim."""

    name: str
    value: str
    mark: Mark


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPage:
    """The values of run.html.jinja.

    Attributes:
      claim: None if no epsilon may be stated.
      about, date: what the configuration says about the run, and when the page was written.
      qualities: how good the model is, said first; for a release only what the guarantee covers.
      verdict: whether the model is any good, from content; empty for a release, as is next_steps.
      noise: what the signal-to-noise ratio means, from public numbers; "" without noise.
      covered: figures of a covered evaluation: name, value, interval; empty without a claim for them.
      cost_left_out: why that section is empty; "" if it is not.
      figures: by name, in the order of the page.
    """

    run: StoredRun
    claim: PrivacyGuarantee | None
    about: ReportSettings
    date: str
    release: bool
    with_graph: bool
    statement: Statement
    tiles: tuple[Tile, ...]
    qualities: tuple[Quality, ...]
    verdict: tuple[str, ...]
    next_steps: tuple[str, ...]
    noise: str
    covered: tuple[TableRow, ...]
    adjacencies: tuple[TableRow, ...]
    kept: tuple[TableRow, ...]
    cost_left_out: str
    figures: dict[str, Figure]
    measured: "tuple[Measured, ...]"
    bob_rows: tuple[TableRow, ...]
    config: str
    versions: str

    @property
    def is_weak(self) -> bool:
        return bool(self.claim) and self.statement.protection[self.claim.adjacency] == "little"

    @property
    def stated_graph_statistics(self) -> str:
        """The graph statistics of a release, needed to check the claim and to see whom it leaves out.

        Nor would leaving it out hide much: batch size and sampling probability give the size of the training set.
        """
        digests = "the digests of the graph and the selection"
        if not self.claim:
            return f"Of the graph, this page shows {digests}."
        tiers = self.claim.certificate.tiers
        opted_out = ", of users who opted out" if tiers and tiers.num_opted_out else ""
        return (
            "Of the graph, this page shows what the claim rests on: the numbers of copies and examples in the training "
            f"set, of users excluded from protection{opted_out} and of copies without a protected user, and {digests}. "
            "The exported model states them too."
        )

    def named(self, *prefixes: str) -> list[Figure]:
        return [figure for name, figure in self.figures.items() if name.startswith(prefixes)]


def gather(
    run: StoredRun,
    also: Sequence[StoredRun],
    measured: "Sequence[Measured]",
    *,
    release: bool,
    with_graph: bool,
) -> RunPage:
    """Returns the content of a run's page; what cannot be shown is replaced by the reason.

    Guarantees:
      - With release, metrics and evaluations are not even opened.   (test_release_opens_no_private_file)
      - Runs on other data, or that predict something else, are refused.
        (test_runs_of_different_tasks_are_not_compared)
    """
    for other in also:
        _check_same_task(run, other)
    claim = run.claim if run.claims else None
    kept, cost_left_out, of_graph = _graph_section(run) if with_graph else ((), _NO_GRAPH, [])
    figures = [run_figures.bob(one) for one in measured]
    if with_graph and run.certificate.copies_per_user:
        figures.append(graph_figures.levels(run))
    figures += [*of_graph, *([] if release else _utility(run, also))]
    if claim:
        promised = [run_figures.tiers(run), run_figures.membership(run), run_figures.delta_curve(run)]
        figures += filter(None, promised)
    figures += _audits(run, release=release)
    verdict = () if release else tuple(sentences(run.evaluations(), run.metrics() if run.guarantee else None))
    return RunPage(
        run=run,
        claim=claim,
        about=run.config(run.path).report if run.config_text else ReportSettings(),
        date=datetime.date.today().isoformat(),
        release=release,
        with_graph=with_graph,
        statement=run.guarantee.statement_parts(model=run.record.model)
        if run.guarantee
        else Statement(headline=run.statement(), sentences=(run.statement(),)),
        tiles=_tiles(run, with_graph=with_graph),
        qualities=tuple(qualities(run, release=release)),
        verdict=verdict,
        next_steps=() if release else _next_steps(run, verdict),
        noise=run.signal_to_noise.verdict() if run.signal_to_noise else "",
        covered=covered_rows(run),
        adjacencies=_adjacencies(claim) if claim else (),
        kept=kept,
        cost_left_out=cost_left_out,
        figures={figure.name: figure for figure in figures},
        measured=tuple(measured),
        bob_rows=tuple(_bob_row(one) for one in measured),
        config=releasable_config(run.config_text) if release else run.config_text.rstrip("\n"),
        versions=", ".join(
            [
                *(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES),
                f"Python {sys.version_info.major}.{sys.version_info.minor}",
            ]
        ),
    )


def _next_steps(run: StoredRun, verdict: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(step for step in next_steps(run) if step not in verdict)


def _check_same_task(run: StoredRun, other: StoredRun) -> None:
    tasks = [_task(one) for one in (run, other)]
    for name, value in tasks[0].items():
        if tasks[1][name] != value:
            raise InputError(
                f"{other.path}: a different task from {run.path} ({name}: {tasks[1][name]!r}, not {value!r}); "
                "accuracies of different tasks cannot be compared"
            )


def _task(run: StoredRun) -> dict[str, Any]:
    """Returns a description of the run's data and predictions, for any model."""
    config = tomllib.loads(run.config_text)
    data, model = config.get("data", {}), config.get("model", {})
    return {
        "[data] path": Path(str(data.get("path"))).name,
        "[data] query": data.get("query"),
        "[data] splits": data.get("splits"),
        "[model] label": model.get("label", model.get("kind")),
    }


def _graph_section(run: StoredRun) -> tuple[tuple[TableRow, ...], str, list[Figure]]:
    """Returns what was kept, or the reason why that is left out, and the figures of the graph."""
    try:
        summary = run.graph_summary()
    except CoownedError as error:
        return (), str(error), []
    size = [] if run.certificate.origin.upper_bound is None else [graph_figures.size_against_bound(run)]
    return _kept(run, summary), "", [*size, *graph_figures.before_and_after(run, summary)]


def _kept(run: StoredRun, summary: GraphSummary) -> tuple[TableRow, ...]:
    certificate = run.certificate
    distinct, left = certificate.num_distinct, summary.num_users_left
    return (
        ("examples to choose from (train split)", shown(summary.num_examples), "100%"),
        ("distinct examples selected", shown(distinct), percent(distinct, summary.num_examples)),
        ("further copies of them", shown(certificate.size - distinct), "–"),
        ("users of the train split", shown(summary.num_users), "100%"),
        ("users with any example left", shown(left), percent(left, summary.num_users)),
        ("users per example, before", f"{summary.mean_users_per_example:.2f}", "–"),
        ("users per copy, after", f"{summary.mean_users_per_copy:.2f}", "–"),
    )


def _utility(run: StoredRun, also: Sequence[StoredRun]) -> list[Figure]:
    metrics = run.metrics()
    figures = [run_figures.utility_by_users(run, run.evaluations()), run_figures.utility_by_epsilon(run, also)]
    curves = [] if metrics is None else run_figures.training_curves(run, metrics)
    return [*filter(None, figures), *curves]


def _audits(run: StoredRun, *, release: bool) -> list[Figure]:
    """Returns the figures of audits: of the mechanism, and with canaries, which learned from the data."""
    found = run.audit()
    if found is None:
        return []
    audits = [run_figures.audit(run, found.epsilon_lower_bound, verdict=found.verdict)]
    if not release and found.canaries is not None:
        audits.append(run_figures.audit(run, found.canaries.get("epsilon_lower_bound")))
    return [figure for figure in audits if figure is not None]


def releasable_config(text: str) -> str:
    """Removes comments, which may say anything, and the folders of files from a configuration.

    >>> print(releasable_config('# reached 0.93\\n[data]\\npath = "/home/bob/mail.mbox"\\nsplits = [1, 0, 0]'))
    [data]
    path = "mail.mbox"
    splits = [1, 0, 0]
    """
    sections = tomllib.loads(text)
    sections |= {name: _without_folders(values) for name, values in sections.items() if name != "report"}
    return codec.encode_toml(sections).rstrip("\n")


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and "/" in value else value


def _tiles(run: StoredRun, *, with_graph: bool) -> tuple[Tile, ...]:
    """Returns three or four counts for the tiles under the claim; empty if there is nothing to show."""
    certificate = run.certificate
    left = certificate.num_users - (certificate.copies_per_user[0] if certificate.copies_per_user else 0)
    people = (
        Tile("people in the data", shown(certificate.num_users), Mark.GRAPH),
        Tile("of them in the training set", percent(left, certificate.num_users), Mark.GRAPH),
        Tile("people excluded from protection", shown(certificate.num_unprotected_users), Mark.GRAPH),
    )
    if not run.claims:
        return (*people, Tile("copies in the training set", shown(certificate.size), Mark.GRAPH)) if with_graph else ()
    noise = Tile("noise multiplier", run.claim.shown_noise_multiplier, Mark.COVERED)
    if with_graph:
        return (*people, noise)
    bound = Tile("copies of one person, at most", shown(run.claim.contribution_bound), Mark.COVERED)
    return (noise, bound, Tile("training steps", shown(run.mechanism.iterations), Mark.COVERED))


def covered_rows(run: StoredRun) -> tuple[TableRow, ...]:
    """Returns name, value and interval of every figure that the guarantee covers; empty if there are none.

    Guarantees:
      - They are the figures of the run's covered evaluation, shown with a claim only.
        (test_covered_figures_are_shown)
    """
    found = run.covered
    if found is None or not run.claims:
        return ()
    rows: list[TableRow] = []
    if found.accuracy is not None:
        rows.append(("accuracy", f"{found.accuracy:.1%}", f"{found.accuracy_low:.1%} to {found.accuracy_high:.1%}"))
    if found.loss is not None:
        name = f"mean loss, each example's at most {found.loss_bound:g}"
        rows.append((name, f"{found.loss:.4g}", f"{found.loss_low:.4g} to {found.loss_high:.4g}"))
    for true, row in zip(found.classes or (), found.confusion or (), strict=False):
        for predicted, share in zip(found.classes or (), row, strict=True):
            rows.append((f"{true} taken for {predicted}", f"{share:.1%}", f"noise ±{1.96 * found.noise_share:.1%}"))
    return tuple(rows)


def _adjacencies(claim: PrivacyGuarantee) -> tuple[TableRow, ...]:
    epsilons = {claim.adjacency: claim.epsilon, OTHER_ADJACENCY[claim.adjacency]: claim.other_epsilon}
    return (
        *(
            (world, f"{name} (claimed)" if name == claim.adjacency else name, rounded_up(epsilons[name]))
            for name, world in _WORLDS.items()
        ),
        ("one example alone differs", claim.adjacency, rounded_up(claim.example_epsilon)),
    )


def _bob_row(one: "Measured") -> TableRow:
    return (
        one.title.removeprefix("attributed to "),
        f"{one.copies_with_bob} of {one.size}",
        one.shown_epsilon,
        rounded_down(one.leak.epsilon_lower_bound),
        "not refuted" if one.claim_holds else "not true for Bob",
    )
