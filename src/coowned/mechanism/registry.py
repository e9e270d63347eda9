"""Lists every mechanism: one file, one class, one line here. Importing this imports none of them."""

import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned.errors import InputError
from coowned.progress import one_of

if TYPE_CHECKING:
    from coowned.certificate import ContributionCertificate
    from coowned.mechanism.mechanism import Mechanism


class Entry(NamedTuple):
    """The dotted path of a mechanism's class, and its name in a sentence."""

    path: str
    title: str


MECHANISMS = {
    "poisson": Entry("coowned.mechanism.poisson_sampling.PoissonSampling", "DP-SGD"),
    "min-separation": Entry("coowned.mechanism.min_separation.MinSeparation", "DP-MF with min separation"),
    "cyclic": Entry("coowned.mechanism.cyclic_poisson.CyclicPoisson", "cyclic DP-MF"),
    "random-allocation": Entry("coowned.mechanism.random_allocation.RandomAllocation", "random allocation"),
}
"""Every mechanism by its `kind`."""


def mechanisms() -> "Iterator[type[Mechanism]]":
    """Yields every mechanism's class, and imports none before it is asked for."""
    for entry in MECHANISMS.values():
        yield pkgutil.resolve_name(entry.path)


def training_kind_for(*, schedules: bool, groups: bool) -> str:
    """Returns the training kind that uses most of what a selector provides.

    >>> training_kind_for(schedules=False, groups=False), training_kind_for(schedules=True, groups=False)
    ('dp-sgd', 'dp-mf')
    """
    suitable = [kind for kind in mechanisms() if kind.needs_schedule == schedules and (groups or not kind.needs_groups)]
    return max(suitable, key=lambda kind: kind.needs_groups).training_kind


def mechanism_class(kind: str) -> "type[Mechanism]":
    """Returns the class with this `kind` or `training_kind`.

    >>> mechanism_class("poisson").__name__, mechanism_class("dp-mf").__name__
    ('PoissonSampling', 'MinSeparation')
    """
    for mechanism in mechanisms():
        if kind in (mechanism.kind, mechanism.training_kind):
            return mechanism
    raise InputError(f"Unknown mechanism {kind!r}; choose {one_of(MECHANISMS)}")


def mechanism_class_for(certificate: "ContributionCertificate") -> "type[Mechanism]":
    """Returns the mechanism that the selection was made for: the first above that needs what was certified."""
    scheduled = certificate.schedule is not None
    needs = scheduled, not scheduled and bool(certificate.groups)
    return next(kind for kind in mechanisms() if (kind.needs_schedule, kind.needs_groups) == needs)


def mechanism_from_dict(stored: dict[str, Any]) -> "Mechanism":
    """Reads a mechanism's `to_dict()` back."""
    return mechanism_class(stored.get("kind", "")).from_dict(stored)
