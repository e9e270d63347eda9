"""Models of one's own: exact clipped sums of any loss, found shapes, and losses that are refused."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from jax_privacy.clipping import clipped_grad
from tests.arrays import same
from tests.exact.lengths import squared_radius
from tests.models.model_sums import make_batch, sums

import coowned as co
from coowned import CertificateMismatchError, InputError, evaluate, read_jsonl, train
from coowned.content.example_table import KEY, USABLE, ExampleTable
from coowned.errors import BatchCoupledLossError, MemoryLimitError
from coowned.exact.grid import Grid
from coowned.models.example_model import at_own_places
from coowned.models.jax_model import JaxModel
from coowned.models.parameter_trees import ParameterTree
from coowned.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SCHEMA = pa.schema({"x": pa.list_(pa.float64()), "label": pa.int64(), "note": pa.string(), "other": pa.float64()})


def make_parameters(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "layers": [
            {"w": generator.normal(size=(5, 4)).astype(np.float32), "b": np.zeros(4, np.float32)},
            {"w": generator.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)},
        ]
    }


def scores(parameters, x):
    first, second = parameters["layers"]
    return jax.nn.relu(x @ first["w"] + first["b"]) @ second["w"] + second["b"]


def loss(parameters, example, key):
    del key
    given = scores(parameters, example["x"])
    return jax.nn.logsumexp(given) - given[example["label"]]


def predict(parameters, example):
    return jax.nn.softmax(scores(parameters, example["x"]))


def make_model(schema=SCHEMA, **changes):
    settings = {"loss": loss, "parameters": make_parameters(), "predict": predict} | changes
    return JaxModel(**settings).for_schema(schema)


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:optax.global_norm")
def test_equals_jax_privacy():
    model, batch = make_model(), make_batch(40)
    found, clipped = sums(model, batch, clip_norm=2.0)
    reference = clipped_grad(lambda p, e: loss(p, e, None), l2_clip_norm=2.0, keep_batch_dim=False)
    expected = ParameterTree.of(reference(make_parameters(), {"x": batch["x"], "label": batch["label"]})).trained
    assert 0 < clipped < 40
    for name, array in expected.items():
        assert found[name] * Grid.for_gradients(2.0).unit == pytest.approx(array, abs=2e-3)  # a clip margin of 2^-16


def test_no_example_adds_more():
    model, grid = make_model(), Grid.for_gradients(0.5)
    for number in range(20):
        found, clipped = sums(model, make_batch(1, seed=number, scale=100.0), clip_norm=0.5)
        square = sum(int((array.astype(object) ** 2).sum()) for array in found.values())
        assert square <= squared_radius(grid)
        assert square > 0.99 * squared_radius(grid) or not clipped


def gradients_of(model, batch):
    """Of every row, as XLA gives them in microbatches of this model's size."""
    size, rows = model.rows_at_once, len(batch[KEY])
    parameters = {"trained": {name: array[None] for name, array in model.initial().items()}, "frozen": {}}
    found = []
    for begin in range(0, rows, size):
        part = {
            name: np.zeros((size, *array.shape[1:]), array.dtype) for name, array in batch.items() if name != USABLE
        }
        for name, array in part.items():
            array[: rows - begin] = batch[name][begin : begin + size]
        found.append([np.asarray(leaf)[: rows - begin] for leaf in model._gradients(parameters, part).values()])
    return [np.concatenate(leaves) for leaves in zip(*found, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_microbatches_give_the_same_integers(size):
    batch, models = make_batch(37), (make_model(microbatch=16), make_model(microbatch=size))
    (usual, clipped), (other, clipped_too) = (sums(model, batch) for model in models)
    gradients = [gradients_of(model, batch) for model in models]
    if all(one.tobytes() == two.tobytes() for one, two in zip(*gradients, strict=True)):
        assert same(usual, other)
    else:  # XLA adds in another order for another shape: a number may be rounded the other way
        assert all(np.abs(array - other[name]).max() <= 37 for name, array in usual.items())
    assert clipped == clipped_too


def test_an_example_counts_the_same_in_any_company():
    model = make_model(microbatch=8)
    batch, others = make_batch(8), make_batch(8, seed=9, scale=50.0)
    alone = sums(model, batch, np.arange(8) == 3)[0]
    mixed = {name: array.copy() for name, array in others.items()}
    for name, array in batch.items():
        mixed[name][3] = array[3]
    everybody, without = sums(model, mixed)[0], sums(model, mixed, np.arange(8) != 3)[0]
    assert same({name: everybody[name] - without[name] for name in alone}, alone)


def make_wide(microbatch):
    """A network that XLA multiplies in other kernels for the last rows of an odd microbatch; starts at zero."""

    def of_wide(p, e, key):
        z = jnp.tanh(jnp.tanh(e["x"] @ p["a"]) @ p["b"])
        return (z @ p["c"] - e["label"]) ** 2

    shapes = {"a": (100, 33), "b": (33, 33), "c": (33,)}
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    schema = pa.schema({"x": pa.list_(pa.float32(), 100), "label": pa.float32()})
    return JaxModel(loss=of_wide, parameters=parameters, microbatch=microbatch).for_schema(schema)


@pytest.mark.parametrize("size", [13, 16])
def test_an_example_counts_the_same_in_any_place(size):
    model, generator = make_wide(size), np.random.default_rng(0)
    own = {name: generator.normal(size=s).astype(np.float32) / 6 for name, s in model.shapes().items()}
    batch = make_batch(40) | {
        "x": generator.normal(size=(40, 100)).astype(np.float32),
        "label": generator.normal(size=40).astype(np.float32),
    }
    everybody, clipped = sums(model, batch, clip_norm=100.0, parameters=own)
    assert not clipped
    for leaver in (0, 17):
        alone = sums(model, batch, np.arange(40) == leaver, clip_norm=100.0, parameters=own)[0]
        others = {name: np.delete(array, leaver, axis=0) for name, array in batch.items()}  # all after it move up
        without = sums(model, others, clip_norm=100.0, parameters=own)[0]
        assert same({name: everybody[name] - without[name] for name in alone}, alone)


def test_places_are_the_copies_own():
    batch, mask = make_batch(50), np.arange(50) % 7 != 0
    rows, real = at_own_places(batch, mask, 8)
    assert np.count_nonzero(real) == np.count_nonzero(mask)
    assert real.size % 8 == 0
    assert sorted(map(bytes, rows[KEY][real])) == sorted(map(bytes, batch[KEY][mask]))
    assert (rows[KEY][real, 0] % 8 == np.flatnonzero(real) % 8).all()
    by_key = {bytes(key): x for key, x in zip(batch[KEY], batch["x"], strict=True)}
    assert all((by_key[bytes(key)] == x).all() for key, x in zip(rows[KEY][real], rows["x"][real], strict=True))
    assert not rows["x"][~real].any()
    assert at_own_places(batch, np.zeros(50, bool), 8)[1].size == 0


def test_unusable_adds_zero():
    model, batch = make_model(), make_batch(6)
    batch[USABLE][2] = False
    left_out = sums(model, batch, np.arange(6) != 2)
    assert same(sums(model, batch)[0], left_out[0])
    assert not any(array.any() for array in sums(model, batch, np.zeros(6, bool))[0].values())

    def infinite(parameters, example, key):
        return loss(parameters, example, key) / (example["x"][0] - 1)

    batch["x"][0, 0] = 1
    model = make_model(loss=infinite)
    assert same(sums(model, batch)[0], sums(model, batch, np.arange(6) > 0)[0])


def test_plain_gradients_are_those_of_the_loss():
    model, batch = make_model(), make_batch(300)
    batch[USABLE][4] = False
    mask = np.arange(300) < 290
    found = jax.jit(model.gradient_sum)(model.initial(), batch, mask)
    kept = mask & batch[USABLE]

    def total(parameters):
        examples = {"x": batch["x"][kept], "label": batch["label"][kept]}
        return jax.vmap(loss, in_axes=(None, 0, None))(
            model.tree.whole(parameters, model.tree.frozen), examples, None
        ).sum()

    for name, array in jax.grad(total)(model.initial()).items():
        assert np.asarray(found[name]) == pytest.approx(np.asarray(array), abs=1e-3)


def test_keys_reach_the_loss():
    def dropout(parameters, example, key):
        kept = jax.random.bernoulli(key, 0.5, example["x"].shape)
        return loss(parameters, {**example, "x": jnp.where(kept, example["x"], 0)}, key)

    model, batch = make_model(loss=dropout, columns=["x", "label"]), make_batch(8)
    again = {**batch, KEY: batch[KEY].copy()}
    assert same(sums(model, batch)[0], sums(model, again)[0])
    again[KEY] += np.uint32(1)
    assert not same(sums(model, batch)[0], sums(model, again)[0])


def test_memory_limit_is_kept():
    wide = {"w": np.zeros((5, 20_000), np.float32)}

    def own(parameters, example, key):
        return (example["x"] @ parameters["w"]).sum()

    needed = make_model(loss=own, parameters=wide, predict=None).memory_of
    model = make_model(loss=own, parameters=wide, predict=None, memory_limit="6MB")
    assert model.rows_at_once >= 1
    assert model.memory_of(model.rows_at_once) <= 6e6
    assert needed(2 * model.rows_at_once) > 6e6
    with pytest.raises(MemoryLimitError, match=r"needs \d+ MB, and memory_limit is 1 MB; raise it"):
        _ = make_model(loss=own, parameters=wide, predict=None, memory_limit="1MB").rows_at_once
    assert make_model().rows_at_once == 128  # of a small model


@pytest.mark.full
def test_memory_that_is_measured():
    """In a process of its own: by how much it grows at most while batches are summed under a limit of 20 MB."""
    code = """
        from benchmarks.any_model import _growth, make_batch, make_model, summing
        model = make_model(memory_limit=20_000_000)
        action = summing(model, make_batch())
        action()
        print(model.rows_at_once, max(_growth(action) for _ in range(3)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows, grown = map(float, done.stdout.split())
    assert rows > 1
    assert grown < 20e6


def test_backends_that_do_not_tell_their_memory(monkeypatch):
    model = make_model(microbatch=4)
    told = model.memory_of(4)
    monkeypatch.setattr(type(model), "_program", lambda self, rows: None)
    assert told / 20 < model.memory_of(4) < 20 * told


@pytest.mark.full
def test_more_devices_give_the_same_integers(tmp_path):
    code = """
import jax, numpy as np
from tests.arrays import same
from tests.models.model_sums import make_batch, sums
from tests.models.test_jax_model import make_model
for changes in ({}, {"trainable": lambda path: path != "layers/0/w"}):
    model = make_model(microbatch=4, **changes)
    alone, both = (sums(model, make_batch(30), devices=given)[0] for given in ((), jax.devices()[:2]))
    print(len(jax.devices()), same(alone, both))
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "True"] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_coupled_losses_are_refused():
    def collective(parameters, example, key):
        return loss(parameters, example, key) - jax.lax.pmean(example["x"].mean(), "batch")

    with pytest.raises(BatchCoupledLossError, match="layer norm or group norm"):
        sums(make_model(loss=collective), make_batch(4))

    @jax.custom_batching.custom_vmap
    def normalized(x):
        return x

    @normalized.def_vmap
    def _(size, batched, x):
        return x - x.mean(axis=0), True

    def norm(parameters, example, key):
        return scores(parameters, normalized(example["x"])).sum()

    def of_batch(parameters, example, key):
        return scores(parameters, example["x"] * jax.lax.stop_gradient(normalized(example["x"])).sum()).sum()

    for coupled in (norm, of_batch):
        with pytest.raises(BatchCoupledLossError, match="changed when other examples of the batch did"):
            sums(make_model(loss=coupled), make_batch(4))
    sums(make_model(loss=norm, microbatch=1), make_batch(4))  # alone there is nothing to mix


TABLES = pa.schema({"x": pa.list_(pa.float32(), 3), "p": pa.list_(pa.int32(), 2)})


def table_model(look_up):
    """A model whose loss looks up indices of an example in a table that is made of the example."""

    def of_table(parameters, example, key):
        table = example["x"][:, None] * parameters["w"] + parameters["b"]  # (3, 2)
        return jnp.sum(look_up(table, example["p"]) ** 2)

    parameters = {"w": np.array([0.5, -2.0], np.float32), "b": np.ones(2, np.float32)}
    return make_model(TABLES, loss=of_table, parameters=parameters, predict=None, microbatch=8)


@pytest.mark.parametrize("microbatch", [2, 3, 8])
@pytest.mark.parametrize("length", [3, 1000])
def test_coupling_by_an_index_out_of_range_is_refused(length, microbatch):
    @jax.custom_batching.custom_vmap
    def look_up(table, p):
        return table[p]

    @look_up.def_vmap
    def _(size, batched, table, p):  # as PyTorch does it: all tables one below the other
        begins = length * jnp.arange(size)[:, None]
        return table.reshape(-1, 2)[p + begins], True

    def of_table(parameters, example, key):
        table = jnp.tile(example["x"][:, None], (length, 2))[:length]
        return (parameters["w"] * jax.lax.stop_gradient(look_up(table, example["p"]))).sum()

    parameters = {"w": np.ones(2, np.float32)}
    model = make_model(TABLES, loss=of_table, parameters=parameters, predict=None, microbatch=microbatch)
    with pytest.raises(BatchCoupledLossError, match="index out of range takes into another example"):
        model.check_independence()


def test_coupling_that_zeros_hide_is_refused():
    @jax.custom_batching.custom_vmap
    def centred(x):
        return x

    @centred.def_vmap
    def _(size, batched, x):
        return x - x.mean(axis=0), True

    def hidden(parameters, example, key):
        return parameters["a"] * parameters["b"] * jax.lax.stop_gradient(centred(example["x"]) ** 2).sum()

    parameters = {name: np.zeros((), np.float32) for name in "ab"}
    model = make_model(TABLES, loss=hidden, parameters=parameters, predict=None, microbatch=4)
    with pytest.raises(BatchCoupledLossError, match="changed when other examples of the batch did"):
        model.check_independence()


LOOKUPS = {
    "index": lambda table, p: table[p],
    "fill": lambda table, p: table.at[p].get(mode="fill", fill_value=0.0),
    "clip": lambda table, p: table.at[p].get(mode="clip"),
    "wrap": lambda table, p: jnp.take(table, p, axis=0, mode="wrap"),
    "in bounds": lambda table, p: table.at[p].get(mode="promise_in_bounds"),
    "set": lambda table, p: table.at[p].set(table[0]),
    "add": lambda table, p: table.at[p].add(table[:2]),
    "add in bounds": lambda table, p: table.at[p].add(table[:2], mode="promise_in_bounds"),
    "multiply": lambda table, p: table.at[p].multiply(table[:2], unique_indices=True),
    "max": lambda table, p: table.at[p].max(table[:2]),
    "take": lambda table, p: jnp.take(table, p, axis=0),
    "flat take": lambda table, p: jnp.take(table, p),
    "take_along_axis": lambda table, p: jnp.take_along_axis(table, p[:, None], axis=0),
    "put_along_axis": lambda table, p: jnp.put_along_axis(table, p[None], 0.0, axis=0, inplace=False),
    "one_hot": lambda table, p: jax.nn.one_hot(p, 3) @ table,
    "segment_sum": lambda table, p: jax.ops.segment_sum(table[:2], p, num_segments=3),
    "dynamic_slice": lambda table, p: jax.lax.dynamic_slice(table, (p[0], p[1]), (2, 1)),
    "dynamic_update": lambda table, p: jax.lax.dynamic_update_slice(table, table[:1], (p[0], p[1])),
    "dynamic_index": lambda table, p: jax.lax.dynamic_index_in_dim(table, p[0]),
    "choose": lambda table, p: jnp.choose(p, list(table), mode="clip"),
    "select_n": lambda table, p: jax.lax.switch(p[0], [lambda t=t: t for t in range(3)]) * table,
    "roll": lambda table, p: jnp.roll(table, p[0], axis=0),
    "repeat": lambda table, p: jnp.repeat(table, p, axis=1, total_repeat_length=4),
    "searchsorted": lambda table, p: table * jnp.searchsorted(jnp.arange(3), p),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_indices_out_of_range_stay_in_their_example(name):
    model, generator = table_model(LOOKUPS[name]), np.random.default_rng(0)
    model.check_independence()
    rows = {
        "x": generator.normal(size=(8, 3)).astype(np.float32),
        "p": generator.integers(0, 2, (8, 2), np.int32),
        KEY: generator.integers(0, 2**32, (8, 2), np.uint32),
    }
    gradients, parameters, others = model._program(8), model._all_parameters(), np.arange(8) != 3
    usual = {tensor: np.asarray(array)[others] for tensor, array in gradients(parameters, rows).items()}
    assert any(array.any() for array in usual.values())
    for value in (*range(-30, 31), 2**31 - 1, 1 - 2**31):
        rows["p"][3] = value
        for tensor, array in gradients(parameters, rows).items():
            assert np.asarray(array)[others].tobytes() == usual[tensor].tobytes()


@pytest.mark.parametrize("columns", [None, ["x", "label"], {"x": "points", "label": "label"}])
def test_prediction_names_the_column_that_is_missing(columns):
    reads = "points" if isinstance(columns, dict) else "x"
    specification = JaxModel(loss=loss, parameters=make_parameters(), predict=predict, columns=columns)
    lists, number = pa.list_(pa.float64(), 5), pa.float64()
    assert specification.for_schema(pa.schema({reads: lists}), labels=False).entries[0].column == reads
    for fields, there in (({"z": lists, "q": number}, "z, q"), ({"z": pa.string()}, "z"), ({}, "no columns")):
        with pytest.raises(InputError, match=rf"(?m)no column '{reads}', which the model reads; they have {there}$"):
            specification.for_schema(pa.schema(fields), labels=False)
    with pytest.raises(InputError, match=rf"column '{reads}'.*(, which holds|, not) string"):
        specification.for_schema(pa.schema({reads: pa.string()}), labels=False)


def test_refused_before_anything_is_read(tmp_path):
    def collective(parameters, example, key):
        return loss(parameters, example, key) - jax.lax.pmean(example["x"].mean(), "batch")

    @jax.custom_batching.custom_vmap
    def normalized(x):
        return x

    @normalized.def_vmap
    def _(size, batched, x):
        return x - x.mean(axis=0), True

    def norm(parameters, example, key):
        return scores(parameters, normalized(example["x"])).sum()

    for coupled in (collective, norm):
        with pytest.raises(BatchCoupledLossError):
            JaxModel(loss=coupled, parameters=make_parameters()).task(SCHEMA, folder=tmp_path, is_private=True)


def test_other_losses_are_refused():
    for wrong in (
        lambda p, e, k: scores(p, e["x"]),
        lambda p, e, k: (loss(p, e, k), 0.0),
        lambda p, e, k: e["label"],
        lambda p, e, k: loss(p, e, k).astype(jnp.float16),
    ):
        with pytest.raises(InputError, match="one float32 number"):
            _ = make_model(loss=wrong).program_digest

    def prints(parameters, example, key):
        jax.debug.print("{}", example["x"])
        return loss(parameters, example, key)

    with pytest.raises(InputError, match="calls back into Python"):
        _ = make_model(loss=prints).program_digest


def test_wrong_settings():
    for changes, match in (
        ({"loss": 3}, "loss must be a function"),
        ({"predict": "x"}, "predict must be a function"),
        ({"microbatch": 0}, "microbatch must be"),
        ({"memory_limit": "many"}, 'such as "1GB"'),
        ({"classes": 4}, "returns 3 probabilities, but there are 4 classes"),
        ({"predict": lambda p, e: scores(p, e["x"])}, "must return probabilities"),
        ({"predict": lambda p, e: 3.0 + e["x"].sum(), "classes": 2}, "jax.nn.sigmoid for one of two"),
        ({"label": "z"}, "not an entry of an example"),
        ({"columns": "x"}, "columns must be a list"),
        ({"columns": ["x", "note", "label"]}, "column 'note' must contain numbers"),
        ({"columns": ["x"]}, r"reads example\['label'\], and columns names only x"),
        ({"parameters": {"w": np.arange(3)}}, "no parameter is trained"),
        ({"parameters": {"a/b": np.zeros(2), "a": {"b": np.zeros(2)}}}, "two parameters have the path 'a/b'"),
        ({"parameters": {"w": jnp.zeros(3, jnp.bfloat16)}}, "must be float32"),
    ):
        with pytest.raises(InputError, match=match):
            make_model(**changes)


# ---- what an example looks like --------------------------------------------------------------------------------------


def test_lengths_follow_from_the_parameters():
    assert [(entry.name, entry.shape) for entry in make_model().entries] == [("x", (5,)), ("label", ())]
    assert make_model(shapes={"x": (5,)}).entries == make_model().entries
    fixed = pa.schema({"x": pa.list_(pa.float32(), 5), "label": pa.int8()})
    assert [entry.shape for entry in make_model(fixed).entries] == [(5,), ()]

    def any_length(parameters, example, key):
        return (parameters["w"] * example["x"].mean()).sum()

    settings = {"loss": any_length, "predict": None, "parameters": {"w": np.zeros((3, 4))}}
    with pytest.raises(InputError, match=r"several lengths fit; pass shapes={'x': \(length,\)}"):
        make_model(**settings)
    assert make_model(**settings, shapes={"x": (9,)}).entries[0].shape == (9,)
    with pytest.raises(InputError, match="no length of a parameter fits"):
        make_model(
            parameters={"layers": [{"w": np.zeros((5, 4)), "b": np.zeros(4)}, {"w": np.zeros((2, 3)), "b": 0.0}]}
        )


def test_columns_and_labels():
    schema = pa.schema({"features": pa.list_(pa.float32(), 5), "folder": pa.string()})
    columns, classes = {"x": "features", "label": "folder"}, ["a", "b", "c"]
    model = make_model(schema, columns=columns, classes=classes)
    assert model.classes == ("a", "b", "c")
    assert model.label == "label"
    assert model.entries[1].classes == ("a", "b", "c")
    with pytest.raises(InputError, match="holds text: declare its classes"):
        make_model(schema, columns=columns)
    assert make_model().classes == (0, 1, 2)  # as many as there are probabilities
    spec = JaxModel(loss=loss, parameters=make_parameters(), predict=predict, columns=columns, classes=classes)
    unlabelled = spec.for_schema(pa.schema({"features": pa.list_(pa.float32(), 5)}), labels=False)
    assert [entry.name for entry in unlabelled.entries] == ["x"]


def test_floats_may_be_classes():
    """A column of 0.0, 1.0 and 2.0 is one of classes where classes are predicted."""
    schema = pa.schema({"x": pa.list_(pa.float32(), 5), "label": pa.float64()})
    model = make_model(schema)
    assert model.entries[1].whole
    payload = pa.table({"x": [[0.0] * 5] * 3, "label": [2.0, 0.5, None]})
    values, usable = model.entries[1].read(payload)
    assert values.tolist() == [2, 0, 0]
    assert usable.tolist() == [True, False, False]


def test_for_table(small):
    table = make_data(small)
    model = JaxModel(loss=loss, parameters=make_parameters(), predict=predict).for_table(table)
    assert [(entry.name, entry.shape, entry.whole) for entry in model.entries] == [
        ("x", (5,), False),
        ("label", (), True),
    ]
    model.check_data(table.shapes())
    with pytest.raises(InputError, match="takes 'x' of shape"):
        model.check_data(table.shapes() | {"x": (4,)})


def test_predictions():
    model, batch = make_model(), make_batch(300)
    batch[USABLE][7] = False
    predicted, probability = jax.jit(model.predict)(model.initial(), batch)
    expected = jax.vmap(lambda x: jax.nn.softmax(scores(make_parameters(), x)))(batch["x"])
    assert (np.asarray(predicted) == np.asarray(expected).argmax(axis=1)).all()
    assert predicted.dtype == np.int32
    assert np.isnan(probability[7])
    assert np.delete(np.asarray(probability), 7) == pytest.approx(np.delete(np.asarray(expected).max(axis=1), 7))
    shares = np.asarray(model.probabilities(model.initial(), batch))
    assert np.isnan(shares[7]).all()
    np.testing.assert_allclose(np.delete(shares, 7, axis=0), np.delete(np.asarray(expected), 7, axis=0), rtol=1e-5)
    losses, right = jax.jit(model.losses)(model.initial(), batch)
    assert np.isnan(losses[7])
    assert (np.asarray(right) == (np.asarray(predicted) == batch["label"])).all()
    assert float(losses[0]) == pytest.approx(
        float(loss(make_parameters(), {n: batch[n][0] for n in ("x", "label")}, None))
    )

    two = make_model(predict=lambda p, e: jax.nn.sigmoid(scores(p, e["x"])[0]), classes=["no", "yes"])
    index, chance = two.predict(two.initial(), batch)
    assert set(np.asarray(index).tolist()) == {0, 1}
    assert (np.delete(np.asarray(chance), 7) >= 0.5).all()
    both = np.delete(np.asarray(two.probabilities(two.initial(), batch)), 7, axis=0)
    np.testing.assert_allclose(both.sum(axis=1), 1, rtol=1e-5)
    assert (both.argmax(axis=1) == np.delete(np.asarray(index), 7)).all()
    number = make_model(predict=lambda p, e: scores(p, e["x"])[0])
    value, chance = number.predict(number.initial(), batch)
    assert number.classes is None
    assert np.isnan(chance).all()
    assert np.isnan(value[7])
    assert value.dtype == np.float32
    with pytest.raises(InputError, match="no predict function"):
        make_model(predict=None).predict(model.initial(), batch)


# ---- parameters ------------------------------------------------------------------------------------------------------


class _Module:
    """As Equinox has them: a tree with functions and numbers among its leaves."""

    def __init__(self, w, activation, steps):
        self.w, self.activation, self.steps = w, activation, steps


jax.tree_util.register_pytree_with_keys(
    _Module,
    lambda m: (((jax.tree_util.GetAttrKey("w"), m.w), (jax.tree_util.GetAttrKey("activation"), m.activation)), m.steps),
    lambda steps, leaves: _Module(*leaves, steps),
)


def test_trees_are_put_together_again():
    for given in (make_parameters(), (np.ones(2), [np.zeros(3)]), np.ones(4), {"table": np.arange(3), "w": np.ones(2)}):
        tree = ParameterTree.of(given)
        whole = tree.whole(tree.trained, tree.frozen)
        assert jax.tree.structure(whole) == jax.tree.structure(given)
        assert all(
            (one == other).all() for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(given), strict=True)
        )
    assert list(ParameterTree.of(make_parameters()).trained) == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w"]
    module = ParameterTree.of(_Module(np.ones(2), jax.nn.relu, 3))
    whole = module.whole(module.trained, module.frozen)
    assert list(module.trained) == ["w"]
    assert whole.activation is jax.nn.relu
    assert whole.steps == 3


def test_frozen_leaves_stay():
    by_path = make_model(trainable=lambda path: path.startswith("layers/1"))
    by_tree = make_model(trainable={"layers": [False, True]})
    by_pattern = make_model(trainable=["layers/1/*"])
    for model in (by_path, by_tree, by_pattern):
        assert list(model.shapes()) == ["layers/1/b", "layers/1/w"]
        found, _ = sums(model, make_batch(6))
        assert list(found) == ["layers/1/b", "layers/1/w"]
        assert found["layers/1/w"].any()
        whole = model.tree.whole(model.initial(), model.tree.frozen)
        assert (whole["layers"][0]["w"] == make_parameters()["layers"][0]["w"]).all()
    with pytest.raises(InputError, match="structure of parameters"):
        make_model(trainable={"layers": [True]})
    with pytest.raises(InputError, match=r"no parameter matches 'layers/2/\*'; the parameters are layers/0/b"):
        make_model(trainable=["layers/2/*"])


def test_arrays_round_trip():
    model = make_model()
    arrays = model.to_arrays(model.initial())
    assert sorted(arrays) == ["layers/0/b", "layers/0/w", "layers/1/b", "layers/1/w"]
    assert same(model.from_arrays(arrays), model.initial())
    with pytest.raises(InputError, match="not the arrays of this model"):
        model.from_arrays({"w": np.zeros(3)})


_NUMBERS = np.arange(200)
CLOSED_OVER = [  # arrays whose bytes have decimal digits only, in hexadecimal
    (_NUMBERS % 10).astype(np.int32),
    (_NUMBERS % 7).astype(np.int32),
    _NUMBERS % 2 == 0,
    _NUMBERS % 2 == 1,
    np.where(_NUMBERS % 2, 2, 0).astype(np.float32),
    np.where(_NUMBERS % 3, 2, 0).astype(np.float32),
]


def weighted_by(weights):
    return lambda p, e, k: loss(p, e, k) + (p["layers"][0]["b"][0] * weights).sum()


@pytest.mark.full
def test_description_follows_the_model():
    first = make_model().describe()
    assert first == make_model().describe()
    assert first["parameters"]["layers/0/w"] == [5, 4]
    assert first["microbatch"] == 128
    scale = np.float32(2.0)
    others = [
        make_model(loss=lambda p, e, k: scale * loss(p, e, k)),
        make_model(loss=lambda p, e, k: np.float32(3) * loss(p, e, k)),
        make_model(trainable=lambda path: path != "layers/0/b"),
        make_model(parameters=make_parameters(1), trainable=lambda path: path != "layers/0/w"),
        make_model(microbatch=4),
        *(make_model(loss=weighted_by(weights)) for weights in CLOSED_OVER),
    ]
    described = [model.describe() for model in others]
    assert all(one != other for number, one in enumerate([first, *described]) for other in described[number:])


@pytest.mark.full
def test_description_is_the_same_in_every_process(tmp_path):
    code = textwrap.dedent(
        """
        import jax, jax.numpy as jnp, numpy as np, pyarrow as pa
        from coowned.models.jax_model import JaxModel
        table = jnp.arange(12.0).reshape(4, 3)
        def loss(parameters, example, key):
            kept = jax.random.bernoulli(key, 0.5, (4,))
            return jax.nn.relu(jnp.where(kept, parameters["w"], 0) @ table @ parameters["v"]).sum() * example["x"]
        model = JaxModel(loss=loss, parameters={"w": np.zeros(4), "v": np.zeros(3)})
        print(model.for_schema(pa.schema({"x": pa.float32()})).program_digest)
        """
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert len(found[0].strip()) == 64


# ---- training --------------------------------------------------------------------------------------------------------


def make_data(small, rows=300):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, 5)).astype(np.float32)
    return ExampleTable(graph=small.graph, arrays={"x": x, "label": (x[:, 0] > 0).astype(np.int32)})


def dropout_loss(parameters, example, key):
    kept = jax.random.bernoulli(key, 0.8, (5,))
    return loss(parameters, {"x": jnp.where(kept, example["x"], 0), "label": example["label"]}, key)


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf"])
def test_resumed_is_bit_identical(small, tmp_path, kind):
    model, data, plan = make_model(loss=dropout_loss), make_data(small), small.plan(kind)
    straight = train(plan, model, data).parameters
    with RunFolder.open(tmp_path / "run") as folder:
        save = folder.save

        def save_and_stop(step, tensors):
            save(step, tensors)
            if step >= 6:
                raise KeyboardInterrupt

        folder.save = save_and_stop
        with pytest.raises(KeyboardInterrupt):
            train(plan, model, data, folder=folder, checkpoint_every=2)
    with RunFolder.open(tmp_path / "run") as folder:
        resumed = train(plan, make_model(loss=dropout_loss), data, folder=folder, checkpoint_every=2).parameters
    assert same(straight, resumed)


def test_changed_model_is_not_resumed(small, tmp_path):
    data, plan = make_data(small), small.plan()

    def stop(done, text):
        if done > 0:
            raise KeyboardInterrupt

    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(KeyboardInterrupt):
        train(plan, make_model(), data, folder=folder, checkpoint_every=1, progress=stop)
    for changes in ({"loss": dropout_loss}, {"microbatch": 4}, {"trainable": lambda path: path != "layers/0/b"}):
        with (
            RunFolder.open(tmp_path / "run") as folder,
            pytest.raises(CertificateMismatchError, match="different model"),
        ):
            train(plan, make_model(**changes), data, folder=folder)


def test_trains_without_privacy_too(small):
    model, data = make_model(), make_data(small)
    plan = small.plan(guarantee=None, clip_norm=None, iterations=60, learning_rate=0.05)
    trained = train(plan, model, data)
    before, after = (
        evaluate(model, parameters, data, split="test")["loss"][0]
        for parameters in (model.initial(), trained.parameters)
    )
    assert after < 0.7 * before


@pytest.mark.full
def test_scaled_gradients(small, tmp_path):
    """The first step is that without scales; later ones are not, and end in the same bits after an interruption."""
    data, scaled = make_data(small), small.plan(scale_gradients=True, iterations=6)
    whole = train(scaled, make_model(), data).parameters
    assert not same(whole, train(small.plan(iterations=6), make_model(), data).parameters)
    one, other = (train(small.plan(iterations=1, scale_gradients=s), make_model(), data).parameters for s in (0, 1))
    for name, array in one.items():  # by another program
        np.testing.assert_allclose(array, other[name], rtol=1e-5)

    def stop(done, text):
        if done > 0.5:
            raise KeyboardInterrupt

    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(KeyboardInterrupt):
        train(scaled, make_model(), data, folder=folder, checkpoint_every=2, progress=stop)
    with RunFolder.open(tmp_path / "run") as folder:
        assert same(train(scaled, make_model(), data, folder=folder).parameters, whole)
    plain = small.plan(scale_gradients=True, iterations=2, guarantee=None, clip_norm=None)
    unscaled = small.plan(iterations=2, guarantee=None, clip_norm=None)
    assert same(train(plain, make_model(), data).parameters, train(unscaled, make_model(), data).parameters)


def test_no_accuracy_without_a_label(small):
    model = make_model(columns={"x": "x", "kind": "label"}, loss=lambda p, e, k: loss(p, {**e, "label": e["kind"]}, k))
    data = make_data(small)
    data = ExampleTable(graph=data.graph, arrays={"x": data.arrays["x"], "kind": data.arrays["label"]})
    found = evaluate(model, model.initial(), data, split="test")
    assert found["accuracy"][0] is None
    assert found["measure"][0] == "loss"
    named = make_model(columns={"x": "x", "kind": "label"}, label="kind", loss=model.loss)
    assert 0 < evaluate(named, named.initial(), data, split="test")["accuracy"][0] < 1


@pytest.mark.parametrize("odd", ["", "oops", "3.5", "[1]", "[1, 2]"])
def test_files_without_types_decide_nothing(odd, tmp_path):
    """What one cell of a CSV holds refuses nothing, and changes neither the types nor the rows of others."""

    def read(*cells):
        file = tmp_path / "data.csv"
        file.write_text("users,n,x,y\n" + "".join(f'u{i},{cell},"[0.5, {i}]",1\n' for i, cell in enumerate(cells)))
        examples = co.read_csv(file, users="users")
        model = JaxModel(
            loss=lambda parameters, example, key: parameters["w"][example["n"]] * example["x"].sum() * example["y"],
            parameters={"w": np.zeros(9, np.float32)},
            integers=["n"],
            shapes={"x": (2,)},
        )
        return ExampleTable.from_examples(examples, model.for_schema(examples.payload.schema).entries)

    plain, other = read(3, 4, 5), read(3, 4, f'"{odd}"')
    assert plain.dtypes() == other.dtypes()
    assert plain.shapes() == other.shapes()
    assert plain.usable.all()
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(array[:2], other.arrays[name][:2])
    np.testing.assert_array_equal(plain.arrays["x"], [[0.5, 0], [0.5, 1], [0.5, 2]])


def test_undeclared_integers_are_asked_for(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("users,n\na,1\n")
    schema = co.read_csv(file, users="users").payload.schema
    nine = {"w": np.zeros(9, np.float32)}
    model = JaxModel(loss=lambda parameters, example, key: parameters["w"][example["n"]], parameters=nine)
    with pytest.raises(InputError, match=r"declare no types: name the entries that are integers, integers=\[...\]"):
        model.for_schema(schema)
    one = {"w": np.zeros((), np.float32)}
    model = JaxModel(loss=lambda parameters, example, key: sum(example.values()) * parameters["w"], parameters=one)
    with pytest.raises(InputError, match=r"uses all entries of an example.*pass columns="):
        model.for_schema(schema)


def test_no_row_decides_which_column_is_the_label(tmp_path):
    """Without declared columns the label is named: one person's further key could change everybody's."""
    rows = [{"users": [f"u{i}"], "x": [1.0, 2.0], "y": i % 2} for i in range(4)]
    more = [*rows[:3], rows[3] | {"label": 1}]

    def loss(parameters, example, key):
        return (parameters["w"] @ example["x"] - example["y"]) ** 2

    def predict(parameters, example):
        return jax.nn.softmax(jnp.stack([0.0, parameters["w"] @ example["x"]]))

    settings = {"loss": loss, "predict": predict, "parameters": {"w": np.zeros(2)}, "shapes": {"x": (2,)}}
    found = []
    for number, written in enumerate((rows, more)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
        schema = read_jsonl(file, users="users").payload.schema
        with pytest.raises(InputError, match="name the column of the label"):
            JaxModel(**settings).for_schema(schema)
        found.append(JaxModel(**settings, label="y", integers=["y"]).for_schema(schema).describe())
    assert found[0] == found[1]
