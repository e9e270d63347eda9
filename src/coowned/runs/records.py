"""The files of a run folder, and the schemas of run.json, audit.json and graph.json.

graph.json holds counts of the graph before and after selection, so that the report of a run only reads.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import codec
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import class_name, histogram
from coowned.certificate import ContributionCertificate
from coowned.selection.selector import Schedule, Selection

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


GRAPH_FILE = "graph.json"
_UNLIKE = 0.25  # a share of S that is worth a warning: a rule of thumb


class CountClass(NamedTuple):
    """The number of examples or users whose count is in one class."""

    begin: int  # smallest count of the class
    before: int
    after: int


class GraphSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the train split's graph and of S. None depends on ids, keys or content.

    Guarantees:
      - Every count equals a plain recount.   (test_counts_equal_a_plain_recount)
      - `distance` is 0 where S is like the data and 1 where they have nothing in common; beyond a quarter it is warned
        of.   (test_an_s_unlike_the_data_is_warned_of)

    Attributes:
      num_users_left: users in at least one copy.
      users_per_example: examples before selection and copies after it, by number of users.
      examples_per_user: users before and after, by number of examples or copies.
    """

    format: Literal["coowned-graph-summary-1"] = "coowned-graph-summary-1"
    num_examples: int
    num_users: int
    num_users_left: int
    mean_users_per_example: float
    mean_users_per_copy: float
    users_per_example: list[CountClass]
    examples_per_user: list[CountClass]

    @classmethod
    def of(cls, graph: AttributionGraph, selected: Selection | Schedule) -> "GraphSummary":
        copies = np.asarray(selected.copies, np.int64)  # (num_examples,)
        per_example = graph.users_per_example.astype(np.int64)
        weights = np.repeat(copies, per_example)  # (num_pairs,)
        per_user = np.bincount(graph.users, weights=weights, minlength=graph.num_users).astype(np.int64)
        return cls(
            num_examples=graph.num_examples,
            num_users=graph.num_users,
            num_users_left=int(np.count_nonzero(per_user)),
            mean_users_per_example=graph.num_pairs / max(1, graph.num_examples),
            mean_users_per_copy=float(copies @ per_example) / max(1, int(copies.sum())),
            users_per_example=_classes(per_example, np.repeat(per_example, copies)),
            examples_per_user=_classes(graph.examples_per_user, per_user),
        )

    def agrees_with(self, certificate: ContributionCertificate) -> bool:
        """Returns whether examples, users and copies are as many as in a certificate."""
        counted = self.num_examples, self.num_users, self.num_users_left, self._num_copies
        left = sum(certificate.copies_per_user[1:])
        return counted == (certificate.num_examples, certificate.num_users, left, certificate.size)

    @property
    def distance(self) -> float:
        """The total variation distance between copies and examples by number of users: the share of S to exchange."""
        return sum(max(0.0, gain) for gain in self._gains().values())

    def warning(self) -> str | None:
        """Returns a warning if S is unlike the data, whose other examples results may then not apply to; else None."""
        if self.distance <= _UNLIKE:
            return None
        gains = self._gains()
        most = max(self.users_per_example, key=lambda counts: gains[counts.begin])
        users = f"{class_name(most.begin)} user{'' if most.begin == 1 else 's'}"
        before, after = (most.before / self.num_examples, most.after / self._num_copies)
        return (
            f"S is not like the data: {after:.0%} of its copies have {users}, but {before:.0%} of the examples do. "
            "What the model learns may hold of such examples alone. A larger contribution bound, or leaving out users "
            "who are not people (--unprotected FILE), brings S closer to the data."
        )

    @property
    def _num_copies(self) -> int:
        return sum(counts.after for counts in self.users_per_example)

    def _gains(self) -> dict[int, float]:
        """By class of `users_per_example`: its share of the copies, less that of the examples."""
        copies, examples = max(1, self._num_copies), max(1, self.num_examples)
        return {begin: after / copies - before / examples for begin, before, after in self.users_per_example}

    def to_json(self) -> str:
        return codec.encode_json(self, indent=2) + "\n"


def _classes(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> list[CountClass]:
    counts = [dict(histogram(values)) for values in (before, after)]
    begins = sorted(counts[0].keys() | counts[1].keys())
    return [CountClass(begin, counts[0].get(begin, 0), counts[1].get(begin, 0)) for begin in begins]
