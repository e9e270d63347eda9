"""Batches from Priced's S: bound and separation held, few repetitions, and less noise than Algorithm 4's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned import GreedyMinSeparation, InfeasibleScheduleError, InputError, Priced, PricedMinSeparation, certify
from coowned.attribution.graph import AttributionGraph
from coowned.testing.selector_checks import check_schedule_selector
from coowned.testing.strategies import attribution_graphs


def test_check_suite():
    def make(batch_size, iterations, min_separation):
        return PricedMinSeparation(
            batch_size=batch_size,
            iterations=iterations,
            min_separation=min_separation,
            contribution_bound=-(-iterations // min_separation),
        )

    check_schedule_selector(make)


@settings(max_examples=150)
@given(
    graph=attribution_graphs(max_examples=30, max_users=20),
    batch_size=st.integers(1, 3),
    iterations=st.integers(1, 8),
    separation=st.integers(1, 6),
    bound=st.integers(1, 4),
    unattributed=st.sampled_from(["drop", "keep"]),
)
def test_separation_and_bound_are_held(graph, batch_size, iterations, separation, bound, unattributed):
    selector = PricedMinSeparation(
        batch_size=batch_size,
        iterations=iterations,
        min_separation=separation,
        contribution_bound=bound,
        unattributed=unattributed,
    )
    try:
        schedule = selector.select(graph)
    except InfeasibleScheduleError:  # its counts are checked by the suite
        return
    certificate = certify(graph, schedule)
    assert certificate.contribution_bound <= bound
    assert certificate.min_separation >= min(separation, iterations)
    alone = schedule.copies[graph.users_per_example == 0]
    assert alone.max(initial=0) <= (unattributed == "keep")


@pytest.fixture(scope="module")
def papers():
    """3,000 examples of one to three of 1,500 users, some of whom have many."""
    random = np.random.default_rng(5)
    heavy = (1500 * random.random((3000, 3)) ** 2).astype(int)
    rows = [np.unique(row[: 1 + number % 3]).tolist() for number, row in enumerate(heavy)]
    return AttributionGraph.from_users_per_example(rows, num_users=1500)


def test_examples_are_repeated_only_where_needed(papers):
    size = Priced(contribution_bound=3).select(papers).size
    few = PricedMinSeparation(batch_size=20, iterations=60, min_separation=10, contribution_bound=3).select(papers)
    assert few.size < size
    assert few.num_distinct == few.size
    many = PricedMinSeparation(batch_size=size // 50, iterations=60, min_separation=5, contribution_bound=3)
    schedule = many.select(papers)
    assert schedule.size > size > schedule.num_distinct > 0.9 * size


def test_fewer_participations_than_algorithm_4(papers):
    """As many distinct examples, at the same separation, with users in far fewer of them."""
    asked = {"batch_size": 20, "iterations": 60, "min_separation": 5}
    greedy, paced = (
        certify(papers, selector.select(papers))
        for selector in (GreedyMinSeparation(**asked), PricedMinSeparation(**asked, contribution_bound=3))
    )
    assert (greedy.num_distinct, paced.num_distinct) == (1200, 1200)
    assert paced.min_separation >= 5
    assert greedy.contribution_bound > 2 * paced.contribution_bound


def test_too_much_is_refused(papers):
    asked = {"batch_size": 20, "iterations": 60}
    with pytest.raises(InfeasibleScheduleError, match="raise contribution_bound, or reduce iterations") as caught:
        PricedMinSeparation(**{**asked, "batch_size": 900}, min_separation=1, contribution_bound=1).select(papers)
    assert caught.value.filled == 0
    with pytest.raises(InfeasibleScheduleError, match=r"reduce min_separation \(58\) or raise contribution_bound"):
        PricedMinSeparation(**asked, min_separation=58, contribution_bound=2).select(papers)
    with pytest.raises(InputError, match="contribution_bound"):
        PricedMinSeparation(**asked, min_separation=1, contribution_bound=0)
