"""Makes privacy guarantees from a certificate and a mechanism, the only way to get one, and composes them."""

import dataclasses
import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec
import polars as pl

import coowned
from coowned import codec, validate
from coowned.accounting import calculators
from coowned.accounting.calibrate import ACCOUNTANT_VERSION, refuse_if_never_drawn
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.statement import (
    FALSE_ALARMS,
    Statement,
    make_statement,
    rounded_down,
    rounded_up,
    unprotected_sentences,
)
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, check_terms, delta_warnings, refuse_large_delta
from coowned.accounting.tiers import check_met, check_targets, copies_of_tiers, noise_for_targets
from coowned.accounting.tuning_claim import TuningClaim
from coowned.cache import cached
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps, check_mechanism
from coowned.mechanism.registry import mechanism_from_dict

FORMAT = "coowned-guarantee-2"
COMPOSED_FORMAT = "coowned-composed-guarantee-1"
_CHANGED = "the guarantee was changed after it was written; run calibrate again"
_MADE_BY_GUARANTEE = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """States an epsilon with everything it means: unit, bound, delta, adjacency, mechanism and certificate.

    Attributes:
      epsilon, delta, adjacency: the claim, for the worst-off protected user.
      target_epsilon: what was asked for; None where the noise multiplier was given.
      noise_multiplier: in units of one example's clip norm.
      other_epsilon: the same run under the other adjacency, at the same delta.
      example_epsilon: the same run for one example alone (edge-data privacy), under `adjacency`.
      simulated_epsilon, simulated_batch_size: where the noise came from a hypothetical batch size, the epsilon it was
        made for. `epsilon` is always that of what runs.
      grid_spacing, error_share: of the accountant's discretization (0 for a closed form), and what part of delta its
        numerical errors take.
      test_run: noise and coins come from a given seed: nothing is promised, and the statement says so.
      run_id: names the one run this is for; two runs need two guarantees.
      evaluation: a covered evaluation; every epsilon is then of training and evaluation together. None without one.
      tuning: the run is the best of a tuning, and every epsilon is that of the whole tuning. None for a run alone.

    Guarantees:
      - Only `guarantee` makes one, from a certificate that the mechanism agrees with.   (test_only_guarantee_makes_one)
      - A file that was changed is refused.   (test_tampered_guarantee_is_refused)
      - What is read back has no epsilon below what this version proves.   (test_read_epsilon_is_never_below_proven)
    """

    epsilon: float
    delta: float
    adjacency: str
    target_epsilon: float | None
    noise_multiplier: float
    other_epsilon: float
    example_epsilon: float
    simulated_epsilon: float | None
    simulated_batch_size: int | None
    grid_spacing: float
    error_share: float
    test_run: bool
    run_id: str
    mechanism: Mechanism
    certificate: ContributionCertificate
    version: str
    evaluation: CoveredRelease | None = None
    tuning: TuningClaim | None = None
    maker: dataclasses.InitVar[object] = None  # not kept, so that dataclasses.replace cannot pass it on

    def __post_init__(self, maker: object) -> None:
        if maker is not _MADE_BY_GUARANTEE:
            raise UncertifiableError("a PrivacyGuarantee comes from guarantee(certificate, ...), not from numbers")

    @property
    def unit(self) -> str:
        return UNIT

    @property
    def contribution_bound(self) -> int:
        return self.mechanism.contribution_bound

    @property
    def shown_epsilon(self) -> str:
        """Epsilon as people are shown it: as it was asked for where it was, else rounded up."""
        met = self.target_epsilon is not None and self.simulated_epsilon is None and self.epsilon <= self.target_epsilon
        return f"{self.target_epsilon:.12g}" if met else rounded_up(self.epsilon)

    @property
    def shown_noise_multiplier(self) -> str:
        """Noise multiplier as people are shown it: as it was given where it was, else rounded down."""
        return f"{self.noise_multiplier:.12g}" if self.target_epsilon is None else rounded_down(self.noise_multiplier)

    @property
    def also(self) -> tuple[Steps, ...]:
        """What a user's data go through beside training."""
        return () if self.evaluation is None else (self.evaluation.steps,)

    def warnings(self) -> tuple[str, ...]:
        """Warns of a delta that is too large for so many users. A test run claims nothing."""
        users = self.certificate.num_users - sum(self.certificate.copies_per_user[:1])
        return () if self.test_run else delta_warnings(self.delta, num_users=users)

    def attack_bound(self, adjacency: str) -> float:
        """Bounds the success of any attack on this run with 1% false alarms."""
        epsilon = self.epsilon if adjacency == self.adjacency else self.other_epsilon
        by_claim = math.exp(min(epsilon, 700.0)) * FALSE_ALARMS + self.delta
        if self.tuning is not None:
            return min(1.0, by_claim, _tuning_attack_bound(self.tuning, adjacency, epsilon))
        return min(1.0, by_claim, _attack_bound(self.mechanism, self.noise_multiplier, adjacency, self.also))

    def statement(self, *, graph_statistics: bool = False, model: Mapping[str, Any] | None = None) -> str:
        """Explains the guarantee in numbered sentences; with graph_statistics, also how many users have which level.

        Such counts are statistics of the graph, which fixed-graph privacy does not protect: leave them out of what is
        published unless the graph is public. With a model's description it names a public encoder.
        """
        return str(self.statement_parts(graph_statistics=graph_statistics, model=model))

    def statement_parts(self, *, graph_statistics: bool = False, model: Mapping[str, Any] | None = None) -> Statement:
        """Returns the statement as data: headline, sentences, and what is not promised."""
        return make_statement(self, graph_statistics=graph_statistics, model=model)

    def by_copies(self) -> pl.DataFrame:
        """Returns epsilon for users with 0, 1, … copies (participations for a schedule), and how many users have them.

        Under a fixed graph a user in fewer copies has a better guarantee. Level 0 has no epsilon: such users have no
        part in training, which says nothing of validation or test. With a covered evaluation every level, 0 too, has
        the epsilon of a user in as many held-out copies as are allowed.   (test_levels_with_an_evaluation)
        Of a tuning, whose runs may differ in their copies, every level has the epsilon of the worst-off user.
        For cyclic sampling there is one row for each group and level; otherwise, where users have bounds of their own,
        one for each tier and level. The `users` column is a statistic of the graph.
        """
        rows = [{**level, "epsilon": self._level_epsilon(level)} for level in self._levels()]
        return pl.DataFrame(rows, infer_schema_length=None).select(
            *(name for name in ("tier", "group", "sampling_probability") if rows and name in rows[0]),
            "copies",
            "epsilon",
            "users",
        )

    def by_tier(self) -> pl.DataFrame:
        """Returns name, bound, epsilon, epsilon under the other adjacency and number of users of each tier.

        Empty where one bound is for everybody; a user who opted out (bound 0) has no epsilon of training. The `users`
        column is a statistic of the graph.

        Guarantees:
          - Every epsilon is that of an independent accountant for so many copies.   (test_epsilons_of_tiers)
        """
        kinds = {"tier": pl.String, "contribution_bound": pl.Int64, "epsilon": pl.Float64, "other_epsilon": pl.Float64}
        tiers = self.certificate.tiers
        if tiers is None:
            return pl.DataFrame(schema={**kinds, "users": pl.Int64})
        levels = [{"copies": copies} for copies in copies_of_tiers(self.certificate, self.mechanism).values()]
        columns = (
            tiers.names,
            tiers.bounds,
            [self._level_epsilon(level) for level in levels],
            [self._level_epsilon(level, other=True) for level in levels],
            tiers.users,
        )
        return pl.DataFrame(dict(zip((*kinds, "users"), columns, strict=True)), schema={**kinds, "users": pl.Int64})

    def _levels(self) -> list[dict[str, Any]]:
        """Returns the mechanism's levels; without groups, those of each tier."""
        levels, tiers = self.mechanism.levels(self.certificate), self.certificate.tiers
        if tiers is None or "group" in levels[0]:
            return levels
        return [
            {"tier": name, "copies": copies, "users": users}
            for name, bound, of_tier in zip(tiers.names, tiers.bounds, tiers.levels(), strict=True)
            for copies, users in enumerate(of_tier[: bound + 1])
        ]

    def _level_epsilon(self, level: dict[str, Any], *, other: bool = False) -> float | None:
        adjacency, worst = self.adjacency, self.epsilon
        if other:
            adjacency, worst = OTHER_ADJACENCY[adjacency], self.other_epsilon
        terms: dict[str, Any] = {"delta": self.delta, "adjacency": adjacency}
        if self.tuning is not None:
            return worst
        if level["copies"] == 0:
            return None if self.evaluation is None else calculators.release_epsilon(self.evaluation.steps, **terms)
        if level["copies"] == self.contribution_bound and "group" not in level:
            return worst
        return calculators.epsilon_of_copies(
            self.mechanism,
            copies=level["copies"],
            group=level.get("group"),
            noise_multiplier=self.noise_multiplier,
            also=self.also,
            **terms,
        )

    def to_json(self, *, embed_certificate: bool = True) -> str:
        """Returns one JSON object with a checksum; without the certificate, its digest stands there."""
        fields = self._fields()
        if not embed_certificate:
            fields["certificate"] = self.certificate.digests()[0]
        return codec.encode_json({**fields, "checksum": codec.checksum(fields)}, indent=2, format=FORMAT)

    @classmethod
    def from_json(cls, text: str | bytes, *, certificate: ContributionCertificate | None = None) -> "PrivacyGuarantee":
        """Reads `to_json()` back; a file that was changed, or whose parts do not agree, is refused.

        Guarantees:
          - A guarantee without its certificate is read with that one certificate alone.
            (test_guarantee_without_its_certificate)
        """
        stored: Any = codec.decode_json(_STORED, text, name="guarantee", format=FORMAT, remedy="run calibrate again")
        fields = codec.to_plain(stored)
        for name in _LATER:
            if fields[name] is None:
                del fields[name]  # as it is written
        if fields.pop("checksum") != codec.checksum(fields) or fields.pop("unit") != UNIT:
            raise CertificateMismatchError(_CHANGED)
        certificate = _certificate_of(fields.pop("certificate"), certificate)
        mechanism = mechanism_from_dict(fields.pop("mechanism"))
        mechanism.check_certificate(certificate)
        parts: dict[str, Any] = {"certificate": certificate, "mechanism": mechanism, "maker": _MADE_BY_GUARANTEE}
        fields |= {name: getattr(stored, name) for name in _LATER}
        guarantee = cls(**fields, **parts)
        proven = guarantee.check()
        # Within the tolerance of `check` the larger counts; a difference of rounding alone is none.
        raised = {name: value for name, value in proven.items() if value > getattr(guarantee, name) * (1 + 1e-9)}
        return cls(**{**fields, **raised}, **parts) if raised else guarantee

    def terms(self) -> str:
        """Returns what an epsilon is never shown without, but for itself.

        Guarantees:
          - Unit, contribution bound, delta and adjacency are in it.   (test_terms_of_an_epsilon)
        """
        return (
            f"unit: {UNIT}; contribution bound {self.contribution_bound:,}; delta {self.delta:.12g}; "
            f"adjacency: {self.adjacency}"
        )

    def check(self) -> dict[str, float]:
        """Computes the claim anew and refuses, with CertificateMismatchError, one that is smaller than what is proven.

        Another version of the accountant may differ in the fourth digit; more than that is no rounding.

        Returns:
          What this version proves for the same noise, by the name of the entry.
        """
        terms: dict[str, Any] = {"delta": self.delta, "adjacency": self.adjacency}
        if self.tuning is not None:
            self.tuning.check_member(self.mechanism, self.noise_multiplier, self.evaluation)
            proven = _proven_of_tuning(self.tuning, **terms)
        else:
            proven = _proven(self.mechanism, self.certificate, self.noise_multiplier, self.evaluation, **terms)[1]
        for name, value in proven.items():
            if not getattr(self, name) >= value * (1 - 1e-3):
                raise CertificateMismatchError(
                    f"{name} = {getattr(self, name):.6g} is stored, but {value:.6g} is proven; compute the guarantee "
                    "again"
                )
        return proven

    def of_tuning(self, tuning: TuningClaim, *, target_epsilon: float, run_id: str) -> "PrivacyGuarantee":
        """Returns the guarantee of this run as the best of a tuning, at this delta: every epsilon is the tuning's.

        Args:
          tuning: of whose grid this run's mechanism, noise and evaluation must be.
          target_epsilon: that was asked for, of the tuning.
          run_id: of the tuning, which is one run to everybody else.
        """
        tuning.check_member(self.mechanism, self.noise_multiplier, self.evaluation)
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        proven = _proven_of_tuning(tuning, delta=self.delta, adjacency=self.adjacency)
        asked: dict[str, Any] = {"target_epsilon": float(target_epsilon), "run_id": run_id, "tuning": tuning}
        return PrivacyGuarantee(**{**kept, **proven, **asked}, maker=_MADE_BY_GUARANTEE)

    def _fields(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _PLAIN}
        for name in _LATER:  # a file without them is that of a version that knew none
            if getattr(self, name) is not None:
                plain[name] = codec.to_plain(getattr(self, name))
        certificate = msgspec.json.decode(self.certificate.to_json())
        return {**plain, "unit": UNIT, "mechanism": self.mechanism.to_dict(), "certificate": certificate}


_LATER = ("evaluation", "tuning")  # what the first version of the format did not know
_PLAIN = {
    field.name: field.type
    for field in dataclasses.fields(PrivacyGuarantee)
    if field.name not in ("mechanism", "certificate", *_LATER)
}
_STORED = msgspec.defstruct(
    "Guarantee",
    [
        *_PLAIN.items(),
        ("unit", str),
        ("mechanism", dict),
        ("certificate", dict | str),
        ("evaluation", CoveredRelease | None, None),
        ("tuning", TuningClaim | None, None),
        ("checksum", str),
    ],
    kw_only=True,
    frozen=True,
)


class ClaimOptions(TypedDict, total=False):
    """Keywords of `guarantee` that are rarely needed."""

    simulated_batch_size: int | None
    test_run: bool
    run_id: str | None
    allow_large_delta: bool
    held_out: ContributionCertificate | None
    epsilon_share: float


def guarantee(
    certificate: ContributionCertificate,
    mechanism: Mechanism,
    *,
    epsilon: float | Mapping[str, float] | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    adjacency: str,
    **options: Unpack[ClaimOptions],
) -> PrivacyGuarantee:
    """Makes a `PrivacyGuarantee`; nothing else does.

    Guarantees:
      - Noise that is given is refused where a target would be: delta must be below the chance of ever being drawn.
        (test_delta_above_the_chance_of_being_drawn)
      - With a held-out part the claim is for training and evaluation together, and has the epsilon that was asked for.
        (test_joint_claim_of_every_mechanism)
      - A delta of 0.1 or more is refused unless it is allowed.   (test_very_large_delta_is_refused)

    Args:
      certificate: what was recounted of the selection that will be trained on.
      mechanism: how batches are drawn; refused where the certificate does not cover it.
      epsilon: the target, or one for each tier by name; the smallest noise multiplier that meets it is found. Or
      noise_multiplier: as it is; its epsilon is computed. Exactly one of the two.
      delta, adjacency: the rest of the claim; neither has a default.
      simulated_batch_size: calibrate the noise as if batches were this large (Poisson sampling only). The result is
        labelled "simulated epsilon" and has the true epsilon of what runs.
      test_run: noise and coins will come from a given seed.
      run_id: a name for the run; made up at random by default.
      allow_large_delta: make the claim although delta is 0.1 or more.
      held_out: what was recounted of the examples that a covered evaluation counts on; None for none.
      epsilon_share: of epsilon, that the evaluation may cost: training alone has the rest, at the same delta.

    Example:
      >>> from coowned import AttributionGraph, Greedy, PoissonSampling, certify
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(100)])
      >>> certificate = certify(graph, Greedy(contribution_bound=1).select(graph))
      >>> mechanism = PoissonSampling.from_certificate(certificate, batch_size=10, iterations=20)
      >>> claim = guarantee(certificate, mechanism, epsilon=2.0, delta=1e-6, adjacency="zero-out")
      >>> 1.99 < claim.epsilon <= 2.0, claim.contribution_bound
      (True, 1)
    """
    request = _Request(
        certificate=certificate,
        mechanism=mechanism,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        adjacency=adjacency,
        **options,
    )
    return request.grant()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """Arguments of `guarantee`, checked."""

    certificate: ContributionCertificate
    mechanism: Mechanism
    epsilon: float | Mapping[str, float] | None
    noise_multiplier: float | None
    delta: float
    adjacency: str
    simulated_batch_size: int | None = None
    test_run: bool = False
    run_id: str | None = None
    allow_large_delta: bool = False
    held_out: ContributionCertificate | None = None
    epsilon_share: float = 0.0

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InputError("give exactly one of epsilon (the target) and noise_multiplier")
        given = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier}
        check_terms(delta=self.delta, adjacency=self.adjacency, **given)
        refuse_large_delta(self.delta, allow_large_delta=self.allow_large_delta)
        check_mechanism(self.mechanism)
        self.mechanism.check_certificate(self.certificate)
        refuse_if_never_drawn(self.mechanism, float(self.delta))
        if isinstance(self.epsilon, Mapping):
            check_targets(self.epsilon, self.certificate)
            if self.held_out is not None:
                raise InputError("a covered evaluation shares one epsilon with training; give one, not tiers")
        if self.held_out is not None:
            validate.in_range(0, 1, open_low=True, open_high=True, epsilon_share=self.epsilon_share)
            if self.simulated_batch_size is not None:
                raise InputError("a simulated epsilon has no covered evaluation; remove one of the two")
            if self.held_out.num_unprotected_users != self.certificate.num_unprotected_users:
                raise CertificateMismatchError(
                    "the training set and the held-out part leave out different numbers of unprotected users"
                )

    def grant(self) -> PrivacyGuarantee:
        """Finds the noise if a target was given, and proves what it gives."""
        delta, target = float(self.delta), None if isinstance(self.epsilon, Mapping) else self.epsilon
        terms: dict[str, Any] = {"delta": delta, "adjacency": self.adjacency}
        size, calibrated = self.simulated_batch_size, self.mechanism
        if size is not None:
            calibrated = self.mechanism.with_batch_size(size, self.certificate)
        noise, evaluation = self.noise_multiplier, None
        if self.held_out is not None:
            noise, evaluation = self._share(self.held_out, target, terms)
        elif target is not None:
            noise = calculators.calibrate(calibrated, epsilon=target, **terms)
        elif isinstance(self.epsilon, Mapping):
            noise = noise_for_targets(self.epsilon, self.certificate, calibrated, **terms)
        assert noise is not None
        noise = float(noise)
        simulated = None if size is None else calculators.epsilon(calibrated, noise_multiplier=noise, **terms)
        answer, proven = _proven(self.mechanism, self.certificate, noise, evaluation, **terms)
        if target is not None and simulated is None and answer.epsilon > target:
            raise UncertifiableError(
                f"the noise multiplier {noise:.6g} that was found gives epsilon {answer.epsilon:.6g}, not {target:g}; "
                "was it stored by another version? Empty the cache (COOWNED_CACHE) and calibrate again"
            )
        made = PrivacyGuarantee(
            **proven,
            **terms,
            target_epsilon=None if target is None else float(target),
            noise_multiplier=noise,
            simulated_epsilon=simulated,
            simulated_batch_size=size,
            grid_spacing=answer.spacing,
            error_share=answer.error_share,
            test_run=self.test_run,
            run_id=self.run_id or secrets.token_hex(8),
            mechanism=self.mechanism,
            certificate=self.certificate,
            version=coowned.__version__,
            evaluation=evaluation,
            maker=_MADE_BY_GUARANTEE,
        )
        if isinstance(self.epsilon, Mapping) and simulated is None:
            check_met(self.epsilon, dict(made.by_tier().select("tier", "epsilon").iter_rows()), noise)
        return made

    def _share(
        self, held_out: ContributionCertificate, target: float | None, terms: dict[str, Any]
    ) -> tuple[float, CoveredRelease]:
        """Returns the noise of training, which alone has a share of epsilon, and the evaluation that takes the rest."""
        noise, unshared = self.noise_multiplier, None
        if target is not None:
            unshared = calculators.calibrate(self.mechanism, epsilon=target, **terms)
            noise = calculators.calibrate(self.mechanism, epsilon=target * (1 - self.epsilon_share), **terms)
        assert noise is not None
        if target is None:
            alone = calculators.epsilon(self.mechanism, noise_multiplier=noise, **terms)
            target = alone / (1 - self.epsilon_share)
        evaluation = CoveredRelease.calibrated(
            held_out,
            self.mechanism,
            epsilon=target,
            epsilon_share=self.epsilon_share,
            noise_multiplier=float(noise),
            unshared=unshared,
            **terms,
        )
        return noise, evaluation


class _StoredComposition(msgspec.Struct, frozen=True, kw_only=True):
    delta: float
    epsilon: float
    members: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedGuarantee:
    """States what several runs on the same people promise together."""

    epsilon: float
    delta: float
    adjacency: str
    other_epsilon: float
    members: tuple[PrivacyGuarantee, ...]
    maker: dataclasses.InitVar[object] = None

    def __post_init__(self, maker: object) -> None:
        if maker is not _MADE_BY_GUARANTEE:
            raise UncertifiableError("a ComposedGuarantee comes from compose([...], delta=...), not from numbers")

    @property
    def unit(self) -> str:
        return UNIT

    def statement(self) -> str:
        runs = "; ".join(f"run {run.run_id}: epsilon {rounded_up(run.epsilon)} alone" for run in self.members)
        bounds = ", ".join(f"{run.contribution_bound:,}" for run in self.members)
        together = "This run is" if len(self.members) == 1 else f"All {len(self.members)} runs together are"
        sentences = [
            f"{together} ({rounded_up(self.epsilon)}, {self.delta:.12g})-differentially private for every protected "
            f"user (unit: {UNIT}; contribution bounds {bounds}; adjacency: {self.adjacency}; independent noise and "
            "coins).",
            *delta_warnings(self.delta, num_users=self.members[0].certificate.num_users),
            f"Under {OTHER_ADJACENCY[self.adjacency]} adjacency epsilon is {rounded_up(self.other_epsilon)} at the "
            "same delta.",
            f"Alone, at their own deltas: {runs}.",
            *unprotected_sentences(self.members[0].certificate),
            "What each run promises, and what it does not, is in its own statement.",
        ]
        return str(Statement(headline=sentences[0], sentences=tuple(sentences)))

    def to_json(self) -> str:
        """Returns one JSON object with every member's guarantee."""
        members = [msgspec.json.decode(run.to_json()) for run in self.members]
        stored = {"delta": self.delta, "epsilon": self.epsilon, "members": members}
        return codec.encode_json(stored, format=COMPOSED_FORMAT)

    @classmethod
    def from_json(cls, text: str) -> "ComposedGuarantee":
        """Reads `to_json()` back by composing the members anew; an epsilon below what that gives is refused."""
        stored = codec.decode_json(
            _StoredComposition, text, name="composed guarantee", format=COMPOSED_FORMAT, remedy="compose the runs again"
        )
        members = [PrivacyGuarantee.from_json(codec.encode_json(member)) for member in stored.members]
        composed = compose(members, delta=stored.delta, allow_large_delta=True)  # allowed when it was composed
        if stored.epsilon < composed.epsilon * (1 - 1e-3):
            raise CertificateMismatchError(
                f"epsilon = {stored.epsilon:.6g} is stored, but {composed.epsilon:.6g} is proven; compose again"
            )
        return composed


def compose(
    guarantees: Sequence[PrivacyGuarantee], *, delta: float, allow_large_delta: bool = False
) -> ComposedGuarantee:
    """Returns the guarantee of several runs with independent coins and noise on the same attribution graph.

    Refused: another graph or list of unprotected users, another adjacency, one run twice. Models of one sweep share
    their coins and are one mechanism, not several runs: see `calculators.sweep_noise_multiplier`.
    """
    if not guarantees:
        raise InputError("there is nothing to compose; give at least one guarantee")
    first = guarantees[0]
    check_terms(delta=delta, adjacency=first.adjacency)
    refuse_large_delta(delta, allow_large_delta=allow_large_delta)
    if any(run.test_run for run in guarantees):
        raise InputError("a run with a given seed has no guarantee to compose; leave it out or train again")
    for other in guarantees[1:]:
        for name in ("graph_digest", "num_unprotected_users"):
            if getattr(first.certificate, name) != getattr(other.certificate, name):
                raise CertificateMismatchError(
                    f"runs {first.run_id} and {other.run_id} differ in {name}; compose runs on one graph"
                )
        if first.adjacency != other.adjacency:
            raise InputError(f"runs {first.run_id} and {other.run_id} have different adjacencies; use one for both")
    if len({run.run_id for run in guarantees}) != len(guarantees):
        raise InputError("duplicate run; compose each run once")
    total, other_total = (
        _composed(guarantees, delta, adjacency) for adjacency in (first.adjacency, OTHER_ADJACENCY[first.adjacency])
    )
    return ComposedGuarantee(
        epsilon=total,
        delta=delta,
        adjacency=first.adjacency,
        other_epsilon=other_total,
        members=tuple(guarantees),
        maker=_MADE_BY_GUARANTEE,
    )


def _composed(guarantees: Sequence[PrivacyGuarantee], delta: float, adjacency: str) -> float:
    """Returns the epsilon of all together. Of a tuning only pairs of epsilon and delta are known, which add up."""
    tunings = [run.tuning for run in guarantees if run.tuning is not None]
    alone = [run for run in guarantees if run.tuning is None]
    share = delta / (len(tunings) + bool(alone))
    total = math.fsum(tuning.epsilon(share, adjacency) for tuning in tunings)
    if not alone:
        return total
    runs = [(run.mechanism, run.noise_multiplier) for run in alone]
    also = [steps for run in alone for steps in run.also]
    return total + calculators.composed_epsilon(runs, delta=share, adjacency=adjacency, also=also)


def _proven_of_tuning(tuning: TuningClaim, *, delta: float, adjacency: str) -> dict[str, float]:
    """Returns what is proven for a tuning. One example is in no more copies than its users may be."""
    question = {"accountant": ACCOUNTANT_VERSION, "tuning": codec.to_plain(tuning), "delta": delta}

    def proven(under: str) -> float:
        asked = {**question, "adjacency": under}
        return cached("accounting", asked, lambda: tuning.epsilon(delta, under), encode=repr, decode=float)

    epsilon = proven(adjacency)
    return {"epsilon": epsilon, "other_epsilon": proven(OTHER_ADJACENCY[adjacency]), "example_epsilon": epsilon}


def _tuning_attack_bound(tuning: TuningClaim, adjacency: str, epsilon: float) -> float:
    def bound() -> float:
        return tuning.attack_bound(adjacency, false_alarms=FALSE_ALARMS, largest=min(epsilon, 20.0))

    question = {"accountant": ACCOUNTANT_VERSION, "attack": codec.to_plain(tuning), "rate": FALSE_ALARMS}
    asked = {**question, "adjacency": adjacency, "epsilon": epsilon}
    return cached("accounting", asked, bound, encode=repr, decode=float)


def _proven(
    mechanism: Mechanism,
    certificate: ContributionCertificate,
    noise_multiplier: float,
    evaluation: CoveredRelease | None,
    *,
    delta: float,
    adjacency: str,
) -> tuple[calculators.Answer, dict[str, float]]:
    """Returns what the accountant proves for this noise: the main answer, and every epsilon by its field's name."""
    claim: dict[str, Any] = {"noise_multiplier": noise_multiplier, "delta": delta}
    also = () if evaluation is None else (evaluation.steps,)
    answer = calculators.epsilon_details(mechanism, adjacency=adjacency, also=also, **claim)
    example = calculators.epsilon(mechanism.for_example(certificate), adjacency=adjacency, **claim)
    if evaluation is not None:  # an example is trained on or held out, never both
        alone = calculators.release_epsilon(evaluation.example_steps, delta=delta, adjacency=adjacency)
        example = max(example, alone)
    return answer, {
        "epsilon": answer.epsilon,
        "other_epsilon": calculators.epsilon(mechanism, adjacency=OTHER_ADJACENCY[adjacency], also=also, **claim),
        "example_epsilon": example,
    }


@functools.lru_cache(maxsize=64)
def _attack_bound(mechanism: Mechanism, noise_multiplier: float, adjacency: str, also: tuple[Steps, ...]) -> float:
    claim: dict[str, Any] = {"noise_multiplier": noise_multiplier, "adjacency": adjacency}

    def bound() -> float:
        try:
            return calculators.true_positive_rate_bound(mechanism, false_positive_rate=FALSE_ALARMS, also=also, **claim)
        except UncertifiableError:
            return 1.0

    question = {"accountant": ACCOUNTANT_VERSION, "attack": mechanism.to_dict(), "rate": FALSE_ALARMS, **claim}
    if also:
        question["also"] = codec.to_plain(also)
    return cached("accounting", question, bound, encode=repr, decode=float)


def _certificate_of(stored: Any, certificate: ContributionCertificate | None) -> ContributionCertificate:
    """Returns the certificate inside a stored guarantee, or the given one where only its digest is stored."""
    if isinstance(stored, dict):
        embedded = ContributionCertificate.from_json(codec.encode_json(stored))
        if certificate in (None, embedded):
            return embedded
    elif certificate is None:
        raise InputError("the guarantee is stored without its certificate; open the run folder it belongs to")
    elif stored in certificate.digests():
        return certificate
    raise CertificateMismatchError("the guarantee is for another certificate; use the one it was made from")
