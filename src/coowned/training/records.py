"""What the JSON files of a run's folder hold: run.json, which is the run, and audit.json."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from coowned import codec


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
        """The record in a folder; None where there is none."""
        file = folder / "run.json"
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        return codec.decode_json(cls, content, name=str(file), remedy="use another folder for the run")

    def as_stored(self) -> "RunRecord":
        """As it is read back: tuples as lists."""
        return codec.decode_json(RunRecord, self.to_json(), name="run.json")

    def to_json(self) -> bytes:
        return codec.encode_json(self, indent=2).encode()


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of audit.json; entries of the plan's audit are empty where there was only one with canaries.

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
