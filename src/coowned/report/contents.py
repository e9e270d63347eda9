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
from coowned.errors import CertificateMismatchError, InputError
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_from_dict
from coowned.training.checkpoint import RunFolder
from coowned.training.tasks import NO_GUARANTEE_FORMAT

AUDIT_FORMAT = "coowned-audit-1"
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
    record: dict[str, Any]
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
      - A run that has not ended is refused.   (test_unfinished_run_is_refused)
      - A guarantee for another certificate or another run is refused.
        (test_foreign_guarantee_is_refused, test_guarantee_of_another_run_is_refused)
      - A run with a seed whose guarantee does not say so is refused.   (test_hidden_seed_is_refused)
    """
    path = Path(folder)
    record = read_record(path)
    certificate = ContributionCertificate.from_json(_text(path / "certificate.json"))
    config_text = _text(path / "config.toml")
    guarantee, public, statement, mechanism = _read_guarantee(path, certificate, record, config_text)
    audit, canaries = _read_audit(path)
    return RunContents(
        path=path,
        guarantee=guarantee,
        public=public,
        statement=statement,
        certificate=certificate,
        mechanism=mechanism,
        record=record,
        config_text=config_text,
        audit=audit,
        private=None if release else _read_private(path, canaries),
    )


def read_record(path: Path) -> dict[str, Any]:
    """The run.json of a finished run."""
    if not path.is_dir():
        raise InputError(f"{path}: no folder of a run; name the folder that `coowned train -o` made")
    folder = RunFolder(path)
    if not folder.is_begun:
        raise InputError(f"{path}: no run is in this folder (run.json is missing); name one made by `coowned train -o`")
    if not folder.is_finished:
        raise InputError(f"{path}: this run has not ended; give the same `coowned train` command again to go on")
    return json.loads(_text(path / "run.json"))


def _read_guarantee(
    path: Path, certificate: ContributionCertificate, record: dict[str, Any], config_text: str
) -> tuple[PrivacyGuarantee | None, bool, str, Mechanism]:
    text = _text(path / "guarantee.json")
    try:
        stored = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path / 'guarantee.json'}: not JSON ({error}); train again") from None
    if isinstance(stored, dict) and stored.get("format") == NO_GUARANTEE_FORMAT:
        if record.get("run_id") is not None:
            raise CertificateMismatchError(
                f"{path}: guarantee.json is not that of this run, which has one; train again"
            )
        return None, stored.get("public") is True, str(stored["statement"]), mechanism_from_dict(stored["mechanism"])
    made = PrivacyGuarantee.from_json(text)
    if made.certificate != certificate:
        raise CertificateMismatchError(f"{path}: guarantee.json was made from another certificate; train again")
    try:
        made.check_run(record.get("run_id"), seeded=_is_seeded(path, config_text))
    except CertificateMismatchError as error:
        raise CertificateMismatchError(f"{path}: {error}") from None
    return made, False, made.statement(), made.mechanism


def _is_seeded(path: Path, config_text: str) -> bool:
    try:
        asked = tomllib.loads(config_text).get("run")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path / 'config.toml'}: not TOML ({error}); put the run's own back") from None
    return isinstance(asked, dict) and "seed" in asked


def _read_private(path: Path, canaries: dict[str, Any] | None) -> PrivateNumbers:
    def parquet(name: str) -> pl.DataFrame | None:
        if not (path / name).exists():
            return None
        try:
            return pl.read_parquet(path / name)
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{path / name}: cannot be read ({error}); train again or remove it") from None

    found = {name: parquet(f"{name}.parquet") for name in ("validation", "test")}
    return PrivateNumbers(
        metrics=parquet("metrics.parquet"),
        splits={name: table for name, table in found.items() if table is not None},
        canaries=canaries,
    )


def _read_audit(path: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The audit of the mechanism, and that with canaries, which learned from the data."""
    if not (path / "audit.json").exists():
        return None, None
    try:
        stored = json.loads(_text(path / "audit.json"))
    except ValueError as error:
        raise InputError(f"{path / 'audit.json'}: not JSON ({error}); audit again or remove it") from None
    if not isinstance(stored, dict) or stored.get("format") != AUDIT_FORMAT:
        raise InputError(f"{path / 'audit.json'}: not of the format {AUDIT_FORMAT!r}; audit again or remove it")
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: missing; the run is not whole, train again") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; the run is not whole, train again") from None
