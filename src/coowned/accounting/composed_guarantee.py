"""The joint guarantee of several runs on the same people."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from coowned import codec
from coowned.accounting import calculators
from coowned.accounting.privacy_guarantee import MADE_HERE, PrivacyGuarantee
from coowned.accounting.statement import (
    Statement,
    rounded_up,
    unprotected_sentences,
)
from coowned.accounting.terms import OTHER_ADJACENCY, UNIT, check_terms, delta_warnings, refuse_large_delta
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError

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
        _composed(guarantees, delta, adjacency) for adjacency in (first.adjacency, OTHER_ADJACENCY[first.adjacency])
    )
    return ComposedGuarantee(
        epsilon=total,
        delta=delta,
        adjacency=first.adjacency,
        other_epsilon=other_total,
        members=tuple(guarantees),
        maker=MADE_HERE,
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
