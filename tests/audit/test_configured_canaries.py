"""The audit with canaries of a configured run, through `coowned audit RUN --canaries`."""

import dataclasses
import json

import pyarrow.parquet as pq
import pytest

from coowned import AttributionGraph
from coowned.audit import canaries, run_audit
from coowned.audit.run_audit import audit_configured_run
from coowned.cli import main
from coowned.errors import InputError
from coowned.runs.config import TrainConfig, example
from coowned.synthetic.logistic_data import LogisticData


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """400 examples of 150 users with 3000 features, and a run of 20 steps with a bound of 2."""
    place = tmp_path_factory.mktemp("canaries")
    graph = AttributionGraph.from_users_per_example(
        [[i % 150] if i % 2 else [i % 150, (i * 7) % 150] for i in range(400)]
    )
    table = LogisticData(num_features=3000).attach(graph, seed=1).to_table().drop_columns(["split"])
    pq.write_table(table, place / "papers.parquet")
    text = example()
    changes = {
        "batch_size = 256": "batch_size = 64",
        "iterations = 500": "iterations = 20",
        "epsilon = 8.0": "epsilon = 1.0",
        'name = "adam"': 'name = "sgd"',
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (place / "run.toml").write_text(text, encoding="utf-8")
    assert main.run(["train", str(place / "run.toml"), "-o", str(place / "RUN")]) == 0
    return place


@pytest.mark.full
def test_canaries_of_a_run(folder, capsys, monkeypatch):
    plans, make = [], run_audit.make_plan
    monkeypatch.setattr(run_audit, "make_plan", lambda *given: plans.append((given, make(*given))) or plans[-1][1])
    words = ["audit", str(folder / "RUN"), "--trials", "1000", "--seed", "1"]  # a false alarm in one of 1000 seeds
    assert main.run([*words, "--canaries", str(folder / "run.toml"), "--canary-users", "100"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 100 synthetic users were included" in printed
    assert "not covered by the guarantee" in printed
    assert printed.count("(unit: user, fixed graph; contribution bound 2; delta 1e-06; adjacency: zero-out") == 3
    stored = json.loads((folder / "RUN" / "audit.json").read_text(encoding="utf-8"))
    assert stored["canaries"]["canaries"] == 100
    assert stored["canaries"]["alpha"] == stored["alpha"] == 5e-4  # half of it for each audit
    assert 0 <= stored["canaries"]["epsilon_lower_bound"] <= stored["canaries"]["claimed_epsilon"] <= 1
    assert stored["holds"] is True
    # Canary users are the last: each owns as much as the run's bound allows, and all of it is chosen.
    [((_, graph, _), plan)] = plans
    bound = json.loads((folder / "RUN" / "certificate.json").read_text(encoding="utf-8"))["contribution_bound"]
    assert bound == 2
    assert graph.examples_per_user[-100:].tolist() == [bound] * 100
    starts, examples = graph.by_user
    assert plan.selected.copies[examples[starts[-101] :]].tolist() == [1] * 100 * bound


@pytest.mark.full
def test_a_run_that_forgets_its_noise(folder, capsys, monkeypatch):
    monkeypatch.setattr(canaries.Trainer, "__init__", _without_noise(canaries.Trainer.__init__))
    words = ["audit", str(folder / "RUN"), "--trials", "1000", "--seed", "1", "--canary-users", "150"]
    assert main.run([*words, "--canaries", str(folder / "run.toml")]) == 1
    assert "reveals more about its canaries than claimed" in capsys.readouterr().err


def _without_noise(init):
    def spoiled(self, plans, model, *, devices=1):
        init(self, [dataclasses.replace(plan, guarantee=None) for plan in plans], model, devices=devices)

    return spoiled


def test_another_configuration_is_refused(folder):
    text = (folder / "run.toml").read_text(encoding="utf-8").replace("batch_size = 64", "batch_size = 32")
    other = TrainConfig.from_toml(text, folder=folder)
    with pytest.raises(InputError, match="a different configuration"):
        audit_configured_run(folder / "RUN", other, canaries=50)


@pytest.mark.parametrize("option", [["--alpha", "1.5"], ["--alpha", "0"], ["--seed", "-1"], ["--seed", str(2**62)]])
def test_settings_are_named_as_given(folder, capsys, option):
    words = ["audit", str(folder / "RUN"), "--canaries", str(folder / "run.toml"), *option]
    assert main.run(words) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"{option[0][2:]} must be" in printed
    assert f"not {option[1]}" in printed
    if option[0] == "--seed":
        config = TrainConfig.read(folder / "run.toml")
        with pytest.raises(InputError, match=f"not {option[1]}"):
            audit_configured_run(folder / "RUN", config, seed=int(option[1]))


def test_too_few_canaries(folder, capsys):
    words = ["audit", str(folder / "RUN"), "--canaries", str(folder / "run.toml"), "--canary-users", "3"]
    assert main.run(words) == 2
    assert "at least 10" in capsys.readouterr().err
