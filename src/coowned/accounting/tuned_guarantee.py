"""Calibrates a tuning: finds the noise of every setting with which the best of a random number of runs is private."""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.tuning import NumberOfRuns, TuningClaim
from coowned.errors import UncertifiableError

_CLOSE = 3e-3  # of epsilon: what the search may leave unused
_TURNS = 30

Claim = Callable[[float], PrivacyGuarantee]
"""Makes the guarantee of one run alone, at an epsilon."""


def tuned_guarantees(
    claims: Sequence[Claim],
    counts: Sequence[int],
    *,
    grid: Mapping[str, Sequence[Any]],
    expected_runs: float,
    epsilon: float,
) -> list[PrivacyGuarantee]:
    """Returns a guarantee of the whole tuning for a run with each of several settings.

    All runs have the same epsilon alone, at the delta of the tuning; it is as large as the tuning's epsilon allows.

    Guarantees:
      - The tuning has the epsilon that was asked for, and uses it up to 0.3%.   (test_noise_of_a_tuning)

    Args:
      claims: for settings that the accountant tells apart.
      counts: how many settings of the grid each stands for.
      grid: the values of every key.
      expected_runs: the mean of their number.
      epsilon: of the tuning.
    """
    law, run_id = NumberOfRuns.geometric(expected_runs), secrets.token_hex(8)
    whole = claims[0](epsilon)
    untuned = whole.noise_multiplier
    alone, low, high = epsilon / (1 + 0.15 * math.log2(1 + expected_runs)), 0.0, epsilon
    for _ in range(_TURNS):
        runs = [claim(alone) for claim in claims]
        tuning = TuningClaim(
            weights=law.weights,
            settings=tuple(run.setting(count) for run, count in zip(runs, counts, strict=True)),
            grid={name: list(values) for name, values in grid.items()},
            untuned_noise_multiplier=untuned,
            individual_bounds=_alike(runs),
        )
        found = tuning.epsilon(whole.delta, whole.adjacency)
        if found <= epsilon:
            low = alone
            if found >= epsilon * (1 - _CLOSE) or high - low <= 1e-4 * high:
                return [run.of_tuning(tuning, target_epsilon=epsilon, run_id=run_id) for run in runs]
        else:
            high = alone
        aimed = alone * epsilon * (1 - _CLOSE / 2) / found
        alone = aimed if low < aimed < high else (low + high) / 2
    raise UncertifiableError("the search for the noise of the tuning did not settle; use a larger epsilon or delta")


def _alike(runs: Sequence[PrivacyGuarantee]) -> bool:
    """Returns whether all runs hold single users to the same bounds, in the held-out part, too."""
    tiers = {None if run.certificate.tiers is None else run.certificate.tiers.digest for run in runs}
    held = all(run.evaluation is not None and run.evaluation.individual_bounds for run in runs)
    return held and None not in tiers and len(tiers) == 1
