"""The accountant's results for a run or a tuning, computed once and cached."""

import functools
from typing import Any

from coowned import codec
from coowned.accounting import calculators
from coowned.accounting.calibrate import ACCOUNTANT_VERSION
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.terms import OTHER_ADJACENCY
from coowned.accounting.tuning import TuningClaim
from coowned.certificate import ContributionCertificate
from coowned.errors import UncertifiableError
from coowned.files import cached
from coowned.mechanism.mechanism import Mechanism, Steps


def proven_of_tuning(tuning: TuningClaim, *, delta: float, adjacency: str) -> dict[str, float]:
    """Returns what is proven for a tuning."""
    return {
        "epsilon": tuned_epsilon(tuning, delta, adjacency),
        "other_epsilon": tuned_epsilon(tuning, delta, OTHER_ADJACENCY[adjacency]),
        "example_epsilon": tuned_epsilon(tuning, delta, adjacency, one_example=True),
    }


def tuned_epsilon(tuning: TuningClaim, delta: float, adjacency: str, **whose: Any) -> float:
    """Returns what `TuningClaim.epsilon` does."""
    plain = codec.to_plain(tuning)
    question = {"accountant": ACCOUNTANT_VERSION, "tuning": plain, "delta": delta, "adjacency": adjacency, **whose}
    answer = functools.partial(tuning.epsilon, delta, adjacency, **whose)
    return cached("accounting", question, answer, encode=repr, decode=float)


def tuning_attack_bound(tuning: TuningClaim, adjacency: str, epsilon: float, false_alarms: float) -> float:
    def bound() -> float:
        return tuning.attack_bound(adjacency, false_alarms=false_alarms, largest=min(epsilon, 20.0))

    question = {"accountant": ACCOUNTANT_VERSION, "attack": codec.to_plain(tuning), "rate": false_alarms}
    asked = {**question, "adjacency": adjacency, "epsilon": epsilon}
    return cached("accounting", asked, bound, encode=repr, decode=float)


def proven_of_run(
    mechanism: Mechanism,
    certificate: ContributionCertificate,
    noise_multiplier: float,
    evaluation: CoveredRelease | None,
    *,
    delta: float,
    adjacency: str,
) -> tuple[calculators.Answer, dict[str, float]]:
    """Returns what the accountant proves for this noise: the main answer, and every epsilon by its field's name."""
    claim: dict[str, Any] = {"noise_multiplier": noise_multiplier, "delta": delta}
    also = () if evaluation is None else (evaluation.steps,)
    answer = calculators.epsilon_details(mechanism, adjacency=adjacency, also=also, **claim)
    example = calculators.epsilon(mechanism.for_example(certificate), adjacency=adjacency, **claim)
    if evaluation is not None:  # an example is trained on or held out, never both
        alone = calculators.release_epsilon(evaluation.example_steps, delta=delta, adjacency=adjacency)
        example = max(example, alone)
    return answer, {
        "epsilon": answer.epsilon,
        "other_epsilon": calculators.epsilon(mechanism, adjacency=OTHER_ADJACENCY[adjacency], also=also, **claim),
        "example_epsilon": example,
    }


@functools.lru_cache(maxsize=64)
def attack_bound(
    mechanism: Mechanism, noise_multiplier: float, adjacency: str, also: tuple[Steps, ...], false_alarms: float
) -> float:
    claim: dict[str, Any] = {"noise_multiplier": noise_multiplier, "adjacency": adjacency}

    def bound() -> float:
        try:
            return calculators.true_positive_rate_bound(mechanism, false_positive_rate=false_alarms, also=also, **claim)
        except UncertifiableError:
            return 1.0

    question = {"accountant": ACCOUNTANT_VERSION, "attack": mechanism.to_dict(), "rate": false_alarms, **claim}
    if also:
        question["also"] = codec.to_plain(also)
    return cached("accounting", question, bound, encode=repr, decode=float)
