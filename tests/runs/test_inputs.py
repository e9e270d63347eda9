"""S from a file: checked against its certificate, and what a run is trained on."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.runs.run_folders import weights

import coowned as co
from coowned.cli.main import run
from coowned.content.splits import train_graph
from coowned.runs.stored_run import StoredRun

SPLITS = [0.8, 0.1, 0.1]
CONFIGURATION = """
[data]
path = "data.parquet"
example_id = "id"
[selection]
{}
[privacy]
epsilon = 8.0
delta = 1e-6
[mechanism]
clip_norm = 1.0
{}
[model]
features = ["x"]
label = "y"
[optimizer]
learning_rate = 0.1
[run]
seed = 3
"""
SHAPE = "batch_size = 40\niterations = 20"


@pytest.fixture
def data(tmp_path):
    rows = [
        {"id": f"m{i}", "users": [f"u{i % 90}", f"u{i * 7 % 60}"], "x": (-1.0) ** i + i / 400, "y": i % 2}
        for i in range(400)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    return tmp_path


def select(folder, *more, name="S.parquet"):
    options = [] if "--selector" in more else ["--contribution-bound", "2"]
    where = ["--example-id", "id", "-o", str(folder / name)]
    assert run(["select", str(folder / "data.parquet"), *where, *options, *more]) == 0


def train(folder, selection, name, shape=SHAPE):
    (folder / "run.toml").write_text(CONFIGURATION.format(selection, shape))
    return run(["train", str(folder / "run.toml"), "-o", str(folder / name)])


def test_train_takes_what_select_chose(data):
    """From the train split: the bits of a run that selects. From all examples: what is left of S in that split."""
    select(data, "--splits", "0.8,0.1,0.1")
    select(data, name="all.parquet")
    assert train(data, 'selector = "greedy"\ncontribution_bound = 2', "chosen") == 0
    assert train(data, 'path = "S.parquet"', "given") == 0
    assert weights(data, "given") == weights(data, "chosen")
    chosen, given = (StoredRun.open(data / name).certificate for name in ("chosen", "given"))
    assert given == chosen
    assert train(data, 'path = "all.parquet"', "part") == 0
    examples = co.read_parquet(data / "data.parquet", example_id="id")
    everything = co.read_selection(data / "all.parquet", examples.graph)
    part = StoredRun.open(data / "part").certificate
    assert 0 < part.size < everything.size
    assert part.size == sum(everything.copies[i] for i in range(400) if f"m{i}" in in_train(examples))


def in_train(examples):
    return set(train_graph(examples.graph).ids_of(range(train_graph(examples.graph).num_examples)).to_pylist())


def test_a_schedule_says_the_shape(data):
    shape = ["--batch-size", "12", "--iterations", "10", "--min-separation", "2"]
    select(data, "--selector", "greedy-min-separation", *shape, "--splits", "0.8,0.1,0.1")
    assert train(data, 'path = "S.parquet"', "RUN", shape="") == 0
    plan = StoredRun.open(data / "RUN").plan
    assert (plan.mechanism.training_kind, plan.batch_size, plan.iterations) == ("dp-mf", 12, 10)


def test_read_selection(data):
    select(data, "--splits", "0.8,0.1,0.1")
    examples = co.read_parquet(data / "data.parquet", example_id="id")
    graph = train_graph(examples.graph)
    found = co.read_selection(data / "S.parquet", examples.graph, splits=SPLITS)
    assert found == co.Greedy(contribution_bound=2).select(graph)
    stored = co.ContributionCertificate.from_json((data / "S.certificate.json").read_text())
    assert co.certify(graph, found) == stored
    made = co.fit(
        examples,
        co.LogisticRegression(features=["x"], label="y"),
        epsilon=8.0,
        delta=1e-6,
        adjacency="zero-out",
        selector=found,
        batch_size=40,
        iterations=5,
        learning_rate=0.1,
    )
    assert made.certificate == stored


def test_read_selection_refuses(data):
    select(data, "--splits", "0.8,0.1,0.1")
    graph = co.read_parquet(data / "data.parquet", example_id="id").graph
    with pytest.raises(co.CertificateMismatchError, match="another graph"):
        co.read_selection(data / "S.parquet", graph)
    with pytest.raises(co.InputError, match="no such file or folder"):
        co.read_selection(data / "T.parquet", graph)
    with pytest.raises(co.InputError, match="files of this machine"):
        co.read_selection("s3a://bucket/S.parquet", graph)
    # One copy more of one example than was certified.
    table = pq.read_table(data / "S.parquet")
    copies = table["copies"].to_pylist()
    changed = table.set_column(1, "copies", pa.array([copies[0] + 1, *copies[1:]], pa.int32()))
    pq.write_table(changed, data / "S.parquet")
    with pytest.raises(co.CertificateMismatchError, match="a recount gives"):
        co.read_selection(data / "S.parquet", graph, splits=SPLITS)
    certificate = data / "S.certificate.json"
    certificate.rename(data / "moved.json")
    with pytest.raises(co.InputError, match="keep it next to S"):
        co.read_selection(data / "S.parquet", graph, splits=SPLITS)
    pq.write_table(table, data / "S.parquet")
    assert co.read_selection(data / "S.parquet", graph, splits=SPLITS, certificate=data / "moved.json").size


def test_train_refuses_another_s(data, capsys):
    select(data, "--splits", "0.5,0.25,0.25")
    assert train(data, 'path = "S.parquet"', "RUN") == 1
    assert "select it with `--splits 0.8,0.1,0.1`" in capsys.readouterr().err
    assert not (data / "RUN").exists()
    assert train(data, 'path = "S.parquet"\ncontribution_bound = 2', "RUN") == 2
    assert "[selection] path is an S that was chosen before; remove contribution_bound" in capsys.readouterr().err
    assert train(data, 'path = "hdfs://head/S.parquet"', "RUN") == 2
    assert "hdfs://head/S.parquet is an address" in capsys.readouterr().err
    assert train(data, 'path = "nowhere.parquet"', "RUN") == 2
    assert "nowhere.parquet: no such file or folder" in capsys.readouterr().err


def test_certify_on_the_train_split(data, capsys):
    select(data, "--splits", "0.8,0.1,0.1")
    capsys.readouterr()
    command = ["certify", str(data / "data.parquet"), str(data / "S.parquet"), "--example-id", "id"]
    assert run([*command, "--splits", "0.8,0.1,0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"]
    assert run(command) == 1
    assert run([*command, "--splits", "most"]) == 2
    assert "--splits takes three numbers" in capsys.readouterr().err
