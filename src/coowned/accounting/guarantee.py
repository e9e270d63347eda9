"""The privacy guarantee: a certificate and a mechanism become a claim. There is no other way to one."""

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any

import polars as pl

import coowned
from coowned import validate
from coowned.accounting import calculators
from coowned.accounting.statement import Statement, make_statement, rounded_up, unprotected_sentences
from coowned.accounting.terms import ADJACENCIES, OTHER_ADJACENCY, UNIT
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_from_dict

FORMAT = "coowned-guarantee-2"
COMPOSED_FORMAT = "coowned-composed-guarantee-1"
_MADE_BY_GUARANTEE = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyGuarantee:
    """An epsilon with everything it means: unit, bound, delta, adjacency, mechanism and certificate.

    Attributes:
      epsilon, delta, adjacency: the claim, for the worst-off protected user.
      noise_multiplier: in units of one example's clip norm.
      other_epsilon: the same run under the other adjacency, at the same delta.
      example_epsilon: the same run for one example alone (edge-data privacy), under `adjacency`.
      simulated_epsilon, simulated_batch_size: where the noise came from a hypothetical batch size, the epsilon it was
        made for. `epsilon` is always that of what runs.
      grid_spacing, error_share: of the accountant's discretization (0 for a closed form), and what part of delta its
        numerical errors take.
      test_run: noise and coins come from a given seed: nothing is promised, and the statement says so.
      run_id: names the one run this is for; two runs need two guarantees.

    Guarantees:
      - Only `guarantee` makes one, from a certificate that the mechanism agrees with.   (test_only_guarantee_makes_one)
      - A file that was changed is refused.   (test_tampered_guarantee_is_refused)
      - What is read back has no epsilon below what this version proves.   (test_read_epsilon_is_never_below_proven)
    """

    epsilon: float
    delta: float
    adjacency: str
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
    maker: dataclasses.InitVar[object] = None  # not kept, so that dataclasses.replace cannot pass it on

    def __post_init__(self, maker: object) -> None:
        if maker is not _MADE_BY_GUARANTEE:
            raise UncertifiableError(
                "a PrivacyGuarantee comes from guarantee(certificate, mechanism, ...), not from numbers"
            )

    @property
    def unit(self) -> str:
        return UNIT

    @property
    def contribution_bound(self) -> int:
        return self.mechanism.contribution_bound

    def statement(self, *, graph_statistics: bool = False) -> str:
        """What a person is told, in numbered sentences; with graph_statistics, also how many users have which level.

        Such counts are statistics of the graph, which fixed-graph privacy does not protect: leave them out of what is
        published unless the graph is public.
        """
        return str(self.statement_parts(graph_statistics=graph_statistics))

    def statement_parts(self, *, graph_statistics: bool = False) -> Statement:
        """The statement as data: headline, sentences, and what is not promised."""
        return make_statement(self, graph_statistics=graph_statistics)

    def by_copies(self) -> pl.DataFrame:
        """Epsilon for users with 0, 1, … copies (participations for a schedule), and how many users have them.

        Under a fixed graph a user in fewer copies has a better guarantee of her own. Level 0 has no epsilon: such users
        have no part in training, which says nothing of validation or test. For cyclic sampling one row a group and
        level.
        The `users` column is a statistic of the graph.
        """
        rows = [{**level, "epsilon": self._level_epsilon(level)} for level in self.mechanism.levels(self.certificate)]
        return pl.DataFrame(rows, infer_schema_length=None).select(
            *(name for name in ("group", "sampling_probability") if rows and name in rows[0]),
            "copies",
            "epsilon",
            "users",
        )

    def _level_epsilon(self, level: dict[str, Any]) -> float | None:
        if level["copies"] == 0:
            return None
        if level["copies"] == self.contribution_bound and "group" not in level:
            return self.epsilon
        return calculators.epsilon_of_copies(
            self.mechanism,
            copies=level["copies"],
            group=level.get("group"),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            adjacency=self.adjacency,
        )

    def to_json(self, *, embed_certificate: bool = True) -> str:
        """One JSON object with a checksum; without the certificate, a digest of it stands in its place."""
        fields = self._fields()
        if not embed_certificate:
            fields["certificate"] = _checksum(fields["certificate"])
        return json.dumps({"format": FORMAT, **fields, "checksum": _checksum(fields)}, indent=2)

    @classmethod
    def from_json(cls, text: str, *, certificate: ContributionCertificate | None = None) -> "PrivacyGuarantee":
        """Reads `to_json()` back; a file that was changed, or whose parts do not agree, is refused.

        Guarantees:
          - A guarantee without its certificate is read with that one certificate alone.
            (test_guarantee_without_its_certificate)
        """
        try:
            stored = json.loads(text)
        except ValueError as error:
            raise InputError(f"the guarantee is not JSON ({error}); make it again with calibrate") from None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            found = stored.get("format") if isinstance(stored, dict) else type(stored).__name__
            raise InputError(
                f"a guarantee of the format {FORMAT!r} was expected, not {found!r}; make it again with calibrate"
            )
        fields = {name: value for name, value in stored.items() if name not in ("format", "checksum", "unit")}
        if stored.get("checksum") != _checksum({**fields, "unit": stored.get("unit")}) or stored.get("unit") != UNIT:
            raise CertificateMismatchError(
                "the guarantee was changed after it was written; make it again with calibrate"
            )
        certificate = _certificate_of(fields.pop("certificate", None), certificate)
        mechanism = mechanism_from_dict(fields.pop("mechanism"))
        mechanism.check_certificate(certificate)
        try:
            made = cls(certificate=certificate, mechanism=mechanism, maker=_MADE_BY_GUARANTEE, **fields)
        except TypeError as error:
            raise CertificateMismatchError(
                f"the guarantee has missing or unknown entries ({error}); make it again"
            ) from None
        proven = made.check()
        # Within the tolerance of `check` the larger counts; a difference of rounding alone is none.
        raised = {name: value for name, value in proven.items() if value > getattr(made, name) * (1 + 1e-9)}
        if not raised:
            return made
        return cls(certificate=certificate, mechanism=mechanism, maker=_MADE_BY_GUARANTEE, **{**fields, **raised})

    def terms(self) -> str:
        """What an epsilon is never shown without, but for itself.

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
        validate.one_of(ADJACENCIES, adjacency=self.adjacency)
        claim = {"noise_multiplier": self.noise_multiplier, "delta": self.delta}
        other = OTHER_ADJACENCY[self.adjacency]
        proven = {
            "epsilon": calculators.epsilon(self.mechanism, adjacency=self.adjacency, **claim),
            "other_epsilon": calculators.epsilon(self.mechanism, adjacency=other, **claim),
            "example_epsilon": _example_epsilon(self.mechanism, self.certificate, adjacency=self.adjacency, **claim),
        }
        for name, value in proven.items():
            if not getattr(self, name) >= value * (1 - 1e-3):
                raise CertificateMismatchError(
                    f"the guarantee says {name} = {getattr(self, name):.6g}, but {value:.6g} is what can be proven; "
                    "make it again"
                )
        return proven

    def _fields(self) -> dict[str, Any]:
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("mechanism", "certificate")
        }
        return {
            **plain,
            "unit": UNIT,
            "mechanism": self.mechanism.to_dict(),
            "certificate": json.loads(self.certificate.to_json()),
        }


def guarantee(
    certificate: ContributionCertificate,
    mechanism: Mechanism,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    adjacency: str,
    simulated_batch_size: int | None = None,
    test_run: bool = False,
    run_id: str | None = None,
) -> PrivacyGuarantee:
    """The only maker of a `PrivacyGuarantee`.

    Args:
      certificate: what was recounted of the selection that will be trained on.
      mechanism: how batches are drawn; refused where the certificate does not cover it.
      epsilon: the target; the smallest noise multiplier that meets it is found. Or
      noise_multiplier: as it is; its epsilon is computed. Exactly one of the two.
      delta, adjacency: the rest of the claim; neither has a default.
      simulated_batch_size: calibrate the noise as if batches were this large (Poisson sampling only). The result is
        labelled "simulated epsilon" and carries the true epsilon of what runs.
      test_run: noise and coins will come from a given seed.
      run_id: a name for the run; made up at random by default.

    Example:
      >>> from coowned import AttributionGraph, Greedy, PoissonSampling, certify
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(100)])
      >>> certificate = certify(graph, Greedy(contribution_bound=1).select(graph))
      >>> mechanism = PoissonSampling.from_certificate(certificate, batch_size=10, iterations=20)
      >>> made = guarantee(certificate, mechanism, epsilon=2.0, delta=1e-6, adjacency="zero-out")
      >>> 1.99 < made.epsilon <= 2.0, made.contribution_bound
      (True, 1)
    """
    if not isinstance(certificate, ContributionCertificate):
        raise InputError(
            f"a ContributionCertificate is needed, not {type(certificate).__name__}; make one with certify"
        )
    if (epsilon is None) == (noise_multiplier is None):
        raise InputError("give exactly one of epsilon (a target) and noise_multiplier (what is used)")
    validate.one_of(ADJACENCIES, adjacency=adjacency)
    if not isinstance(mechanism, Mechanism):
        raise InputError(f"{type(mechanism).__name__} is not a mechanism; use PoissonSampling.from_certificate")
    mechanism.check_certificate(certificate)
    if noise_multiplier is not None:
        validate.positive_number(noise_multiplier=noise_multiplier)
        noise_multiplier = float(noise_multiplier)
    delta = float(delta) if validate.is_number(delta) else delta
    claim: dict[str, Any] = {"delta": delta, "adjacency": adjacency}
    simulated = None
    if simulated_batch_size is not None:
        imagined = mechanism.with_batch_size(simulated_batch_size, certificate)
        if noise_multiplier is None:
            noise_multiplier = calculators.calibrate(imagined, epsilon=epsilon, **claim)  # pyright: ignore[reportArgumentType]
        simulated = calculators.epsilon(imagined, noise_multiplier=noise_multiplier, **claim)
    elif noise_multiplier is None:
        noise_multiplier = calculators.calibrate(mechanism, epsilon=epsilon, **claim)  # pyright: ignore[reportArgumentType]
    other = OTHER_ADJACENCY[adjacency]
    proven = calculators.epsilon_details(mechanism, noise_multiplier=noise_multiplier, **claim)
    if epsilon is not None and simulated_batch_size is None and proven.epsilon > epsilon:
        raise UncertifiableError(
            f"the noise multiplier {noise_multiplier:.6g} that was found gives epsilon {proven.epsilon:.6g}, not "
            f"{epsilon:g}; "
            "was it kept by another version? Empty the cache (COOWNED_CACHE) and calibrate again"
        )
    return PrivacyGuarantee(
        epsilon=proven.epsilon,
        delta=delta,
        adjacency=adjacency,
        noise_multiplier=noise_multiplier,
        other_epsilon=calculators.epsilon(mechanism, noise_multiplier=noise_multiplier, delta=delta, adjacency=other),
        example_epsilon=_example_epsilon(mechanism, certificate, noise_multiplier=noise_multiplier, **claim),
        simulated_epsilon=simulated,
        simulated_batch_size=simulated_batch_size,
        grid_spacing=proven.spacing,
        error_share=proven.error_share,
        test_run=test_run,
        run_id=run_id or secrets.token_hex(8),
        mechanism=mechanism,
        certificate=certificate,
        version=coowned.__version__,
        maker=_MADE_BY_GUARANTEE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedGuarantee:
    """Several runs on the same people, taken together."""

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
        runs = "; ".join(f"run {g.run_id}: epsilon {rounded_up(g.epsilon)} alone" for g in self.members)
        first = self.members[0]
        bounds = ", ".join(f"{made.contribution_bound:,}" for made in self.members)
        sentences = [
            f"All {len(self.members)} runs together are ({rounded_up(self.epsilon)}, {self.delta:.12g})-differentially "
            f"private for every protected user (unit: {UNIT}; contribution bounds {bounds}; adjacency: "
            f"{self.adjacency}; independent noise and coins).",
            f"Under {OTHER_ADJACENCY[self.adjacency]} adjacency epsilon is {rounded_up(self.other_epsilon)} at the "
            "same delta.",
            f"Alone, at their own deltas: {runs}.",
            *unprotected_sentences(first.certificate),
            "What each run promises, and what it does not, is in its own statement.",
        ]
        return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, start=1))

    def to_json(self) -> str:
        """One JSON object with every member's guarantee."""
        members = [json.loads(made.to_json()) for made in self.members]
        return json.dumps({"format": COMPOSED_FORMAT, "delta": self.delta, "epsilon": self.epsilon, "members": members})

    @classmethod
    def from_json(cls, text: str) -> "ComposedGuarantee":
        """Reads `to_json()` back by composing the members anew; an epsilon below what that gives is refused."""
        try:
            stored = json.loads(text)
            members = [PrivacyGuarantee.from_json(json.dumps(member)) for member in stored["members"]]
            claimed, delta = float(stored["epsilon"]), float(stored["delta"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"not a composed guarantee ({error}); compose the runs again") from None
        made = compose(members, delta=delta)
        if claimed < made.epsilon * (1 - 1e-3):
            raise CertificateMismatchError(
                f"the composed guarantee says epsilon = {claimed:.6g}, but {made.epsilon:.6g} is what can be proven"
            )
        return made


def compose(guarantees: Sequence[PrivacyGuarantee], *, delta: float) -> ComposedGuarantee:
    """The guarantee of several runs with independent coins and noise on the same attribution graph.

    Refused: another graph or list of unprotected users, another adjacency, one run twice. Models of one sweep share
    their coins and are one mechanism, not several runs: see `calculators.sweep_noise_multiplier`.
    """
    if not guarantees:
        raise InputError("there is nothing to compose; give at least one guarantee")
    first = guarantees[0]
    validate.in_range(0, 1, open_low=True, open_high=True, delta=delta)
    if any(made.test_run for made in guarantees):
        raise InputError(
            "a run with a given seed has no guarantee: there is nothing to compose; leave it out or train anew"
        )
    for other in guarantees[1:]:
        for name in ("graph_digest", "num_unprotected_users"):
            if getattr(first.certificate, name) != getattr(other.certificate, name):
                raise CertificateMismatchError(
                    f"runs {first.run_id} and {other.run_id} differ in {name}; only runs on one attribution graph "
                    "can be composed"
                )
        if first.adjacency != other.adjacency:
            raise InputError(
                f"runs {first.run_id} and {other.run_id} have different adjacencies; make the guarantees with one"
            )
    if len({g.run_id for g in guarantees}) != len(guarantees):
        raise InputError("one run is there twice; compose each run once")
    runs = [(made.mechanism, made.noise_multiplier) for made in guarantees]
    total, other_total = (
        calculators.composed_epsilon(runs, delta=delta, adjacency=adjacency)
        for adjacency in (first.adjacency, OTHER_ADJACENCY[first.adjacency])
    )
    return ComposedGuarantee(
        epsilon=total,
        delta=delta,
        adjacency=first.adjacency,
        other_epsilon=other_total,
        members=tuple(guarantees),
        maker=_MADE_BY_GUARANTEE,
    )


def _example_epsilon(
    mechanism: Mechanism,
    certificate: ContributionCertificate,
    *,
    noise_multiplier: float,
    delta: float,
    adjacency: str,
) -> float:
    """The epsilon of one example alone."""
    seen = mechanism.for_example(certificate)
    return calculators.epsilon(seen, noise_multiplier=noise_multiplier, delta=delta, adjacency=adjacency)


def _certificate_of(stored: Any, given: ContributionCertificate | None) -> ContributionCertificate:
    """The certificate inside a stored guarantee, or the given one where only its digest is stored."""
    if isinstance(stored, dict):
        embedded = ContributionCertificate.from_json(json.dumps(stored))
        if given is not None and given != embedded:
            raise CertificateMismatchError("the guarantee is for another certificate; use the one it was made from")
        return embedded
    if given is None:
        raise InputError("the guarantee is stored without its certificate; open the run folder it belongs to")
    if stored != _checksum(json.loads(given.to_json())):
        raise CertificateMismatchError("the guarantee is for another certificate; use the one it was made from")
    return given


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
