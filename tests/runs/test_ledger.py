"""The ledger beside the runs."""

import numpy as np
import pytest

import coowned as co
from coowned.accounting.calculators import composed_epsilon
from coowned.accounting.guarantee import compose, guarantee
from coowned.accounting.statement import rounded_up
from coowned.content.splits import split_examples
from coowned.runs.ledger import NAME, enter
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import read_claim

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}


def claim(users=25, **options):
    graph = co.AttributionGraph.from_users_per_example([[user % users] for user in range(100)])
    chosen = co.GreedyMinSeparation(batch_size=4, iterations=10, min_separation=2).select(graph)
    certificate = co.certify(graph, chosen)
    return guarantee(certificate, co.MinSeparation.from_certificate(certificate), epsilon=2.0, **CLAIM, **options)


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_runs_of_one_graph_count_together(tmp_path, caplog):
    first, second = claim(), claim()
    enter(NAME, tmp_path / "gone", first)
    assert warned(caplog) == []
    enter(NAME, tmp_path / "RUN", second)
    [said] = warned(caplog)
    total = compose([first, second], delta=1e-6).epsilon
    assert "2 runs on this attribution graph" in said
    assert f"epsilon {np.ceil(total * 1000) / 1000:.4g} " in said
    assert "coowned tune" in said
    assert (tmp_path / NAME).stat().st_mode & 0o077 == 0  # certificates are statistics of the graph


def test_other_graphs_do_not_count(tmp_path, caplog):
    first = claim()
    for other in (first, claim(users=20), first, claim(test_run=True)):
        enter(NAME, tmp_path / "RUN", other)
    assert warned(caplog) == []
    assert len((tmp_path / NAME).read_text().splitlines()) == 2


def test_other_splits_count(tmp_path, caplog):
    """The same people are in both, though the train splits have other graphs and the claims other adjacencies."""
    asked = {"epsilon": 4.0, "delta": 1e-6, "selector": SELECTOR, "learning_rate": 0.1}
    splits = (0.5, 0.25, 0.25)
    one = co.fit(table(), MODEL, folder=tmp_path / "one", adjacency="zero-out", **asked)
    other = co.fit(table(), MODEL, folder=tmp_path / "other", adjacency="replace", splits=splits, **asked)
    assert one.certificate.graph_digest != other.certificate.graph_digest
    [said] = warned(caplog)
    runs = [(run.mechanism, run.guarantee.noise_multiplier) for run in (one, other)]
    total = composed_epsilon(runs, delta=1e-6, adjacency="replace")
    assert f"epsilon {rounded_up(total)} " in said
    assert "adjacency: replace" in said


def test_runs_without_a_folder_count(tmp_path, caplog):
    """As in a notebook, where settings are tried one after another."""
    asked = {"epsilon": 4.0, "selector": SELECTOR, **CLAIM}
    grid = {"learning_rate": [0.1]}
    co.fit(table(), MODEL, learning_rate=0.1, **asked)
    co.fit(table(), MODEL, learning_rate=1.0, **asked)
    co.fit(table(), MODEL, learning_rate=1.0, seed=0, **asked)  # promises nothing
    co.tune(table(), MODEL, grid=grid, expected_runs=2, **asked)
    co.fit(table(), MODEL, learning_rate=0.1, folder=tmp_path / "RUN", **asked)
    said = warned(caplog)
    assert [text.split(";")[0] for text in said] == [
        "warning: with this one, 2 runs on this attribution graph are of this process",
        "warning: with this one, 3 runs on this attribution graph are of this process",
        f"warning: with this one, 4 runs on this attribution graph are in {tmp_path / NAME} or of this process, "
        "without a folder",
    ]
    assert len((tmp_path / NAME).read_text().splitlines()) == 1


def test_a_broken_ledger_is_a_warning(tmp_path, caplog):
    (tmp_path / NAME).write_text('{"run": 1')
    enter(NAME, tmp_path / "RUN", claim())
    enter(tmp_path / "none" / NAME, tmp_path / "RUN", claim())
    assert ["could not be kept" in text for text in warned(caplog)] == [True, True]


def table():
    return co.from_table([{"users": [f"u{i % 40}"], "x": (-1.0) ** i, "y": i % 2} for i in range(200)])


MODEL = co.LogisticRegression(features=["x"], label="y", classes=[0, 1])
SELECTOR = co.GreedyMinSeparation(batch_size=4, iterations=6, min_separation=2)


def test_fit_warns_of_others(tmp_path, caplog):
    """As a warning of the log, which needs no setting up: before the first step, of the run that is about to train."""
    steps = []
    for name in ("first", "second", "third"):
        co.fit(
            table(),
            MODEL,
            epsilon=4.0,
            selector=SELECTOR,
            learning_rate=0.1,
            folder=tmp_path / name,
            on_metrics=lambda metrics: steps.append(len(warned(caplog))),
            **CLAIM,
        )
    said = warned(caplog)
    assert [text.split(" runs")[0] for text in said] == ["warning: with this one, 2", "warning: with this one, 3"]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2}  # none of the first run, and all of the others' steps after their warning
    together = compose([co.open_run(tmp_path / name).claim for name in ("first", "second")], delta=1e-6).epsilon
    assert f"epsilon {np.ceil(together * 1000) / 1000:.4g} " in said[0]


def test_a_run_is_in_the_ledger_before_it_trains(tmp_path):
    """Who stops a run has seen some of it."""

    def stop(metrics):
        raise KeyboardInterrupt

    asked = {"epsilon": 4.0, "selector": SELECTOR, "learning_rate": 0.1, **CLAIM}
    with pytest.raises(KeyboardInterrupt):
        co.fit(table(), MODEL, folder=tmp_path / "RUN", on_metrics=stop, **asked)
    assert len((tmp_path / NAME).read_text().splitlines()) == 1
    co.fit(table(), MODEL, folder=tmp_path / "RUN", **asked)  # resumed: no other run
    assert len((tmp_path / NAME).read_text().splitlines()) == 1


def test_a_process_that_ends_while_a_run_begins(tmp_path, monkeypatch):
    """Just before the run is entered: the process that goes on trains no run that is not in the ledger."""

    def stop(*run):
        raise KeyboardInterrupt

    asked = {"epsilon": 4.0, "selector": SELECTOR, "learning_rate": 0.1, **CLAIM}
    with monkeypatch.context() as patched:
        patched.setattr("coowned.runs.run_folder.enter", stop)
        with pytest.raises(KeyboardInterrupt):
            co.fit(table(), MODEL, folder=tmp_path / "RUN", **asked)
    run = co.fit(table(), MODEL, folder=tmp_path / "RUN", **asked)
    [entry] = (tmp_path / NAME).read_text().splitlines()
    assert run.claim.run_id in entry


def test_a_run_without_a_folder_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run = co.fit(table(), MODEL, epsilon=4.0, selector=SELECTOR, learning_rate=0.1, **CLAIM)
    assert [path.name for path in tmp_path.iterdir()] == [run.folder.name]


def test_a_tuning_is_in_the_ledger_once(tmp_path, caplog):
    """However many runs it has, and before the first."""
    asked = {"epsilon": 8.0, "selector": SELECTOR, **CLAIM}
    co.fit(table(), MODEL, learning_rate=0.1, folder=tmp_path / "RUN", **asked)
    told = []
    tuned = co.tune(
        table(),
        MODEL,
        grid={"learning_rate": [0.1, 1.0]},
        expected_runs=3,
        folder=tmp_path / "TUNED",
        progress=lambda done, text: told.append((text, len(warned(caplog)))),
        **asked,
    )
    [said] = warned(caplog)
    assert {count for text, count in told if text.startswith("run ")} == {1}
    assert len((tmp_path / NAME).read_text().splitlines()) == 2
    together = compose([co.open_run(tmp_path / "RUN").claim, tuned.claim], delta=1e-6).epsilon
    assert f"epsilon {np.ceil(together * 1000) / 1000:.4g} " in said


def test_a_sweep_is_in_the_ledger(tmp_path, caplog):
    """With what all of its members promise together."""
    examples = table()
    splits = split_examples(examples.graph, (0.5, 0.25, 0.25))
    selected = SELECTOR.select(examples.graph.subgraph(splits["train"]))
    certificate = co.certify(selected.graph, selected)
    content = MODEL.task(examples.payload.schema, folder=tmp_path, is_private=True).load(
        examples, splits, selected.copies
    )
    folders = [tmp_path / "FIRST", tmp_path / "SECOND"]
    for path in folders:
        plans = co.grid(
            certificate,
            selected,
            co.MinSeparation.from_certificate(certificate),
            epsilons=[4.0],
            learning_rates=[0.1, 1.0],
            clip_norms=[1.0],
            run_key=co.RunKey.from_operating_system(),
            **CLAIM,
        )
        with RunFolder.open(path) as folder:
            co.sweep(plans, content.model, content.parts["train"], folder=folder)
    [said] = warned(caplog)
    claims = [read_claim(path).guarantee for path in folders]
    assert all(claim.noise_multiplier < plans[0].noise_multiplier for claim in claims)  # of both members together
    together = compose(claims, delta=1e-6).epsilon
    assert f"2 runs on this attribution graph are in {tmp_path / NAME}; together they promise" in said
    assert f"epsilon {np.ceil(together * 1000) / 1000:.4g} " in said


@pytest.mark.parametrize("verb", ["train", "tune"])
def test_verbs_name_another_ledger(verb, capsys):
    from coowned.cli.main import run

    assert run([verb, "--help"]) == 0
    assert "ledger" in capsys.readouterr().out
