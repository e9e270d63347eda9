"""Training of many configurations on one stream of batches, with shared matrix products for linear models."""

import contextlib
import dataclasses
import io
import itertools
import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.accounting.calculators import sweep_noise_multiplier
from coowned.accounting.guarantee import guarantee
from coowned.certificate import ContributionCertificate
from coowned.content.data import TrainingData
from coowned.errors import InputError, UncertifiableError
from coowned.exact.keys import RunKey
from coowned.mechanism.mechanism import Mechanism
from coowned.models.model import Model
from coowned.progress import Progress
from coowned.selection.selector import Schedule, Selection
from coowned.training.evaluate import example_losses
from coowned.training.loop import LoopOptions, run_plans
from coowned.training.optimizers import OPTION_DEFAULTS
from coowned.training.plan import Keeper, TrainingPlan

if TYPE_CHECKING:
    import polars as pl

_SHARED = ("certificate", "selected", "mechanism", "strategy", "optimizer", "momentum", "scale_gradients", "run_key")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SweptModels:
    """The models of a sweep, in the order of the plans.

    Attributes:
      parameters: arrays with a leading axis for the members.
    """

    model: Model
    plans: tuple[TrainingPlan, ...]
    parameters: dict[str, npt.NDArray[np.float32]]

    def member(self, number: int) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the parameters of one member, as `train` would return them."""
        return {name: array[number] for name, array in self.parameters.items()}

    def compare(self, data: TrainingData, *, split: str) -> "pl.DataFrame":
        """Evaluates every member on a split (validation, to choose; test, to report the one chosen).

        Not covered by any guarantee: a choice by these numbers depends on every member's training and on the split.
        """
        import polars as pl

        if self.model.many_models and len(self.plans) > 1:
            losses, right = example_losses(self.model, self.parameters, data)  # (examples, members)
        else:
            scored = [example_losses(self.model, self.member(number), data) for number in range(len(self.plans))]
            losses, right = (np.stack(arrays, axis=1) for arrays in zip(*scored, strict=True))
        finite = np.isfinite(losses)
        mean = np.where(finite, losses, 0).sum(axis=0) / np.maximum(1, finite.sum(axis=0))
        return self.members().select(
            pl.lit(split).alias("split"),
            pl.exclude("number"),
            pl.Series("loss", mean),
            pl.Series("accuracy", right.mean(axis=0) if len(right) else np.full(len(self.plans), np.nan)),
            pl.lit(False).alias("covered_by_guarantee"),
        )

    def members(self) -> "pl.DataFrame":
        """Returns number, configuration and settings of every member: what was asked for, nothing of the data."""
        import polars as pl

        options = dict.fromkeys(name for plan in self.plans for name in plan.options())  # those that any plan sets
        shown = ("configuration", "learning_rate", "clip_norm", "noise_multiplier", *options)
        columns = {name: [getattr(plan, name) for plan in self.plans] for name in shown}
        return pl.DataFrame({"number": range(len(self.plans)), **columns})

    def statement(self, released: int) -> str:
        """Returns the statement for releasing this member and no other.

        Guarantees:
          - It names the others and says that they are not covered.   (test_statement_covers_one_model)
        """
        text = self.plans[released].statement(self.model.describe())
        if self.plans[released].guarantee is None:
            return text
        number = text.count("\n") + 2
        return (
            f"{text}\n{number}. This covers the release of ONE model of a sweep of {len(self.plans)}, chosen without "
            "looking at the data. All members were trained on the same batches: releasing more of them, or choosing by "
            "their results, is not covered by this epsilon, and the sum of their epsilons is not a bound; see the "
            "noise multiplier of all together."
        )

    def released(self, number: int) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, str]]:
        """Returns (arrays, metadata) of one member's file, with the statement for releasing this member only."""
        metadata = {
            "format": "pt",
            "statement": self.statement(number),
            "model": json.dumps(self.model.describe()),
            "configuration": self.plans[number].configuration,
        }
        return self.model.to_arrays(self.member(number)), metadata

    def noise_multiplier_of_all(self) -> float:
        """Returns the noise multiplier of the one mechanism that releases every member: pass it to `guarantee`.

        Guarantees:
          - It is (sum of sigma^-2)^(-1/2), never above the smallest member's.   (test_noise_multiplier_of_all)
        """
        if any(plan.guarantee is None for plan in self.plans):
            raise InputError("a member was trained without privacy: there is no guarantee for all together")
        return sweep_noise_multiplier([plan.noise_multiplier for plan in self.plans])


def sweep(
    plans: Sequence[TrainingPlan],
    model: Model,
    data: TrainingData,
    *,
    folder: Keeper | None = None,
    progress: Progress | None = None,
    **options: Unpack[LoopOptions],
) -> SweptModels:
    """Trains configurations that share data, S, batch size, iterations and optimizer, all in one pass.

    With a folder, resumes the sweep that it holds; at the end every member is in a file of its own there, with the
    statement for the case that it is the one released.

    They may differ in learning rate, clip norm, noise multiplier and options of the optimizer. Every
    member has noise of its own (its keys name its `configuration`) and the batches of all: a sweep's statement covers
    one released model only.

    Guarantees:
      - Each member is what it would be alone, up to rounding.   (test_sweep_equals_single_runs,
        test_members_of_any_model_equal_single_runs)
      - Members' noise is independent.   (test_members_have_their_own_noise)
      - Plans that cannot share a pass are refused.   (test_plans_that_differ_are_refused)
      - A sweep that was killed anywhere ends in the same bits.   (test_killed_sweep_is_bit_identical,
        test_resumed_sweep_is_bit_identical)
      - A folder is refused where members, their order, data, model, code, devices or key are not what they were, and
        where the sweep has ended.   (test_changed_sweep_is_refused, test_finished_sweep_is_refused)
    Cost: for each step one gather, and of linear models two matrix products of (batch, features) with (features,
    members); any other model's members follow one another in the same compiled program.

    Args:
      plans: at least one, each with a `configuration` of its own; the same run key, certificate, mechanism, optimizer.
      model, data, folder, progress, options: as for `train`; all members start from `initial`.

    Example:
      >>> from coowned import AttributionGraph, Greedy, LogisticRegression, PoissonSampling, certify
      >>> from coowned.synthetic.logistic_data import LogisticData
      >>> from coowned.synthetic.logistic_data import WorldData
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
      >>> data = WorldData.part(LogisticData(num_features=3).attach(graph, seed=0))
      >>> selection = Greedy(contribution_bound=1).select(graph)
      >>> certificate = certify(graph, selection)
      >>> mechanism = PoissonSampling.from_certificate(certificate, batch_size=50, iterations=3)
      >>> plans = grid(certificate, selection, mechanism, epsilons=[2, 8], delta=1e-6, adjacency="zero-out",
      ...              learning_rates=[0.01, 0.1], clip_norms=[1.0], run_key=RunKey.from_seed(0))
      >>> [plan.learning_rate for plan in plans], len({plan.noise_multiplier for plan in plans})
      ([0.01, 0.1, 0.01, 0.1], 2)
      >>> sweep(plans, LogisticRegression(num_features=3), data).parameters["coefficients"].shape
      (4, 4)
    """
    plans = tuple(plans)
    _check(plans)
    if folder is not None and not folder.is_begun:
        _prepare_claim(plans, folder)

    def report(done: int) -> None:
        if progress is not None:
            progress(done / plans[0].iterations, f"{len(plans)} models, step {done:,} of {plans[0].iterations:,}")

    parameters, _ = run_plans(plans, model, data, folder=folder, report=report, **options)
    swept = SweptModels(model=model, plans=plans, parameters=parameters)
    if folder is not None:
        models = {f"model-{number}.safetensors": swept.released(number) for number in range(len(plans))}
        members = io.BytesIO()
        swept.members().write_parquet(members)
        folder.finish(models, {"members.parquet": members.getvalue()})
    return swept


def _prepare_claim(plans: tuple[TrainingPlan, ...], folder: Keeper) -> None:
    """Stores the claim for all members together, for `coowned compose`; none if it cannot be computed."""
    first = plans[0].guarantee
    if first is None:
        return
    with contextlib.suppress(UncertifiableError):
        together = guarantee(
            first.certificate,
            first.mechanism,
            noise_multiplier=sweep_noise_multiplier([plan.noise_multiplier for plan in plans]),
            delta=first.delta,
            adjacency=first.adjacency,
            test_run=first.test_run,
            run_id=first.run_id,
            allow_large_delta=True,
        )
        folder.prepare_claim(first.certificate, together, first.mechanism)


def _check(plans: tuple[TrainingPlan, ...]) -> None:
    if not plans:
        raise InputError("a sweep needs at least one plan")
    first = plans[0]
    names = [plan.configuration for plan in plans]
    if len(set(names)) != len(names):
        raise InputError("every plan of a sweep needs its own `configuration`: two equal ones would share noise")
    for plan in plans[1:]:
        for name in _SHARED:
            own, others = getattr(plan, name), getattr(first, name)
            if own is not others and own != others:
                raise InputError(
                    f"the plans {first.configuration!r} and {plan.configuration!r} differ in {name}; sweep them "
                    "separately"
                )
        if plan.guarantee and first.guarantee and plan.guarantee.run_id != first.guarantee.run_id:
            raise InputError(
                "the models of a sweep share their coins and are ONE run; give their guarantees the same run_id=..., "
                "so that they cannot be composed as independent runs"
            )
        if (plan.guarantee is None) != (first.guarantee is None) or (plan.clip_norm is None) != (
            first.clip_norm is None
        ):
            raise InputError("plans with and without privacy cannot share a sweep; sweep them separately")


class GridOptions(TypedDict, total=False):
    """Keywords of `grid` that have a default.

    epsilons: targets, each calibrated; or
    noise_multipliers: as they are. Exactly one of the two.
    optimizer: of all members; "adam" by default.
    run_id: a name for the one run that all members are; made up at random by default.
    Others: values to try of each option of the optimizer (`OptimizerOptions`): decay=["constant", "cosine"], say.
    """

    epsilons: Sequence[float]
    noise_multipliers: Sequence[float]
    optimizer: str
    run_id: str | None
    momentum: Sequence[float]
    warmup: Sequence[float]
    decay: Sequence[str]
    final_rate: Sequence[float]
    weight_decay: Sequence[float]
    average: Sequence[str]
    average_window: Sequence[float]
    scale_gradients: Sequence[bool]


def grid(
    certificate: ContributionCertificate,
    selected: Selection | Schedule,
    mechanism: Mechanism,
    *,
    learning_rates: Sequence[float],
    clip_norms: Sequence[float],
    delta: float,
    adjacency: str,
    run_key: RunKey,
    **options: Unpack[GridOptions],
) -> list[TrainingPlan]:
    """Returns a plan for every combination of guarantee, clip norm, learning rate and options, for one `sweep`.

    The order is that of nested loops: guarantees first, then clip norms, learning rates, and options as they are given;
    `sweep` has an example.

    Guarantees:
      - All guarantees have one run_id, so that members cannot be composed as independent runs.
        (test_grid_makes_one_run)
      - With a given seed every guarantee is that of a test run.   (test_grid_makes_one_run)

    Args:
      certificate, selected, mechanism: as for `TrainingPlan`, shared by all members.
      options: epsilons or noise_multipliers, optimizer, run_id, and options of the optimizer, as `GridOptions` says.
    """
    tried: dict[str, Any] = dict(options)
    epsilons, noise_multipliers = tried.pop("epsilons", ()), tried.pop("noise_multipliers", ())
    optimizer, run_id = tried.pop("optimizer", "adam"), tried.pop("run_id", None)
    for name in tried:
        validate.one_of(tuple(OPTION_DEFAULTS), option=name)
    if bool(epsilons) == bool(noise_multipliers):
        raise InputError("a grid needs either epsilons or noise_multipliers, at least one of them")
    one_run = secrets.token_hex(8) if run_id is None else run_id
    claims = [
        guarantee(
            certificate,
            mechanism,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            adjacency=adjacency,
            test_run=run_key.is_test_run,
            run_id=one_run,
        )
        for epsilon, noise_multiplier in [*((e, None) for e in epsilons), *((None, s) for s in noise_multipliers)]
    ]
    plans = []
    settings = itertools.product(claims, clip_norms, learning_rates)
    for (claim, clip_norm, rate), values in itertools.product(settings, itertools.product(*tried.values())):
        chosen: dict[str, Any] = dict(zip(tried, values, strict=True))
        named = {"learning_rate": rate, "clip_norm": clip_norm, "noise_multiplier": claim.noise_multiplier, **chosen}
        plan = TrainingPlan(
            certificate=certificate,
            selected=selected,
            mechanism=mechanism,
            guarantee=claim,
            clip_norm=clip_norm,
            learning_rate=rate,
            run_key=run_key,
            optimizer=optimizer,
            configuration=" ".join(f"{name}={value!r}" for name, value in named.items()),
            **chosen,
        )
        plans.append(plan)
    return plans
