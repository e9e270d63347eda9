"""Does a certificate cover a mechanism? If not, no claim is made."""

from coowned.certificate import ContributionCertificate
from coowned.errors import InputError, UncertifiableError
from coowned.mechanism.sampling import CyclicPoisson, Mechanism, MinSeparation, PoissonSampling


def check_agreement(certificate: ContributionCertificate, mechanism: Mechanism) -> None:
    """Refuses, with UncertifiableError, a mechanism that needs more than the certificate proves.

    Guarantees:
      - Every way in which the two can disagree is refused.   (test_every_disagreement_is_refused)
    """
    if not isinstance(mechanism, (PoissonSampling, MinSeparation, CyclicPoisson)):
        raise InputError(
            f"{type(mechanism).__name__} is not a mechanism; use PoissonSampling, MinSeparation or CyclicPoisson"
        )
    if certificate.contribution_bound == 0:
        raise UncertifiableError(
            "no protected user is in the training set: there is nobody to make a claim for; select again"
        )
    if mechanism.contribution_bound < certificate.contribution_bound:
        raise UncertifiableError(
            f"the mechanism is for users in at most {mechanism.contribution_bound} copies, but a recount found one in "
            f"{certificate.contribution_bound}; make it with from_certificate"
        )
    if isinstance(mechanism, PoissonSampling):
        _check_poisson(certificate)
    elif isinstance(mechanism, MinSeparation):
        _check_min_separation(certificate, mechanism)
    else:
        _check_cyclic(certificate, mechanism)


def _check_poisson(certificate: ContributionCertificate) -> None:
    if certificate.min_separation is not None:
        raise UncertifiableError(
            "the certificate is for a fixed schedule, which has no coins; use MinSeparation, or select without a "
            "schedule"
        )


def _check_min_separation(certificate: ContributionCertificate, mechanism: MinSeparation) -> None:
    if certificate.min_separation is None:
        raise UncertifiableError(
            "the certificate is not for a schedule and proves no min separation; use GreedyMinSeparation"
        )
    if certificate.min_separation == 0:
        raise UncertifiableError("some batch of the schedule holds two copies of one user; no min separation holds")
    for name in ("min_separation", "num_bands"):
        if getattr(mechanism, name) > certificate.min_separation:
            raise UncertifiableError(
                f"{name} ({getattr(mechanism, name)}) is more than the certificate's min_separation "
                f"({certificate.min_separation}); reduce it"
            )
    if mechanism.sensitivity is not None and mechanism.sensitivity < mechanism.contribution_bound**0.5:
        raise UncertifiableError(
            f"a sensitivity of {mechanism.sensitivity:.6g} for {mechanism.contribution_bound} participations cannot "
            "be checked "
            "from a certificate; leave it out"
        )
    if mechanism.max_column_norm is not None and mechanism.max_column_norm < 1:
        raise UncertifiableError(
            "columns shorter than 1 cannot be checked from a certificate; leave max_column_norm out"
        )
    if mechanism.iterations != certificate.iterations:
        raise UncertifiableError(
            f"the mechanism runs {mechanism.iterations} iterations, the schedule has {certificate.iterations}; they "
            "must be equal"
        )


def _check_cyclic(certificate: ContributionCertificate, mechanism: CyclicPoisson) -> None:
    sizes, bounds = certificate.group_sizes, certificate.group_bounds
    if certificate.groups is None or sizes is None or bounds is None:
        raise UncertifiableError(
            "the certificate does not prove that every user is in one group only, which cyclic sampling needs; "
            "select with groups"
        )
    if len(sizes) > mechanism.num_groups:
        raise UncertifiableError(
            f"the certificate has {len(sizes)} groups, the mechanism {mechanism.num_groups}; they must agree"
        )
    for group, bound in enumerate(bounds):
        if bound > mechanism.bound_of(group):
            raise UncertifiableError(
                f"group {group} has a user in {bound} copies, the mechanism allows {mechanism.bound_of(group)}; make "
                "it with from_certificate"
            )
