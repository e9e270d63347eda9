"""The accountant's view of a covered evaluation: one Gaussian release of counts over the held-out part.

Training and evaluation see the same people, so the claim is for both together (docs/accounting.md, "A covered
evaluation"): the Gaussian is one further step after those of training.
"""

import dataclasses
import math
from typing import Any

from coowned import validate
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveredEvaluation:
    """Settings of an evaluation that the guarantee covers, so that its figures may be published.

    Individual bounds of the training set hold in the held-out part, too: who opted out is not counted on.

    Attributes:
      epsilon_share: what the evaluation may cost: training alone would have the rest of epsilon, at the same delta. The
        default is what experiments/covered_evaluation.py recommends.
      contribution_bound: most held-out copies that contain one user; by default the smallest that keeps 90% of what
        the best bound keeps.
      loss_bound: also release the mean loss, each example's clipped at this public bound; None for no loss.
      confusion: also release how often each class was taken for each.

    Example:
      >>> CoveredEvaluation(epsilon_share=0.05).confusion
      False
    """

    epsilon_share: float = 0.1
    contribution_bound: int | None = None
    loss_bound: float | None = None
    confusion: bool = False

    def __post_init__(self) -> None:
        validate.in_range(0, 1, open_low=True, open_high=True, epsilon_share=self.epsilon_share)
        if self.contribution_bound is not None:
            validate.positive(contribution_bound=self.contribution_bound)
        if self.loss_bound is not None:
            validate.in_range(0, math.inf, open_low=True, open_high=True, loss_bound=self.loss_bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveredRelease:
    """The contribution of an evaluation to a claim: counts over certified copies, with Gaussian noise.

    Attributes:
      noise_multiplier: in units of the longest vector that one copy adds.
      epsilon_share: of epsilon, that the evaluation was allowed to cost.
      unshared_noise_multiplier: what training would have had at the same epsilon without the evaluation; None where
        the noise of training was given.
      contribution_bound, size, most_copies_of_one_example: of the held-out part, as it was certified.
      graph_digest, selection_digest: of the held-out part.
      individual_bounds: whether everybody with a bound of their own in training is held to it here, too.
    """

    noise_multiplier: float
    epsilon_share: float
    unshared_noise_multiplier: float | None
    contribution_bound: int
    size: int
    most_copies_of_one_example: int
    graph_digest: str
    selection_digest: str
    individual_bounds: bool = False

    def __post_init__(self) -> None:
        validate.positive_number(noise_multiplier=self.noise_multiplier)
        validate.in_range(0, 1, open_low=True, open_high=True, epsilon_share=self.epsilon_share)
        validate.positive(size=self.size, contribution_bound=self.contribution_bound)
        validate.integer(
            at_least=1, at_most=self.contribution_bound, most_copies_of_one_example=self.most_copies_of_one_example
        )

    def check_certificate(self, certificate: ContributionCertificate) -> None:
        """Raises CertificateMismatchError if this was made for another certificate of the held-out part."""
        for name, value in certified(certificate).items():
            if getattr(self, name) != value:
                said = f"the covered evaluation is for a held-out part with {name} = {getattr(self, name)!r}"
                raise CertificateMismatchError(f"{said}, but the certificate has {value!r}")

    def of_user(self, bound: int | None) -> "CoveredRelease":
        """Returns the same release as seen by a user with this bound of their own, which is not 0."""
        copies = self.copies_of(bound)
        repeated = min(copies, self.most_copies_of_one_example)
        return dataclasses.replace(self, contribution_bound=copies, most_copies_of_one_example=repeated)

    @property
    def steps(self) -> Steps:
        """The accountant's steps for a user's held-out data."""
        return self.steps_of(self.contribution_bound)

    @property
    def example_steps(self) -> Steps:
        """The accountant's steps for one held-out example."""
        return self.steps_of(self.most_copies_of_one_example)

    def copies_of(self, bound: int | None) -> int:
        """Returns the most held-out copies of a user with this bound of their own; None for a user without one."""
        if bound is None or not self.individual_bounds:
            return self.contribution_bound
        return min(bound, self.contribution_bound)

    def steps_of(self, copies: int) -> Steps:
        return Steps(copies=copies, probability=1.0, noise_multiplier=self.noise_multiplier, repetitions=1)


def check_held_out(certificate: ContributionCertificate, training: ContributionCertificate) -> None:
    """Raises an error for a held-out part on which nothing can be released, or that does not fit the training set."""
    if certificate.schedule is not None:
        raise UncertifiableError("the held-out part is a schedule; select a set from it")
    if not certificate.size:
        raise InputError("the held-out part has no example to evaluate; give the test split a share of the data")
    if not certificate.contribution_bound:
        raise UncertifiableError("the held-out part has nobody to protect; evaluate it without noise")
    if certificate.graph_digest == training.graph_digest:
        raise InputError(
            "the training set and the held-out part are of one graph, so that an example could be in both; "
            "split the examples first, and select from the graph of each part"
        )
    if certificate.num_unprotected_users != training.num_unprotected_users:
        raise CertificateMismatchError(
            "the training set and the held-out part leave out different numbers of unprotected users"
        )
    check_bounds(certificate, training)


def check_bounds(certificate: ContributionCertificate, training: ContributionCertificate) -> None:
    """Raises CertificateMismatchError for a held-out part whose individual bounds are not those of the training set."""
    tiers = certificate.tiers
    if tiers is not None and (training.tiers is None or tiers.digest != training.tiers.digest):
        raise CertificateMismatchError(
            "the held-out part was selected with other individual bounds than the training set; use the same for both"
        )


def certified(certificate: ContributionCertificate) -> dict[str, Any]:
    """Returns the fields of a release that follow from the certificate of the held-out part."""
    names = ("contribution_bound", "size", "most_copies_of_one_example", "graph_digest", "selection_digest")
    counted = {name: getattr(certificate, name) for name in names}
    return {**counted, "individual_bounds": certificate.tiers is not None}
