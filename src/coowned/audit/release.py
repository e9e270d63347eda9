"""What a training step releases for batches of many kinds: does a copy never add more than one clip norm?

Nor by what it does to others: in a crowd of full gradients, one copy that changes how all of them are computed would
move the sum by far more than it adds itself.
"""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import CheckedLaw, certain_check, checked_law
from coowned.mechanism.noise import ROUNDING_FACTOR

_CROWD, _FEATURES = 512, 100
_LARGE_CROWD, _MANY_FEATURES = 2048, 512  # on the host: in several parts


def audit_release(
    *, noise_multiplier: float, copies: int, batch_size: int, parts: AuditedParts | None = None, alpha: float = 1e-3
) -> CheckedLaw:
    """Runs the training step on batches with few and many copies of a user and of others, and compares.

    Guarantees:
      - A clip that lets more through, a division by what was drawn, and too little noise are caught, without chance.
        (test_wrong_releases_are_caught)
      - So is one example that changes what others add, whatever it holds, in every step: of one model and of many,
        compiled and summed on the host; with norms that come with the rows and without.
        (test_a_copy_that_changes_others_is_caught, test_a_copy_that_changes_logits_is_caught)
    What it is not: a proof for other models than logistic regression, whose step is run.

    >>> audit_release(noise_multiplier=1.0, copies=2, batch_size=4).holds
    True
    """
    validate.positive(copies=copies, batch_size=batch_size)
    parts = parts or AuditedParts()
    clip_norm = 1.0
    scale = parts.noise_scale(noise_multiplier=noise_multiplier, clip_norm=clip_norm, batch_size=batch_size)
    counts = sorted({1, 2, copies} & set(range(1, copies + 1)))
    crowds = (0, 1, min(batch_size, 1000) // 2, min(batch_size, 1000), 2 * min(batch_size, 1000))
    size = 8 * -(-(copies + max(crowds)) // 8)

    def release(count: int, content: int, others: int, noise: float = 0.0, *, on_host: bool) -> float:
        divisor = parts.divisor(batch_size=batch_size, num_copies=count + others)
        settings = {"learning_rate": 1.0, "clip_norm": clip_norm, "noise_scale": scale, "batch_size": float(divisor)}
        released = parts.step(
            user_copies=count,
            content=content,
            other_copies=others,
            size=size,
            settings=settings,
            noise=noise,
            on_host=on_host,
        )
        return released * batch_size / clip_norm

    largest = max(
        abs(release(count, content, others, on_host=on_host) - release(count, 0, others, on_host=on_host)) / count
        for count in counts
        for others in sorted(set(crowds))
        for content in (1, -1)
        for on_host in (False, True)
    )
    noise = min(
        release(0, 0, others, noise=1.0, on_host=on_host) for others in sorted(set(crowds)) for on_host in (False, True)
    )
    checks = [
        certain_check("clip norms that a copy adds", largest <= ROUNDING_FACTOR, observed=largest, expected=1.0),
        certain_check("noise multiplier", noise >= noise_multiplier, observed=noise, expected=noise_multiplier),
    ]
    steps = {
        "one model": {},
        "one model, summed on the host": {"on_host": True},
        "many models": {"models": 2},
        "many models, summed on the host": {"models": 2, "on_host": True},
    }
    for (name, step), with_norms in itertools.product(steps.items(), (True, False)):
        kind = f"{name}, norms {'given' if with_norms else 'computed'}"
        crowd = _LARGE_CROWD if step.get("on_host") else _CROWD
        rounding = 3 * crowd * 2.0**-24  # of a clip norm: what roundings of two so large sums may be
        for what, moved in _moves(_crowd_releases(parts, step, with_norms)).items():
            checks.append(certain_check(f"{what} ({kind})", moved <= 1 + rounding, observed=moved, expected=1.0))
        for width in (1, _FEATURES):
            shift = _logit_shift(parts, step, with_norms, width)
            what = f"clip norms that a copy of nothing moves others by, {width} features ({kind})"
            checks.append(certain_check(what, shift <= rounding, observed=shift, expected=0.0))
    return checked_law("release", checks, alpha)


def _crowd_releases(parts: AuditedParts, step: dict[str, Any], with_norms: bool) -> dict[str, npt.NDArray[np.float64]]:
    """For each thing that one copy may hold, the sum with a crowd of equal gradients longer than the clip norm.

    On the host the crowd is so large that threads share it, and its rows lie scattered in a larger array.
    """
    from coowned.mechanism.clipping import squared_norms_of
    from coowned.mechanism.fused_clipping import RowsInPlace

    on_host = step.get("on_host", False)
    crowd, width = (_LARGE_CROWD, _MANY_FEATURES) if on_host else (_CROWD, _FEATURES)
    generator = np.random.default_rng(0)
    row = generator.normal(scale=100.0, size=width).astype(np.float32)  # the intercept hardly counts
    places = generator.permutation(2 * crowd)[:crowd]
    place = 2 * crowd // 3  # of the copy that changes: not in the first part
    contents = {  # features and label; at parameters zero a label of 0.5 has no gradient
        "nothing": (0 * row, 0.5),
        "NaN": (np.where(np.arange(width) == 7, np.nan, row), 0.0),
        "infinite": (np.where(np.arange(width) == 7, np.inf, row), 0.0),
        "equal": (row, 0.0),
        "opposite": (row, 1.0),
        "huge": (np.float32(1e30) * row, 1.0),
    }
    divisor = parts.divisor(batch_size=crowd, num_copies=crowd)
    settings = {"learning_rate": 1.0, "clip_norm": 1.0, "noise_scale": 0.0, "batch_size": float(divisor)}
    released = {}
    for name, (features, label) in contents.items():
        batch: dict[str, Any] = {"features": np.tile(row, (crowd, 1)), "labels": np.zeros(crowd, np.float32)}
        batch["features"][place], batch["labels"][place] = features, label
        if with_norms:
            batch["squared_norms"] = squared_norms_of(batch["features"])
        if on_host:
            source = np.full((2 * crowd, width), np.nan, np.float32)
            source[places] = batch["features"]
            batch["features"] = RowsInPlace(source, places)
        released[name] = crowd * parts.release(batch, np.ones(crowd, bool), settings=settings, **step)
    return released


def _logit_shift(parts: AuditedParts, step: dict[str, Any], with_norms: bool, width: int) -> float:
    """How far one copy that is not finite, and so adds nothing, moves a crowd, in clip norms.

    Logits are small sums of large numbers, and gradients shorter than the clip norm: what changes a logit in its last
    digits is seen.
    """
    from coowned.mechanism.clipping import squared_norms_of

    generator = np.random.default_rng(width)
    row = (generator.uniform(0.5, 2, width) / (8 * np.sqrt(width))).astype(np.float32)
    weights = generator.uniform(1e5, 1e6, width).astype(np.float32)
    coefficients = np.append(weights, np.float32(0.3 - weights.astype(np.float64) @ row.astype(np.float64)))
    settings = {"learning_rate": 2.0**24, "clip_norm": 1.0, "noise_scale": 0.0}
    settings["batch_size"] = float(parts.divisor(batch_size=_CROWD, num_copies=_CROWD))
    released = []
    for bad in (row[0], np.nan, np.inf):
        batch: dict[str, Any] = {"features": np.tile(row, (_CROWD, 1)), "labels": np.zeros(_CROWD, np.float32)}
        batch["features"][_CROWD // 2, 0] = bad
        if with_norms:
            batch["squared_norms"] = squared_norms_of(batch["features"])
        mask = (np.arange(_CROWD) != _CROWD // 2) | ~np.isfinite(bad)  # left out where it is like the others
        released.append(_CROWD * parts.release(batch, mask, settings=settings, coefficients=coefficients, **step))
    return max(float(np.linalg.norm(one - released[0], axis=-1).max()) for one in released[1:])


def _moves(released: dict[str, npt.NDArray[np.float64]]) -> dict[str, float]:
    """How far a copy moves the sum, in clip norms: against one that adds nothing; and half of what a replaced one does.

    What is not finite adds nothing.
    """

    def longest(pairs) -> float:
        # numpy's maximum, which does not pass over what is not a number
        return float(np.max([np.linalg.norm(released[a] - released[b], axis=-1) for a, b in pairs]))

    silent, loud = ("nothing", "NaN", "infinite"), ("equal", "opposite", "huge")
    return {
        "clip norms that a copy moves a crowd by": longest(
            [*itertools.product(loud, silent), *itertools.combinations(silent, 2)]
        ),
        "half of those that a replaced copy moves a crowd by": longest(itertools.combinations(loud, 2)) / 2,
    }
