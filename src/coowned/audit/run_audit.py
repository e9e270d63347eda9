"""The mechanism audit of a training run: reads its claim, tries to break it, and writes `audit.json`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import coowned
from coowned import validate
from coowned.accounting.guarantee import OTHER_ADJACENCY, UNIT, PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.canaries import CanaryAudit
from coowned.audit.checks import CheckedLaw
from coowned.audit.claims import MechanismClaim
from coowned.audit.mechanism_audit import ALPHA, TRIALS, MechanismAudit, audit_mechanism
from coowned.audit.noise_law import audit_noise, audit_noise_tail
from coowned.audit.participation import audit_sampler
from coowned.audit.release import audit_release
from coowned.errors import InputError
from coowned.files import check_writable
from coowned.mechanism.keys import RunKey
from coowned.training.checkpoint import RunFolder
from coowned.training.run import AUDIT_FORMAT, Run

NOT_SEEN = (
    "Not seen by trials: what happens less often than about once in ten thousand; tails of noise and coins are looked "
    "at on extreme bit patterns instead. Not audited here: the run's own model, data and attribution."
)
LARGEST_SEED = 2**57 - 1  # every test of an audit has a seed of its own, made from the given one
_CLAIM = ("epsilon", "delta", "adjacency", "contribution_bound", "noise_multiplier")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAudit:
    """What was tried on a run's mechanism.

    Attributes:
      claim: the run's guarantee, computed anew.
      alpha: probability, at most, of an alarm where the claim holds, all tests together.
      audits_run: how many times this run was audited, this one included; each could be a false alarm.
      curves: the whole-curve audits, of the claim's adjacency first.
      laws: direct tests of sampler, noise, tails and the compiled step.
      repeatable: coins and noise of the audit came from a given seed.
    """

    claim: PrivacyGuarantee
    alpha: float
    audits_run: int
    curves: tuple[MechanismAudit, ...]
    laws: tuple[CheckedLaw, ...]
    repeatable: bool

    @property
    def holds(self) -> bool:
        return all(curve.holds for curve in self.curves) and all(law.holds for law in self.laws)

    @property
    def epsilon_lower_bound(self) -> float:
        """Measured, at the claim's delta and adjacency."""
        return self.curves[0].epsilon_lower_bound(self.claim.delta)

    def verdict(self) -> str:
        """One sentence."""
        odds = f"false-alarm probability at most {self.alpha:g}, audit {self.audits_run} of this run"
        if self.holds:
            return (
                f"Not broken: {len(self.curves) + len(self.laws)} tests with up to "
                f"{max(curve.trials for curve in self.curves):,} trials found nothing against epsilon "
                f"{rounded_up(self.claim.epsilon)} ({self.claim.terms()}; {odds})."
            )
        broken = [f"the {curve.adjacency} curve" for curve in self.curves if not curve.holds]
        broken += [f"the {law.law} test" for law in self.laws if not law.holds]
        return f"Broken: {' and '.join(broken)} contradict what is claimed ({odds})."

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the content of `audit.json`."""
        return {
            "format": AUDIT_FORMAT,
            "holds": self.holds,
            "verdict": self.verdict(),
            "not_seen": NOT_SEEN,
            "run_id": self.claim.run_id,
            "test_run": self.claim.test_run,
            "claim": {"unit": UNIT} | {name: getattr(self.claim, name) for name in _CLAIM},
            "mechanism": self.claim.mechanism.to_dict(),
            "alpha": self.alpha,
            "audits_run": self.audits_run,
            "repeatable": self.repeatable,
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "curves": [curve.to_dict() for curve in self.curves],
            "laws": [law.to_dict() for law in self.laws],
            "version": coowned.__version__,
        }


def audit_run(
    path: str | os.PathLike[str],
    *,
    alpha: float = ALPHA,
    trials: int | None = None,
    seconds: float = 60.0,
    seed: int | None = None,
    parts: AuditedParts | None = None,
) -> RunAudit:
    """Audits the mechanism of a run with fresh keys, and writes RUN/audit.json.

    The run's own key is never used: its noise would serve a second time. The false-alarm probability is shared among
    the tests. Entries that other audits of the run made ("canaries") are kept.

    Guarantees:
      - A guarantee that was changed, or says less than can be proven, is refused.   (test_changed_claim_is_refused)
      - A run without a guarantee is refused.   (test_run_without_a_guarantee_is_refused)
      - `audit.json` is written whole, broken or not.   (test_audit_of_a_run, test_broken_claim)

    Args:
      path: the folder of the run.
      alpha: probability of a false alarm, all tests together.
      trials: of each curve (default: up to 200,000, as many as fit `seconds`).
      seconds: for both curves together; with `trials` given, time does not count.
      seed: makes the audit repeatable, together with `trials`; from 0 to 2^57 - 1. By default keys come from the
        operating system.
      parts: with one exchanged, to try the audit itself.
    """
    folder = Path(path)
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)
    validate.positive_number(seconds=seconds)
    if seed is not None:
        validate.integer(at_least=0, at_most=LARGEST_SEED, seed=seed)
    made = read_claim(folder)
    check_writable(folder)  # before the work
    keys = _Keys(seed)
    parts = parts or AuditedParts()
    mechanism = made.mechanism
    # Two curves, noise and participation share it; the other tests are certain.
    share = alpha / (3 if mechanism.needs_schedule else 4)
    laws = []
    if not mechanism.needs_schedule:
        laws += audit_sampler(mechanism, run_key=keys.next(), alpha=share, parts=parts)
    claim = MechanismClaim(mechanism=mechanism, noise_multiplier=made.noise_multiplier, adjacency=made.adjacency)
    laws.append(
        audit_noise(
            keys.next(),
            coefficients=claim.coefficients,
            iterations=min(claim.iterations, 1000),
            trials=1024,
            alpha=share,
            parts=parts,
        )
    )
    laws.append(audit_noise_tail(alpha=share, parts=parts))
    laws.append(
        audit_release(
            noise_multiplier=made.noise_multiplier,
            copies=min(made.contribution_bound, 100),
            batch_size=mechanism.batch_size or 1,
            parts=parts,
            alpha=share,
        )
    )
    curves = tuple(
        audit_mechanism(
            mechanism,
            noise_multiplier=made.noise_multiplier,
            adjacency=adjacency,
            run_key=keys.next(),
            alpha=share,
            trials=TRIALS if trials is None else trials,
            seconds=seconds / 2 if trials is None else None,
            parts=parts,
        )
        for adjacency in (made.adjacency, OTHER_ADJACENCY[made.adjacency])
    )
    earlier = _earlier(folder)
    audit = RunAudit(
        claim=made,
        alpha=alpha,
        audits_run=1 + _audits_run(earlier),
        curves=curves,
        laws=tuple(laws),
        repeatable=seed is not None and trials is not None,
    )
    content = {name: value for name, value in earlier.items() if name == "canaries"} | audit.to_dict()
    mode = 0o600 if "canaries" in content else 0o644  # what canaries found was learned from the data
    RunFolder(folder).write("audit.json", (json.dumps(content, indent=2) + "\n").encode(), mode=mode)
    return audit


def store_canaries(path: str | os.PathLike[str], found: CanaryAudit) -> None:
    """Puts an audit with canaries into RUN/audit.json, beside that of the mechanism if there is one.

    Guarantees:
      - What else is in the file stays.   (test_canaries_are_kept_beside_the_mechanism)
    """
    folder = Path(path)
    read_claim(folder)
    content = {"format": AUDIT_FORMAT} | _earlier(folder) | {"canaries": found.to_dict()}
    RunFolder(folder).write("audit.json", (json.dumps(content, indent=2) + "\n").encode(), mode=0o600)


def read_claim(folder: Path) -> PrivacyGuarantee:
    """The guarantee of a run, computed anew; refused where the parts of the folder do not agree."""
    guarantee = Run.open(folder).guarantee
    if guarantee is None:
        raise InputError(f"{folder}: the run has no guarantee: there is no claim to audit; train with privacy")
    return guarantee


class _Keys:
    """A key of its own for each test."""

    def __init__(self, seed: int | None):
        self._seed, self._number = seed, 0

    def next(self) -> RunKey:
        self._number += 1
        if self._seed is None:
            return RunKey.from_operating_system()
        return RunKey.from_seed(self._seed * 64 + self._number)


def _audits_run(earlier: dict[str, Any]) -> int:
    """How many audits a file counts; what is not a number of audits counts as none."""
    count = earlier.get("audits_run")
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else 0


def _earlier(folder: Path) -> dict[str, Any]:
    """What an earlier audit left; anything else that is there is replaced."""
    try:
        stored = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and stored.get("format") == AUDIT_FORMAT else {}
