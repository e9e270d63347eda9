"""Argument checks: one line per argument, with uniform errors.

>>> positive(contribution_bound=3)
>>> positive(contribution_bound=0)
Traceback (most recent call last):
  ...
coowned.errors.InputError: contribution_bound must be an integer of at least 1, not 0
"""

import math
import numbers
from collections.abc import Collection, Sized
from typing import Any

from coowned.errors import InputError
from coowned.progress import did_you_mean


def integer(*, at_least: int, at_most: int | None = None, **named: Any) -> None:
    """Raises InputError unless it is an integer in [at_least, at_most]; booleans do not count as numbers."""
    for name, value in named.items():
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or int(value) < at_least or (at_most is not None and int(value) > at_most):
            upper = "" if at_most is None else f" and at most {at_most}"
            raise InputError(f"{name} must be an integer of at least {at_least}{upper}, not {value!r}")


def positive(**named: Any) -> None:
    """Raises InputError unless it is an integer of at least 1."""
    integer(at_least=1, **named)


def positive_number(**named: Any) -> None:
    """Raises InputError unless it is a finite number above 0."""
    for name, value in named.items():
        if not is_number(value) or value <= 0 or value == math.inf:
            raise InputError(f"{name} must be a finite number above 0, not {value!r}")


def in_range(low: float, high: float, *, open_low: bool = False, open_high: bool = False, **named: Any) -> None:
    """Raises InputError unless it is a number between low and high, ends excluded as declared."""
    for name, value in named.items():
        inside = is_number(value) and (low < value if open_low else low <= value)
        inside = inside and (value < high if open_high else value <= high)
        if not inside:
            brackets = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
            raise InputError(f"{name} must be a number in {brackets}, not {value!r}")


def one_of(choices: Collection[str], **named: Any) -> None:
    """Raises InputError unless it is one of the named choices, suggesting a close one."""
    for name, value in named.items():
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            close = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise InputError(f"{name} must be one of {listed}, not {value!r}{close}")


def column_names(**named: Any) -> None:
    """Raises InputError unless it is the name of one column or a list of names; None is allowed."""
    for name, value in named.items():
        names = [value] if isinstance(value, str) else value
        if names is not None and not (names and all(isinstance(column, str) and column for column in names)):
            raise InputError(f"{name} must be a column name or a list of them, not {value!r}")


def local_path(**named: Any) -> None:
    """Raises InputError if it is the address of something elsewhere (hdfs://…); None is allowed."""
    for name, value in named.items():
        if "://" in str(value):
            raise InputError(f"{name}: {value} is an address, which only Spark reads; copy it to this machine")


def same_length(expected: int, **named: Sized) -> None:
    """Raises InputError unless sequences have the expected length."""
    for name, value in named.items():
        if len(value) != expected:
            raise InputError(f"{name} must have {expected} entries, not {len(value)}")


def seed(value: Any) -> None:
    """Raises InputError unless it can be a seed, an integer in [0, 2^63)."""
    integer(at_least=0, at_most=2**63 - 1, seed=value)


def is_number(value: Any) -> bool:
    """Returns whether a value is a real number; false for booleans, nan and everything else."""
    # nan is the one number that is not itself; math.isnan would overflow on very large integers.
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and bool(value == value)
