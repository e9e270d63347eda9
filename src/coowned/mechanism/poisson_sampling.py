"""Implements DP-SGD: every copy is drawn by its own coin in every step."""

import dataclasses
import math
from typing import Any, Self

from coowned import validate
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.mechanism.batching import PoissonBatches
from coowned.mechanism.mechanism import Mechanism, Selected
from coowned.progress import counted

_MOST_RAISES = 10  # times the bound that raising it is still advised


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoissonSampling(Mechanism):
    """Draws every copy in each step by its own coin of probability `sampling_probability`.

    Attributes:
      sampling_probability: expected batch size over the number of copies (not of distinct examples).

    Guarantees:
      - From a certificate, the probability is batch_size over the number of copies.   (test_probability_counts_copies)

    Example:
      >>> PoissonSampling(contribution_bound=3, sampling_probability=0.01, iterations=2500).iterations
      2500

    References: Charles et al. (2024), https://arxiv.org/abs/2407.07737
    """

    kind = "poisson"
    training_kind = "dp-sgd"

    sampling_probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.in_range(0, 1, open_low=True, sampling_probability=self.sampling_probability)

    @classmethod
    def _certified_fields(cls, certificate: ContributionCertificate, batch_size: int | None) -> dict[str, Any]:
        assert batch_size is not None
        if batch_size > certificate.size:
            size = counted(certificate.size, "copy", "copies")
            raise InputError(
                f"batch_size must be at most the size of S ({size}), not {batch_size}; reduce it, "
                f"or {_larger_selection(certificate, batch_size)}"
            )
        return {"sampling_probability": batch_size / certificate.size}

    def batches(self, selected: Selected, *, run_key: RunKey, multiple_of: int = 8) -> PoissonBatches:
        drawing = self._drawing(selected, run_key, multiple_of)
        return PoissonBatches(**drawing, sampling_probability=self.sampling_probability)

    def probability_of(self, group: int) -> float:
        return self.sampling_probability

    def expected_copies(self, certificate: ContributionCertificate) -> int:
        return max(super().expected_copies(certificate), math.ceil(self.sampling_probability * certificate.size))

    def with_batch_size(self, batch_size: int, certificate: ContributionCertificate) -> Self:
        validate.positive(simulated_batch_size=batch_size)
        return dataclasses.replace(self, **self._certified_fields(certificate, batch_size))

    @classmethod
    def for_size(cls, *, contribution_bound: int, size: int, batch_size: int, iterations: int) -> Self:
        return cls(
            contribution_bound=contribution_bound,
            sampling_probability=batch_size / size,
            batch_size=batch_size,
            iterations=iterations,
        )

    def describe(self) -> str:
        return (
            f"Poisson sampling: every copy has its own coin of probability {self.sampling_probability:.10g} in every "
            "step"
        )


def _larger_selection(certificate: ContributionCertificate, size: int) -> str:
    """Explains how S can become larger: a bound higher by one adds at most a copy for each user at the bound."""
    at_bound = certificate.copies_per_user[-1] if certificate.copies_per_user else 0
    if certificate.size + at_bound * _MOST_RAISES * certificate.contribution_bound >= size:
        return "raise the bound"
    return (
        "exclude users who are in most examples (--unprotected FILE), or change the attribution (`coowned inspect` "
        "shows the heaviest users); raising the bound is not enough"
    )
