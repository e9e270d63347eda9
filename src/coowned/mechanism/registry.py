"""Every mechanism: one file, one class, one line here. Importing this imports none of them."""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.certificate import ContributionCertificate
    from coowned.mechanism.mechanism import Mechanism

CLASSES = {
    "poisson": "coowned.mechanism.poisson_sampling.PoissonSampling",
    "min-separation": "coowned.mechanism.min_separation.MinSeparation",
    "cyclic": "coowned.mechanism.cyclic_poisson.CyclicPoisson",
    "random-allocation": "coowned.mechanism.random_allocation.RandomAllocation",
}
"""The dotted path of every mechanism's class by its `kind`."""
TITLES = {
    "poisson": "DP-SGD",
    "min-separation": "DP-MF with min separation",
    "cyclic": "cyclic DP-MF",
    "random-allocation": "random allocation",
}
"""What each is called in a sentence."""


@functools.cache
def mechanisms() -> "tuple[type[Mechanism], ...]":
    """Every mechanism's class."""
    paths = [path.rpartition(".") for path in CLASSES.values()]
    return tuple(getattr(importlib.import_module(module), name) for module, _, name in paths)


def mechanism_class(kind: str) -> "type[Mechanism]":
    """The class with this `kind` or `training_kind`.

    >>> mechanism_class("poisson").__name__, mechanism_class("dp-mf").__name__
    ('PoissonSampling', 'MinSeparation')
    """
    for mechanism in mechanisms():
        if kind in (mechanism.kind, mechanism.training_kind):
            return mechanism
    raise InputError(f"Unknown mechanism {kind!r}; choose {one_of(CLASSES)}")


def mechanism_class_for(certificate: "ContributionCertificate") -> "type[Mechanism]":
    """The mechanism that the certified selection was made for: the first above that needs what was certified."""
    scheduled = certificate.min_separation is not None
    needs = scheduled, not scheduled and bool(certificate.groups)
    return next(kind for kind in mechanisms() if (kind.needs_schedule, kind.needs_groups) == needs)


def mechanism_from_dict(stored: dict[str, Any]) -> "Mechanism":
    """Reads a mechanism's `to_dict()` back."""
    return mechanism_class(stored.get("kind", "")).from_dict(stored)
