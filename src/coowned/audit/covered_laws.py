"""Tests of the noise and the counts of a covered evaluation, which an attacker sees besides the model.

The functions that evaluate are driven as they are, with fresh keys and synthetic examples.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from coowned.accounting.covered import CoveredEvaluation, CoveredRelease
from coowned.attribution.graph import AttributionGraph
from coowned.audit.checks import CheckedLaw, any_of, certain_check, share_check
from coowned.audit.trainer_laws import too_small
from coowned.certificate import certify
from coowned.content.data import FeatureTable
from coowned.content.splits import select_held_out
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.model import Model
from coowned.selection.selector import Selection
from coowned.training.covered import SCALE, evaluate_covered
from coowned.training.plan import TrainingPlan

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
