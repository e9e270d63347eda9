"""The check-suite catches selectors that are wrong: each bug is planted and must be found."""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np
import pytest

from coowned.errors import InfeasibleScheduleError
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.testing.selector_checks import check_schedule_selector, check_selector, hard_graphs

CALLS = itertools.count()  # what a selector that forgets its seed lets decide


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(Selector[Selection]):
    """Greedy with one mistake."""

    contribution_bound: int
    mistake: str

    name: ClassVar[str] = "wrong"

    def _select(self, graph, seed, progress):
        bound = self.contribution_bound + (self.mistake == "one too many")
        right = Greedy(contribution_bound=bound).select(graph, seed=seed)
        copies = right.copies.copy()
        taken = np.flatnonzero(copies)
        upper_bound = None
        if self.mistake == "not maximal":
            copies[taken[20:]] = 0
        if self.mistake == "forgets the seed":
            copies[taken[: next(CALLS) % 2]] = 0
        if self.mistake == "sees labels":
            first_user = graph.users[graph.indptr[taken]] if len(taken) else taken
            copies[taken[first_user % 2 == 0]] = 0
        if self.mistake == "takes examples without users":
            copies[graph.users_per_example == 0] = 1
        if self.mistake == "false upper bound":
            upper_bound = right.size - 1
        if self.mistake == "false proof":
            upper_bound = right.size + 1
        if self.mistake == "repeats" and len(taken):
            counts = np.zeros(graph.num_users, int)
            np.add.at(counts, graph.users, np.repeat(copies, graph.users_per_example))
            for example in taken:
                users = graph.users[graph.indptr[example] : graph.indptr[example + 1]]
                if (counts[users] < self.contribution_bound).all():
                    copies[example] += 1
                    break
        proven = self.mistake == "false proof"
        return Selection(graph=graph, copies=copies, upper_bound=upper_bound, proven_optimal=proven, seed=seed)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("one too many", "a user is in"),
        ("not maximal", "could be added"),
        ("forgets the seed", "the same seed gave a different selection"),
        ("sees labels", "renumbering the users changed the selection"),
        ("takes examples without users", "an example without users was selected"),
        ("false upper bound", "upper_bound"),
        ("false proof", "proven_optimal"),
        ("repeats", "an example was selected twice"),
    ],
)
def test_mistakes_are_found(mistake, message):
    with pytest.raises(AssertionError, match=message):
        check_selector(lambda bound: Wrong(contribution_bound=bound, mistake=mistake), maximal=mistake == "not maximal")


def test_no_mistake_is_no_failure():
    check_selector(lambda bound: Wrong(contribution_bound=bound, mistake="none"), maximal=True)


def test_swallowed_interrupts_are_found():
    class Deaf(Greedy):
        def select(self, graph, *, seed=0, progress=None):
            if progress is not None:
                try:
                    progress(0.5, "half")
                except Exception:
                    progress = None
            return super().select(graph, seed=seed, progress=progress)

    with pytest.raises(AssertionError, match="select swallowed the exception"):
        check_selector(lambda bound: Deaf(contribution_bound=bound))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongSchedule(Selector[Schedule]):
    """Algorithm 4 with one mistake."""

    settings_: tuple[int, int, int]
    mistake: str

    name: ClassVar[str] = "wrong-schedule"

    def _select(self, graph, seed, progress):
        batch_size, iterations, separation = self.settings_
        if self.mistake == "gives up":
            raise InfeasibleScheduleError("no", filled=0, needed=batch_size * iterations)
        separation -= self.mistake == "one too near" and separation > 1
        right = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=separation)
        batches = right.select(graph, seed=seed).batches
        if self.mistake == "too short":
            batches = batches[:-1]
        if self.mistake == "forgets the seed":
            batches = batches[:, :: 1 - 2 * (next(CALLS) % 2)]
        return Schedule(graph=graph, batches=batches, num_examples=graph.num_examples)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("gives up", "no schedule found for an easy case"),
        ("one too near", "is in batches"),
        ("too short", "wrong shape"),
        ("forgets the seed", "the same seed gave a different schedule"),
    ],
)
def test_mistakes_in_schedules_are_found(mistake, message):
    with pytest.raises(AssertionError, match=message):
        check_schedule_selector(
            lambda batch_size, iterations, separation: WrongSchedule(
                settings_=(batch_size, iterations, separation), mistake=mistake
            )
        )


def test_hard_graphs_are_what_they_say():
    graphs = hard_graphs()
    assert graphs["empty"].num_examples == 0
    assert graphs["one example with 3,000 users"].users_per_example.max() == 3000
    assert graphs["one user in everything"].examples_per_user[0] == graphs["one user in everything"].num_examples
    assert (graphs["long cycle"].examples_per_user == 2).all()
