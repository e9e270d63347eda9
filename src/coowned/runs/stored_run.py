"""The folder of a run, read back: a `StoredRun` checks that its files (`records.FILES`) agree."""

import dataclasses
import functools
import hashlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt

import coowned
from coowned import codec
from coowned.accounting.covered import check_bounds
from coowned.accounting.privacy_guarantee import (
    GUARANTEE_FILE,
    PrivacyGuarantee,
    absent_statement,
    model_metadata,
    parse_claim,
)
from coowned.accounting.signal_to_noise import SignalToNoise
from coowned.accounting.statement import rounded_up
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import one_line
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, CoownedError, InputError
from coowned.files import write_file
from coowned.mechanism.mechanism import Mechanism
from coowned.runs import records
from coowned.runs.config import TrainConfig, reasons_in
from coowned.runs.records import COVERED, AuditRecord, GraphSummary, RunRecord, read_json
from coowned.selection.selector import Schedule, Selection
from coowned.training.plan import RunPlan, claim_terms, plan_digest

if TYPE_CHECKING:
    import polars as pl

    from coowned.training.covered import CoveredFigures

MODEL_FILES = {
    "config.json": "the sizes of the model.",
    "vocab.txt": "its public vocabulary.",
    "model.py": "the code that creates the model; using the model runs it.",
    "encoder.json": "what the public encoder makes of a text besides its weights.",
    "encoder.safetensors": "the public encoder's weights, as they were given.",
}
"""What some models need beside their parameters, and what it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run folder, read and checked: the only reader of everything that `coowned train` writes.

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
    """

    path: Path
    record: RunRecord
    certificate: ContributionCertificate
    guarantee: PrivacyGuarantee | None
    public: bool
    mechanism: Mechanism

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, finished: bool = True) -> Self:
        """Reads a folder that `coowned train` or `fit` made; raises an error if its parts do not agree.

        With `finished` it refuses a run that has not ended; otherwise the model is not looked at.
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
        claim = _parsed(
            folder,
            record,
            GUARANTEE_FILE,
            lambda text: parse_claim(text, certificate),
        )
        run = cls(path=folder, record=record, certificate=certificate, **claim._asdict())
        _check_plan(folder, record, claim_terms(certificate, run.mechanism, run.guarantee))
        if finished:
            same_version = run.guarantee is None or run.guarantee.version == coowned.__version__
            _check_model(folder, record, run.statement() if same_version else None)
            _ = run.covered
        return run

    def statement(self) -> str:
        """Returns the privacy statement of the model."""
        if self.guarantee is None:
            return absent_statement(public=self.public)
        return self.guarantee.statement(model=self.record.model)

    @property
    def claims(self) -> bool:
        """Whether the run claims an epsilon."""
        return self.guarantee is not None and not self.guarantee.test_run

    @property
    def claim(self) -> PrivacyGuarantee:
        """The guarantee of a run that claims one."""
        if self.guarantee is None or not self.claims:
            raise InputError(f"{self.path}: this run has no guarantee ({self.reason})")
        return self.guarantee

    @property
    def reason(self) -> str:
        """The reason why there is no guarantee."""
        if self.guarantee is not None:
            return "test run with a given seed"
        return "public data" if self.public else "trained without privacy"

    @property
    def headline(self) -> str:
        """The claim in one line, with its unit, bound, delta and adjacency, or that there is none."""
        if not self.claims:
            return f"no guarantee ({self.reason})"
        text = f"epsilon {self.claim.shown_epsilon} ({self.claim.terms()})"
        if self.claim.simulated_epsilon is not None:
            return f"simulated epsilon {rounded_up(self.claim.simulated_epsilon)}, true {text}"
        return text

    @property
    def plan(self) -> RunPlan:
        """The settings of the run."""
        plan = RunPlan.from_description(self.record.plan, self.certificate, self.mechanism, self.guarantee)
        return dataclasses.replace(plan, reasons=self.reasons)

    @functools.cached_property
    def covered(self) -> "CoveredFigures | None":
        """Figures of the covered evaluation, part of the claim: they may be published. None without one.

        Guarantees:
          - Refused unless claim, certificate of the held-out part and released counts agree.
            (test_covered_parts_must_agree)
        """
        release = None if self.guarantee is None else self.guarantee.evaluation
        if self.guarantee is None or release is None:
            if COVERED in self.record.files:
                raise CertificateMismatchError(
                    f"{self.path / COVERED}: the claim has no covered evaluation; restore the original files"
                )
            return None
        from coowned.training.covered import CoveredFigures

        held_out = self._held_out_certificate()
        release.check_certificate(held_out)
        check_bounds(held_out, self.certificate)
        run_id = self.guarantee.run_id
        return _parsed(
            self.path,
            self.record,
            COVERED,
            lambda text: CoveredFigures.from_json(text, release=release, run_id=run_id),
        )

    def held_out(self, graph: AttributionGraph) -> Selection:
        """Returns the selection that a covered evaluation counts on, from the test split's graph."""
        _checked(self.path, self.record, "held-out.parquet")
        from coowned.selection.selection_files import read_selection  # a report needs none

        found = read_selection(self.path / "held-out.parquet", graph)
        assert isinstance(found, Selection)
        self._held_out_certificate().check(graph, found)
        return found

    def _held_out_certificate(self) -> ContributionCertificate:
        name = "held-out-certificate.json"
        return _parsed(self.path, self.record, name, ContributionCertificate.from_json)

    def model_files(self) -> dict[str, bytes]:
        """Returns the files needed to use model.safetensors, by name; raises an error for a changed one."""
        return {name: _checked(self.path, self.record, name) for name in MODEL_FILES if name in self.record.files}

    @property
    def signal_to_noise(self) -> SignalToNoise | None:
        """The signal-to-noise ratio of the mean gradient, from public numbers; None without noise."""
        if self.guarantee is None or not self.record.num_parameters or self.mechanism.batch_size is None:
            return None
        noise = self.guarantee.noise_multiplier
        sizes = {name: getattr(self.record, name) for name in ("num_parameters", "num_scores")}
        return SignalToNoise.of(self.mechanism, noise_multiplier=noise, **sizes)

    @property
    def selector(self) -> str:
        return str(self.certificate.origin.selector.get("name", "given"))

    @functools.cached_property
    def config_text(self) -> str:
        return _checked(self.path, self.record, "config.toml").decode()

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence for each omitted key of the configuration: what was chosen, and why; () if there were none.

        Guarantees:
          - They are those that the run was made with, after it was resumed too.   (test_defaults_are_explained)
        """
        return reasons_in(self.config_text)

    def config(self, folder: str | os.PathLike[str]) -> TrainConfig:
        """Returns the configuration; its relative paths are relative to `folder`."""
        return TrainConfig.from_toml(self.config_text, folder=folder, name=str(self.path / "config.toml"))

    def selection(self, graph: AttributionGraph) -> Selection | Schedule:
        """Returns what was selected from the train split's graph."""
        _checked(self.path, self.record, "S.parquet")
        from coowned.selection.selection_files import read_selection  # a report needs none

        return read_selection(self.path / "S.parquet", graph)

    def graph_summary(self) -> GraphSummary:
        """Returns counts of the graph before and after selection; InputError if the run stored none."""
        if records.GRAPH_FILE not in self.record.files:
            raise InputError("this run was written by a version that stored no counts of the graph")
        return _parsed(
            self.path,
            self.record,
            records.GRAPH_FILE,
            lambda text: codec.decode_json(GraphSummary, text, name="counts of the graph"),
        )

    def private_log(self) -> dict[str, Any] | None:
        """Returns counts of what the examples hold: not covered by the guarantee."""
        if not (self.path / "private-log.json").exists():
            return None
        content = _checked(self.path, self.record, "private-log.json")
        return codec.decode_json(dict[str, Any], content, name=str(self.path / "private-log.json"))

    def metrics(self) -> "pl.DataFrame | None":
        """Returns the training curves: not covered by the guarantee."""
        return self._private_table("metrics.parquet")

    def evaluations(self) -> "dict[str, pl.DataFrame]":
        """Returns the evaluations by split, validation and test: not covered by the guarantee."""
        found = {name: self._private_table(f"{name}.parquet") for name in ("validation", "test")}
        return {name: table for name, table in found.items() if table is not None}

    def _private_table(self, name: str) -> "pl.DataFrame | None":
        return _table(self.path, self.record, name) if (self.path / name).exists() else None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the model's parameters."""
        from safetensors.numpy import load

        return load(_checked(self.path, self.record, "model.safetensors"))

    def audit(self) -> AuditRecord | None:
        """Returns the findings of audits; None before the first."""
        return read_json(AuditRecord, self.path / "audit.json", remedy="audit again or remove it")

    def write_audit(self, found: AuditRecord) -> None:
        """Writes audit.json; results of canaries were learned from the data, and are readable by the owner only."""
        content = codec.encode_json(found, indent=2).encode() + b"\n"
        write_file(self.path / "audit.json", content, mode=0o600 if found.canaries else 0o644)


@dataclasses.dataclass(frozen=True)
class ReleasedClaim:
    """The joint guarantee for all that a folder may release, and the number of models."""

    guarantee: PrivacyGuarantee
    num_models: int


def read_claim(path: str | os.PathLike[str]) -> ReleasedClaim:
    """Returns the claim for all that a finished run or sweep may release, to be composed with others.

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
    guarantee = _parsed(folder, record, GUARANTEE_FILE, lambda text: parse_claim(text, certificate)).guarantee
    noise = _table(folder, record, "members.parquet")["noise_multiplier"].to_list()
    if guarantee.run_id != record.run_id or guarantee.noise_multiplier > sweep_noise_multiplier(noise) * (1 + 1e-9):
        raise CertificateMismatchError(f"{folder}: guarantee.json belongs to another sweep; restore the original files")
    return ReleasedClaim(guarantee, len(noise))


def _checked(folder: Path, record: RunRecord, name: str) -> bytes:
    """Reads a file that the run wrote; raises an error if it was changed."""
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


def _check_plan(folder: Path, record: RunRecord, terms: dict[str, Any]) -> None:
    for name, value in terms.items():
        if record.plan.get(name) != value:
            raise CertificateMismatchError(
                f"{folder}: guarantee.json and certificate.json do not agree with the plan in run.json ({name}); "
                "restore the original files, or train again elsewhere"
            )


def _check_model(folder: Path, record: RunRecord, statement: str | None) -> None:
    """Checks that a model file has its run's plan and statement (None: the text is of another version)."""
    file = folder / "model.safetensors"
    _checked(folder, record, file.name)
    metadata = model_metadata(file)
    stated = statement is None or metadata.get("statement") == statement
    if not stated or metadata.get("plan") != plan_digest(record.plan):
        raise CertificateMismatchError(
            f"{file}: the statement inside the model is not that of guarantee.json; restore the original files, or "
            "train again elsewhere"
        )


def _table(folder: Path, record: RunRecord, name: str) -> "pl.DataFrame":
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = _checked(folder, record, name)
    try:
        return pl.DataFrame(pl.from_arrow(pq.read_table(io.BytesIO(content))))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{folder / name}: not a table ({one_line(error)}); restore the original file") from None
