"""Guarantees for people with individual bounds: an epsilon for each tier under one noise multiplier."""

from collections.abc import Mapping
from typing import Any

from coowned.accounting.covered import CoveredRelease
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism
from coowned.progress import counted


def copies_of_tiers(certificate: ContributionCertificate, mechanism: Mechanism) -> dict[str, int]:
    """Returns the copies of one user to account for, by tier: the tier's bound, or the most that any user has."""
    tiers = certificate.tiers
    if tiers is None:
        return {}
    return {name: min(bound, mechanism.contribution_bound) for name, bound in tiers.by_name().items()}


def check_targets(targets: Mapping[str, float], certificate: ContributionCertificate) -> None:
    """Refuses targets that leave a tier with users out, or are for a tier that there is not."""
    tiers = certificate.tiers
    if tiers is None:
        raise InputError("an epsilon for each tier needs bounds for single users; select with contribution_bounds")
    bounds = tiers.by_name()
    for name in targets:
        if not bounds.get(name):
            why = "has bound 0: nothing of theirs is used" if name in bounds else "is unknown"
            raise InputError(f"tier {name!r} {why}; give an epsilon for each of {_named(bounds)}")
    for name, users in zip(tiers.names, tiers.users, strict=True):
        if users and bounds[name] and name not in targets:
            raise InputError(f"{counted(users, 'user is', 'users are')} of tier {name!r}, which has no target; add one")


def check_met(targets: Mapping[str, float], epsilons: Mapping[str, float | None], noise_multiplier: float) -> None:
    """Refuses noise that was found but does not meet the target of every tier."""
    for name, target in targets.items():
        found = epsilons[name]
        if found is not None and found > target:
            raise UncertifiableError(
                f"the noise multiplier {noise_multiplier:.6g} that was found gives tier {name!r} epsilon {found:.6g}, "
                f"not {target:g}; empty the cache (COOWNED_CACHE) and calibrate again"
            )


def tier_sentences(
    certificate: ContributionCertificate, rows: list[dict[str, Any]], shown: Any, evaluation: CoveredRelease | None
) -> list[str]:
    """Returns a statement's sentences on tiers; `rows` have an epsilon and an other_epsilon, formatted by `shown`."""
    tiers = certificate.tiers
    if tiers is None:
        return []
    parts = [
        f"{row['tier']!r} (bound {row['contribution_bound']:,}): epsilon {shown(row['epsilon'])}, "
        f"{shown(row['other_epsilon'])} under the other adjacency"
        for row in rows
        if row["epsilon"] is not None
    ]
    sentences = [f"By tier, at the same delta: {'; '.join(parts)}."] if parts else []
    sentences.append(
        "Bounds of single users are assumed to be chosen, like the training set, without looking at content; a bound "
        "that a person is told tells of the policy, not of anybody's content."
    )
    if tiers.num_opted_out:
        unused, may_be = "is in the training set", "Validation and test examples may be theirs."
        if evaluation is not None and evaluation.individual_bounds:
            unused += " or counted in the covered evaluation"
        elif evaluation is not None:
            may_be = "Validation and test examples, and the counts of the covered evaluation, may be theirs."
        sentences.append(
            f"{counted(tiers.num_opted_out, 'user')} opted out (bound 0): no example that they are part of {unused}. "
            f"{may_be}"
        )
    return sentences


def opted_out_examples(certificate: ContributionCertificate) -> list[str]:
    """Returns a sentence on the examples removed with opted-out users, a statistic of perhaps few people."""
    tiers = certificate.tiers
    if tiers is None or not tiers.num_opted_out:
        return []
    return [
        "Graph statistic, not protected by this guarantee: users who opted out are part of "
        f"{counted(tiers.num_examples_opted_out, 'example')}."
    ]


def _named(bounds: Mapping[str, int]) -> str:
    return ", ".join(repr(name) for name, bound in bounds.items() if bound)
