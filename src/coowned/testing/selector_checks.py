"""Checks that every selector must pass, including third-party ones.

    check_selector(lambda bound: Greedy(contribution_bound=bound), maximal=True)
    check_schedule_selector(lambda size, number, separation: GreedyMinSeparation(
        batch_size=size, iterations=number, min_separation=separation))

The checks recount independently and raise AssertionError with the graph, the setting and the problem.
"""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from coowned.attribution.graph import AttributionGraph
from coowned.errors import InfeasibleScheduleError
from coowned.selection.selector import Schedule, Selection, Selector


class _Interrupted(Exception):
    """Raised by a progress callback of the checks: it must propagate out of `select`."""


def hard_graphs() -> dict[str, AttributionGraph]:
    """Graphs that break careless selectors, by name."""
    make = AttributionGraph.from_users_per_example
    rng = np.random.default_rng(7)
    mixed = [rng.choice(40, size=rng.integers(0, 5), replace=False).tolist() for _ in range(150)]
    return {
        "empty": make([]),
        "no users": make([[], [], []]),
        "users without examples": make([], num_users=4),
        "examples without users among others": make([[], [0], [], [0, 1], []]),
        "one user in everything": make([[0, 1 + i] for i in range(50)] + [[0]]),
        "one example with 3,000 users": make([list(range(3000)), [0], [1, 2999], [5]]),
        "long path": make([[i, i + 1] for i in range(2001)]),
        "long cycle": make([[i, (i + 1) % 1500] for i in range(1500)]),
        "star": make([[0, i] for i in range(1, 300)]),
        "repeated hyperedges": make([[0, 1, 2]] * 40 + [[3, 4]] * 40 + [[5]] * 3),
        "mixed": make(mixed, num_users=45),
        "mixed with ids": make(mixed, num_users=45, example_ids=[f"m{i * 7919 % 150}" for i in range(150)]),
    }


def check_selector(
    make: Callable[[int], Selector[Selection]],
    *,
    contribution_bounds: Iterable[int] = (1, 2, 3, 300),
    duplicates: bool = False,
    maximal: bool = False,
    same_when_relabelled: bool = True,
    graphs: dict[str, AttributionGraph] | None = None,
) -> None:
    """Checks a selector of sets on `hard_graphs()`.

    Checked: the bound is held; the seed alone decides; the answer does not change when users are renumbered; an
    example without users is left out; a proven upper bound is not below the size; what progress raises comes out.

    Args:
      make: a contribution bound to a selector with it.
      contribution_bounds: the bounds to try.
      duplicates: whether more than one copy of an example is allowed.
      maximal: whether to check that nothing could be added.
      same_when_relabelled: False checks only that the bound survives renumbering (for solvers that may return
        another of several equally good answers).
      graphs: other graphs than `hard_graphs()`.
    """
    for name, graph in (hard_graphs() if graphs is None else graphs).items():
        for bound in contribution_bounds:
            where = f"{name}, contribution_bound={bound}"
            selector = make(bound)
            selection = selector.select(graph, seed=3)
            check_selection(graph, selection, contribution_bound=bound, where=where)
            _require(duplicates or selection.copies.max(initial=0) <= 1, where, "an example was selected twice")
            if maximal:
                check_maximal(graph, selection, contribution_bound=bound, duplicates=duplicates, where=where)
            _require(selector.select(graph, seed=3) == selection, where, "the same seed gave a different selection")
            other = selector.select(relabelled(graph), seed=3)
            check_selection(relabelled(graph), other, contribution_bound=bound, where=where + ", users renumbered")
            if same_when_relabelled:
                same = np.array_equal(other.copies, selection.copies)
                _require(same, where, "renumbering the users changed the selection")
            _check_progress(selector, graph, where)


def check_schedule_selector(
    make: Callable[[int, int, int], Selector[Schedule]],
    *,
    same_when_relabelled: bool = True,
    graphs: dict[str, AttributionGraph] | None = None,
) -> None:
    """Checks a selector of batches, created from (batch_size, iterations, min_separation), on `hard_graphs()`.

    Checked: as `check_selector`, with the min separation instead of the bound; that no user is in more than
    ceil(iterations / min_separation) copies; that it finds the schedule where no example is shared.
    """
    alone = AttributionGraph.from_users_per_example([[i] for i in range(12)])
    tried = (hard_graphs() if graphs is None else graphs) | {"nothing shared": alone}
    for name, graph in tried.items():
        for batch_size, iterations, separation in [(1, 1, 1), (2, 6, 1), (3, 8, 4), (2, 5, 9)]:
            where = f"{name}, batch_size={batch_size}, iterations={iterations}, min_separation={separation}"
            selector = make(batch_size, iterations, separation)
            try:
                schedule = selector.select(graph, seed=3)
            except InfeasibleScheduleError as error:
                _require(graph is not alone, where, "no schedule found for an easy case")
                _require(error.filled < error.needed == batch_size * iterations, where, "the error has wrong counts")
                continue
            _require(schedule.batches.shape == (iterations, batch_size), where, "batches have the wrong shape")
            check_separation(graph, schedule, min_separation=separation, where=where)
            _require(selector.select(graph, seed=3) == schedule, where, "the same seed gave a different schedule")
            other = selector.select(relabelled(graph), seed=3)
            check_separation(relabelled(graph), other, min_separation=separation, where=where + ", users renumbered")
            if same_when_relabelled:
                same = np.array_equal(other.batches, schedule.batches)
                _require(same, where, "renumbering the users changed the schedule")
            _check_progress(selector, graph, where)


def check_selection(graph: AttributionGraph, selection: Selection, *, contribution_bound: int, where: str = "") -> None:
    """Recounts one selection: shape, bound, proven bound, examples without users left out."""
    _require(isinstance(selection, Selection), where, f"select returned a {type(selection).__name__}")
    _require(selection.copies.shape == (graph.num_examples,), where, "copies must have one entry per example")
    _require(selection.size == int(selection.copies.sum()), where, "size is not the sum of copies")
    counts = copies_per_user(graph, selection.copies)
    _require(counts.max(initial=0) <= contribution_bound, where, f"a user is in {counts.max(initial=0)} copies")
    taken_alone = selection.copies[graph.users_per_example == 0]
    _require(not taken_alone.any(), where, "an example without users was selected")
    if selection.upper_bound is not None:
        _require(selection.upper_bound >= selection.size, where, f"upper_bound {selection.upper_bound} < size")
    if selection.proven_optimal:
        _require(selection.upper_bound == selection.size, where, "proven_optimal, but upper_bound is not the size")


def check_maximal(
    graph: AttributionGraph, selection: Selection, *, contribution_bound: int, duplicates: bool, where: str = ""
) -> None:
    """Checks that no copy could be added: every example that might be has a user without room."""
    full = copies_per_user(graph, selection.copies) >= contribution_bound
    for example in range(graph.num_examples):
        users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
        if len(users) and (duplicates or not selection.copies[example]):
            _require(bool(full[users].any()), where, f"example {example} could be added")


def check_separation(graph: AttributionGraph, schedule: Schedule, *, min_separation: int, where: str = "") -> None:
    """Recounts one schedule: any `min_separation` consecutive batches hold at most one copy with a given user."""
    last: dict[int, int] = {}
    copies: Counter[int] = Counter()
    for t, batch in enumerate(schedule.batches.tolist()):
        for example in batch:
            for user in graph.users[graph.indptr[example] : graph.indptr[example + 1]].tolist():
                close = user in last and t - last[user] < min_separation
                _require(not close, where, f"user {user} is in batches {last.get(user)} and {t}")
                last[user] = t
                copies[user] += 1
    most = -(-schedule.iterations // min_separation)
    _require(max(copies.values(), default=0) <= most, where, f"a user is in more than {most} copies")


def copies_per_user(graph: AttributionGraph, copies: np.ndarray) -> np.ndarray:
    """Counts (num_users,) the selected copies that contain each user."""
    counts = np.zeros(graph.num_users, np.int64)
    np.add.at(counts, graph.users, np.repeat(copies, graph.users_per_example))
    return counts


def relabelled(graph: AttributionGraph) -> AttributionGraph:
    """Returns the same graph with its users numbered differently."""
    new_label = np.random.default_rng(11).permutation(graph.num_users)
    return AttributionGraph.from_csr(
        graph.indptr, new_label[graph.users], num_users=graph.num_users, example_ids=graph.example_ids
    )


def _check_progress(selector: Selector, graph: AttributionGraph, where: str) -> None:
    seen: list[float] = []

    def record(done: float, message: str) -> None:
        seen.append(done)

    def interrupt(done: float, message: str) -> None:
        raise _Interrupted(message)

    selector.select(graph, seed=3, progress=record)
    in_range = bool(seen) and min(seen) >= 0 and max(seen) <= 1
    _require(in_range, where, f"progress must be called with numbers in [0, 1], not {seen}")
    try:
        selector.select(graph, seed=3, progress=interrupt)
    except _Interrupted:
        return
    raise AssertionError(f"{where}: select swallowed the exception that progress raised")


def _require(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise AssertionError(f"{where}: {problem}")
