"""The privacy guarantee: an epsilon with everything it means, and how guarantee.json stores it or says there is none.

No other module writes or reads that file.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import polars as pl

from coowned import codec
from coowned.accounting import calculators
from coowned.accounting.covered import CoveredRelease
from coowned.accounting.proven import (
    attack_bound,
    proven_of_run,
    proven_of_tuning,
    tuned_epsilon,
    tuning_attack_bound,
)
from coowned.accounting.statement import (
    FALSE_ALARMS,
    Statement,
    make_statement,
    rounded_down,
    rounded_up,
)
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, delta_warnings
from coowned.accounting.tiers import copies_of_tiers
from coowned.accounting.tuning import TunedSetting, TuningClaim
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism, Steps
from coowned.mechanism.registry import mechanism_from_dict

FORMAT = "coowned-guarantee-2"
_CHANGED = "the guarantee was changed after it was written; run calibrate again"
MADE_HERE = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """An epsilon with everything it means: unit, bound, delta, adjacency, mechanism and certificate.

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
        if maker is not MADE_HERE:
            raise UncertifiableError("a PrivacyGuarantee comes from guarantee(certificate, ...), not from numbers")

    @property
    def unit(self) -> str:
        return UNIT

    @property
    def contribution_bound(self) -> int:
        return self.mechanism.contribution_bound

    @property
    def shown_epsilon(self) -> str:
        """Epsilon as displayed: as requested if it was, else rounded up."""
        met = self.target_epsilon is not None and self.simulated_epsilon is None and self.epsilon <= self.target_epsilon
        return f"{self.target_epsilon:.12g}" if met else rounded_up(self.epsilon)

    @property
    def shown_noise_multiplier(self) -> str:
        """Noise multiplier as displayed: as given if it was, else rounded down."""
        return f"{self.noise_multiplier:.12g}" if self.target_epsilon is None else rounded_down(self.noise_multiplier)

    @property
    def also(self) -> tuple[Steps, ...]:
        """The accountant's steps for a user's data besides training."""
        return self._also(None)

    def _also(self, bound: int | None) -> tuple[Steps, ...]:
        """Returns the same for a user with this bound of their own."""
        copies = 0 if self.evaluation is None else self.evaluation.copies_of(bound)
        return () if self.evaluation is None or not copies else (self.evaluation.steps_of(copies),)

    def warnings(self) -> tuple[str, ...]:
        """Warns of a delta that is too large for so many users. A test run claims nothing."""
        users = self.certificate.num_users - sum(self.certificate.copies_per_user[:1])
        return () if self.test_run else delta_warnings(self.delta, num_users=users)

    def attack_bound(self, adjacency: str, false_alarms: float = FALSE_ALARMS) -> float:
        """Bounds the success of any attack on what is released, with this rate of false alarms."""
        epsilon = self.epsilon if adjacency == self.adjacency else self.other_epsilon
        by_claim = math.exp(min(epsilon, 700.0)) * false_alarms + self.delta
        if self.tuning is not None:
            return min(1.0, by_claim, tuning_attack_bound(self.tuning, adjacency, epsilon, false_alarms))
        bound = attack_bound(self.mechanism, self.noise_multiplier, adjacency, self.also, false_alarms)
        return min(1.0, by_claim, bound)

    def deltas(self, adjacency: str, epsilons: Sequence[float]) -> np.ndarray:
        """Returns upper bounds on delta of what is released at each epsilon, (len(epsilons),).

        Guarantees:
          - Of a tuning they are those of the whole tuning.   (test_curve_of_a_tuning)
        """
        if self.tuning is not None:
            return self.tuning.deltas(adjacency, epsilons)
        noise = {"noise_multiplier": self.noise_multiplier, "also": self.also}
        return calculators.epsilon_curve(self.mechanism, adjacency=adjacency, epsilons=epsilons, **noise)

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
        the epsilon of a user in as many held-out copies as they may be in.   (test_levels_with_an_evaluation)
        Of a tuning, whose runs may differ in their copies, every level has the epsilon of the worst-off user, or of
        their tier.
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

        Empty where one bound is for everybody. With a covered evaluation every tier has the epsilon of a user in as
        many held-out copies as they may be in; none of whose examples anything is used of has none. The `users` column
        is a statistic of the graph.

        Guarantees:
          - Every epsilon is that of an independent accountant for so many copies.   (test_epsilons_of_tiers)
        """
        kinds = {"tier": pl.String, "contribution_bound": pl.Int64, "epsilon": pl.Float64, "other_epsilon": pl.Float64}
        tiers = self.certificate.tiers
        if tiers is None:
            return pl.DataFrame(schema={**kinds, "users": pl.Int64})
        copies = copies_of_tiers(self.certificate, self.mechanism)
        levels = [{"copies": copies[name], "bound": bound} for name, bound in tiers.by_name().items()]
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
            {"tier": name, "copies": copies, "users": users, "bound": bound}
            for name, bound, of_tier in zip(tiers.names, tiers.bounds, tiers.levels(), strict=True)
            for copies, users in enumerate(of_tier[: bound + 1])
        ]

    def _level_epsilon(self, level: dict[str, Any], *, other: bool = False) -> float | None:
        adjacency, worst = self.adjacency, self.epsilon
        if other:
            adjacency, worst = OTHER_ADJACENCY[adjacency], self.other_epsilon
        terms: dict[str, Any] = {"delta": self.delta, "adjacency": adjacency}
        if self.tuning is not None:
            return self._tuned_epsilon(level.get("bound"), worst, adjacency)
        also = self._also(level.get("bound"))
        if level["copies"] == 0:
            return calculators.release_epsilon(also[0], **terms) if also else None
        if level["copies"] == self.contribution_bound and "group" not in level and also == self.also:
            return worst
        return calculators.epsilon_of_copies(
            self.mechanism,
            copies=level["copies"],
            group=level.get("group"),
            noise_multiplier=self.noise_multiplier,
            also=also,
            **terms,
        )

    def _tuned_epsilon(self, bound: int | None, worst: float, adjacency: str) -> float | None:
        """Returns the epsilon of a tier with this bound, where all runs of the tuning have the same tiers."""
        tiers, tuning = self.certificate.tiers, self.tuning
        if (
            bound is None
            or tiers is None
            or tuning is None
            or not tuning.individual_bounds
            or bound == max(tiers.bounds)
        ):
            return worst
        return tuned_epsilon(tuning, self.delta, adjacency, bound=bound) if bound else None

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
        parts: dict[str, Any] = {"certificate": certificate, "mechanism": mechanism, "maker": MADE_HERE}
        fields |= {name: getattr(stored, name) for name in _LATER}
        guarantee = cls(**fields, **parts)
        proven = guarantee.check()
        # Within the tolerance of `check` the larger counts; a difference of rounding alone is none.
        raised = {name: value for name, value in proven.items() if value > getattr(guarantee, name) * (1 + 1e-9)}
        return cls(**{**fields, **raised}, **parts) if raised else guarantee

    def terms(self) -> str:
        """Returns the terms without which an epsilon is never shown.

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
            self.tuning.check_member(self.setting())
            proven = proven_of_tuning(self.tuning, **terms)
        else:
            proven = proven_of_run(self.mechanism, self.certificate, self.noise_multiplier, self.evaluation, **terms)[1]
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
        tuning.check_member(self.setting())
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        proven = proven_of_tuning(tuning, delta=self.delta, adjacency=self.adjacency)
        asked: dict[str, Any] = {"target_epsilon": float(target_epsilon), "run_id": run_id, "tuning": tuning}
        return PrivacyGuarantee(**{**kept, **proven, **asked}, maker=MADE_HERE)

    def setting(self, count: int = 1) -> TunedSetting:
        """Returns this run as `count` settings of a tuning's grid."""
        return TunedSetting(
            count=count,
            mechanism=self.mechanism.to_dict(),
            example=self.mechanism.for_example(self.certificate).to_dict(),
            noise_multiplier=self.noise_multiplier,
            evaluation=self.evaluation,
        )

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


GUARANTEE_FILE = "guarantee.json"
NO_GUARANTEE = "No guarantee: this model was trained without privacy and may reveal its training examples."
PUBLIC = "No guarantee: the data were declared public; nothing about them is protected."
_NoGuaranteeFormat = Literal["coowned-no-guarantee-1"]
(_NO_GUARANTEE_FORMAT,) = get_args(_NoGuaranteeFormat)


class NoGuarantee(msgspec.Struct, frozen=True, kw_only=True):
    """Content of guarantee.json where nothing is claimed."""

    format: _NoGuaranteeFormat = _NO_GUARANTEE_FORMAT
    public: bool
    statement: str
    mechanism: dict[str, Any]


class Claim(NamedTuple):
    """The content of guarantee.json.

    Attributes:
      guarantee: None without privacy.
      public: without a guarantee because the data are public.
    """

    guarantee: PrivacyGuarantee | None
    public: bool
    mechanism: Mechanism


def absent_statement(*, public: bool) -> str:
    """Returns the statement of a run without a guarantee."""
    return PUBLIC if public else NO_GUARANTEE


def write_claim(guarantee: PrivacyGuarantee | None, mechanism: Mechanism, *, public: bool) -> str:
    """Returns the content of guarantee.json."""
    if guarantee is not None:
        return guarantee.to_json(embed_certificate=False) + "\n"
    absent = NoGuarantee(public=public, statement=absent_statement(public=public), mechanism=mechanism.to_dict())
    return codec.encode_json(absent, indent=2) + "\n"


def parse_claim(text: bytes, certificate: ContributionCertificate) -> Claim:
    """Reads the content of guarantee.json; the epsilon of a guarantee is computed anew."""
    stored = codec.decode_json(dict[str, Any], text, name="guarantee", remedy="train again")
    if stored.get("format") != _NO_GUARANTEE_FORMAT:
        guarantee = PrivacyGuarantee.from_json(text, certificate=certificate)
        return Claim(guarantee, False, guarantee.mechanism)
    absent = codec.decode_json(NoGuarantee, text, name="guarantee", remedy="train again")
    return Claim(None, absent.public, mechanism_from_dict(absent.mechanism))


def stated_origins(folder: Path) -> list[str]:
    """Returns the statements that guarantee.json and the weights in a folder make; none for weights from elsewhere.

    The folder need not be a whole run: weights may have been copied.
    """
    stated = []
    file = folder / GUARANTEE_FILE
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass
    else:
        remedy = "the checkpoint is not a run's folder"
        stored = codec.decode_json(dict[str, Any], content, name=str(file), remedy=remedy)
        absent = absent_statement(public=stored.get("public") is True)
        stated.append(absent if stored.get("format") == _NO_GUARANTEE_FORMAT else "a guarantee")
    weights = folder / "model.safetensors"
    if weights.is_file() and "statement" in (metadata := model_metadata(weights)):
        stated.append(metadata["statement"])
    return stated


def model_metadata(weights: Path) -> dict[str, str]:
    """Returns the statement, plan and kind in a model file's metadata."""
    from safetensors import safe_open

    try:
        with safe_open(weights, framework="numpy") as opened:
            return opened.metadata() or {}
    except Exception as error:  # safetensors raises various kinds
        raise InputError(
            f"{weights}: the model cannot be read ({error}); give a folder with a complete model"
        ) from error
