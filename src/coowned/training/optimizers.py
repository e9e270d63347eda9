"""Optimizers of optax, by name."""

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError

if TYPE_CHECKING:
    import optax

LEARNING_RATES = (2.0**-126, (2 - 2.0**-23) * 2.0**127)  # the normal numbers of float32, in which training computes
_NO_OPTIMIZERS = (
    "lbfgs",  # its line search asks for the loss again and again
    "noisy_sgd",  # noise of its own, from a fixed key
    "optimistic_adam",  # deprecated for optimistic_adam_v2
    "scale_by_learning_rate", "scale_by_rprop",  # parts of optimizers
    "sm3",  # no parameter without an axis, such as an intercept
)  # fmt: skip


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Every optimizer of optax that needs no more than a learning rate and a gradient.

    Guarantees:
      - Each of them takes compiled steps on a number and on a vector, and its state can be stored.
        (test_every_optimizer_takes_steps)
    """
    import optax

    names = []
    for name in dir(optax):
        function = getattr(optax, name)
        if not inspect.isfunction(function) or name.startswith("_") or name in _NO_OPTIMIZERS:
            continue
        parameters = inspect.signature(function).parameters
        needed = [
            p
            for p in parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        if "learning_rate" in parameters and {p.name for p in needed} <= {"learning_rate"}:
            names.append(name)
    return tuple(names)


def check_optimizer(name: str) -> None:
    """Refuses, with InputError, what optax does not have."""
    if name == "adam":
        return
    if name not in optimizer_names():
        near = difflib.get_close_matches(str(name), optimizer_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; adam and sgd are among them"
        raise InputError(f"optax has no optimizer {name!r} that needs only a learning rate{hint}")


def make_optimizer(name: str, learning_rate: Any) -> "optax.GradientTransformation":
    """The optax optimizer of this name.

    >>> make_optimizer("sgd", 0.1).init({})
    (EmptyState(), EmptyState())
    """
    import optax

    check_optimizer(name)
    return getattr(optax, name)(learning_rate)
