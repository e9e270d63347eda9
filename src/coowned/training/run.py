"""The folder of a run: what each file is called, and a `Run` that reads them back and checks that they agree.

config.toml             the configuration as it was given
certificate.json        the recount of what was selected
guarantee.json          the claim, with a digest of the certificate; or that there is none
S.parquet               what was selected
run.json                what the run is: its plan, digests of data, code and files, and whether it has ended
run-key.json            the secret, readable by its owner alone; destroyed when the run has ended
checkpoint.safetensors  parameters, optimizer state and metrics after some step; removed when the run has ended
model.safetensors       the result, with the statement inside
model-N.safetensors     of a sweep: member N, readable by its owner alone, since only one of them is covered
members.parquet         of a sweep: number, configuration and settings of every member
metrics.parquet         training curves: not covered by any guarantee
validation.parquet      evaluation on held-out examples, and test.parquet: not covered
private-log.json        what reading the content showed: not covered, readable by its owner alone
signature.json          of run.json, where the run was signed (`coowned.training.signature`)
audit.json              written by `coowned audit`
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy.typing as npt

import coowned
from coowned import codec
from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.accounting.signal_to_noise import SignalToNoise
from coowned.accounting.statement import rounded_up
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import one_line
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, CoownedError, InputError
from coowned.files import write_file
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_from_dict
from coowned.selection.selection_files import read_selection
from coowned.selection.selector import Schedule, Selection
from coowned.training.config import TrainConfig
from coowned.training.records import AuditRecord, RunRecord

if TYPE_CHECKING:
    import polars as pl

NO_GUARANTEE_FORMAT = "coowned-no-guarantee-1"
NO_GUARANTEE = "No guarantee: this model was trained without privacy and may reveal its training examples."
MODEL_FILES = {
    "config.json": "the sizes of the model.",
    "vocab.txt": "its public vocabulary.",
    "model.py": "the code that creates the model; using the model runs it.",
}
"""What some models need beside their parameters, and what it is."""
PUBLIC = "No guarantee: the data were declared public; nothing about them is protected."


class _NoGuarantee(msgspec.Struct, frozen=True, kw_only=True):
    """The content of guarantee.json where nothing is claimed."""

    format: Literal["coowned-no-guarantee-1"] = NO_GUARANTEE_FORMAT
    public: bool
    statement: str
    mechanism: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run folder, read and checked: the one reader of everything that `coowned train` writes.

    Guarantees:
      - A file that is not what the run wrote is refused when it is read.
        (test_changed_files_are_refused)
      - Certificate, guarantee, plan and the statement inside the model must agree, also where digests and checksums
        were computed anew.   (test_claim_plan_and_model_must_agree)
      - Metrics, evaluations and the private log are opened only when they are asked for.
        (test_private_files_are_read_when_asked_for)
    What it is not: proof against whoever can write to the folder and forges all of it.

    Attributes:
      path: the folder.
      record: run.json.
      certificate: of what was selected.
      guarantee: the claim, computed anew; None without privacy. A test run has one too, which claims nothing: see
        `claims`.
      public: without a guarantee because the data are public.
      mechanism: how batches were drawn.
      statement: what may be said of the model.
    """

    path: Path
    record: RunRecord
    certificate: ContributionCertificate
    guarantee: PrivacyGuarantee | None
    public: bool
    mechanism: Mechanism
    statement: str

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, finished: bool = True) -> "StoredRun":
        """Reads a folder that `coowned train` or `fit` made; refuses one whose parts do not agree.

        Args:
          path: the folder.
          finished: refuse a run that has not ended; otherwise the model is not looked at.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise InputError(f"{folder}: not a folder; give the folder of a run that `coowned train -o` or `fit` wrote")
        record = RunRecord.read(folder)
        if record is None or record.state == "preparing":
            raise InputError(f"{folder}: no run in this folder (no run.json); give one written by `coowned train -o`")
        if finished and record.state != "finished":
            raise InputError(
                f"{folder}: this run is not finished; run the same `coowned train` command again to resume"
            )
        if "guarantee.json" not in record.files or "members.parquet" in record.files:
            raise InputError(f"{folder}: a sweep, or a run of `train(folder=...)`, without guarantee.json; use `fit`")
        _checked(folder, record, "config.toml")
        certificate = _parsed(folder, record, "certificate.json", ContributionCertificate.from_json)
        guarantee, public, statement, mechanism = _parsed(
            folder, record, "guarantee.json", lambda text: _parse_guarantee(text, certificate)
        )
        _check_plan(folder, record, claim_terms(certificate, mechanism, guarantee))
        if finished:
            same_version = guarantee is None or guarantee.version == coowned.__version__
            _check_model(folder, record, statement if same_version else None)
        return cls(
            path=folder,
            record=record,
            certificate=certificate,
            guarantee=guarantee,
            public=public,
            mechanism=mechanism,
            statement=statement,
        )

    @property
    def claims(self) -> bool:
        """Whether an epsilon may be said of this run."""
        return self.guarantee is not None and not self.guarantee.test_run

    @property
    def claim(self) -> PrivacyGuarantee:
        """The guarantee of a run that claims one."""
        if self.guarantee is None or not self.claims:
            raise InputError(f"{self.path}: this run has no guarantee ({self.reason})")
        return self.guarantee

    @property
    def reason(self) -> str:
        """Why there is no guarantee."""
        if self.guarantee is not None:
            return "test run with a given seed"
        return "public data" if self.public else "trained without privacy"

    @property
    def headline(self) -> str:
        """The claim in one line, with its unit, bound, delta and adjacency; or that there is none."""
        if not self.claims:
            return f"no guarantee ({self.reason})"
        text = f"epsilon {self.claim.shown_epsilon} ({self.claim.terms()})"
        if self.claim.simulated_epsilon is not None:
            return f"simulated epsilon {rounded_up(self.claim.simulated_epsilon)}, true {text}"
        return text

    @property
    def plan(self) -> "RunPlan":
        """Every choice of the run."""
        described = self.record.plan
        clip_norm, (optimizer, learning_rate, *options) = described["clip_norm"], described["optimizer"]
        return RunPlan(
            mechanism=self.mechanism,
            noise_multiplier=described["noise_multiplier"],
            clip_norm=None if clip_norm is None else float(clip_norm),
            optimizer=optimizer,
            learning_rate=learning_rate,
            optimizer_options=dict(*options),
            coefficients=tuple(described["coefficients"]),
            public=described["public"],
            test_run=described["test_run"],
            graph_digest=described["graph"],
            selection_digest=described["selection"],
        )

    def model_files(self) -> dict[str, bytes]:
        """What stands beside model.safetensors and is needed to use it, by name; a file that was changed is refused."""
        return {name: _checked(self.path, self.record, name) for name in MODEL_FILES if name in self.record.files}

    @property
    def signal_to_noise(self) -> SignalToNoise | None:
        """Of its mean gradient, from public numbers; None without noise."""
        if self.guarantee is None or not self.record.num_parameters or self.mechanism.batch_size is None:
            return None
        noise = self.guarantee.noise_multiplier
        sizes = {name: getattr(self.record, name) for name in ("num_parameters", "num_scores")}
        return SignalToNoise.of(self.mechanism, noise_multiplier=noise, **sizes)

    @property
    def selector(self) -> str:
        return str(self.certificate.selector.get("name", "given"))

    @functools.cached_property
    def config_text(self) -> str:
        return _checked(self.path, self.record, "config.toml").decode()

    def config(self, folder: str | os.PathLike[str]) -> TrainConfig:
        """The configuration; its relative paths are relative to `folder`."""
        return TrainConfig.from_toml(self.config_text, folder=folder, name=str(self.path / "config.toml"))

    def selection(self, graph: AttributionGraph) -> Selection | Schedule:
        """What was selected from the train split's graph."""
        _checked(self.path, self.record, "S.parquet")
        return read_selection(self.path / "S.parquet", graph)

    def private_log(self) -> dict[str, Any] | None:
        """Counts of what the examples hold: not covered by the guarantee."""
        if not (self.path / "private-log.json").exists():
            return None
        content = _checked(self.path, self.record, "private-log.json")
        return codec.decode_json(dict[str, Any], content, name=str(self.path / "private-log.json"))

    def metrics(self) -> "pl.DataFrame | None":
        """Training curves: not covered by the guarantee."""
        return self._private_table("metrics.parquet")

    def evaluations(self) -> "dict[str, pl.DataFrame]":
        """By split, validation and test: not covered by the guarantee."""
        found = {name: self._private_table(f"{name}.parquet") for name in ("validation", "test")}
        return {name: table for name, table in found.items() if table is not None}

    def _private_table(self, name: str) -> "pl.DataFrame | None":
        return _table(self.path, self.record, name) if (self.path / name).exists() else None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The model's parameters."""
        from safetensors.numpy import load

        return load(_checked(self.path, self.record, "model.safetensors"))

    def audit(self) -> AuditRecord | None:
        """What audits have found; None before the first."""
        file = self.path / "audit.json"
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        return codec.decode_json(AuditRecord, content, name=str(file), remedy="audit again or remove it")

    def write_audit(self, found: AuditRecord) -> None:
        """Writes audit.json; what canaries found was learned from the data, and is readable by its owner alone."""
        content = codec.encode_json(found, indent=2).encode() + b"\n"
        write_file(self.path / "audit.json", content, mode=0o600 if found.canaries else 0o644)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a finished run chose, as its record has it.

    Attributes:
      mechanism: how batches were drawn; its batch size and iterations are also here.
      noise_multiplier: 0 without privacy.
      clip_norm: longest gradient of one copy; None or infinite where nothing was clipped.
      optimizer, learning_rate, optimizer_options: how noisy gradients moved the parameters.
      coefficients: of the correlated noise; (1.0,) is independent noise.
      public: without a guarantee because the data are public.
      test_run: noise and coins came from a given seed.
      graph_digest, selection_digest: of the train split's graph, and of S.
    """

    mechanism: Mechanism
    noise_multiplier: float
    clip_norm: float | None
    optimizer: str
    learning_rate: float
    optimizer_options: Mapping[str, Any]
    coefficients: tuple[float, ...]
    public: bool
    test_run: bool
    graph_digest: str
    selection_digest: str

    @property
    def batch_size(self) -> int:
        assert self.mechanism.batch_size is not None
        return self.mechanism.batch_size

    @property
    def iterations(self) -> int:
        return self.mechanism.iterations


@dataclasses.dataclass(frozen=True)
class ReleasedClaim:
    """What everything a folder may release costs one person, and how many models that is."""

    guarantee: PrivacyGuarantee
    num_models: int


def read_claim(path: str | os.PathLike[str]) -> ReleasedClaim:
    """The claim for all that a finished run or sweep may release, to be composed with others.

    Guarantees:
      - A sweep counts with all its models, which share their batches.   (test_a_sweep_counts_with_all_its_models)
    """
    folder = Path(path)
    record = RunRecord.read(folder) if folder.is_dir() else None
    if record is None or "members.parquet" not in record.files:
        return ReleasedClaim(StoredRun.open(folder).claim, 1)
    if "guarantee.json" not in record.files:
        raise InputError(f"{folder}: this sweep has no guarantee for all its models; there is nothing to compose")
    from coowned.accounting.calculators import sweep_noise_multiplier

    certificate = _parsed(folder, record, "certificate.json", ContributionCertificate.from_json)
    guarantee = _parsed(
        folder, record, "guarantee.json", lambda text: PrivacyGuarantee.from_json(text, certificate=certificate)
    )
    noise = _table(folder, record, "members.parquet")["noise_multiplier"].to_list()
    if guarantee.run_id != record.run_id or guarantee.noise_multiplier > sweep_noise_multiplier(noise) * (1 + 1e-9):
        raise CertificateMismatchError(f"{folder}: guarantee.json belongs to another sweep; restore the original files")
    return ReleasedClaim(guarantee, len(noise))


def claim_terms(
    certificate: ContributionCertificate, mechanism: Mechanism, guarantee: PrivacyGuarantee | None
) -> dict[str, Any]:
    """What a plan, a guarantee and a certificate must agree in, as plain values."""
    terms: dict[str, Any] = {
        "graph": certificate.graph_digest,
        "selection": certificate.selection_digest,
        "mechanism": mechanism.to_dict(),
        "noise_multiplier": 0.0 if guarantee is None else guarantee.noise_multiplier,
        "claim": None,
    }
    if guarantee is not None:
        # Epsilon follows from these and the mechanism, and is computed anew whenever a guarantee is read.
        names = ("run_id", "delta", "adjacency", "simulated_batch_size", "test_run")
        terms["claim"] = {name: getattr(guarantee, name) for name in names}
    return json.loads(json.dumps(terms))  # tuples as lists, as they are read back


def plan_digest(plan: dict[str, Any]) -> str:
    """Names a plan, as `TrainingPlan.describe` gives it."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def guarantee_text(guarantee: PrivacyGuarantee | None, mechanism: Mechanism, *, public: bool) -> str:
    """The content of guarantee.json."""
    if guarantee is not None:
        return guarantee.to_json(embed_certificate=False) + "\n"
    statement = PUBLIC if public else NO_GUARANTEE
    absent = _NoGuarantee(public=public, statement=statement, mechanism=mechanism.to_dict())
    return codec.encode_json(absent, indent=2) + "\n"


def stated_origins(folder: Path) -> list[str]:
    """What guarantee.json and the weights in a folder say of them, as statements; empty for weights from elsewhere.

    The folder need not be a whole run: weights may have been copied.
    """
    stated = []
    file = folder / "guarantee.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(stored, dict) and stored.get("format") == NO_GUARANTEE_FORMAT:
            stated.append(PUBLIC if stored.get("public") is True else NO_GUARANTEE)
        else:
            stated.append("a guarantee")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (ValueError, RecursionError):
        raise InputError(f"{file}: not JSON; the checkpoint is not a run's folder") from None
    weights = folder / "model.safetensors"
    if weights.is_file() and "statement" in (metadata := _model_metadata(weights)):
        stated.append(metadata["statement"])
    return stated


def _checked(folder: Path, record: RunRecord, name: str) -> bytes:
    """The bytes of a file that the run wrote; refused where they are others."""
    file = folder / name
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); restore it, or train again elsewhere") from None
    if hashlib.sha256(content).hexdigest() != record.files.get(name):
        raise CertificateMismatchError(f"{file}: changed since this run wrote it; restore it, or train again elsewhere")
    return content


def _parsed(folder: Path, record: RunRecord, name: str, parse: Any) -> Any:
    content = _checked(folder, record, name)
    try:
        return parse(content)
    except CoownedError as error:
        raise type(error)(f"{folder / name}: {error}") from None


def _parse_guarantee(
    text: bytes, certificate: ContributionCertificate
) -> tuple[PrivacyGuarantee | None, bool, str, Mechanism]:
    stored = codec.decode_json(dict[str, Any], text, name="guarantee", remedy="train again")
    if stored.get("format") == NO_GUARANTEE_FORMAT:
        absent = codec.decode_json(_NoGuarantee, text, name="guarantee", remedy="train again")
        return None, absent.public, PUBLIC if absent.public else NO_GUARANTEE, mechanism_from_dict(absent.mechanism)
    guarantee = PrivacyGuarantee.from_json(text, certificate=certificate)
    return guarantee, False, guarantee.statement(), guarantee.mechanism


def _check_plan(folder: Path, record: RunRecord, terms: dict[str, Any]) -> None:
    for name, value in terms.items():
        if record.plan.get(name) != value:
            raise CertificateMismatchError(
                f"{folder}: guarantee.json and certificate.json do not agree with the plan in run.json ({name}); "
                "restore the original files, or train again elsewhere"
            )


def _check_model(folder: Path, record: RunRecord, statement: str | None) -> None:
    """A model file carries its run's plan and statement (None: the words are those of another version)."""
    file = folder / "model.safetensors"
    _checked(folder, record, file.name)
    metadata = _model_metadata(file)
    stated = statement is None or metadata.get("statement") == statement
    if not stated or metadata.get("plan") != plan_digest(record.plan):
        raise CertificateMismatchError(
            f"{file}: the statement inside the model is not that of guarantee.json; restore the original files, or "
            "train again elsewhere"
        )


def _model_metadata(weights: Path) -> dict[str, str]:
    from safetensors import safe_open

    try:
        with safe_open(weights, framework="numpy") as opened:
            return opened.metadata() or {}
    except Exception as error:  # safetensors raises various kinds
        raise InputError(
            f"{weights}: the model cannot be read ({error}); give a folder with a complete model"
        ) from error


def _table(folder: Path, record: RunRecord, name: str) -> "pl.DataFrame":
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = _checked(folder, record, name)
    try:
        return pl.DataFrame(pl.from_arrow(pq.read_table(io.BytesIO(content))))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{folder / name}: not a table ({one_line(error)}); restore the original file") from None
