"""Guarantees of a run, a tuning, and runs together: from certificates and mechanisms, the only way to get one."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

import coowned
from coowned import codec, validate
from coowned.accounting import calculators
from coowned.accounting.calibrate import calibrate_release, refuse_if_never_drawn
from coowned.accounting.covered import CoveredRelease, certified, check_held_out
from coowned.accounting.privacy_guarantee import MADE_HERE, PrivacyGuarantee
from coowned.accounting.proven import proven_of_run
from coowned.accounting.statement import (
    Statement,
    rounded_up,
    unprotected_sentences,
)
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, check_terms, delta_warnings, refuse_large_delta
from coowned.accounting.tiers import check_met, check_targets, copies_of_tiers
from coowned.accounting.tuning import NumberOfRuns, TuningClaim
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Mechanism, check_mechanism


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
    """Computes the `PrivacyGuarantee` of a mechanism and a certificate; nothing else makes one.

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
      held_out: what was recounted of the examples that a covered evaluation counts on; None for none. None of them
        may be in the training set.
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
    """The checked arguments of `guarantee`."""

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
            validate.in_range(0, 1, open_low=True, open_high=True, epsilon_share=self.epsilon_share)
            if self.simulated_batch_size is not None:
                raise InputError("a simulated epsilon has no covered evaluation; remove one of the two")
            check_held_out(self.held_out, self.certificate)

    def grant(self) -> PrivacyGuarantee:
        """Finds the noise if a target was given, and proves the guarantee."""
        delta, target = float(self.delta), None if isinstance(self.epsilon, Mapping) else self.epsilon
        terms: dict[str, Any] = {"delta": delta, "adjacency": self.adjacency}
        size, calibrated = self.simulated_batch_size, self.mechanism
        if size is not None:
            calibrated = self.mechanism.with_batch_size(size, self.certificate)
        noise, evaluation = self.noise_multiplier, None
        if noise is None:
            noise = self._noise_for(calibrated, 1.0 if self.held_out is None else 1 - self.epsilon_share, terms)
        noise = float(noise)
        if self.held_out is not None:
            evaluation = self._evaluation(self.held_out, noise, terms)
        simulated = None if size is None else calculators.epsilon(calibrated, noise_multiplier=noise, **terms)
        answer, proven = proven_of_run(self.mechanism, self.certificate, noise, evaluation, **terms)
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
            maker=MADE_HERE,
        )
        if isinstance(self.epsilon, Mapping) and simulated is None:
            check_met(self.epsilon, dict(made.by_tier().select("tier", "epsilon").iter_rows()), noise)
        return made

    def _targets(self, mechanism: Mechanism) -> list[tuple[Mechanism, float, int | None]]:
        """Returns the mechanism of every kind of user who has a target, the target, and the user's own bound."""
        if not isinstance(self.epsilon, Mapping):
            return [] if self.epsilon is None else [(mechanism, self.epsilon, None)]
        copies = copies_of_tiers(self.certificate, mechanism)
        bounds = self.certificate.tiers.by_name() if self.certificate.tiers else {}
        return [(mechanism.for_copies(copies[name]), target, bounds[name]) for name, target in self.epsilon.items()]

    def _noise_for(self, mechanism: Mechanism, share: float, terms: dict[str, Any]) -> float:
        """Returns the smallest noise multiplier with which training alone has this share of every target."""
        return max(
            calculators.calibrate(mechanism, epsilon=target * share, **terms)
            for mechanism, target, _ in self._targets(mechanism)
        )

    def _evaluation(self, held_out: ContributionCertificate, noise: float, terms: dict[str, Any]) -> CoveredRelease:
        """Returns the release with the least noise with which training and evaluation together meet every target."""
        targets = self._targets(self.mechanism)
        unshared = self._noise_for(self.mechanism, 1.0, terms) if targets else None
        if not targets:  # the noise of training was given
            alone = calculators.epsilon(self.mechanism, noise_multiplier=noise, **terms)
            targets = [(self.mechanism, alone / (1 - self.epsilon_share), None)]
        release = CoveredRelease(
            noise_multiplier=1.0,
            epsilon_share=float(self.epsilon_share),
            unshared_noise_multiplier=unshared,
            **certified(held_out),
        )
        found = max(
            calibrate_release(
                mechanism, noise_multiplier=noise, contribution_bound=release.copies_of(bound), epsilon=target, **terms
            )
            for mechanism, target, bound in targets
        )
        return dataclasses.replace(release, noise_multiplier=found)


_CLOSE = 3e-3  # of epsilon: what the search may leave unused
_TURNS = 30

Claim = Callable[[float], PrivacyGuarantee]
"""Makes the guarantee of one run alone, at an epsilon."""


def tuned_guarantees(
    claims: Sequence[Claim],
    counts: Sequence[int],
    *,
    grid: Mapping[str, Sequence[Any]],
    expected_runs: float,
    epsilon: float,
) -> list[PrivacyGuarantee]:
    """Returns a guarantee of the whole tuning for a run with each of several settings.

    All runs have the same epsilon alone, at the delta of the tuning; it is as large as the tuning's epsilon allows.

    Guarantees:
      - The tuning has the epsilon that was asked for, and uses it up to 0.3%.   (test_noise_of_a_tuning)

    Args:
      claims: for settings that the accountant tells apart.
      counts: how many settings of the grid each stands for.
      grid: the values of every key.
      expected_runs: the mean of their number.
      epsilon: of the tuning.
    """
    law, run_id = NumberOfRuns.geometric(expected_runs), secrets.token_hex(8)
    whole = claims[0](epsilon)
    untuned = whole.noise_multiplier
    alone, low, high = epsilon / (1 + 0.15 * math.log2(1 + expected_runs)), 0.0, epsilon
    for _ in range(_TURNS):
        runs = [claim(alone) for claim in claims]
        tuning = TuningClaim(
            weights=law.weights,
            settings=tuple(run.setting(count) for run, count in zip(runs, counts, strict=True)),
            grid={name: list(values) for name, values in grid.items()},
            untuned_noise_multiplier=untuned,
            individual_bounds=_alike(runs),
        )
        found = tuning.epsilon(whole.delta, whole.adjacency)
        if found <= epsilon:
            low = alone
            if found >= epsilon * (1 - _CLOSE) or high - low <= 1e-4 * high:
                return [run.of_tuning(tuning, target_epsilon=epsilon, run_id=run_id) for run in runs]
        else:
            high = alone
        aimed = alone * epsilon * (1 - _CLOSE / 2) / found
        alone = aimed if low < aimed < high else (low + high) / 2
    raise UncertifiableError("the search for the noise of the tuning did not settle; use a larger epsilon or delta")


def _alike(runs: Sequence[PrivacyGuarantee]) -> bool:
    """Returns whether all runs hold single users to the same bounds, in the held-out part, too."""
    tiers = {None if run.certificate.tiers is None else run.certificate.tiers.digest for run in runs}
    held = all(run.evaluation is not None and run.evaluation.individual_bounds for run in runs)
    return held and None not in tiers and len(tiers) == 1


COMPOSED_FORMAT = "coowned-composed-guarantee-1"


class _StoredComposition(msgspec.Struct, frozen=True, kw_only=True):
    delta: float
    epsilon: float
    members: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComposedGuarantee:
    """The joint guarantee of several runs on the same people."""

    epsilon: float
    delta: float
    adjacency: str
    other_epsilon: float
    members: tuple[PrivacyGuarantee, ...]
    maker: dataclasses.InitVar[object] = None

    def __post_init__(self, maker: object) -> None:
        if maker is not MADE_HERE:
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
        joint_epsilon(guarantees, delta=delta, adjacency=adjacency)
        for adjacency in (first.adjacency, OTHER_ADJACENCY[first.adjacency])
    )
    return ComposedGuarantee(
        epsilon=total,
        delta=delta,
        adjacency=first.adjacency,
        other_epsilon=other_total,
        members=tuple(guarantees),
        maker=MADE_HERE,
    )


def joint_epsilon(guarantees: Sequence[PrivacyGuarantee], *, delta: float, adjacency: str) -> float:
    """Returns the epsilon of all together, for a user of all of them.

    Of a tuning only pairs of epsilon and delta are known, which add up.
    """
    tunings = [run.tuning for run in guarantees if run.tuning is not None]
    alone = [run for run in guarantees if run.tuning is None]
    share = delta / (len(tunings) + bool(alone))
    total = math.fsum(tuning.epsilon(share, adjacency) for tuning in tunings)
    if not alone:
        return total
    runs = [(run.mechanism, run.noise_multiplier) for run in alone]
    also = [steps for run in alone for steps in run.also]
    return total + calculators.composed_epsilon(runs, delta=share, adjacency=adjacency, also=also)
