"""A run with a covered evaluation: from settings to a figure that may be published, and back from the folder."""

import collections
import dataclasses
import json
import shutil

import numpy as np
import polars as pl
import pytest
from tests.runs.run_folders import reseal
from tests.test_fitting import CONFIGURATION, fit, rows

import coowned as co
from coowned import certify, codec
from coowned.accounting.calculators import epsilon
from coowned.audit.run_audit import audit_run
from coowned.cli import main
from coowned.content.splits import select_held_out, split_examples
from coowned.errors import CertificateMismatchError, CoownedError
from coowned.runs import configured_run
from coowned.runs.config import TrainConfig
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun
from coowned.selection.user_bounds import UserBounds

SETTINGS = co.CoveredEvaluation(epsilon_share=0.2, loss_bound=2.0, confusion=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("runs") / "RUN", evaluation=SETTINGS, iterations=12)


def test_covered_evaluation_of_a_run(run):
    found, claim = run.covered, run.guarantee
    assert 0 <= found.accuracy_low <= found.accuracy <= found.accuracy_high <= 1
    assert 0 <= found.loss_low <= found.loss <= found.loss_high <= 2
    assert np.shape(found.confusion) == (2, 2)
    assert claim.epsilon <= 8.0 < claim.other_epsilon
    alone = epsilon(claim.mechanism, noise_multiplier=claim.noise_multiplier, delta=1e-6, adjacency="zero-out")
    assert alone == pytest.approx(6.4, rel=1e-3)
    graph = co.from_table(rows(), example_id="id").graph
    test = graph.subgraph(split_examples(graph)["test"])
    assert found.size == run.held_out(test).size == select_held_out(test).size
    assert co.open_run(run.folder).covered == found
    assert run.covered.run_id == claim.run_id
    assert "Covered, as part of the claim above" in run.statement()


def test_a_run_without_one_has_none(tmp_path):
    plain = fit(folder=tmp_path / "plain", iterations=3)
    assert plain.covered is None
    assert "Covered, as part" not in plain.statement()
    assert not {"covered.json", "held-out.parquet"} & set(plain.record.files)


def test_covered_parts_must_agree(run, tmp_path):
    def changed(name, change):
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run.folder, folder)
        change(folder / name)
        return folder

    def replace(old, new):
        return lambda file: file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")

    assert str(run.covered.accuracy) in (run.folder / "covered.json").read_text(encoding="utf-8")
    better = changed("covered.json", replace(str(run.covered.accuracy), "0.999"))
    with pytest.raises(CertificateMismatchError, match="changed since"):
        StoredRun.open(better)
    with pytest.raises(CertificateMismatchError, match="do not follow"):
        StoredRun.open(reseal(better))
    removed = changed("covered.json", lambda file: file.unlink())
    with pytest.raises(CoownedError, match=r"covered\.json"):
        StoredRun.open(removed)
    foreign = changed("held-out-certificate.json", lambda file: shutil.copy(run.folder / "certificate.json", file))
    with pytest.raises(CertificateMismatchError, match="held-out part with"):
        StoredRun.open(reseal(foreign))
    # The plan in run.json names the evaluation that was accounted for.
    file = changed("run.json", lambda file: None) / "run.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    record["plan"]["claim"]["evaluation"]["noise_multiplier"] *= 2
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="do not agree with the plan"):
        StoredRun.open(file.parent)


def test_killed_covered_run_is_resumed(tmp_path, monkeypatch):
    settings = {"seed": 5, "evaluation": SETTINGS, "iterations": 12}
    whole = fit(folder=tmp_path / "whole", **settings)

    def stop(self, models, files):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "finish", stop)  # after the counts were released
        with pytest.raises(KeyboardInterrupt):
            fit(folder=tmp_path / "killed", **settings)
    released = (tmp_path / "killed" / "covered.json").read_bytes()
    table = rows().with_columns(y=1 - rows()["y"])
    with pytest.raises(CertificateMismatchError, match="resuming would use the same noise"):
        fit(co.from_table(table, example_id="id"), folder=tmp_path / "killed", **settings)
    # The same training set, but other labels in the test split: the same noise on other counts.
    examples = co.from_table(rows(), example_id="id")
    test = split_examples(examples.graph)["test"]
    labels = rows()["y"].to_numpy().copy()
    labels[test] = 1 - labels[test]
    other = co.from_table(rows().with_columns(y=labels), example_id="id")
    with pytest.raises(CertificateMismatchError, match="resuming would use the same noise"):
        fit(other, folder=tmp_path / "killed", **settings)
    resumed = fit(folder=tmp_path / "killed", **settings)
    assert resumed.covered.counts == whole.covered.counts
    assert json.loads(released)["counts"] == list(whole.covered.counts)


def test_a_held_out_part_beyond_its_bound_is_refused(monkeypatch, tmp_path):
    """The bound is not enforced: what is counted on is not what was certified and accounted for."""
    honest = configured_run.certify

    def certify(graph, selected):
        if graph.num_examples > 100:
            return honest(graph, selected)
        return honest(graph, select_held_out(graph, contribution_bound=1))

    monkeypatch.setattr(configured_run, "certify", certify)
    with pytest.raises(CertificateMismatchError, match="held-out part with"):
        fit(folder=tmp_path / "RUN", evaluation=co.CoveredEvaluation(contribution_bound=3), iterations=3)
    assert not (tmp_path / "RUN" / "covered.json").exists()


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """A run of people of whom some are careful and some have opted out."""
    bounds = {f"u{user}": user % 2 for user in range(40)}
    selector = co.Greedy(contribution_bound=3, contribution_bounds=bounds)
    settings = {"selector": selector, "evaluation": SETTINGS, "iterations": 12, "splits": (0.5, 0.1, 0.4)}
    folder = tmp_path_factory.mktemp("tiered") / "RUN"
    return fit(folder=folder, epsilon={"bound 3": 8.0, "bound 1": 4.0}, **settings), bounds


def test_nobody_who_opted_out_is_counted_on(tiered):
    run, bounds = tiered
    users = dict(rows().select("id", "users").iter_rows())
    for part in ("S.parquet", "held-out.parquet"):
        stored = pl.read_parquet(run.folder / part)
        copies = collections.Counter()
        for name, count in stored.select("example_id", "copies").iter_rows():
            for user in set(users[name]):
                copies[user] += count
        assert all(copies[user] <= bound for user, bound in bounds.items())
        assert any(copies[user] for user in bounds)
        assert max(copies.values()) > 1
    assert run.guarantee.evaluation.individual_bounds
    rows_of_tiers = {row["tier"]: row for row in run.guarantee.by_tier().to_dicts()}
    assert rows_of_tiers["bound 0"]["epsilon"] is None
    assert rows_of_tiers["bound 1"]["epsilon"] <= 4.0
    assert rows_of_tiers["bound 3"]["epsilon"] <= 8.0
    assert "or counted in the covered evaluation" in run.statement()
    assert co.open_run(run.folder).covered == run.covered


def test_a_held_out_part_that_keeps_no_individual_bounds_is_refused(monkeypatch, tmp_path):
    """The planted bug: the bounds are named in the held-out part, but nobody was held to them."""

    def free(config, graph, selected):
        return dataclasses.replace(select_held_out(graph), user_bounds=selected.user_bounds)

    monkeypatch.setattr(configured_run, "held_out_of", free)
    selector = co.Greedy(contribution_bound=3, contribution_bounds={f"u{user}": user % 2 for user in range(40)})
    with pytest.raises(co.UncertifiableError, match="are in more copies than their bound"):
        fit(folder=tmp_path / "RUN", selector=selector, evaluation=SETTINGS, iterations=3)


def test_held_out_bounds_of_other_people_are_refused(tiered, tmp_path):
    run, bounds = tiered
    shutil.copytree(run.folder, tmp_path / "RUN")
    test = (graph := co.from_table(rows(), example_id="id").graph).subgraph(
        split_examples(graph, (0.5, 0.1, 0.4))["test"]
    )
    other = UserBounds.of({f"u{39 - int(user[1:])}": bound for user, bound in bounds.items()}, others=3)
    honest = json.loads((run.folder / "held-out-certificate.json").read_text())
    swapped = json.loads(certify(test, select_held_out(test, user_bounds=other)).to_json())["tiers"]
    fields = {
        name: entry for name, entry in (honest | {"tiers": swapped}).items() if name not in ("format", "checksum")
    }
    fields["tiers"]["copies_per_user"] = honest["tiers"]["copies_per_user"]
    sealed = {"format": honest["format"], **fields, "checksum": codec.checksum(fields)}
    (tmp_path / "RUN" / "held-out-certificate.json").write_text(json.dumps(sealed))
    with pytest.raises(CertificateMismatchError, match="other individual bounds"):
        StoredRun.open(reseal(tmp_path / "RUN"))


def test_configuration_of_a_covered_evaluation(tmp_path, capsys):
    section = "[evaluation]\nepsilon_share = 0.2\nloss_bound = 2.0\nconfusion = true\n"
    config = TrainConfig.from_toml(CONFIGURATION + section)
    plain = TrainConfig.from_toml(CONFIGURATION)
    assert config.evaluation == SETTINGS
    assert plain.evaluation is None
    assert plain.digest != config.digest
    assert TrainConfig.from_toml(CONFIGURATION + "[evaluation]\n").evaluation == co.CoveredEvaluation()
    for wrong, words in (
        (section.replace("0.2", "1.5"), "epsilon_share"),
        (section + "share = 1\n", "share"),
    ):
        with pytest.raises(co.ConfigError, match=words):
            TrainConfig.from_toml(CONFIGURATION + wrong)
    for line, words in (
        ("epsilon = 8.0\n", "covers nothing"),
        ('example_id = "id"\n', "test split is empty"),
    ):
        changed = {
            "epsilon = 8.0\n": 'epsilon = "none"\n',
            'example_id = "id"\n': 'example_id = "id"\nsplits = [0.9, 0.1, 0.0]\n',
        }
        with pytest.raises(co.ConfigError, match=words):
            TrainConfig.from_toml(CONFIGURATION.replace(line, changed[line]) + section)
    rows().write_parquet(tmp_path / "data.parquet")
    file = tmp_path / "run.toml"
    text = CONFIGURATION.replace("seed = 3", "").replace("iterations = 30", "iterations = 12")
    file.write_text(text + section, encoding="utf-8")
    assert main.run(["train", str(file), "-o", str(tmp_path / "RUN"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["covered"]["accuracy"] == co.open_run(tmp_path / "RUN").covered.accuracy


def test_covered_figures_are_shown(run, tmp_path):
    accuracy = f"{run.covered.accuracy:.1%}"
    for release in (True, False):
        page = run.report(tmp_path / f"{release}.html", release=release).read_text(encoding="utf-8")
        assert "Covered evaluation on" in page
        assert accuracy in page
        assert f"{run.covered.accuracy_low:.1%} to {run.covered.accuracy_high:.1%}" in page
        assert ("validation and test metrics" in page) == release  # which stay left out
    test_run = fit(folder=tmp_path / "test", evaluation=SETTINGS, iterations=12, seed=1)
    assert "Covered evaluation on" not in test_run.report(tmp_path / "none.html").read_text(encoding="utf-8")


def test_covered_figures_are_exported(run, tmp_path):
    folder = run.export(tmp_path / "exported")
    assert (folder / "covered.json").read_bytes() == (run.folder / "covered.json").read_bytes()
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"accuracy {run.covered.accuracy:.1%}" in readme
    assert "covered.json" in readme
    assert not {"held-out.parquet", "test.parquet"} & {file.name for file in folder.iterdir()}


@pytest.mark.full
def test_an_audit_tries_the_evaluation(run):
    found = audit_run(run.folder, trials=1000, seed=0)
    assert found.holds, found.verdict()
    assert "covered evaluation" in [law.law for law in found.laws]
