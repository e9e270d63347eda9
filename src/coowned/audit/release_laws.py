"""Tests of what a run releases under any plan: full noise everywhere, one clip norm per copy, noisy counts per user.

Two trainings with the same fresh key share coins and noise, so that their difference is what users added, without any
noise: whether a copy adds more than a clip norm, or changes what others add, is seen exactly.

The noise and the counts of a covered evaluation, which an attacker sees besides the model, are tested in the same way:
the functions that evaluate are driven as they are, with fresh keys and synthetic examples.
"""

import dataclasses
import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2, norm

from coowned.accounting.covered import CoveredEvaluation, CoveredRelease
from coowned.attribution.graph import AttributionGraph
from coowned.audit import driving
from coowned.audit.checks import Check, CheckedLaw, any_of, binomial_check, certain_check, share_check
from coowned.audit.claims import whitening
from coowned.audit.driving import Released, World, WorldData, audited, drive, first_scales
from coowned.certificate import certify
from coowned.content.data import FeatureTable
from coowned.content.splits import select_held_out
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.model import Model, num_parameters
from coowned.models.probes import BLANK, HUGE, IN, INFINITE, NOT_A_NUMBER, OPPOSITE, QUIET
from coowned.selection.selector import Selection
from coowned.training.covered import SCALE, evaluate_covered
from coowned.training.plan import TrainingPlan

_LIMITS = (1.0, 2.0, 3.0)
_LONGEST_LAG = 64
_MOST_STEPS = 1000
_MOST_NUMBERS = 2**24  # steps times parameters that are kept of one training
_TOLERANCE = 1e-4  # of a clip norm
_SHORT = 0.01  # of a clip norm: a gradient may be rounded down, but a user who adds less is not the worst case
_FAR = 0.02  # clip norms that two ways to compute a gradient in float32 may differ by
_CLIP_NORMS = (1.0, 0.5, 0.25)  # of the members of a sweep, times the run's


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainerLaws:
    """The tests of one plan and model."""

    plan: TrainingPlan  # of the run; its key and S are not used, only their shape
    model: Model  # that was trained
    world: World  # with its worst-case users
    seconds: float = math.inf  # about how long all of them may take
    devices: int = 1  # among which a batch is split

    def noise(self, run_key: RunKey, *, alpha: float) -> CheckedLaw:
        """Trains without any gradient, stopping and resuming once: what is released must be noise of the claimed law.

        Undone by the strategy, it must be independent normals at least as large as claimed, at every coordinate of
        every tensor.

        Guarantees:
          - The probability of an alarm is at most alpha where it is.   (test_honest_trainers_pass)
          - Noise that is too small, at one coordinate alone too, repeated on resumption, or shared by two tensors is
            caught.   (test_planted_bugs_are_caught)
        """
        steps = min(self.plan.iterations, _MOST_STEPS, max(4, _MOST_NUMBERS // num_parameters(self.model)))
        resumed = min(16, steps // 2)
        released = self._drive(
            [self._plan(run_key)], BLANK, QUIET, steps=steps, resume_at=resumed, seconds=0.25 * self.seconds
        )
        return CheckedLaw("noise", noise_checks(released, self.plan, resumed=resumed), alpha)

    def contributions(self, run_key: RunKey, *, steps: int) -> CheckedLaw:
        """Trains with users whose examples hold gradients of full length, their opposite, or what is not finite.

        Against users with empty content, with the same coins and noise: each copy that the plan's batches draw may add
        one clip norm along its own coordinate, and nothing elsewhere, in a quiet crowd and in one of full gradients.

        Guarantees:
          - A clip that lets more through, a division by what was drawn, other batches than the plan's, and a copy that
            changes what others add are caught, without chance.   (test_planted_bugs_are_caught)
        """
        plan = self._plan(run_key)
        drawn = self._drawn(plan, steps)
        checks = []
        # A crowd that adds thousands of clip norms leaves few digits for what one copy adds.
        for crowd, name, some in ((QUIET, "a quiet crowd", steps), (IN, "a crowd of full gradients", min(2, steps))):
            empty = self._drive([plan], BLANK, crowd, steps=some)
            for held, what in _CONTENTS.items():
                full = self._drive([plan], held, crowd, steps=some, resume_at=some // 2 if held == IN else None)
                checks += self._compare(empty, full, drawn, held, f"{what}, in {name}")
        return CheckedLaw("contributions", checks, 0.5)  # certain

    def sweep(self, run_key: RunKey, *, steps: int, alpha: float) -> CheckedLaw:
        """Trains members with several clip norms at once: each must have its own clip norm and its own noise.

        Guarantees:
          - A clip norm or noise of another member is caught.   (test_planted_bugs_are_caught)
        """
        own = self._plan(run_key)
        assert own.clip_norm is not None
        members = [
            dataclasses.replace(own, clip_norm=share * own.clip_norm, configuration=f"{share}") for share in _CLIP_NORMS
        ]
        plans = [audited(plan, plan.selected, plan.run_key) for plan in members]
        drawn = self._drawn(plans[0], steps)
        empty, full = (self._drive(plans, held, QUIET, steps=steps) for held in (BLANK, IN))
        checks = []
        for number, share in enumerate(_CLIP_NORMS):
            mine = [{name: rows[:, number] for name, rows in released.items()} for released in (empty, full)]
            checks += self._compare(mine[0], mine[1], drawn, IN, f"member with {share:g} of the clip norm")
            own = noise_checks(mine[0], self.plan)
            checks += [dataclasses.replace(check, name=f"{check.name}, {share:g} of the clip norm") for check in own]
        white = [whiten(rows, self.plan) for rows in empty.values()]
        for one, other in itertools.combinations(range(len(plans)), 2):
            pairs = [_same_sign(rows[:, one], rows[:, other]) for rows in white]
            checks.append(any_of(f"same sign for members {one} and {other}", pairs))
        return CheckedLaw("sweep", checks, alpha)

    def gradient(self, run_key: RunKey) -> CheckedLaw:
        """Compares one step from the model's own start, with one ordinary example, with the gradient computed by JAX.

        Guarantees:
          - What the model's own clipper adds is its gradient, scaled where the plan says so, one clip norm long.
            (test_honest_trainers_pass, test_scaled_trainers_pass)
        """
        import jax

        plan = audited(self.plan, self.world.selected, run_key, change=1.0)
        content, start = driving.content_for(self.model), self.model.initial()
        batch = plan.batches().batch(0)
        drawn = batch.examples[batch.mask]
        if not len(drawn):  # the next key
            return self.gradient(RunKey(hashlib.sha256(run_key.secret).digest()))
        released = [
            drive(
                [plan],
                self.model,
                WorldData(world=self.world, content=content, held=BLANK, one=int(one)),
                steps=1,
                start_from=start,
                devices=self.devices,
            )
            for one in (-1, drawn[0])
        ]
        row = {name: np.asarray(value)[None] for name, value in content.example().items()}
        if self.model.runs_in_jax:
            slopes = jax.grad(lambda parameters: self.model.losses(parameters, row)[0][0])(start)
        else:
            slopes = self.model.gradient_sum(start, row, np.ones(1, bool))
        scales = first_scales(plan, self.model) or dict.fromkeys(slopes, 1.0)
        expected = {name: scales[name] * np.asarray(slope, np.float64) for name, slope in slopes.items()}
        length = math.sqrt(sum(float((array**2).sum()) for array in expected.values()))
        assert plan.clip_norm is not None
        times = np.count_nonzero(drawn == drawn[0]) / max(length, plan.clip_norm)
        moved = {name: released[1][name][0] - released[0][name][0] for name in expected}
        off = math.sqrt(sum(float(((moved[name] - times * expected[name]) ** 2).sum()) for name in moved))
        check = certain_check("clip norms from the gradient", off <= _FAR, observed=off)
        return CheckedLaw("gradient", [check], 0.5)  # certain

    def step_seconds(self, run_key: RunKey) -> float:
        """Measures a step once it is compiled, in seconds."""
        self._drive([self._plan(run_key)], IN, QUIET, steps=1)
        started = time.monotonic()
        self._drive([self._plan(run_key)], IN, QUIET, steps=2)
        return (time.monotonic() - started) / 2

    # ---- one training

    def _plan(self, run_key: RunKey) -> TrainingPlan:
        return audited(self.plan, self.world.selected, run_key)

    def _drive(self, plans: Sequence[TrainingPlan], held: int, crowd: int, **settings: Any) -> Released:
        """Drives the trainer on worst-case users and a crowd with this content; returns the releases."""
        data = WorldData(world=self.world, content=driving.content_for(self.model), held=held, crowd=crowd)
        return drive(plans, self.model, data.in_memory(), devices=self.devices, **settings)

    def _drawn(self, plan: TrainingPlan, steps: int) -> npt.NDArray[np.float64]:
        """Counts the (steps, coordinates) copies of worst-case users that the plan's batches draw, by coordinate."""
        coordinates = driving.content_for(self.model).users
        drawn = np.zeros((steps, coordinates))
        batches = plan.batches()
        for step in range(steps):
            batch = batches.batch(step)
            owner = self.world.owner[batch.examples[batch.mask]]
            drawn[step] = np.bincount(owner[owner >= 0] % coordinates, minlength=coordinates)
        return drawn

    def _compare(
        self, empty: Released, full: Released, drawn: npt.NDArray[np.float64], held: int, what: str
    ) -> list[Check]:
        """Checks, of two trainings' difference, how much a copy adds at its coordinate, and anything elsewhere."""
        content = driving.content_for(self.model)
        expected = content.released(drawn[: len(full[content.tensor])], held)
        moved = {name: full[name] - empty[name] for name in full}
        # Parameters are sums of what was released, as float32: their last digit counts.
        largest = max(float(np.abs(np.cumsum(rows, axis=0)).max()) for rows in (*full.values(), *empty.values()))
        tolerance = _TOLERANCE + 2.0**-21 * largest
        own = moved.pop(content.tensor).reshape(len(expected), -1)
        if held == HUGE:  # may be taken for what is not finite, or be predicted rightly: then little is added
            expected = np.where(np.abs(own) < np.abs(expected) / 2, own, expected)
        beyond = np.where(expected == 0, np.abs(own), np.sign(expected) * (own - expected))
        missing = float(np.max(-beyond / np.maximum(1, np.abs(expected)), initial=0.0))
        most = float(np.max([np.max(beyond), *(np.abs(rows).max() for rows in moved.values())]))
        return [
            certain_check(f"clip norms beyond one a copy: {what}", most <= tolerance, observed=most),
            certain_check(f"share that is missing of a clip norm: {what}", missing <= _SHORT, observed=missing),
        ]


_CONTENTS = {
    IN: "full gradients",
    OPPOSITE: "their opposites",
    NOT_A_NUMBER: "NaN",
    INFINITE: "infinity",
    HUGE: "numbers too large to be squared",
}


def whiten(released: npt.NDArray[np.float64], plan: TrainingPlan) -> npt.NDArray[np.float64]:
    """Returns (steps, ...) values that are independent unit normals if the release is noise of the claimed law."""
    white = whitening(plan.coefficients, len(released)) @ released.reshape(len(released), -1)
    return white.reshape(released.shape) / plan.noise_multiplier


def noise_checks(released: Released, plan: TrainingPlan, *, resumed: int = 0) -> list[Check]:
    """Tests noise exactly: its size from below, its independence from both sides."""
    white = {name: whiten(rows, plan).reshape(len(rows), -1) for name, rows in released.items()}  # (steps, size)
    count, steps = sum(rows.size for rows in white.values()), len(next(iter(white.values())))
    squares = {name: rows**2 for name, rows in white.items()}
    checks = [
        too_small("mean square", sum(rows.sum() for rows in squares.values()), count),
        any_of(
            "mean square of one coordinate",
            [too_small("", rows.sum(axis=0), steps) for rows in squares.values()],
        ),
        too_small("mean square of one step", sum(rows.sum(axis=1) for rows in squares.values()), count // steps),
    ]
    for limit in _LIMITS:
        beyond = sum(int(np.count_nonzero(np.abs(rows) > limit)) for rows in white.values())
        share = 2 * float(norm.sf(limit))
        checks.append(binomial_check(f"values beyond {limit:g}", beyond, count, share, too_few=True))
    joined = np.concatenate(list(white.values()), axis=1) > 0  # (steps, all parameters) signs
    checks.append(share_check("positive values", joined, 0.5))
    # Products of independent signs along a chain are themselves independent signs.
    lags = [lag for lag in range(1, steps) if lag <= _LONGEST_LAG or lag == resumed]
    checks += [_same_sign(joined[lag:], joined[:-lag], f"same sign {lag} steps later") for lag in lags]
    if joined.shape[1] > 1:
        checks.append(_same_sign(joined[:, 1:], joined[:, :-1], "same sign in the next coordinate"))
    pairs = [
        _same_sign(one[:, : other.shape[1]] > 0, other[:, : one.shape[1]] > 0)
        for one, other in itertools.combinations(white.values(), 2)
    ]
    return [*checks, any_of("same sign in two tensors", pairs)] if pairs else checks


def too_small(name: str, squares: Any, degrees: int) -> Check:
    """Returns the smallest of sums of squares, each chi-square where the noise is as large as claimed."""
    smallest = float(np.nan_to_num(np.min(squares), nan=0.0))  # what is not a number is no noise
    p_value = min(1.0, np.size(squares) * float(chi2.cdf(smallest, degrees)))
    return Check(name=name, observed=smallest / degrees, expected=1.0, p_value=p_value)


def _same_sign(one: npt.NDArray[Any], other: npt.NDArray[Any], name: str = "") -> Check:
    return share_check(name, (one > 0) == (other > 0), 0.5)


NUM_KEYS = 300  # evaluations with a key of their own
_USERS, _MORE = 8, 2  # how many more examples every user has than the bound allows
_LARGEST_BOUND = 50  # of copies that are tried
_SETTINGS = CoveredEvaluation(loss_bound=1.0, confusion=True)
_LENGTH = 6  # right answers, loss and four cells


def audit_covered(plan: TrainingPlan, model: Model, keys: Sequence[RunKey], *, alpha: float) -> CheckedLaw:
    """Evaluates worlds that differ in one user's held-out examples, with the noise that the plan claims.

    Guarantees:
      - The probability of an alarm is at most alpha where counts and noise are as claimed.
        (test_honest_evaluations_pass)
      - Noise that is missing, too small, or that of training, and a user who moves the counts by more copies than were
        accounted for, are caught.   (test_planted_evaluation_bugs_are_caught)

    Args:
      plan: whose guarantee has a covered evaluation.
      model: that is trained; the noise of its tensors is not to come again.
      keys: fresh, one for each evaluation.
      alpha: probability of a false alarm.
    """
    claimed = plan.guarantee.evaluation if plan.guarantee else None
    assert claimed is not None
    made = _HeldOut.like(claimed)
    bound = made.bound
    released = {held: made.evaluate(keys if held == "blank" else keys[:2], held, _SETTINGS) for held in _WORLDS}
    deviation = claimed.noise_multiplier * SCALE * np.sqrt(3)  # of three parts: right answers, loss, confusion matrix
    white = released["blank"] / deviation  # (keys, length) pure noise
    training = [_of_training(plan, model, key) for key in keys]
    checks = [
        too_small("mean square", (white**2).sum(), white.size),
        too_small("mean square of one count", (white**2).sum(axis=0), len(white)),
        share_check("values beyond 1", np.abs(white) > 1, float(2 * norm.sf(1.0))),
        share_check("positive values", white > 0, 0.5),
        share_check("same sign in the next evaluation", (white[1:] > 0) == (white[:-1] > 0), 0.5),
        any_of(
            "same sign as the noise of training",
            [
                share_check(
                    "", [(mine[: len(row)] > 0) == (row > 0) for mine, row in zip(white, rows, strict=True)], 0.5
                )
                for rows in zip(*training, strict=True)
            ],
        ),
    ]
    for one, other in itertools.combinations(_WORLDS, 2):
        moved = float(np.linalg.norm(released[one][:2] - released[other][:2], axis=1).max())
        most = (1 if "blank" in (one, other) else 2) * bound * SCALE * np.sqrt(3)
        name = f"lengths of a copy that a user adds: {one} against {other}"
        checks.append(certain_check(name, moved <= most, observed=moved / (SCALE * np.sqrt(3)), expected=bound))
    return CheckedLaw("covered evaluation", checks, alpha)


_WORLDS = {"blank": (0.0, np.nan), "right": (5.0, 1.0), "wrong": (-5.0, 1.0)}  # feature and label of one user


def covered_scores(claimed: CoveredRelease, keys: Sequence[RunKey]) -> dict[str, npt.NDArray[np.float64]]:
    """Evaluates worlds with and without one user's right answers, and returns what an attacker makes of the counts.

    Returns:
      By adjacency: (2, keys) log likelihood ratios of the claimed noise, with the user and without (or with wrong
      answers), for a user in as many copies as the claim allows.
    """
    made = _HeldOut.like(claimed)
    counted = {held: made.evaluate(keys, held, CoveredEvaluation())[:, 0] / SCALE for held in _WORLDS}
    ratios = {
        held: made.bound * (counts - made.bound / 2) / claimed.noise_multiplier**2 for held, counts in counted.items()
    }
    return {
        adjacency: np.stack([ratios["right"], ratios[other]])
        for adjacency, other in (("zero-out", "blank"), ("replace", "wrong"))
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _HeldOut:
    """A held-out part in which users have more examples than the bound allows, and its release with claimed noise."""

    graph: AttributionGraph
    selected: Selection
    release: CoveredRelease
    bound: int

    @classmethod
    def like(cls, claimed: CoveredRelease) -> Self:
        bound = min(claimed.contribution_bound, _LARGEST_BOUND)
        users = [[user] for user in range(_USERS) for _ in range(bound + _MORE)]
        graph = AttributionGraph.from_users_per_example(users)
        selected = select_held_out(graph, contribution_bound=bound)
        own = certify(graph, selected)
        release = CoveredRelease(
            noise_multiplier=claimed.noise_multiplier,
            epsilon_share=claimed.epsilon_share,
            unshared_noise_multiplier=None,
            contribution_bound=own.contribution_bound,
            size=own.size,
            most_copies_of_one_example=own.most_copies_of_one_example,
            graph_digest=own.graph_digest,
            selection_digest=own.selection_digest,
        )
        return cls(graph=graph, selected=selected, release=release, bound=bound)

    def evaluate(self, keys: Sequence[RunKey], held: str, settings: CoveredEvaluation) -> npt.NDArray[np.int64]:
        """Computes (keys, length) released counts; everybody but the first user is blank."""
        count = self.graph.num_examples
        features, labels = np.zeros((count, 1), np.float32), np.full(count, np.nan, np.float32)
        of_user = self.graph.users == 0  # every example has one user
        features[of_user], labels[of_user] = _WORLDS[held]
        data = FeatureTable(graph=self.graph, features=features, labels=labels)
        model, found = LogisticRegression(num_features=1), {"coefficients": np.array([1.0, 0.0], np.float32)}
        given: dict[str, Any] = {"settings": settings, "release": self.release, "run_id": "audit"}
        return np.array(
            [evaluate_covered(model, found, data, self.selected, run_key=key, **given).counts for key in keys]
        )


def _of_training(plan: TrainingPlan, model: Model, key: RunKey) -> list[npt.NDArray[np.int64]]:
    """Returns the first numbers of training's noise under the same key, for every tensor."""
    shapes = {name: (min(_LENGTH, math.prod(shape)),) for name, shape in model.shapes().items()}
    stream = NoiseStream(
        key,
        deviations=[2.0**20],
        coefficients=[1.0],  # the first row of correlated noise is the same but for a factor
        shapes={"counts": (_LENGTH,), **shapes},
        iterations=1,
        configurations=(plan.configuration,),
    )
    return [row[0] for row in stream.next().values()]
