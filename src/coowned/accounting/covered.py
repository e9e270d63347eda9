"""The accountant's view of a covered evaluation: one Gaussian release of counts over the held-out part.

Training and evaluation see the same people, so the claim is for both together (docs/accounting.md, "A covered
evaluation"): the Gaussian is one further step after those of training.
"""

import dataclasses
import math
from typing import Any, Self

from coowned import validate
from coowned.accounting.calibrate import calibrate_release
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveredEvaluation:
    """Settings of an evaluation that the guarantee covers, so that its figures may be published.

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
    """

    noise_multiplier: float
    epsilon_share: float
    unshared_noise_multiplier: float | None
    contribution_bound: int
    size: int
    most_copies_of_one_example: int
    graph_digest: str
    selection_digest: str

    def __post_init__(self) -> None:
        validate.positive_number(noise_multiplier=self.noise_multiplier)
        validate.in_range(0, 1, open_low=True, open_high=True, epsilon_share=self.epsilon_share)
        validate.positive(size=self.size, contribution_bound=self.contribution_bound)
        validate.integer(
            at_least=1, at_most=self.contribution_bound, most_copies_of_one_example=self.most_copies_of_one_example
        )

    @classmethod
    def calibrated(
        cls,
        certificate: ContributionCertificate,
        mechanism: Mechanism,
        *,
        epsilon: float,
        epsilon_share: float,
        noise_multiplier: float,
        unshared: float | None,
        **terms: Any,
    ) -> Self:
        """Returns the release with the least noise under which training and evaluation together have `epsilon`.

        Args:
          certificate: what was recounted of the held-out part.
          mechanism, noise_multiplier: of the training.
          unshared: what training would have had without the evaluation.
          terms: delta and adjacency.
        """
        check_held_out(certificate)
        noise = calibrate_release(
            mechanism,
            noise_multiplier=noise_multiplier,
            contribution_bound=certificate.contribution_bound,
            epsilon=epsilon,
            **terms,
        )
        return cls(
            noise_multiplier=noise,
            epsilon_share=float(epsilon_share),
            unshared_noise_multiplier=unshared,
            **_certified(certificate),
        )

    def check_certificate(self, certificate: ContributionCertificate) -> None:
        """Raises CertificateMismatchError if this was made for another certificate of the held-out part."""
        for name, value in _certified(certificate).items():
            if getattr(self, name) != value:
                said = f"the covered evaluation is for a held-out part with {name} = {getattr(self, name)!r}"
                raise CertificateMismatchError(f"{said}, but the certificate has {value!r}")

    @property
    def steps(self) -> Steps:
        """The accountant's steps for a user's held-out data."""
        return self.steps_of(self.contribution_bound)

    @property
    def example_steps(self) -> Steps:
        """The accountant's steps for one held-out example."""
        return self.steps_of(self.most_copies_of_one_example)

    def steps_of(self, copies: int) -> Steps:
        return Steps(copies=copies, probability=1.0, noise_multiplier=self.noise_multiplier, repetitions=1)


def check_held_out(certificate: ContributionCertificate) -> None:
    """Raises an error for a held-out part on which nothing can be released, or that is no set."""
    if certificate.schedule is not None:
        raise UncertifiableError("the held-out part is a schedule; select a set from it")
    if not certificate.size:
        raise InputError("the held-out part has no example to evaluate; give the test split a share of the data")
    if not certificate.contribution_bound:
        raise UncertifiableError("the held-out part has nobody to protect; evaluate it without noise")


def _certified(certificate: ContributionCertificate) -> dict[str, Any]:
    names = ("contribution_bound", "size", "most_copies_of_one_example", "graph_digest", "selection_digest")
    return {name: getattr(certificate, name) for name in names}
