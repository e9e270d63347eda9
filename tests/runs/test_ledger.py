"""The ledger beside the runs."""

import numpy as np
import pytest

import coowned as co
from coowned.accounting.guarantee import compose, guarantee
from coowned.runs.ledger import NAME, enter, ledger_of

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}


def claim(users=25, **options):
    graph = co.AttributionGraph.from_users_per_example([[user % users] for user in range(100)])
    chosen = co.GreedyMinSeparation(batch_size=4, iterations=10, min_separation=2).select(graph)
    certificate = co.certify(graph, chosen)
    return guarantee(certificate, co.MinSeparation.from_certificate(certificate), epsilon=2.0, **CLAIM, **options)


def test_runs_of_one_graph_count_together(tmp_path):
    ledger = ledger_of(tmp_path / "RUN")
    assert ledger == tmp_path / NAME
    first, second = claim(), claim()
    assert enter(ledger, tmp_path / "gone", first) is None
    said = enter(ledger, tmp_path / "RUN", second)
    total = compose([first, second], delta=1e-6).epsilon
    assert "2 runs on this attribution graph" in said
    assert f"epsilon {np.ceil(total * 1000) / 1000:.4g} " in said
    assert "coowned tune" in said
    assert ledger.stat().st_mode & 0o077 == 0  # certificates are statistics of the graph


def test_other_graphs_do_not_count(tmp_path):
    ledger, first = tmp_path / NAME, claim()
    for other in (first, claim(users=20), first, claim(test_run=True)):
        assert enter(ledger, tmp_path / "RUN", other) is None
    assert len(ledger.read_text().splitlines()) == 2


def test_a_broken_ledger_is_a_warning(tmp_path):
    (tmp_path / NAME).write_text('{"run": 1')
    assert "could not be kept" in enter(tmp_path / NAME, tmp_path / "RUN", claim())
    assert "could not be kept" in enter(tmp_path / "none" / NAME, tmp_path / "RUN", claim())


def test_fit_warns_of_others(tmp_path, caplog):
    """Through `progress`; where nobody listens, as a warning of the log, which needs no setting up."""
    rows = [{"users": [f"u{i % 40}"], "x": (-1.0) ** i, "y": i % 2} for i in range(200)]
    told = []
    for name in ("first", "second", "third"):
        progress = None if name == "third" else lambda done, text: told.append(text)
        co.fit(
            co.from_table(rows),
            co.LogisticRegression(features=["x"], label="y", classes=[0, 1]),
            epsilon=4.0,
            selector=co.GreedyMinSeparation(batch_size=4, iterations=6, min_separation=2),
            learning_rate=0.1,
            folder=tmp_path / name,
            progress=progress,
            **CLAIM,
        )
        assert any("2 runs on this attribution graph" in text for text in told) == (name != "first")
    [warned] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned.startswith("warning: 3 runs on this attribution graph")


@pytest.mark.parametrize("verb", ["train", "tune"])
def test_verbs_name_another_ledger(verb, capsys):
    from coowned.cli.main import run

    assert run([verb, "--help"]) == 0
    assert "ledger" in capsys.readouterr().out
