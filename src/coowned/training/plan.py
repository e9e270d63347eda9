"""The training plan: everything that defines a run, in one frozen object, so that what runs is what is accounted.

A `Keeper` is where a run that follows the plan is stored, and resumed from.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.accounting.privacy_guarantee import PrivacyGuarantee, absent_statement
from coowned.accounting.signal_to_noise import SignalToNoise
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError
from coowned.exact.grid import CLIP_NORMS
from coowned.exact.keys import RunKey
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import Batches
from coowned.mechanism.mechanism import Mechanism
from coowned.selection.selector import Schedule, Selection
from coowned.training.optimizers import OptimizerOptions

if TYPE_CHECKING:
    from coowned.training.workers import Workers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunPlan(OptimizerOptions):
    """The settings of a run, and what may be claimed afterwards; `Run.plan` of a finished run.

    Sampler, noise and claim are read from one mechanism and one guarantee; nothing can be set twice.

    Guarantees:
      - A guarantee for another certificate or mechanism is refused.   (test_parts_must_agree)
      - What `describe` gives is read back as the same plan.   (test_plans_are_read_back)

    Attributes:
      certificate: what was recounted of S.
      mechanism: how batches are drawn; `batch_size` must be set.
      guarantee: the claim, with the noise; None trains without privacy.
      clip_norm: longest gradient of one copy. Without a guarantee it may be infinite, or None for the plain gradient.
      optimizer, learning_rate: any of optax by name; `OptimizerOptions` has the rest.
      configuration: names the member of a sweep, in its noise keys.
      public: without a guarantee because the data are public, not because privacy was left out.
      strategy: of the correlated noise; by default the best for the mechanism's bands and iterations.
      test_run: noise and coins come from a given seed, so nothing is promised.
      reasons: what was chosen from the graph and public numbers because nobody said it, and why.
    """

    certificate: ContributionCertificate
    mechanism: Mechanism
    guarantee: PrivacyGuarantee | None
    clip_norm: float | None
    learning_rate: float
    optimizer: str = "adam"
    configuration: str = ""
    public: bool = False
    strategy: BandedStrategy | None = None
    test_run: bool = False
    reasons: tuple[str, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.mechanism.batch_size is None:
            raise InputError(
                "the mechanism has no batch_size, which gradients are divided by; create it with from_certificate"
            )
        self.check_options(self.optimizer, self.learning_rate)
        object.__setattr__(self, "learning_rate", float(self.learning_rate))
        if self.guarantee is not None:
            self._check_guarantee(self.guarantee)
        if self.clip_norm is not None:
            validate.in_range(0, math.inf, open_low=True, clip_norm=self.clip_norm)
            object.__setattr__(self, "clip_norm", float(self.clip_norm))
        object.__setattr__(self, "strategy", self.mechanism.check_strategy(self.strategy))

    def _check_guarantee(self, guarantee: PrivacyGuarantee) -> None:
        if not isinstance(guarantee, PrivacyGuarantee):
            raise InputError(f"guarantee must come from guarantee(...), not {type(guarantee).__name__}")
        if guarantee.certificate != self.certificate:
            raise CertificateMismatchError("the guarantee is for another certificate; compute it again for this one")
        if guarantee.mechanism != self.mechanism:
            raise CertificateMismatchError("the guarantee is for another mechanism; compute it again for this one")
        if self.test_run and not guarantee.test_run:
            raise InputError(
                "the run key comes from a given seed, so noise and coins are known: there is no guarantee; use "
                "guarantee(..., test_run=True), or use RunKey.from_operating_system()"
            )
        if guarantee.test_run and not self.test_run:
            raise InputError(
                "a test run takes its key from a seed; use RunKey.from_seed, or a guarantee for a real run"
            )
        validate.in_range(*CLIP_NORMS, clip_norm=self.clip_norm)
        if self.public:
            raise InputError("public data need no guarantee; remove one of the two")

    @classmethod
    def from_description(
        cls,
        described: Mapping[str, Any],
        certificate: ContributionCertificate,
        mechanism: Mechanism,
        guarantee: PrivacyGuarantee | None,
    ) -> "RunPlan":
        """Reads the values of `describe` back, as stored in JSON."""
        clip_norm, (optimizer, learning_rate, *options) = described["clip_norm"], described["optimizer"]
        coefficients, iterations = np.array(described["coefficients"]), mechanism.iterations
        return RunPlan(
            certificate=certificate,
            mechanism=mechanism,
            guarantee=guarantee,
            clip_norm=None if clip_norm is None else float(clip_norm),
            optimizer=optimizer,
            learning_rate=learning_rate,
            **dict(*options),
            **{name: described[name] for name in ("configuration", "public", "test_run")},
            strategy=None if len(coefficients) == 1 else BandedStrategy(len(coefficients), iterations, coefficients),
        )

    @property
    def iterations(self) -> int:
        return self.mechanism.iterations

    @property
    def batch_size(self) -> int:
        """The public number that sums of gradients are divided by, never the number of copies drawn."""
        assert self.mechanism.batch_size is not None
        return self.mechanism.batch_size

    @property
    def expected_copies(self) -> int:
        """An upper bound on the mean number of copies per step; it may exceed batch_size in custom mechanisms."""
        return self.mechanism.expected_copies(self.certificate)

    @property
    def noise_multiplier(self) -> float:
        return 0.0 if self.guarantee is None else self.guarantee.noise_multiplier

    @property
    def coefficients(self) -> np.ndarray:
        """The (num_bands,) coefficients of the strategy; (1.0,) is independent noise."""
        return np.ones(1) if self.strategy is None else self.strategy.coefficients

    def signal_to_noise(self, num_parameters: int, num_scores: int | None = None) -> SignalToNoise | None:
        """Estimates the signal-to-noise ratio of the mean gradient for a model of this size; None without noise."""
        if self.guarantee is None:
            return None
        return SignalToNoise.of(
            self.mechanism,
            noise_multiplier=self.noise_multiplier,
            num_parameters=num_parameters,
            num_scores=num_scores,
            strategy=self.strategy,
        )

    def __str__(self) -> str:
        """Returns every setting in a line or two, with the reasons for those chosen automatically."""
        clip_norm = "no clipping" if self.clip_norm in (None, math.inf) else f"clip norm {self.clip_norm:g}"
        options = "".join(f", {name} {value}" for name, value in self.options().items())
        rate = f"learning rate {self.learning_rate:g}"
        said = (
            f"{self.mechanism.training_kind}: batches of {self.batch_size:,}, {self.iterations:,} steps, {clip_norm}, "
            f"noise multiplier {self.noise_multiplier:.4g}; {self.optimizer}, {rate}{options}."
        )
        chosen = ["", "Chosen from the graph and public numbers alone:"] if self.reasons else []
        return "\n".join([said, *chosen, *(f"- {reason}" for reason in self.reasons)])

    def statement(self, model: Mapping[str, Any] | None = None) -> str:
        """Returns what may be claimed about the model, and about the public parts that its description names."""
        if self.guarantee is None:
            return absent_statement(public=self.public)
        return self.guarantee.statement(model=model)

    def describe(self) -> dict[str, Any]:
        """Returns all settings except data, code and key, as plain values; a run resumes only under the same."""
        clip_norm, options = self.clip_norm, self.options()
        return {
            **claim_terms(self.certificate, self.mechanism, self.guarantee),
            "clip_norm": str(clip_norm) if clip_norm == math.inf else clip_norm,  # JSON has no infinity
            "optimizer": [self.optimizer, self.learning_rate, *([options] if options else ())],
            "configuration": self.configuration,
            "coefficients": self.coefficients.tolist(),
            "public": self.public,
            "test_run": self.test_run,
        }

    @functools.cached_property
    def digest(self) -> str:
        """The digest of `describe`."""
        return plan_digest(self.describe())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainingPlan(RunPlan):
    """A plan that can be trained: a `RunPlan` with S and the run key.

    Guarantees:
      - A guarantee for another certificate, mechanism or kind of key is refused.   (test_parts_must_agree)
      - `check` refuses another graph or selection than the certificate's, a mechanism whose coins are not the ones
        accounted for, and a sensitivity below the strategy's.   (test_mismatches_are_refused)

    Attributes:
      selected: S or a schedule; example i is example i of the training data's graph.
      run_key: where coins and noise come from; it decides whether this is a test run.

    Example:
      >>> from coowned import Greedy, PoissonSampling, certify, guarantee
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(100)])
      >>> selection = Greedy(contribution_bound=1).select(graph)
      >>> certificate = certify(graph, selection)
      >>> mechanism = PoissonSampling.from_certificate(certificate, batch_size=10, iterations=20)
      >>> claim = guarantee(certificate, mechanism, noise_multiplier=1.0, delta=1e-6, adjacency="zero-out",
      ...                  test_run=True)
      >>> plan = TrainingPlan(certificate=certificate, selected=selection, mechanism=mechanism, guarantee=claim,
      ...                     clip_norm=1.0, learning_rate=0.1, run_key=RunKey.from_seed(0))
      >>> plan.iterations, plan.batch_size, plan.statement()[:15]
      (20, 10, '1. No guarantee')
    """

    selected: Selection | Schedule
    run_key: RunKey = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.run_key, RunKey):
            raise InputError("run_key must be a RunKey; use RunKey.from_operating_system()")
        object.__setattr__(self, "test_run", self.run_key.is_test_run)
        super().__post_init__()

    def batches(self, *, multiple_of: int = 8) -> Batches:
        """Returns the batches of every step, from the mechanism that was accounted for."""
        return self.mechanism.batches(self.selected, run_key=self.run_key, multiple_of=multiple_of)

    def check(self, graph: AttributionGraph) -> None:
        """Recounts everything the claim rests on, before the first step; raises an error for any mismatch."""
        self.certificate.check(graph, self.selected)
        self.mechanism.check_selected(self.selected)
        if self.guarantee is not None:
            self.mechanism.check_sensitivity(self.selected, graph, self.strategy)


def claim_terms(
    certificate: ContributionCertificate, mechanism: Mechanism, guarantee: PrivacyGuarantee | None
) -> dict[str, Any]:
    """Returns the terms that a plan, a guarantee and a certificate must share, as plain values."""
    terms: dict[str, Any] = {
        "graph": certificate.graph_digest,
        "selection": certificate.selection_digest,
        "mechanism": mechanism.to_dict(),
        "noise_multiplier": 0.0 if guarantee is None else guarantee.noise_multiplier,
        "claim": None,
    }
    if guarantee is not None:
        # Epsilon follows from these and the mechanism, and is computed anew whenever a guarantee is read.
        names = ("run_id", "delta", "adjacency", "simulated_batch_size", "test_run")
        terms["claim"] = {name: getattr(guarantee, name) for name in names}
        if guarantee.evaluation is not None:
            terms["claim"]["evaluation"] = dataclasses.asdict(guarantee.evaluation)
        if guarantee.tuning is not None:
            terms["claim"]["tuning"] = dataclasses.asdict(guarantee.tuning)
    return json.loads(json.dumps(terms))  # tuples as lists, as they are read back


def plan_digest(plan: dict[str, Any]) -> str:
    """Returns the digest of a plan as `TrainingPlan.describe` gives it."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


class Checkpoint(NamedTuple):
    """The training state after `step` steps."""

    step: int
    tensors: dict[str, npt.NDArray[Any]]


class Keeper(Protocol):
    """The storage of one run, such as `coowned.runs.run_folder.RunFolder`."""

    @property
    def is_begun(self) -> bool: ...

    @property
    def workers(self) -> "Workers":
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
