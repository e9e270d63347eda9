"""The graph that a run selected from, read again from the run's data, and what other choices would have given."""

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coowned.accounting.planning import Plan, default_bounds, plan
from coowned.accounting.signal_to_noise import DEFAULT_PARAMETERS
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import histogram
from coowned.certificate import ContributionCertificate
from coowned.content.splits import split_examples
from coowned.errors import CoownedError, InputError
from coowned.runs.stored_run import StoredRun
from coowned.selection.priced import Priced
from coowned.selection.selection_files import select_once

_SECONDS_FOR_THE_BOUND = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectedGraph:
    """The train split's graph and what was selected from it. Nothing shown of it depends on ids, keys or content.

    Guarantees:
      - Every count equals a plain recount.   (test_counts_equal_a_plain_recount)
    """

    graph: AttributionGraph
    copies: npt.NDArray[np.int64]  # (num_examples,)
    certificate: ContributionCertificate

    @property
    def copies_per_user(self) -> npt.NDArray[np.int64]:
        """(num_users,) copies that contain each user."""
        weight = np.repeat(self.copies, self.graph.users_per_example)  # (num_pairs,)
        return np.bincount(self.graph.users, weights=weight, minlength=self.graph.num_users).astype(np.int64)

    @property
    def num_users_left(self) -> int:
        return int(np.count_nonzero(self.copies_per_user))

    @property
    def mean_users_per_example(self) -> float:
        return self.graph.num_pairs / max(1, self.graph.num_examples)

    @property
    def mean_users_per_copy(self) -> float:
        return float(self.copies @ self.graph.users_per_example.astype(np.int64)) / max(1, self.certificate.size)

    def users_per_example(self) -> list[tuple[int, int, int]]:
        """Classes of users per example: where each begins, examples before selection, copies after it."""
        per_example = self.graph.users_per_example
        return _before_and_after(per_example, np.repeat(per_example, self.copies))

    def examples_per_user(self) -> list[tuple[int, int, int]]:
        """Classes of examples per user: where each begins, users before selection, users after it."""
        return _before_and_after(self.graph.examples_per_user, self.copies_per_user)

    def upper_bound(self) -> tuple[int, str] | None:
        """A proven bound on the size of any S under the same rules, and what proved it; None for a schedule."""
        certificate = self.certificate
        if certificate.upper_bound is not None:
            return certificate.upper_bound, str(certificate.selector.get("name", "given"))
        if certificate.min_separation is not None or certificate.contribution_bound == 0:
            return None
        prover = Priced(
            contribution_bound=certificate.contribution_bound,
            allow_duplicates=certificate.size > certificate.num_distinct,
            unattributed="keep" if certificate.num_copies_without_users else "drop",
            time_limit=_SECONDS_FOR_THE_BOUND,
        )
        bound = select_once(self.graph, prover).upper_bound
        return None if bound is None else (bound, Priced.name)


def read_selected_graph(run: StoredRun) -> SelectedGraph:
    """Reads the run's data again; raises InputError if they cannot be found or have changed."""
    reason = "the run's data are not where config.toml says"
    if run.config(run.path).data.path is None:
        raise InputError("the run's data were in memory, and their graph is not in its folder")
    for folder in (run.path.parent, run.path, Path.cwd()):  # config.toml does not say what its paths are relative to
        try:
            config = run.config(folder)
            whole = config.source().read().graph
        except (CoownedError, OSError):
            continue
        graph = whole.subgraph(split_examples(whole, config.splits)["train"])
        if graph.digest == run.certificate.graph_digest:
            copies = np.asarray(run.selection(graph).copies, dtype=np.int64)
            return SelectedGraph(graph=graph, copies=copies, certificate=run.certificate)
        reason = "the data that config.toml names are not the ones that were trained on"
    raise InputError(reason)


def plan_of_run(run: StoredRun, graph: AttributionGraph) -> Plan:
    """The plan for other bounds and selectors on the run's graph, at the run's own privacy target."""
    guarantee, mechanism = run.guarantee, run.mechanism
    if guarantee is None or mechanism.batch_size is None:
        raise InputError(f"without a privacy target there is no noise to compare ({run.reason})")
    bound = run.certificate.selector.get("contribution_bound", run.certificate.contribution_bound)
    return plan(
        graph,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        adjacency=guarantee.adjacency,
        batch_size=mechanism.batch_size,
        iterations=mechanism.iterations,
        contribution_bounds=sorted({*default_bounds(graph), bound}),
        selectors=["greedy", "greedy-with-duplicates", *(["priced"] if run.selector == "priced" else [])],
        mechanism="poisson",
        num_parameters=run.record.num_parameters or DEFAULT_PARAMETERS,
        seed=run.certificate.seed or 0,
    )


def _before_and_after(before: npt.NDArray, after: npt.NDArray) -> list[tuple[int, int, int]]:
    counts = [dict(histogram(values)) for values in (before, after)]
    begins = sorted(counts[0].keys() | counts[1].keys())
    return [(begin, counts[0].get(begin, 0), counts[1].get(begin, 0)) for begin in begins]
