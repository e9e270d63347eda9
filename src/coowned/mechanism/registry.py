"""Every mechanism: one file, one class, one line here."""

from typing import Any

from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.mechanism.cyclic_poisson import CyclicPoisson
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.min_separation import MinSeparation
from coowned.mechanism.poisson_sampling import PoissonSampling

MECHANISMS: tuple[type[Mechanism], ...] = (
    PoissonSampling,
    MinSeparation,
    CyclicPoisson,
)


def mechanism_class(kind: str) -> type[Mechanism]:
    """The class with this `kind` or `training_kind`.

    >>> mechanism_class("poisson").__name__, mechanism_class("dp-mf").__name__
    ('PoissonSampling', 'MinSeparation')
    """
    for mechanism in MECHANISMS:
        if kind in (mechanism.kind, mechanism.training_kind):
            return mechanism
    kinds = [mechanism.kind for mechanism in MECHANISMS]
    raise InputError(f"Unknown mechanism {kind!r}; choose {', '.join(kinds[:-1])} or {kinds[-1]}")


def mechanism_class_for(certificate: ContributionCertificate) -> type[Mechanism]:
    """The mechanism that the certified selection was made for."""
    return next(mechanism for mechanism in MECHANISMS if mechanism.suits(certificate))


def mechanism_from_dict(stored: dict[str, Any]) -> Mechanism:
    """Reads a mechanism's `to_dict()` back.

    >>> mechanism = PoissonSampling(contribution_bound=2, sampling_probability=0.5, iterations=3)
    >>> mechanism_from_dict(mechanism.to_dict()) == mechanism
    True
    """
    return mechanism_class(stored.get("kind", "")).from_dict(stored)
