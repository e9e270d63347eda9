"""The plan of a configuration, without a run; whole runs are in tests/cli/test_train.py and test_tasks.py."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from coowned import AttributionGraph, from_table
from coowned.attribution.sources import DataSource
from coowned.content.splits import split_examples
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.runs import configured_run
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import make_plan, run_configuration
from coowned.runs.run_folder import RunFolder

SCHEDULED = """
[data]
path = "data.parquet"
users = "users"
[selection]
selector = "greedy-min-separation"
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-mf"
batch_size = 8
iterations = 60
clip_norm = 1.0
[optimizer]
learning_rate = 0.1
"""


def test_schedule_without_a_given_separation():
    """The last columns of a strategy are shorter than 1; a claim counts them as 1, since a certificate cannot tell."""
    graph = AttributionGraph.from_users_per_example([[user % 100, (3 * user + 1) % 100] for user in range(1000)])
    plan = make_plan(TrainConfig.from_toml(SCHEDULED), graph, RunKey.from_operating_system())
    assert plan.guarantee is not None
    assert plan.guarantee.epsilon <= 8
    assert plan.mechanism.num_bands == plan.certificate.min_separation
    plan.check(graph)


def test_no_bands_are_refused():
    graph = AttributionGraph.from_users_per_example([[user % 100] for user in range(1000)])
    text = SCHEDULED.replace("clip_norm = 1.0", "clip_norm = 1.0\nnum_bands = 0\nmin_separation = 4")
    with pytest.raises(InputError, match=r"num_bands must be .* at least 1"):
        make_plan(TrainConfig.from_toml(text), graph, RunKey.from_operating_system())


@pytest.mark.parametrize("how", ["public = true", 'epsilon = "none"'])
@pytest.mark.parametrize("kind", ["dp-mf", "dp-mf of 4", "dp-sgd"])
def test_without_a_claim_there_need_be_no_users(kind, how):
    graph = AttributionGraph.from_users_per_example([[] for _ in range(1000)])
    text = SCHEDULED.replace("epsilon = 8\ndelta = 1e-6", how)
    text = text.replace('"greedy-min-separation"', '"greedy-min-separation"\nunattributed = "keep"')
    if kind == "dp-sgd":
        text = text.replace("greedy-min-separation", "greedy").replace("dp-mf", kind)
        text = text.replace("[privacy]", "contribution_bound = 1\n[privacy]")
    elif kind == "dp-mf of 4":
        text = text.replace("iterations = 60", "iterations = 60\nmin_separation = 4")
    plan = make_plan(TrainConfig.from_toml(text), graph, RunKey.from_operating_system())
    plan.check(graph)
    assert plan.guarantee is None


class Sealed:
    """A payload whose schema may be looked at, and whose rows may be taken once S is certified and accounted for."""

    def __init__(self, table: pa.Table):
        self.schema, self.open, self.taken = table.schema, False, []
        self._table = table

    def take(self, rows: pa.Array) -> pa.Table:
        assert self.open, "content was read before S was chosen, certified and accounted for"
        self.taken.append(rows.to_numpy())
        return self._table.take(rows)

    def __getattr__(self, name: str):
        raise AssertionError(f"{name} of the payload was asked for")


POISSON = """
[data]
path = "data.parquet"
users = "users"
[selection]
selector = "greedy"
contribution_bound = 1
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 8
iterations = 3
clip_norm = 1.0
[model]
features = ["x"]
label = "y"
[optimizer]
learning_rate = 0.1
"""


def sealed_examples(labels=None):
    count = 400
    table = pa.table(
        {
            "users": [[f"u{i % 150}"] if i % 2 else [f"u{i % 150}", f"u{i * 7 % 150}"] for i in range(count)],
            "x": np.linspace(-1, 1, count),
            "y": np.arange(count) % 2 if labels is None else labels,
        }
    )
    examples = from_table(table)
    return dataclasses.replace(examples, payload=Sealed(examples.payload))


def test_content_is_read_after_selection(tmp_path, monkeypatch):
    examples = sealed_examples()
    account = configured_run.guarantee

    def accounted(*given, **named):
        made = account(*given, **named)
        examples.payload.open = True
        return made

    monkeypatch.setattr(configured_run, "guarantee", accounted)
    monkeypatch.setattr(DataSource, "read", lambda self, content: examples)
    config = TrainConfig.from_toml(POISSON)
    with RunFolder.open(tmp_path / "run") as folder:
        plan = run_configuration(config, folder).plan
    # And then the rows that were selected or held out, and no others.
    splits = split_examples(examples.graph, config.splits)
    selected = splits["train"][plan.selected.copies > 0]
    assert 0 < len(selected) < len(splits["train"])
    [taken] = examples.payload.taken
    assert sorted(taken) == sorted([*selected, *splits["validation"], *splits["test"]])


def test_unselected_rows_are_not_read():
    """They have no content; rows that were read are those of the whole payload."""
    examples = sealed_examples()
    examples.payload.open = True
    splits = split_examples(examples.graph)
    copies = np.arange(len(splits["train"])) % 3
    content = TrainConfig.from_toml(POISSON).task(examples.payload.schema).load(examples, splits, copies)
    train = content.parts["train"]
    out = {name: np.zeros((1, *shape), np.float32) for name, shape in train.shapes().items()}
    for example, count in enumerate(copies[:30]):
        if count:
            train.fill(np.array([example]), out)
            assert out["features"][0, 0] == np.float32(np.linspace(-1, 1, 400)[splits["train"][example]])
        else:
            with pytest.raises(InputError, match="not selected"):
                train.fill(np.array([example]), out)


def test_held_out_rows_do_not_depend_on_the_selection():
    examples = sealed_examples()
    examples.payload.open = True
    splits = split_examples(examples.graph)
    task = TrainConfig.from_toml(POISSON).task(examples.payload.schema)
    one, two = (task.load(examples, splits, np.arange(len(splits["train"])) % k == 0).parts for k in (2, 3))
    for name in ("validation", "test"):
        assert np.array_equal(one[name].rows, two[name].rows)


def test_content_cannot_refuse_a_run(tmp_path, monkeypatch):
    """Labels that are no labels: the run trains on noise, and only its private log tells."""
    examples = sealed_examples(labels=np.full(400, 7))
    examples.payload.open = True
    monkeypatch.setattr(DataSource, "read", lambda self, content: examples)
    with RunFolder.open(tmp_path / "run") as folder:
        run_configuration(TrainConfig.from_toml(POISSON), folder)
    log = configured_run.StoredRun.open(tmp_path / "run").private_log()
    assert log is not None
    assert log["unusable_rows"] == len(examples.payload.taken[0])
