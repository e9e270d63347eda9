"""Training on shards that `select` wrote: the bits of training on the data, and nothing that does not belong."""

import json

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.runs.run_folders import weights

from coowned import Greedy, certify
from coowned.attribution.sources import DataSource
from coowned.certificate import ContributionCertificate
from coowned.cli.main import run
from coowned.content.hashed_text import hash_texts
from coowned.content.splits import train_graph
from coowned.runs.config import TrainConfig
from coowned.runs.inputs import kept_arrays, read_examples, write_shards
from coowned.runs.stored_run import StoredRun
from coowned.selection.shards import MANIFEST, Manifest, file_entry, read_shards

SPLITS = [0.7, 0.1, 0.2]
MODELS = {
    "linear": ('features = ["x", "z"]\nlabel = "y"', ""),
    "text": ('kind = "text-classifier"\ntext = "text"\nlabel = "folder"\nclasses = ["a", "b"]\nnum_features = 512', ""),
    "own": ('kind = "python"\nfactory = "own.py:make"', ""),
    "bert": (
        'kind = "bert-masked-lm"\ntext = "text"\nvocabulary = "vocab.txt"\narchitecture = "config.json"\n'
        "sequence_length = 12",
        "",
    ),
}
CONFIGURATION = """
[data]
{data}
splits = [0.7, 0.1, 0.2]
{selection}
[privacy]
epsilon = 8.0
delta = 1e-6
[mechanism]
{mechanism}
clip_norm = 1.0
[model]
{model}
[optimizer]
learning_rate = 0.1
[run]
seed = 3
"""
OWN = """
import jax
import jax.numpy as jnp
import coowned as co


def loss(parameters, example, key):
    noise = jax.random.uniform(key)
    return jnp.square(parameters["w"] @ example["x"] + 0.1 * noise - example["y"])


def predict(parameters, example):
    return parameters["w"] @ example["x"]


def make():
    columns = {"x": "pair", "y": "y"}
    return co.JaxModel(loss=loss, predict=predict, parameters={"w": jnp.ones(2)}, columns=columns)
"""
ARCHITECTURE = {
    "model_type": "bert", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
POISSON = 'kind = "dp-sgd"\nbatch_size = 20\niterations = 8'
SCHEDULE = 'kind = "dp-mf"\nbatch_size = 10\niterations = 8'
CYCLIC = 'kind = "cyclic-dp-mf"\nbatch_size = 10\niterations = 8'


@pytest.fixture
def data(tmp_path):
    """Several files and row groups; ids in no order, some example in two rows, and an odd text."""
    order = np.random.default_rng(1).permutation(400)
    rows = [
        {
            "id": f"m{i % 390}",
            "users": [f"u{i % 90}", f"u{i * 7 % 60}"],
            "x": (-1.0) ** i + i / 400,
            "z": float(i % 5),
            "pair": [i / 100, 1.0],
            "y": i % 2,
            "text": f"hello {'there' * (i % 3)} number{i % 11} and so on"[: i % 40],
            "folder": "ab"[i % 2],
        }
        for i in order.tolist()
    ]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(4, "pair", table["pair"].cast(pa.list_(pa.float32(), 2)))
    (tmp_path / "data").mkdir()
    for number in range(3):
        part = table.slice(140 * number, 140)
        pq.write_table(part, tmp_path / "data" / f"{number}.parquet", row_group_size=50)
    (tmp_path / "own.py").write_text(OWN)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there", "number", "##1", "and", "so", "on"]
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return tmp_path


def select(folder, *more, shards="DIR", selector=("--contribution-bound", "2")):
    where = ["--example-id", "id", "--splits", "0.7,0.1,0.2", "-o", str(folder / "S.parquet")]
    return run(["select", str(folder / "data"), *where, *selector, "--shards", str(folder / shards), *more])


def train(folder, name, *, model="linear", mechanism=POISSON, shards=None):
    given = 'path = "data"\nexample_id = "id"' if shards is None else f'shards = "{shards}"'
    selection = '[selection]\npath = "S.parquet"' if shards is None else ""
    text = CONFIGURATION.format(data=given, selection=selection, mechanism=mechanism, model=MODELS[model][0])
    (folder / f"{name}.toml").write_text(text)
    return run(["train", str(folder / f"{name}.toml"), "-o", str(folder / name)])


@pytest.mark.parametrize(
    "model", ["linear", "text", *(pytest.param(one, marks=pytest.mark.full) for one in ("own", "bert"))]
)
def test_shards_train_the_same_bits(data, model):
    assert select(data) == 0
    assert train(data, "whole", model=model) == 0
    assert train(data, "sharded", model=model, shards="DIR") == 0
    assert weights(data, "sharded") == weights(data, "whole")
    whole, sharded = (StoredRun.open(data / name) for name in ("whole", "sharded"))
    assert sharded.certificate == whole.certificate
    assert sharded.graph_summary() == whole.graph_summary()
    assert sharded.private_log() == whole.private_log()
    for name in ("validation.parquet", "test.parquet", "S.parquet"):
        assert pq.read_table(data / "sharded" / name).equals(pq.read_table(data / "whole" / name))


@pytest.mark.parametrize(
    ("selector", "mechanism"),
    [
        ("--selector greedy-min-separation --batch-size 10 --iterations 8 --min-separation 2", SCHEDULE),
        ("--selector cyclic-groups --num-groups 2 --contribution-bound 2", CYCLIC),
    ],
)
def test_other_mechanisms(data, selector, mechanism):
    assert select(data, selector=selector.split()) == 0
    assert train(data, "whole", mechanism=mechanism) == 0
    assert train(data, "sharded", mechanism=mechanism, shards="DIR") == 0
    assert weights(data, "sharded") == weights(data, "whole")


def test_rows_in_another_order_train_the_same_bits(data):
    """As Spark may write them: several files a group, in any order."""
    assert select(data) == 0
    assert train(data, "first", shards="DIR") == 0
    folder = data / "DIR"
    manifest, files = Manifest.read(folder), []
    for file in manifest.files:
        table = pq.read_table(folder / file.path)
        (folder / file.path).unlink()
        for number, rows in enumerate(np.array_split(np.random.default_rng(0).permutation(len(table)), 2)):
            path = folder / file.path.replace("part-0", f"a{number}")
            pq.write_table(table.take(rows), path)
            files.append(file_entry(folder, path, len(rows)))
    (folder / MANIFEST).write_text(msgspec.structs.replace(manifest, files=tuple(files)).to_json())
    assert train(data, "second", shards="DIR") == 0
    assert weights(data, "first") == weights(data, "second")


def test_shards_are_read_back(data):
    examples = DataSource(path=data / "data", example_id="id").read()
    graph = train_graph(examples.graph, SPLITS)
    selected = Greedy(contribution_bound=2).select(graph)
    certificate = certify(graph, selected)
    manifest = write_shards(data / "DIR", examples, SPLITS, selected, certificate)
    found = read_shards(data / "DIR")
    ids = found.graph.example_ids.to_pylist()
    assert found.manifest == manifest
    assert len(ids) == certificate.num_distinct + examples.graph.num_examples - graph.num_examples
    assert (data / "DIR").stat().st_mode & 0o077 == 0
    stored = ContributionCertificate.from_json((data / "DIR" / "S.certificate.json").read_text())
    assert stored == certificate


def test_unselected_content_is_not_read(data):
    """No row of an example that was neither selected nor held out is in any file."""
    assert select(data) == 0
    chosen = set(pq.read_table(data / "S.parquet")["example_id"].to_pylist())
    examples = DataSource(path=data / "data", example_id="id").read()
    everywhere = set(examples.ids.to_pylist())
    train_ids = set(train_graph(examples.graph, SPLITS).example_ids.to_pylist())
    files = list((data / "DIR").glob("group=*/*.parquet"))
    content = [row for path in files for row in pq.ParquetFile(path).read(["id", "coowned_id"]).to_pylist()]
    assert {row["id"] for row in content} == chosen | (everywhere - train_ids)
    assert all(row["id"] == row["coowned_id"] for row in content)


@pytest.mark.parametrize("damage", ["missing", "changed", "selection", "certificate", "counts"])
def test_damage_is_refused_before_the_first_step(data, capsys, damage):
    assert select(data) == 0
    path = sorted((data / "DIR").glob("group=*/*.parquet"))[0]
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        path.write_bytes(path.read_bytes()[::-1])
    else:
        other = select(data, "--seed", "5", "--overwrite", shards="OTHER", selector=["--contribution-bound", "1"])
        assert other == 0
        moved = {"selection": ["S.parquet", "S.certificate.json"], "certificate": ["S.certificate.json"]}
        for name in moved.get(damage, ["graph.json"]):
            (data / "OTHER" / name).replace(data / "DIR" / name)
    capsys.readouterr()
    assert train(data, "RUN", shards="DIR") in (1, 2)
    said = capsys.readouterr().err
    of_content = damage in ("missing", "changed")
    expected = path.name if of_content else "another S"
    assert expected in said
    assert not (data / "RUN").exists()


def test_configurations_that_contradict_shards(data, capsys):
    assert select(data) == 0
    for more, expected in [
        ('path = "data"', "remove path"),
        ('[selection]\nselector = "greedy"', "remove [selection]"),
        ("", "set the same"),
    ]:
        text = CONFIGURATION.format(
            data='shards = "DIR"' + ("\n" + more if "path" in more else ""),
            selection=more if "selector" in more else "",
            mechanism=POISSON,
            model=MODELS["linear"][0],
        )
        if not more:
            text = text.replace("[0.7, 0.1, 0.2]", "[0.8, 0.1, 0.1]")
        (data / "run.toml").write_text(text)
        assert run(["train", str(data / "run.toml"), "-o", str(data / "RUN")]) == 2
        assert expected in capsys.readouterr().err


def test_shards_need_splits(data, capsys):
    where = ["--example-id", "id", "-o", str(data / "S.parquet"), "--contribution-bound", "2"]
    assert run(["select", str(data / "data"), *where, "--shards", str(data / "DIR")]) == 2
    assert "--shards needs --splits" in capsys.readouterr().err


def test_bounds_of_single_users_are_refused(data, capsys):
    """Before anything is written, not when training recounts them."""
    (data / "bounds.csv").write_text("user,bound\nu3,0\nu4,1\n")
    bounds = ("--contribution-bound", "2", "--contribution-bounds-file", str(data / "bounds.csv"))
    assert select(data, selector=bounds) == 2
    assert "shards cannot hold an S with bounds of single users" in capsys.readouterr().err
    assert not (data / "DIR").exists()
    assert not (data / "S.parquet").exists()


def test_existing_shards_are_kept(data, capsys):
    assert select(data) == 0
    before = (data / "DIR" / "manifest.json").read_bytes()
    assert select(data, "--overwrite") == 2
    assert "a folder with other files in it" in capsys.readouterr().err
    assert (data / "DIR" / "manifest.json").read_bytes() == before


def test_another_model_has_arrays_of_its_own(data, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(data / "cache"))
    assert select(data) == 0
    for name, model in [("a", "text"), ("b", "text"), ("c", "linear"), ("d", "own")]:
        assert train(data, name, model=model, shards="DIR") == 0
    kept = [path for path in (data / "cache" / "derived").iterdir() if path.is_dir()]
    assert len(kept) == 2
    assert weights(data, "a") == weights(data, "b")
    assert not list((data / "cache").glob(".derived-*"))
    config = TrainConfig.read(data / "d.toml")
    task = config.task(read_examples(config).schema)
    assert kept_arrays(config, task) is None
    (data / "e.toml").write_text((data / "d.toml").read_text().replace('kind = "python"', 'kind = "torch"'))
    assert kept_arrays(TrainConfig.read(data / "e.toml"), task) is None


def test_arrays_are_mapped(data, monkeypatch):
    """Of what is in the cache nothing is computed again."""
    monkeypatch.setenv("COOWNED_CACHE", str(data / "cache"))
    assert select(data) == 0
    assert train(data, "a", model="text", shards="DIR") == 0
    monkeypatch.setattr("coowned.models.text_classifier.hash_texts", refuse_texts)
    assert train(data, "b", model="text", shards="DIR") == 0
    assert StoredRun.open(data / "a").record.data == StoredRun.open(data / "b").record.data


def refuse_texts(texts, **settings):
    assert len(texts) == 0
    return hash_texts(texts, **settings)
