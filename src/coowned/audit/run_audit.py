"""Audits a training run: its plan on synthetic data, and its data with canaries. Writes `audit.json`."""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec

import coowned
from coowned import codec, validate
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT
from coowned.audit.canaries import CanaryAudit, audit_with_canaries
from coowned.audit.checks import CheckedLaw
from coowned.audit.curve import ALPHA, TRIALS, AuditedTier, CurveAudit, audit_curves
from coowned.audit.driving import World, audited, audited_model
from coowned.audit.randomness import (
    audit_allocation,
    audit_coin_words,
    audit_key_source,
    audit_noise_tail,
    audit_participation,
)
from coowned.audit.release_laws import NUM_KEYS, TrainerLaws, audit_covered
from coowned.content.splits import split_examples
from coowned.errors import CertificateMismatchError, InputError, require
from coowned.exact.coins import PoissonCoins
from coowned.exact.keys import Purpose, RunKey
from coowned.files import check_writable
from coowned.mechanism.mechanism import WorstUser
from coowned.models.model import Model
from coowned.models.registry import model_from_description
from coowned.progress import counted
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import make_plan
from coowned.runs.records import AuditRecord
from coowned.runs.stored_run import StoredRun
from coowned.selection.selector import Selection
from coowned.training.plan import TrainingPlan

_NOT_SEEN = (
    "Trials cannot see events rarer than about 1 in 10,000; the tails of noise and coins are tested on extreme bit "
    "patterns instead. Not audited: the run's own data and attribution"
)
_ONE_DEVICE = "; sharing a batch among several devices (the audit trains on one)"
_STAND_IN = "; the gradients of the model's own loss (the audit clips those of a linear one, with the same parameters)"
_OF_TUNING = "; the choice among the runs of the tuning (the audit attacks one run with the settings that were kept)"
LARGEST_SEED = 2**57 - 1  # every test of an audit has its own seed, derived from the given one
_CLAIM = ("epsilon", "delta", "adjacency", "contribution_bound", "noise_multiplier")
_USERS = 64  # worst-case users, at least; some may share a coordinate
_DRAWN = 8  # copies of worst-case users in an average step, at least, if there are so many
_COMPARED = 20  # trainings that are compared with one another
_STEPS = 16  # steps of each training that is compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAudit:
    """The results of the attacks on a run's plan."""

    claim: PrivacyGuarantee  # the run's guarantee, recomputed
    alpha: float  # probability, at most, of an alarm where the claim holds, all tests together
    audits_run: int  # how many times this run was audited, this one included; each could be a false alarm
    curves: tuple[CurveAudit, ...]  # the whole-curve audits, of the claim's adjacency first
    laws: tuple[CheckedLaw, ...]  # direct tests of trainer, sampler, noise, tails and keys
    repeatable: bool  # coins and noise of the audit came from a given seed
    asked: float  # seconds it was given
    taken: float  # seconds it took
    longest: str  # what took so long
    devices: int = 1  # among which its trainings split a batch
    stand_in: bool = False  # no gradient of the model is known: it trained another one with the same clipper

    @property
    def holds(self) -> bool:
        return all(curve.holds for curve in self.curves) and all(law.holds for law in self.laws)

    @property
    def alarms(self) -> list[str]:
        """The tests that contradict the claim."""
        of_tier = ["" if curve.tier is None else f" of tier {curve.tier!r}" for curve in self.curves]
        named = zip(self.curves, of_tier, strict=True)
        kind = {False: "curve", True: "curve with the evaluation"}
        broken = [f"{curve.adjacency} {kind[curve.evaluated]}{tier}" for curve, tier in named if not curve.holds]
        return broken + [law.law for law in self.laws if not law.holds]

    @property
    def epsilon_lower_bound(self) -> float:
        """The measured bound, at the claim's delta and adjacency."""
        return self.curves[0].epsilon_lower_bound(self.claim.delta)

    def verdict(self) -> str:
        """Returns the verdict in one sentence."""
        odds = f"false-alarm probability at most {self.alpha:g}, audit {self.audits_run} of this run"
        if self.holds:
            return (
                f"Not broken: {counted(len(self.curves) + len(self.laws), 'test')} with up to "
                f"{counted(max(curve.trials for curve in self.curves), 'trial')} found no evidence against epsilon "
                f"{self.claim.shown_epsilon} ({self.claim.terms()}; {odds})."
            )
        tests = " and ".join(f"the {name} test" for name in self.alarms)
        return f"Broken: {tests} {'contradicts' if len(self.alarms) == 1 else 'contradict'} the claim ({odds})."

    def overtime(self) -> str:
        """Explains why it took longer than requested; empty if it did not."""
        if self.taken <= 1.1 * self.asked:
            return ""
        return f"It took {self.taken:.0f} s instead of {self.asked:g}: {self.longest}."

    def not_seen(self) -> str:
        """Returns a sentence on the limits of the audit."""
        tuned = _OF_TUNING if self.claim.tuning is not None else ""
        return f"{_NOT_SEEN}{_ONE_DEVICE if self.devices == 1 else ''}{_STAND_IN if self.stand_in else ''}{tuned}."

    def to_record(self) -> AuditRecord:
        """Returns the content of `audit.json`."""
        return AuditRecord(
            holds=self.holds,
            verdict=self.verdict(),
            not_seen=self.not_seen(),
            run_id=self.claim.run_id,
            test_run=self.claim.test_run,
            claim={"unit": UNIT} | {name: getattr(self.claim, name) for name in _CLAIM},
            mechanism=self.claim.mechanism.to_dict(),
            alpha=self.alpha,
            audits_run=self.audits_run,
            repeatable=self.repeatable,
            epsilon_lower_bound=self.epsilon_lower_bound,
            curves=[curve.to_dict() for curve in self.curves],
            laws=[law.to_dict() for law in self.laws],
            seconds=round(self.taken, 1),
            version=coowned.__version__,
        )


def audit_run(
    path: str | os.PathLike[str],
    *,
    alpha: float = ALPHA,
    trials: int | None = None,
    seconds: float = 60.0,
    seed: int | None = None,
) -> RunAudit:
    """Audits a run: its own plan and model, on synthetic data of its shape, with fresh keys. Writes RUN/audit.json.

    The run's own key is never used: its noise would serve a second time. The false-alarm probability is shared among
    the tests. A batch is split among as many devices as the run had, where there are so many, else on one. Entries of
    other audits of the run ("canaries") are kept.

    Guarantees:
      - A folder whose parts do not agree is refused.   (test_changed_claim_is_refused)
      - A run without a guarantee is refused.   (test_run_without_a_guarantee_is_refused)
      - `audit.json` is written whole, broken or not.   (test_audit_of_a_run, test_broken_claim)

    Args:
      path: the folder of the run.
      alpha: probability of a false alarm, all tests together.
      trials: of each curve (default: up to 200,000, as many as fit `seconds`).
      seconds: for the whole audit; with `trials` given, time does not count.
      seed: makes the audit repeatable, together with `trials`; from 0 to 2^57 - 1. By default keys come from the
        operating system.
    """
    require("train", "an audit")
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    validate.positive_number(seconds=seconds)
    if seed is not None:
        validate.integer(at_least=0, at_most=LARGEST_SEED, seed=seed)
    run = StoredRun.open(path)
    plan = plan_of(run)
    check_writable(run.path)  # before the work
    found = audit_plan(
        plan,
        model_from_description(run.record.model),
        alpha=alpha,
        trials=trials,
        seconds=seconds,
        seed=seed,
        devices=_devices(run.record.devices),
    )
    earlier = _earlier(run)
    found = dataclasses.replace(found, audits_run=1 + earlier.audits_run)
    run.write_audit(msgspec.structs.replace(found.to_record(), canaries=earlier.canaries))
    return found


def audit_plan(
    plan: TrainingPlan,
    model: Model,
    *,
    alpha: float = ALPHA,
    trials: int | None = None,
    seconds: float = 60.0,
    seed: int | None = None,
    devices: int = 1,
) -> RunAudit:
    """Audits a plan before or after it has run; see `audit_run`. `devices`: among which it splits a batch.

    Guarantees:
      - An honest trainer is accused with probability at most alpha.   (test_honest_plans_pass_twenty_seeds)
      - Each of the planted bugs is caught.   (test_planted_bugs_are_caught)
      - The worst person of each tier is attacked.   (test_a_tier_above_its_bound_is_caught)
    """
    if plan.guarantee is None:
        raise InputError("the plan has no guarantee: there is no claim to audit; train with privacy")
    asked = seconds if trials is None else math.inf
    clock, keys = _Clock(), _keys(seed)
    worst = plan.mechanism.worst_user(plan.strategy)
    users = max(_USERS, math.ceil(_DRAWN / (worst.copies * worst.probability)))  # copies of one user in a step
    world = World.like(plan.certificate, plan.mechanism, users=users, strategy=plan.strategy)
    trained = audited_model(model)
    laws = TrainerLaws(plan=plan, model=trained, world=world, seconds=asked, devices=devices)
    tiers = AuditedTier.all_of(plan)
    # Two curves, participation, noise twice, a sweep and the key source, two of each tier, and a covered evaluation
    # with two curves of its own and one of each tier; others are certain.
    share = alpha / (7 + 2 * len(tiers) + (3 + len(tiers)) * (plan.guarantee.evaluation is not None))
    found = [] if seed is not None else [audit_key_source(alpha=share)]
    found.append(audit_noise_tail())
    with clock.part("drawing batches"):
        found += _sampler_laws(plan, worst, world, keys, share)
    with clock.part("compiling and training without gradients"):
        found.append(laws.noise(next(keys), alpha=share))
    with clock.part("comparing trainings with one another"):
        steps = min(_STEPS, plan.iterations)
        if math.isfinite(asked):
            steps = max(1, min(steps, int(0.2 * asked / (_COMPARED * laws.step_seconds(next(keys))))))
        found += [laws.gradient(next(keys)), laws.contributions(next(keys), steps=steps)]
        if trained.many_models:
            found.append(laws.sweep(next(keys), steps=steps, alpha=share))
    if plan.guarantee.evaluation is not None:
        with clock.part("evaluating with the noise of the claim"):
            found.append(audit_covered(plan, model, list(itertools.islice(keys, NUM_KEYS)), alpha=share))
    with clock.part("training worst-case users side by side"):
        curves, beside = audit_curves(
            plan,
            keys.__next__,
            adjacencies=(plan.guarantee.adjacency, OTHER_ADJACENCY[plan.guarantee.adjacency]),
            alpha=share,
            trials=TRIALS if trials is None else trials,
            seconds=max(asked - clock.taken(), 0.4 * asked) / (1 + len(tiers)),  # also if compiling took all the time
        )
    with clock.part("training worst-case users of each tier"):
        for tier in tiers:
            own, noise = audit_curves(
                plan,
                keys.__next__,
                adjacencies=(plan.guarantee.adjacency,),
                alpha=share,
                trials=TRIALS if trials is None else trials,
                seconds=max(asked - clock.taken(), 0.4 * asked) / (1 + len(tiers)),
                tier=tier,
            )
            curves, found = (*curves, *own), [*found, noise]
    return RunAudit(
        claim=plan.guarantee,
        alpha=alpha,
        audits_run=1,
        curves=curves,
        laws=(*found, beside),
        repeatable=seed is not None and trials is not None,
        asked=asked,
        taken=clock.taken(),
        longest=clock.longest(),
        devices=devices,
        stand_in=trained is not model,
    )


def _devices(of_run: int) -> int:
    """Returns the number of devices of the run if available; else one, which gives the same sums and is reported."""
    import jax

    return of_run if of_run <= len(jax.devices()) else 1


def plan_of(run: StoredRun) -> TrainingPlan:
    """Returns the plan of a finished run, with a fresh key and a synthetic S of the same shape.

    Guarantees:
      - It is the plan that run.json describes, but for its S, or is refused.   (test_another_plan_is_refused)
    """
    if run.guarantee is None:
        raise InputError(f"{run.path}: the run has no guarantee: there is no claim to audit; train with privacy")
    chosen = run.plan
    fields: dict[str, Any] = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
    fields["strategy"] = None  # made anew, to compare with the record
    plan = TrainingPlan(
        **fields,
        selected=World.like(run.certificate, run.mechanism, users=1).selected,
        run_key=RunKey.from_seed(0) if chosen.test_run else RunKey.from_operating_system(),
    )
    if codec.to_plain(plan.describe()) != run.record.plan:
        raise CertificateMismatchError(
            f"{run.path}: run.json and guarantee.json describe different plans; restore the original files"
        )
    return plan


def audit_configured_run(
    path: str | os.PathLike[str],
    config: TrainConfig,
    *,
    canaries: int = 200,
    alpha: float = ALPHA,
    seed: int | None = None,
) -> CanaryAudit:
    """Trains the run's configuration once more with canary users, and stores the result in RUN/audit.json.

    The model it trains is thrown away. What it finds was learned from the data: no guarantee covers it.

    Guarantees:
      - Another configuration than the run's is refused.   (test_another_configuration_is_refused)
      - Every canary user has as many examples as the run's bound allows.   (test_canaries_of_a_run)
    Cost: one training.

    Args:
      path, alpha: as for `audit_run`.
      config: the run's configuration, read from where its data can be found.
      canaries: number of canary users.
      seed: makes it repeatable, for tests; without it keys are the operating system's.
    """
    if seed is not None:
        validate.integer(at_least=0, at_most=LARGEST_SEED, seed=seed)
    run = StoredRun.open(path)
    clip_norm, per_user = plan_of(run).clip_norm, run.certificate.contribution_bound
    stored = run.config(config.folder)
    config = config.completed_as(stored)
    if stored.digest != config.digest:
        raise InputError(
            f"{run.path}: trained with a different configuration; compare it with {run.path / 'config.toml'}"
        )
    examples = config.source().read(content=False)
    task = config.task(examples.schema)
    own = task.load(examples, {"train": split_examples(examples.graph, config.splits)["train"]})
    make = getattr(own.model, "with_canaries", None)
    if make is None:
        kind = type(own.model).__name__
        raise InputError(f"no canaries are defined for {kind}; call audit_with_canaries with your own")
    model, content = make(canaries, per_user, clip_norm)
    run_key, coins = (
        RunKey.from_operating_system() if seed is None else RunKey.from_seed(2 * seed + number) for number in range(2)
    )
    found = audit_with_canaries(
        model,
        own.parts["train"],
        lambda graph: make_plan(config, graph, run_key),
        content,
        per_user=per_user,
        alpha=alpha,
        initial=task.initial,
        coins=coins,
    )
    store_canaries(run, found)
    return found


def store_canaries(run: StoredRun, found: CanaryAudit) -> None:
    """Adds an audit with canaries to RUN/audit.json, next to that of the plan if there is one.

    Guarantees:
      - What else is in the file stays.   (test_canaries_are_kept_beside_the_mechanism)
    """
    run.write_audit(msgspec.structs.replace(_earlier(run), canaries=found.to_dict()))


def _sampler_laws(
    plan: TrainingPlan, user: WorstUser, world: World, keys: Iterator[RunKey], alpha: float
) -> list[CheckedLaw]:
    if not isinstance(world.selected, Selection):  # a schedule has no coins
        return []
    samplers = (audited(plan, world.selected, key).batches() for key in keys)
    looked_at: dict[str, Any] = {"alpha": alpha, "num_groups": plan.mechanism.cycle_length, "group": user.group}
    if user.rounds_per_epoch > 1:
        return [audit_allocation(samplers, world.selected, rounds_per_epoch=user.rounds_per_epoch, **looked_at)]
    words = audit_coin_words(PoissonCoins(user.probability))
    if user.probability == 1:
        return [words]
    return [words, audit_participation(samplers, world.selected, probability=user.probability, **looked_at)]


def _keys(seed: int | None) -> Iterator[RunKey]:
    """Yields the audit's own keys."""
    while seed is None:
        yield RunKey.from_operating_system()
    for number in itertools.count():
        yield RunKey(RunKey.from_seed(seed).derive(Purpose.CANARIES, step=number).tobytes())


class _Clock:
    """A stopwatch for an audit and its parts."""

    def __init__(self) -> None:
        self._started, self._parts = time.monotonic(), {}

    def taken(self) -> float:
        return time.monotonic() - self._started

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        began = self.taken()
        yield
        self._parts[what] = self.taken() - began

    def longest(self) -> str:
        """Returns the two parts that took longest, as part of a sentence."""
        parts = sorted(self._parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{what} took {seconds:.0f} s" for what, seconds in parts[:2])


def _earlier(run: StoredRun) -> AuditRecord:
    """Returns the record of an earlier audit; anything else in the file is replaced."""
    with contextlib.suppress(InputError):
        return run.audit() or AuditRecord()
    return AuditRecord()
