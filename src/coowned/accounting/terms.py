"""The words an epsilon is never shown without, and the guards for what a claim is asked for."""

from coowned import validate

UNIT = "user, fixed graph"
ADJACENCIES = ("zero-out", "replace")
OTHER_ADJACENCY = {"zero-out": "replace", "replace": "zero-out"}


def check_terms(
    *,
    adjacency: str,
    delta: float | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
) -> None:
    """Refuses, with InputError, an unknown adjacency, and whatever else is given but impossible."""
    validate.one_of(ADJACENCIES, adjacency=adjacency)
    if delta is not None:
        validate.in_range(0, 1, open_low=True, open_high=True, delta=delta)
    if epsilon is not None:
        validate.positive_number(epsilon=epsilon)
    if noise_multiplier is not None:
        validate.positive_number(noise_multiplier=noise_multiplier)
