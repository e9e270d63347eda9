"""One typed door to scipy's bracketing root finder."""

from collections.abc import Callable

from scipy.optimize import brentq


def find_root(
    function: Callable[[float], float], low: float, high: float, *, absolute: float, relative: float = 1e-13
) -> float:
    """Where a continuous function with different signs at low and high is 0, to about absolute + relative * |root|.

    >>> round(find_root(lambda x: x * x - 2, 0.0, 2.0, absolute=1e-12), 9)
    1.414213562
    """
    return brentq(function, low, high, xtol=absolute, rtol=relative)  # pyright: ignore[reportArgumentType,reportReturnType]
