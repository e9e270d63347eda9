"""`[model] kind = "python"`: a model from a file of one's own."""

import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.report.readme import run_readme

from coowned import open_run
from coowned.errors import CertificateMismatchError, ConfigError, InputError
from coowned.models.python_model import PythonModel
from coowned.models.registry import model_from_description
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun

CONFIGURATION = """
[data]
path = "data.parquet"
users = "users"
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 20
iterations = 6
clip_norm = 1.0
[model]
kind = "python"
factory = "own_model:make_model"
arguments = { width = 4 }
[optimizer]
learning_rate = 0.1
[run]
seed = 1
checkpoint_every = 2
"""
SOURCE = """
import jax
import numpy as np
import coowned as co
from helper import CLASSES


def make_model(width=3):
    generator = np.random.default_rng(0)
    parameters = {"w": generator.normal(size=(2, width)), "v": generator.normal(size=(width, CLASSES))}

    def scores(parameters, example):
        return jax.nn.relu(example["x"] @ parameters["w"]) @ parameters["v"]

    def loss(parameters, example, key):
        given = scores(parameters, example)
        return jax.nn.logsumexp(given) - given[example["label"]]

    def predict(parameters, example):
        return jax.nn.softmax(scores(parameters, example))

    return co.JaxModel(loss=loss, parameters=parameters, predict=predict)


def make_nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path):
    count = 300
    x = np.random.default_rng(0).normal(size=(count, 2))
    table = pa.table(
        {"users": [[f"u{i % 90}"] for i in range(count)], "x": x.tolist(), "label": (x[:, 0] > 0).astype(int)}
    )
    pq.write_table(table, tmp_path / "data.parquet")
    (tmp_path / "own_model.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text("CLASSES = 2")
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    return tmp_path


def train(folder, progress=None):
    config = TrainConfig.read(folder / "run.toml")
    with RunFolder.open(folder / "run") as opened:
        return run_configuration(config, opened, progress=progress)


def test_run_keeps_its_file(folder):
    trained = train(folder)
    run = StoredRun.open(folder / "run")
    assert (folder / "run" / "model.py").read_text() == SOURCE
    assert run.record.model["factory"] == "make_model"
    assert run.record.model["arguments"] == {"width": 4}
    assert sorted(run.arrays()) == ["v", "w"]
    (folder / "own_model.py").write_text("raise NotImplementedError")
    model = run.config(folder).model.from_run(run.path)
    task = model.task(pa.schema({"x": pa.list_(pa.float64())}), folder=folder, is_private=False, labels=False)
    assert (task.files["model.py"]).decode() == SOURCE
    assert trained.model.classes == (0, 1)


@pytest.fixture
def moved(folder):
    """A run on public data whose folder is all that is left."""
    (folder / "own_model.py").write_text(SOURCE.replace("from helper import CLASSES", "CLASSES = 2"))
    text = CONFIGURATION.replace("epsilon = 8\ndelta = 1e-6", "public = true").replace("seed = 1\n", "")
    (folder / "run.toml").write_text(text)
    with RunFolder.open(folder / "run") as opened:
        run_configuration(TrainConfig.read(folder / "run.toml"), opened)
    (folder / "elsewhere").mkdir()
    (folder / "run").rename(folder / "elsewhere" / "run")
    (folder / "own_model.py").unlink()
    return folder / "elsewhere" / "run"


def test_moved_run_predicts(moved):
    found = open_run(moved).predict({"x": [[1.0, 0.0], [-1.0, 0.0]]})
    assert found["probability"].is_between(0.5, 1).all()


def test_changed_code_is_refused(moved):
    with (moved / "model.py").open("a") as file:
        file.write("raise NotImplementedError")
    run = open_run(moved)
    with pytest.raises(CertificateMismatchError, match=r"model.py"):
        run.predict({"x": [[1.0, 0.0]]})
    with pytest.raises(CertificateMismatchError, match=r"model.py"):
        run.export(moved.parent / "exported")


@pytest.mark.full
def test_exported_code_runs(moved):
    output = open_run(moved).export(moved.parent / "exported")
    assert (output / "model.py").read_bytes() == (moved / "model.py").read_bytes()
    assert run_readme(output) == "{'v': (4, 2), 'w': (2, 4)}\n"


def test_changed_file_is_not_resumed(folder):
    def stop(done, text):
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder, progress=stop)
    (folder / "own_model.py").write_text(SOURCE + "# another file")
    with pytest.raises(CertificateMismatchError, match="different model"):
        train(folder)
    (folder / "own_model.py").write_text(SOURCE)
    assert set(train(folder).arrays) == {"v", "w"}


def test_wrong_factories(folder):
    schema = pa.schema({"x": pa.list_(pa.float64(), 2), "label": pa.int64()})
    for factory, error, match in (
        ("no_such_module:make_model", ConfigError, "is not a file, and 'no_such_module' cannot be imported"),
        ("own_model:make_other", ConfigError, "has no function 'make_other'"),
        ("own_model:make_nothing", ConfigError, "must return a coowned.JaxModel, not int"),
        (None, InputError, "passed in memory and are not in the run's folder"),
    ):
        with pytest.raises(error, match=match):
            PythonModel(factory=factory).task(schema, folder=folder, is_private=True)
    (folder / "lonely.py").write_text("import no_such_helper")
    with pytest.raises(ConfigError, match=r"lonely.py: No module named 'no_such_helper'; what it imports must be"):
        PythonModel(factory="lonely:make_model").load(folder)
    for factory in ("own_model", "own_model:", ":make_model", "own_model:make-model"):
        with pytest.raises(InputError, match='factory must be "module:function"'):
            PythonModel(factory=factory)


def test_installed_modules(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "installed_model.py").write_text(textwrap.dedent(SOURCE))
    (folder / "elsewhere" / "helper.py").write_text("CLASSES = 2")
    monkeypatch.syspath_prepend(folder / "elsewhere")
    made, source = PythonModel(factory="installed_model:make_model").load(folder / "nowhere")
    assert source.decode() == SOURCE
    assert made.parameters["w"].shape == (2, 3)


def test_description_makes_a_stand_in(folder):
    described = train(folder).model.describe()
    stand_in = model_from_description(described)
    assert stand_in.shapes() == {"v": (4, 2), "w": (2, 4)}
    assert stand_in.describe()["microbatch"] == described["microbatch"]
