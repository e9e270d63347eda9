"""The terms that always accompany an epsilon, and checks of a requested claim."""

from collections.abc import Mapping

from coowned import validate
from coowned.errors import InputError

UNIT = "user, fixed graph"
ADJACENCIES = ("zero-out", "replace")
OTHER_ADJACENCY = {"zero-out": "replace", "replace": "zero-out"}
_LARGE_DELTA = 1e-5  # above it a claim carries a warning, whatever the number of users
_REFUSED_DELTA = 0.1  # from here on a claim is made only where that was asked for


def check_terms(
    *,
    adjacency: str,
    delta: float | None = None,
    epsilon: float | Mapping[str, float] | None = None,
    noise_multiplier: float | None = None,
) -> None:
    """Raises InputError for an unknown adjacency, and for whatever else is given but impossible."""
    validate.one_of(ADJACENCIES, adjacency=adjacency)
    if delta is not None:
        validate.in_range(0, 1, open_low=True, open_high=True, delta=delta)
    for target in epsilon.values() if isinstance(epsilon, Mapping) else [] if epsilon is None else [epsilon]:
        validate.positive_number(epsilon=target)
    if noise_multiplier is not None:
        validate.positive_number(noise_multiplier=noise_multiplier)


def refuse_large_delta(delta: float, *, allow_large_delta: bool) -> None:
    """Raises InputError for a delta that leaves next to nothing of a promise, unless it was asked for."""
    if delta >= _REFUSED_DELTA and not allow_large_delta:
        raise InputError(
            f"delta = {delta:g} lets the guarantee fail for 1 person in {1 / delta:.0f}; use a delta far below 1 / "
            "users, or allow it (--allow-large-delta; in a configuration [privacy] allow_large_delta = true)"
        )


def delta_warnings(delta: float, *, num_users: int) -> tuple[str, ...]:
    """Warns of a delta that is too large for so many protected users; returns () where it is not.

    >>> delta_warnings(1e-8, num_users=1000)
    ()
    """
    if delta * num_users > 1:
        return (
            f"Warning: delta {delta:.12g} is above 1 / (users in the training set). Publishing all the data of one "
            "user, chosen at random, would satisfy such a guarantee; use a delta far below it.",
        )
    if delta > _LARGE_DELTA:
        return (
            f"Warning: delta {delta:.12g} is above {_LARGE_DELTA:g}. The guarantee may fail with that "
            "probability; use less.",
        )
    return ()
