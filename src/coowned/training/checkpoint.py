"""The interface between training and the folder that stores a run: where to resume, and what to store."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.certificate import ContributionCertificate
from coowned.mechanism.mechanism import Mechanism
from coowned.training.workers import Workers


class Checkpoint(NamedTuple):
    """The training state after `step` steps."""

    step: int
    tensors: dict[str, npt.NDArray[Any]]


class Keeper(Protocol):
    """The storage of one run, such as `coowned.runs.run_folder.RunFolder`."""

    @property
    def is_begun(self) -> bool: ...

    @property
    def workers(self) -> Workers:
        """The processes that train; only worker 0 stores anything."""
        ...

    def prepare_claim(
        self, certificate: ContributionCertificate, guarantee: PrivacyGuarantee | None, mechanism: Mechanism
    ) -> None:
        """Holds the claim until `begin` writes it."""
        ...

    def begin(self, run: Mapping[str, Any]) -> Checkpoint | None:
        """Starts the run, or returns the state of an earlier process; raises an error for a different run.

        Args:
          run: what a resumed run must agree in; fields of `coowned.runs.records.RunRecord`.
        """
        ...

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replaces the checkpoint."""
        ...

    def finish(
        self, models: Mapping[str, tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, str]]], files: Mapping[str, bytes]
    ) -> None:
        """Stores models and files by name, and ends the run."""
        ...
