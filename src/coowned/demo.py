"""The demo: all stages on a synthetic e-mail world, from a mailbox to a report, in one folder."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from coowned.accounting.choices import Choice, Plan
from coowned.accounting.guarantee import guarantee
from coowned.accounting.planning import plan
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.attribution.graph import AttributionGraph
from coowned.audit.bob import Measured
from coowned.certificate import certificate_path_of, certify
from coowned.codec import encode_toml
from coowned.errors import InputError
from coowned.files import check_writable, remove
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.report.page import write_report
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun
from coowned.selection.registry import make_selector
from coowned.selection.selection_files import write_selection
from coowned.synthetic.toy_emails import EmailWorld, hashed_words, write_mbox

EPSILONS = (0.5, 2.0, 8.0)  # the last is that of the report
TARGET: dict[str, Any] = {"delta": 1e-8, "adjacency": "zero-out"}
_BATCHES: dict[str, Any] = {"batch_size": 64, "iterations": 200}
_NUM_FEATURES = 64
_CLIP_NORM = 0.4  # at 1 hardly any gradient would be clipped, and the noise be larger than it needs to be
_MARKER = ".coowned-demo"  # in a folder whose files a further demo may replace
_WRITTEN = ("mailbox.mbox", "emails.parquet", "S.parquet", "S.certificate.json", "guarantee.json", "report.html")


@dataclasses.dataclass(frozen=True)
class Demo:
    """The stages of the demo, in the order in which they are called; each writes its files into the folder.

    Guarantees:
      - Files of the demo's names that no demo wrote are kept, and the folder refused.   (test_others_files_are_kept)
    """

    folder: Path
    world: EmailWorld = dataclasses.field(default_factory=lambda: EmailWorld(num_people=1000, num_emails=5000))

    @property
    def mailbox(self) -> Path:
        return self.folder / "mailbox.mbox"

    @property
    def selected(self) -> Path:
        return self.folder / "S.parquet"

    def prepare(self) -> None:
        """Creates the folder and removes the files of an earlier demo; other files are not touched."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot create the folder ({error.strerror}); choose another with -o"
            ) from None
        check_writable(self.folder)
        paths = [self.folder / name for name in _WRITTEN]
        for epsilon in EPSILONS:
            paths += self._paths(epsilon)
        marker = self.folder / _MARKER
        if not marker.exists():
            for path in paths:
                if os.path.lexists(path):
                    raise InputError(
                        f"{path}: already exists and was not written by a demo; choose another folder with -o"
                    )
            marker.write_text("Written by `coowned demo`, which replaces its own files here.\n", encoding="utf-8")
        for path in paths:
            remove(path)

    def write_mailbox(self) -> pa.Table:
        """Generates the e-mails of the world and writes them as a mailbox."""
        emails = self.world.generate(seed=0)
        write_mbox(emails, self.mailbox)
        return emails

    def plan(self, graph: AttributionGraph, epsilon: float) -> tuple[Plan, Choice]:
        """Returns every choice for one epsilon, and the best of them."""
        planned = plan(
            graph,
            epsilon=epsilon,
            contribution_bounds=(1, 3, 10),
            mechanism="poisson",
            num_parameters=_NUM_FEATURES + 1,
            **TARGET,
            **_BATCHES,
        )
        return planned, next(choice for choice in planned.choices if choice.best)

    def select(self, graph: AttributionGraph, choice: Choice) -> PrivacyGuarantee:
        """Selects from all e-mails, certifies and accounts for the largest epsilon."""
        selection = make_selector(choice.selector, {"contribution_bound": choice.contribution_bound}).select(graph)
        certificate = certify(graph, selection)
        mechanism = PoissonSampling.from_certificate(certificate, **_BATCHES)
        claim = guarantee(certificate, mechanism, epsilon=EPSILONS[-1], **TARGET)
        write_selection(self.selected, graph, selection)
        certificate_path_of(self.selected).write_text(certificate.to_json() + "\n", encoding="utf-8")
        (self.folder / "guarantee.json").write_text(claim.to_json() + "\n", encoding="utf-8")
        return claim

    def write_features(self, emails: pa.Table) -> None:
        """Writes the hashed words of every e-mail, for a linear model."""
        features = hashed_words(emails["text"].to_pylist(), _NUM_FEATURES)
        column = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), _NUM_FEATURES)
        table = emails.select(["message_id", "users", "label"]).append_column("features", column)
        pq.write_table(table, self.folder / "emails.parquet")

    def train(self, epsilon: float, choice: Choice) -> StoredRun:
        """Trains at one epsilon, from a configuration that stays beside the run."""
        folder, config = self._paths(epsilon)
        config.write_text(_configuration(epsilon, choice), encoding="utf-8")
        with RunFolder.open(folder, ledger=None) as opened:
            run_configuration(TrainConfig.read(config), opened)
        return StoredRun.open(folder)

    def report(self, main: StoredRun, others: Sequence[StoredRun], measured: Sequence[Measured]) -> Path:
        """Writes the page of the main run, beside the others and what was measured for Bob."""
        return write_report(
            main.path, self.folder / "report.html", also=[run.path for run in others], bob=list(measured)
        )

    def _paths(self, epsilon: float) -> tuple[Path, Path]:
        return self.folder / f"run-epsilon-{epsilon:g}", self.folder / f"epsilon-{epsilon:g}.toml"


def _configuration(epsilon: float, choice: Choice) -> str:
    sections = {
        "data": {"path": "emails.parquet", "users": "users", "example_id": "message_id", "splits": [0.8, 0.1, 0.1]},
        "selection": {"selector": choice.selector, "contribution_bound": choice.contribution_bound, "seed": 0},
        "privacy": {"epsilon": epsilon, **TARGET},
        "mechanism": {"kind": "dp-sgd", **_BATCHES, "clip_norm": _CLIP_NORM},
        "model": {"kind": "logistic-regression", "features": "features", "label": "label"},
        "optimizer": {"name": "adam", "learning_rate": 0.05},
        "run": {"baseline": True},
        "report": {"name": "E-mail classifier of the demo", "purpose": "tells work from private life"},
    }
    return encode_toml(sections)
