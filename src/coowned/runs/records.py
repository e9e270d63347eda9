"""The files of a run folder, and the schemas of run.json and audit.json."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from coowned import codec

COVERED = "covered.json"
FILES = (
    "config.toml",  # the configuration as it was given
    "certificate.json",  # the recount of what was selected
    "guarantee.json",  # the claim, with a digest of the certificate; or that there is none
    "S.parquet",  # what was selected
    "held-out.parquet",  # what a covered evaluation counts on
    "held-out-certificate.json",  # its recount
    COVERED,  # the figures of a covered evaluation: part of the claim
    "graph.json",  # counts of the graph before and after selection
    "run.json",  # what the run is: its plan, digests of data, code and files, and whether it has ended
    "run-key.json",  # the secret, readable by its owner alone; destroyed when the run has ended
    "checkpoint.safetensors",  # parameters, optimizer state and metrics after some step; removed when the run has ended
    "model.safetensors",  # the result, with the statement inside
    "config.json", "vocab.txt", "model.py", "encoder.json", "encoder.safetensors",  # what some models need besides
    "members.parquet",  # of a sweep: number, configuration and settings of every member
    "metrics.parquet",  # training curves: not covered by any guarantee
    "validation.parquet", "test.parquet",  # evaluation on held-out examples: not covered
    "private-log.json",  # what reading the content showed: not covered, readable by its owner alone
    "signature.json",  # of run.json, where the run was signed (`coowned.runs.signature`)
    "audit.json",  # written by `coowned audit`
    "report.html", "report-release.html",  # written by `coowned report`
)  # fmt: skip
"""The files of a run's folder."""
_MEMBER = re.compile(r"model-\d+\.safetensors")  # of a sweep, its owner's alone, since only one of them is covered
Kind = TypeVar("Kind")


def is_run_file(name: str) -> bool:
    """Returns whether a run writes files of this name."""
    return name in FILES or _MEMBER.fullmatch(name) is not None


def read_json(kind: type[Kind], file: Path, *, remedy: str) -> Kind | None:
    """Reads a file; returns None if it does not exist."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return codec.decode_json(kind, content, name=str(file), remedy=remedy)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of run.json.

    Attributes:
      state: "preparing" while the first files are written, "training", then "finished".
      plan: every choice of the run, as `TrainingPlan.describe` gives it.
      model, data, configuration, initial, code, devices, platform, key: what a resumed run must agree in.
      run_id: of the guarantee; None for a run without one.
      num_parameters: that are trained; 0 where it was not stored.
      num_scores: that a linear model gives an example; 0 for other models, None where it was not stored.
      members: how many models a sweep trains.
      files: name and SHA-256 of the files that the run wrote and that do not change any more.
    """

    format: Literal["coowned-run-2"] = "coowned-run-2"
    state: Literal["preparing", "training", "finished"]
    plan: dict[str, Any] = {}
    model: dict[str, Any] = {}
    data: str = ""
    configuration: str = ""
    initial: str = ""
    code: str = ""
    devices: int = 1
    platform: str = ""
    key: str = ""
    run_id: str | None = None
    iterations: int = 0
    num_parameters: int = 0
    num_scores: int | None = None
    members: int = 1
    files: dict[str, str] = {}

    @classmethod
    def read(cls, folder: Path) -> "RunRecord | None":
        """Reads the record in a folder; returns None if there is none."""
        return read_json(cls, folder / "run.json", remedy="use another folder for the run")

    def as_stored(self) -> "RunRecord":
        """Returns the record as it is read back, with tuples as lists."""
        return codec.decode_json(RunRecord, self.to_json(), name="run.json")

    def to_json(self) -> bytes:
        return codec.encode_json(self, indent=2).encode()


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of audit.json; entries of the plan's audit are empty after an audit with canaries only.

    Attributes:
      audits_run: how often the plan was audited.
      canaries: what a training with canary users proved; None where there was none.
    """

    format: Literal["coowned-audit-2"] = "coowned-audit-2"
    audits_run: Annotated[int, msgspec.Meta(ge=0)] = 0
    holds: bool | None = None
    verdict: str = ""
    not_seen: str = ""
    run_id: str = ""
    test_run: bool = False
    claim: dict[str, Any] = {}
    mechanism: dict[str, Any] = {}
    alpha: float | None = None
    repeatable: bool = False
    epsilon_lower_bound: float | None = None
    curves: list[dict[str, Any]] = []
    laws: list[dict[str, Any]] = []
    seconds: float | None = None
    version: str = ""
    canaries: dict[str, Any] | None = None
