"""What a run folder holds, read for a page; a release never opens the files that hold private numbers."""

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import polars as pl

from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.mechanism.mechanism import Mechanism
from coowned.training.run import Run, RunRecord

_AUDIT_ENTRIES = ("epsilon_lower_bound", "holds", "verdict", "alpha", "audits_run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateNumbers:
    """Everything of a run that was computed from content without noise."""

    metrics: pl.DataFrame | None
    splits: dict[str, pl.DataFrame]  # validation and test, where they were evaluated
    canaries: dict[str, Any] | None  # an audit that trained on the data


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContents:
    """One finished run.

    Attributes:
      guarantee: what was accounted; None without privacy. Of a test run too, though it claims nothing: ask `claims`.
      public: without a guarantee because the data are public.
      audit: of the mechanism, with keys and users of its own: nothing of the run's content is in it.
      private: None in a release.
    """

    path: Path
    guarantee: PrivacyGuarantee | None
    public: bool
    statement: str
    certificate: ContributionCertificate
    mechanism: Mechanism
    record: RunRecord
    config_text: str
    audit: dict[str, Any] | None
    private: PrivateNumbers | None

    @property
    def claims(self) -> bool:
        """Whether an epsilon may be said of this run."""
        return self.guarantee is not None and not self.guarantee.test_run

    @property
    def claim(self) -> PrivacyGuarantee:
        """The guarantee of a run that claims one."""
        if self.guarantee is None or self.guarantee.test_run:
            raise InputError(f"{self.path}: this run has no guarantee")
        return self.guarantee

    @property
    def selector(self) -> str:
        return str(self.certificate.selector.get("name", "given"))

    @property
    def headline(self) -> str:
        """The claim in one line, always with its unit, bound, delta and adjacency; or that there is none."""
        if not self.claims:
            return f"no guarantee ({self.reason})"
        made = self.claim
        text = f"epsilon {rounded_up(made.epsilon)} ({made.terms()})"
        if made.simulated_epsilon is not None:
            return f"simulated epsilon {rounded_up(made.simulated_epsilon)}, true {text}"
        return text

    @property
    def reason(self) -> str:
        """Why there is no guarantee."""
        if self.guarantee is not None:
            return "test run with a given seed"
        return "public data" if self.public else "trained without privacy"

    @property
    def short(self) -> str:
        """A label for an axis."""
        if not self.claims:
            return "no guarantee"
        made = self.claim
        if made.simulated_epsilon is not None:
            return f"{rounded_up(made.epsilon)} (simulated {rounded_up(made.simulated_epsilon)})"
        return rounded_up(made.epsilon)


def read_run(folder: str | os.PathLike[str], *, release: bool) -> RunContents:
    """Reads a finished run; its guarantee is computed anew, and refused where it claims too much.

    Guarantees:
      - With release, metrics and evaluations are not even opened.   (test_release_opens_no_private_file)
      - A folder whose parts do not agree is refused, as `Run.open` does.   (test_claim_plan_and_model_must_agree)
    """
    run = Run.open(folder)
    audit, canaries = _read_audit(run)
    return RunContents(
        path=run.path,
        guarantee=run.guarantee,
        public=run.public,
        statement=run.statement,
        certificate=run.certificate,
        mechanism=run.mechanism,
        record=run.record,
        config_text=run.config_text,
        audit=audit,
        private=None if release else _read_private(run, canaries),
    )


def _read_private(run: Run, canaries: dict[str, Any] | None) -> PrivateNumbers:
    return PrivateNumbers(metrics=run.metrics(), splits=run.evaluations(), canaries=canaries)


def _read_audit(run: Run) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The audit of the mechanism, and that with canaries, which learned from the data."""
    stored = run.audit()
    if stored is None:
        return None, None
    canaries = stored.get("canaries")
    own = {name: stored[name] for name in _AUDIT_ENTRIES if name in stored}
    return own or None, canaries if isinstance(canaries, dict) else None


def releasable_config(text: str) -> str:
    """A configuration without comments, which may say anything, and without the folders that its files are in.

    >>> print(releasable_config('# reached 0.93\\n[data]\\npath = "/home/bob/mail.mbox"\\nsplits = [1, 0, 0]'))
    [data]
    path = "mail.mbox"
    splits = [1, 0, 0]
    """
    lines = []
    for section, values in tomllib.loads(text).items():
        lines += [f"[{section}]"] if not lines else ["", f"[{section}]"]
        for key, value in values.items():
            if isinstance(value, str) and "/" in value:
                value = Path(value).name
            # What TOML and JSON write alike is all that a configuration has: texts, numbers, lists, true and false.
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
