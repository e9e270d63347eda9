"""Calculators on a hypothetical mechanism: numbers, no claim. A claim needs a certificate (`guarantee`).

Every epsilon here is of one user (or one example) under a fixed, public attribution graph; `adjacency` says what may
change: "zero-out" (all their examples become blank) or "replace" (they become anything else).
"""

import itertools
import math
from collections.abc import Sequence

from coowned import validate
from coowned.accounting.calibrate import calibrate
from coowned.accounting.curve import epsilon_curve, gaussian_dp, true_positive_rate_bound
from coowned.accounting.numerical import Answer
from coowned.accounting.terms import check_terms
from coowned.accounting.zero_out_twice import compose_steps
from coowned.errors import UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps

__all__ = [
    "Answer",
    "calibrate",
    "composed_epsilon",
    "epsilon",
    "epsilon_curve",
    "epsilon_details",
    "epsilon_of_copies",
    "gaussian_dp",
    "sweep_noise_multiplier",
    "true_positive_rate_bound",
]


def epsilon(mechanism: Mechanism, *, noise_multiplier: float, delta: float, adjacency: str) -> float:
    """The smallest epsilon that is proven for one user at `delta`.

    Guarantees:
      - Never below the true epsilon.   (test_never_below_the_closed_form, test_never_below_quadrature,
        test_never_below_the_lower_estimate)
      - About 0.01% above it where the grid allows.   (test_close_to_dp_accounting)
      - Falls with the noise, rises with copies, probability and iterations.   (test_laws_of_epsilon)

    Raises UncertifiableError where numerical errors would take more than 1% of delta.
    Cost: 0.05 to 0.5 s; a few seconds at a million iterations with tiny probabilities. `MinSeparation` is immediate.

    Example:
      >>> from coowned import PoissonSampling
      >>> m = PoissonSampling(contribution_bound=3, sampling_probability=0.01, iterations=2500)
      >>> round(epsilon(m, noise_multiplier=2.0, delta=1e-10, adjacency="zero-out"), 2)
      5.32

    References: Charles et al. (2024), https://arxiv.org/abs/2407.07737
    """
    return epsilon_details(mechanism, noise_multiplier=noise_multiplier, delta=delta, adjacency=adjacency).epsilon


def epsilon_details(mechanism: Mechanism, *, noise_multiplier: float, delta: float, adjacency: str) -> Answer:
    """`epsilon` with the grid it was computed on and what numerical errors were charged."""
    check_terms(delta=delta, adjacency=adjacency, noise_multiplier=noise_multiplier)
    return _worst([[steps] for steps in mechanism.user_steps(noise_multiplier)], delta, adjacency)


def epsilon_of_copies(
    mechanism: Mechanism,
    *,
    copies: int,
    noise_multiplier: float,
    delta: float,
    adjacency: str,
    group: int | None = None,
) -> float:
    """The epsilon of a user who is in `copies` copies (participations for `MinSeparation`), not in all allowed.

    `group` narrows `CyclicPoisson` to that group of users. 0 copies are refused: such a user has no part in training.
    With the copies of one example in place of a user's it is the example-level (edge-data) epsilon.

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=9, min_separation=16, num_bands=16, iterations=2500)
      >>> round(epsilon_of_copies(m, copies=1, noise_multiplier=2.0, delta=1e-6, adjacency="zero-out"), 3)
      2.254
    """
    return epsilon(
        mechanism.for_copies(copies, group=group), noise_multiplier=noise_multiplier, delta=delta, adjacency=adjacency
    )


def composed_epsilon(runs: Sequence[tuple[Mechanism, float]], *, delta: float, adjacency: str) -> float:
    """The epsilon of several runs on the same people, given as (mechanism, noise multiplier), with independent coins.

    NOT for models of one sweep that share their batches: see `sweep_noise_multiplier`.

    Guarantees:
      - A run composed with itself is one run of twice the iterations.   (test_composition_of_a_run_with_itself)

    Example:
      >>> from coowned import MinSeparation
      >>> m = MinSeparation(contribution_bound=1, min_separation=8, num_bands=8, iterations=100)
      >>> round(composed_epsilon([(m, 2.0), (m, 2.0)], delta=1e-6, adjacency="zero-out"), 3)
      3.308
    """
    validate.positive(number_of_runs=len(runs))
    for _, noise_multiplier in runs:
        check_terms(delta=delta, adjacency=adjacency, noise_multiplier=noise_multiplier)
    choices = [mechanism.user_steps(noise_multiplier) for mechanism, noise_multiplier in runs]
    return _worst([list(choice) for choice in itertools.product(*choices)], delta, adjacency).epsilon


def sweep_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """The noise multiplier of ONE mechanism as strong as several models trained on the same batches.

    Models of one sweep share their coins and have noise of their own: together they are a single release with noise
    (sum of sigma_i^-2)^(-1/2). Composing them as independent runs would promise too much.

    >>> sweep_noise_multiplier([1.0, 1.0, 1.0, 1.0])
    0.4999...
    """
    validate.positive(number_of_models=len(noise_multipliers))
    for noise_multiplier in noise_multipliers:
        validate.positive_number(noise_multiplier=noise_multiplier)
    return math.fsum(sigma**-2 for sigma in noise_multipliers) ** -0.5 * (1 - 2.0**-50)


def _worst(candidates: Sequence[Sequence[Steps]], delta: float, adjacency: str) -> Answer:
    answers = [compose_steps(steps, adjacency).epsilon(delta) for steps in candidates]
    if not answers:
        raise UncertifiableError("no protected user is ever drawn: nothing to account for; run more iterations")
    return max(answers, key=lambda answer: answer.epsilon)
