"""A new mechanism is one file and one line in the registry: everything else finds it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.registration import READING, registered, write_configuration, write_table

import coowned as co
from coowned.cli.main import run
from coowned.mechanism.registry import MECHANISMS, Entry

MODULE = '''
"""Draws every copy by a coin."""

import dataclasses

from coowned.mechanism.batching import PoissonBatches
from coowned.mechanism.mechanism import Mechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySampling(Mechanism):
    kind = "toy"
    training_kind = "toy-sgd"

    sampling_probability: float

    @classmethod
    def _certified_fields(cls, certificate, batch_size):
        return {"sampling_probability": batch_size / certificate.size}

    def batches(self, selected, *, run_key, multiple_of=8):
        drawing = self._drawing(selected, run_key, multiple_of)
        return PoissonBatches(**drawing, sampling_probability=self.sampling_probability)

    def probability_of(self, group):
        return self.sampling_probability

    def describe(self):
        return f"toy coins of probability {self.sampling_probability:.3g}"
'''
TARGET = ["--epsilon", "8", "--delta", "1e-6", "--batch-size", "8", "--iterations", "20"]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A table, in a folder where the toy mechanism's module is; that module is registered."""
    entry = Entry("toy_sampling.ToySampling", "toy DP-SGD")
    with registered(tmp_path, "toy_sampling", MODULE, MECHANISMS, entry, public="ToySampling"):
        yield write_table(tmp_path)


def test_api(data: Path):
    graph = co.read_csv(data, users="users", example_id="id", separator=";").graph
    certificate = co.certify(graph, co.Greedy(contribution_bound=2).select(graph))
    mechanism = co.ToySampling.from_certificate(certificate, batch_size=8, iterations=20)
    assert "ToySampling" in dir(co)
    claim = co.guarantee(certificate, mechanism, epsilon=8.0, delta=1e-6, adjacency="zero-out")
    assert "Mechanism: toy coins of probability" in claim.statement()
    assert co.PrivacyGuarantee.from_json(claim.to_json()) == claim


def test_plan(data: Path, capsys):
    asked = ["plan", str(data), *READING, *TARGET, "--contribution-bounds", "1,2", "--selectors", "greedy"]
    assert run([*asked, "--mechanism", "toy", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mechanism"], row["selector"], row["contribution_bound"]) for row in rows] == [
        ("toy", "greedy", 1),
        ("toy", "greedy", 2),
    ]
    assert all(row["noise_multiplier"] > 0 for row in rows)
    assert run(asked) == 0
    assert "toy DP-SGD (greedy, bound " in capsys.readouterr().out  # among all, and compared by its title


def test_calibrate(data: Path, capsys):
    selection = data.with_name("S.parquet")
    assert run(["select", str(data), *READING, "--contribution-bound", "2", "-o", str(selection)]) == 0
    certificate = ["--certificate", str(data.with_name("S.certificate.json"))]
    assert run(["calibrate", *certificate, *TARGET, "--mechanism", "toy"]) == 0
    assert "Mechanism: toy coins of probability" in capsys.readouterr().out


@pytest.mark.full
def test_train_and_report(data: Path, capsys):
    config, folder = write_configuration(data.parent, mechanism={"kind": "toy-sgd"}), data.with_name("RUN")
    assert run(["train", str(config), "-o", str(folder)]) == 0
    assert type(co.open_run(folder).plan.mechanism) is co.ToySampling
    assert run(["report", str(folder)]) == 0
    assert "toy coins of probability" in (folder / "report.html").read_text(encoding="utf-8")


def test_without_the_line_it_is_unknown(data: Path, capsys, monkeypatch):
    monkeypatch.delitem(MECHANISMS, "toy")
    with pytest.raises(AttributeError, match="ToySampling"):
        _ = co.ToySampling
    assert run(["plan", str(data), *READING, *TARGET, "--mechanism", "toy"]) == 2
    config = write_configuration(data.parent, mechanism={"kind": "toy-sgd"})
    assert run(["train", str(config), "-o", str(data.with_name("RUN"))]) == 2
    assert "toy-sgd" in capsys.readouterr().err
