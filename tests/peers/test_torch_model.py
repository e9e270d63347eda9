"""PyTorch modules: every copy's gradient is that of JAX and of Opacus, and what mixes examples is refused.

PyTorch and JAX compute in float32, in other orders: a copy's gradient of a clip norm differs by about 1e-6 of it, which
is about 16 units of the grid; sums of n copies are compared to 64 n units, 4e-6 of the clip norm each.
"""

import contextlib
import json

import numpy as np
import pyarrow as pa
import pytest
from tests.arrays import same
from tests.models.model_sums import make_batch, sums

from coowned import InputError, read_jsonl
from coowned.content.example_table import KEY, USABLE
from coowned.errors import BatchCoupledLossError
from coowned.exact.grid import Grid
from coowned.models.jax_model import JaxModel
from coowned.torch import module_model

SCHEMA = pa.schema({"x": pa.list_(pa.float64()), "label": pa.int64(), "note": pa.string()})
FAR = 64  # grid units a copy

pytestmark = pytest.mark.usefixtures("torch")


def make_module(torch):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def loss(module, example):
    import torch

    return torch.nn.functional.cross_entropy(module(example["x"]), example["label"])


def predict(module, example):
    import torch

    return torch.softmax(module(example["x"]), -1)


def make_model(torch, schema=SCHEMA, **changes):
    from coowned.torch import TorchModel

    settings = {"loss": loss, "module": make_module(torch), "predict": predict} | changes
    return TorchModel(**settings).for_schema(schema)


def jax_model(torch):
    """The same network with the same parameters."""
    import jax

    parameters = {name: own.detach().numpy() for name, own in make_module(torch).named_parameters()}

    def scores(p, x):
        return p["2.weight"] @ jax.nn.relu(p["0.weight"] @ x + p["0.bias"]) + p["2.bias"]

    def of_example(p, example, key):
        return jax.nn.logsumexp(scores(p, example["x"])) - scores(p, example["x"])[example["label"]]

    def probabilities(p, example):
        return jax.nn.softmax(scores(p, example["x"]))

    return JaxModel(loss=of_example, parameters=parameters, predict=probabilities).for_schema(SCHEMA)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("clip_norm", [0.5, 2.0, 100.0])
def test_sums_are_those_of_jax(torch, clip_norm):
    batch = make_batch(40)
    batch[USABLE][3] = False
    ours, clipped = sums(make_model(torch), batch, clip_norm=clip_norm)
    theirs, clipped_too = sums(jax_model(torch), batch, clip_norm=clip_norm)
    assert clipped == clipped_too
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() <= 40 * FAR
        assert np.abs(array).max() > 10_000


@pytest.mark.peers
def test_scaled_sums_are_those_of_jax(torch):
    batch, generator = make_batch(20), np.random.default_rng(1)
    models = make_model(torch), jax_model(torch)
    scales = {n: generator.uniform(0.5, 2, (1, *s)).astype(np.float32) for n, s in models[0].shapes().items()}
    ours, theirs = (sums(model, batch, clip_norm=2.0, scales=scales)[0] for model in models)
    assert all(np.abs(ours[name] - array).max() <= 20 * FAR for name, array in theirs.items())
    assert not same(ours, sums(models[0], batch, clip_norm=2.0)[0])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_those_of_opacus(torch):
    from opacus import GradSampleModule

    model, batch = make_model(torch, microbatch=16), make_batch(16)
    given = model._program(16)(model._all_parameters(), {name: batch[name] for name in ("x", "label", KEY)})
    peer = GradSampleModule(make_module(torch), loss_reduction="sum")
    scores = peer(torch.tensor(batch["x"]))
    torch.nn.functional.cross_entropy(scores, torch.tensor(batch["label"]).long(), reduction="sum").backward()
    for name, parameter in peer._module.named_parameters():
        np.testing.assert_allclose(given[name], parameter.grad_sample, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.peers
def test_plain_sums_and_losses_are_those_of_jax(torch):
    import jax

    batch, mask = make_batch(300), np.arange(300) < 290
    batch[USABLE][4] = False
    ours, theirs = make_model(torch), jax_model(torch)
    slopes = jax.jit(theirs.gradient_sum)(theirs.initial(), batch, mask)
    for name, array in ours.gradient_sum(ours.initial(), batch, mask).items():
        np.testing.assert_allclose(array, slopes[name], rtol=1e-3, atol=1e-3)
    for method in ("losses", "predict"):
        expected = jax.jit(getattr(theirs, method))(theirs.initial(), batch)
        for found, wanted in zip(getattr(ours, method)(ours.initial(), batch), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.peers
def test_a_copy_adds_the_same_in_any_company_in_torch(torch):
    model = make_model(torch, microbatch=8)
    batch, others = make_batch(8), make_batch(8, seed=9, scale=50.0)
    for position in (0, 3, 7):
        alone = sums(model, batch, np.arange(8) == position)[0]
        mixed = {name: array.copy() for name, array in others.items()}
        for name, array in batch.items():
            mixed[name][position] = array[position]
        everybody, without = sums(model, mixed)[0], sums(model, mixed, np.arange(8) != position)[0]
        assert same({name: everybody[name] - without[name] for name in alone}, alone)


@pytest.mark.peers
@pytest.mark.parametrize("microbatch", [None, 13])
def test_a_copy_adds_the_same_in_any_place_in_torch(torch, microbatch):
    torch.manual_seed(0)
    widths = ((1000, 10), (10, 10), (10, 1))
    module = torch.nn.Sequential(*(layer for w in widths for layer in (torch.nn.Linear(*w), torch.nn.Tanh())))
    schema = pa.schema({"x": pa.list_(pa.float32(), 1000), "t": pa.float32()})
    model = make_model(
        torch,
        schema=schema,
        module=module,
        loss=lambda m, e: (m(e["x"])[0] - e["t"]) ** 2,
        predict=None,
        microbatch=microbatch,
    )
    generator = np.random.default_rng(0)
    x, t = generator.normal(size=(150, 1000)).astype(np.float32), generator.normal(size=150).astype(np.float32)
    batch = make_batch(150) | {"x": x, "t": t}
    everybody = sums(model, batch, clip_norm=1000.0)[0]
    for leaver in (0, 60):
        alone = sums(model, batch, np.arange(150) == leaver, clip_norm=1000.0)[0]
        others = {name: np.delete(array, leaver, axis=0) for name, array in batch.items()}  # all after it move up
        without = sums(model, others, clip_norm=1000.0)[0]
        assert same({name: everybody[name] - without[name] for name in alone}, alone)


def with_words(torch, **changes):
    """A model that looks up one of ten words, and a batch of 20 that has a word for each row."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = torch.nn.Embedding(10, 5), torch.nn.Linear(5, 3)

        def forward(self, example):
            return self.head(self.words(example["word"]) + example["x"])

    def of_words(module, example):
        return torch.nn.functional.cross_entropy(module(example), example["label"])

    def probabilities(module, example):
        return torch.softmax(module(example), -1)

    torch.manual_seed(0)
    settings = {"module": Words(), "loss": of_words, "predict": probabilities, "microbatch": 8} | changes
    schema = SCHEMA.append(pa.field("word", pa.int64()))
    batch = make_batch(20) | {"word": np.arange(20, dtype=np.int32) % 10}
    return make_model(torch, schema=schema, **settings), batch


@pytest.mark.peers
def test_rows_that_raise_add_nothing(torch, capfd):
    (model, batch), raising = with_words(torch), [1, 9, 10, 19]
    kept, everything, own = ~np.isin(np.arange(20), raising), np.ones(20, bool), model.initial()
    expected, plain = sums(model, batch, kept), model.gradient_sum(own, batch, kept)
    before = (*model.losses(own, batch), *model.predict(own, batch))
    batch["word"][raising] = [50, -1, 10, 2**31 - 1]
    with pytest.raises(IndexError):
        model._program(8)(model._all_parameters(), {name: array[:8] for name, array in model._rows(batch).items()})
    found = sums(model, batch)
    assert same(found[0], expected[0])
    assert found[1] == expected[1]
    for name, array in model.gradient_sum(own, batch, everything).items():
        np.testing.assert_allclose(array, plain[name], rtol=1e-5, atol=1e-5)
    after = (*model.losses(own, batch), *model.predict(own, batch))
    assert all((now[kept] == then[kept]).all() for now, then in zip(after, before, strict=True))
    assert np.isnan(after[0][raising]).all()  # losses
    assert np.isnan(after[3][raising]).all()  # probabilities
    assert capfd.readouterr() == ("", "")


@pytest.mark.peers
def test_errors_of_the_model_are_reported(torch, monkeypatch):
    from coowned import interrupts

    def wrong(module, example):
        return module.words(example["word"] + 10).sum()

    with pytest.raises(IndexError):
        sums(*with_words(torch, loss=wrong, predict=None))

    model, batch = with_words(torch)
    model.check_independence()
    rows = {name: array[:8] for name, array in model._rows(batch).items()}
    for error in (MemoryError, KeyboardInterrupt, SystemExit):

        def failing(parameters, rows, error=error):
            raise error

        with monkeypatch.context() as patched:
            patched.setitem(model._programs, 8, failing)
            with pytest.raises(error):
                model._program_for_data()({}, rows)

    def short_of_memory(parameters, rows):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")  # whatever the rows are

    with monkeypatch.context() as patched:
        patched.setitem(model._programs, 8, short_of_memory)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            model._program_for_data()({}, rows)
    batch["word"][3] = 50
    monkeypatch.setattr(interrupts, "received", [2])  # its exception was lost, or ended as another
    with pytest.raises(KeyboardInterrupt):
        sums(model, batch)


@pytest.mark.peers
def test_frozen_parameters_stay(torch):
    module = make_module(torch)
    module[0].requires_grad_(False)
    model = make_model(torch, module=module)
    assert set(model.shapes()) == {"2.weight", "2.bias"}
    whole = jax_model(torch)
    found, _ = sums(model, make_batch(20), clip_norm=100.0)
    expected, _ = sums(whole, make_batch(20), clip_norm=100.0)
    assert all(np.abs(found[name] - expected[name]).max() <= 20 * FAR for name in found)
    module.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter is trained"):
        make_model(torch, module=module)
    with pytest.raises(InputError, match="must be float32: cast or freeze it"):
        make_model(torch, module=make_module(torch).bfloat16())


@pytest.mark.peers
def test_tied_parameters_are_one(torch):
    from coowned.torch.module_model import tensors

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(3, 5)
            self.head = torch.nn.Linear(5, 3, bias=False)
            self.head.weight = self.words.weight

    def of_tied(module, example):
        hidden = torch.tanh(module.words(example["label"]) + example["x"])
        return torch.nn.functional.cross_entropy(module.head(hidden), example["label"])

    model, batch = make_model(torch, module=Tied(), loss=of_tied, predict=None), make_batch(6)
    assert set(model.shapes()) == {"words.weight"}
    module = model.module
    total = torch.stack([of_tied(module, tensors({k: batch[k][i] for k in ("x", "label")})) for i in range(6)])
    total.sum().backward()
    found = sums(model, batch, clip_norm=100.0)[0]["words.weight"] * Grid.for_gradients(100.0).unit
    np.testing.assert_allclose(found, module.words.weight.grad, rtol=1e-4, atol=1e-4)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.peers
def test_batch_norm_is_refused(torch):
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(BatchCoupledLossError, match=r"layer '1' is a BatchNorm1d, .*use GroupNorm or LayerNorm"):
        make_model(torch, module=module)

    def of_one(module, example):
        return torch.nn.functional.cross_entropy(module(example["x"][None])[0], example["label"])

    sums(make_model(torch, module=module.eval(), loss=of_one, predict=None), make_batch(3))  # constants then


@pytest.mark.peers
def test_lazy_layers_are_refused(torch):
    for first in (torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d().eval()):
        module = torch.nn.Sequential(first, torch.nn.Linear(4, 3))
        with pytest.raises(InputError, match=r"'0\..*' has no shape yet.*call the module on one made-up example"):
            make_model(torch, module=module)
    module = torch.nn.Sequential(torch.nn.LazyLinear(3))
    module(torch.zeros(5))
    assert sums(make_model(torch, module=module), make_batch(3))[1] > 0


@pytest.mark.peers
def test_coupled_losses_are_refused_by_perturbation(torch):
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, slope):
            return slope

        @staticmethod
        def vmap(info, in_dims, x):
            return x - x.mean(dim=0), 0

    def coupled(module, example):
        return module(Centred.apply(example["x"])).sum()

    with pytest.raises(BatchCoupledLossError, match="changed when other examples of the batch did"):
        sums(make_model(torch, loss=coupled), make_batch(4))


def in_own_table(look_up):
    """A loss of a table that is made of the example, in which `look_up(table, indices)` looks up the example's."""

    def of_table(module, example):
        return example["weight"] * look_up(module(example["x"][:, None]), example["p"]).sum()

    return of_table


TABLES = pa.schema({"x": pa.list_(pa.float32(), 3), "p": pa.list_(pa.int64(), 2), "weight": pa.float32()})


def table_model(torch, look_up, microbatch=8):
    torch.manual_seed(0)
    module = torch.nn.Linear(1, 2)
    return make_model(
        torch, TABLES, module=module, loss=in_own_table(look_up), predict=None, microbatch=microbatch
    ), make_tables(8)


def make_tables(rows, seed=0):
    generator = np.random.default_rng(seed)
    return {
        "x": generator.normal(size=(rows, 3)).astype(np.float32),
        "p": generator.integers(0, 3, (rows, 2)).astype(np.int32),
        "weight": np.ones(rows, np.float32),
        KEY: generator.integers(0, 2**32, (rows, 2), np.uint32),
        USABLE: np.ones(rows, bool),
    }


def own_function(torch):
    class Own(torch.autograd.Function):
        """A lookup with a derivative of its own."""

        generate_vmap_rule = True

        @staticmethod
        def forward(table, p):
            return torch.nn.functional.embedding(p, table)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[1])
            ctx.length = len(inputs[0])

        @staticmethod
        def backward(ctx, slope):
            return torch.ops.aten.embedding_dense_backward(slope, ctx.saved_tensors[0], ctx.length, -1, False), None

    return Own


def unchecked(torch):
    """Calls that `vmap` does for the tables of all examples at once, and calls that check nothing."""
    functional = torch.nn.functional
    return {
        "functional": lambda table, p: functional.embedding(p, table),
        "own function": lambda table, p: own_function(torch).apply(table, p),
        "by name": lambda table, p: functional.embedding(input=p, weight=table),
        "torch": lambda table, p: torch.embedding(table, p),
        "aten": lambda table, p: torch.ops.aten.embedding(table, p),
        "overload": lambda table, p: torch.ops.aten.embedding.default(table, p),
        "inner vmap": lambda table, p: torch.func.vmap(lambda index: functional.embedding(index, table))(p),
        "index_fill": lambda table, p: table.index_fill(0, p, 0.0),
        "index_fill_": lambda table, p: (1 * table).index_fill_(1, p, 0.0),
        "bincount": lambda table, p: torch.bincount(p, minlength=3)[:, None] * table,
        "ctc_loss": lambda table, p: functional.ctc_loss(
            table.log_softmax(-1), p[:1], torch.tensor(3), torch.tensor(1)
        ),
        "repeat_interleave": lambda table, p: table[:2].repeat_interleave(
            torch.stack([p[0], 2 - p[0]]), 0, output_size=2
        ),
        "repeats": lambda table, p: table[torch.repeat_interleave(torch.stack([p[0], 2 - p[0]]), output_size=2)],
        "segment_reduce": lambda table, p: torch.segment_reduce(table, "sum", offsets=p),
        "embedding_bag": lambda table, p: functional.embedding_bag(torch.tensor([0, 1]), table, p, mode="sum"),
        **{
            padding: lambda table, p, padding=padding: functional.grid_sample(
                table[None, None], p.float()[None, None, None], padding_mode=padding, align_corners=True
            )
            for padding in ("border", "reflection")  # a number that is none is a place far away
        },
    }


@pytest.mark.peers
@pytest.mark.parametrize("microbatch", [1, 8])
def test_unchecked_indices_are_refused(torch, microbatch):
    for look_up in unchecked(torch).values():
        model, batch = table_model(torch, look_up, microbatch)
        with pytest.raises(BatchCoupledLossError, match="one out of range reaches into other examples"):
            sums(model, batch)
    # What is the same for all examples on one side cannot reach into another example.
    positions = torch.tensor([0, 2])
    model, batch = table_model(torch, lambda table, p: torch.nn.functional.embedding(positions, table) * p[0])
    assert sums(model, batch)[1] > 0


@pytest.mark.peers
def test_operations_of_other_libraries_are_refused(torch):
    """Nobody knows where they look: torchvision's `roi_align` takes the number of an image from a float."""
    with torch.library._scoped_library("elsewhere", "DEF") as library:
        library.define("look(Tensor table, Tensor place) -> Tensor")
        library.impl("look", lambda table, place: table[place.long()], "CompositeExplicitAutograd")
        model, batch = table_model(torch, lambda table, p: torch.ops.elsewhere.look(table.detach(), p.float()))
        with pytest.raises(BatchCoupledLossError, match="calls look with numbers that differ"):
            sums(model, batch)


@pytest.mark.peers
@pytest.mark.parametrize("microbatch", [2, 3, 8, 64])
@pytest.mark.parametrize("length", [2, 3, 50, 1000])
def test_the_probe_finds_a_lookup_that_no_name_tells(torch, length, microbatch, monkeypatch):
    monkeypatch.setattr(module_model, "refuse_unchecked_indices", lambda rows: contextlib.nullcontext())

    own = own_function(torch)

    def look_up(table, p):
        return own.apply(table.repeat(length, 1)[:length], p)

    model, batch = table_model(torch, look_up, microbatch)
    with pytest.raises(BatchCoupledLossError, match="lookups that an index out of range takes into another example"):
        sums(model, batch)


def networks(torch):
    """Parameters, and what they make of tokens (2,) and numbers (3,): layers that use integers in usual ways."""
    nn, functional = torch.nn, torch.nn.functional

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.positions, self.bag = nn.Embedding(50, 4), nn.Embedding(9, 4), nn.EmbeddingBag(50, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.convolution, self.last = nn.Conv2d(1, 2, 2), nn.Linear(4, 3)

        def forward(self, p, x):
            mask = p > 0
            tokens = self.table(p) + self.positions(torch.cumsum(mask, 0)) + self.bag(p[None])
            seen, _ = self.attention(tokens[None], tokens[None], tokens[None], key_padding_mask=mask[None] & False)
            image = self.convolution(torch.outer(x.repeat(2), x.repeat(2))[None, None])
            values, places = functional.max_pool2d(image, 2, return_indices=True)
            unpooled = functional.max_unpool2d(values, places, 2, output_size=image.shape[-2:]).sum()
            pooled = functional.adaptive_max_pool2d(image, 2).sum() + functional.max_pool1d(x[None], 2).sum()
            return self.last(seen.sum((0, 1))) + unpooled + pooled + x.sort().values[0] + x.topk(2).values.sum()

    return Pooled()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_layers_that_use_integers_can_be_trained(torch):
    """Also after the rule that refuses what is not known to check indices, one row out of range adds nothing."""

    def of_tokens(module, example):
        return functional.cross_entropy(module(example["p"], example["x"]), example["p"][0] % 3)

    functional = torch.nn.functional
    model = make_model(torch, TABLES, module=networks(torch), loss=of_tokens, predict=None, microbatch=8)
    model.check_independence()
    batch = make_tables(8)
    assert sums(model, batch)[1] == 8
    for value in (50, -1, 2**31 - 1):
        batch["p"][3] = value
        mask = np.arange(8) != 3
        assert same(sums(model, batch)[0], sums(model, batch, mask)[0])


@pytest.mark.peers
def test_dropout_is_refused(torch):
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
    with pytest.raises(InputError, match=r"draws random numbers \(dropout\)"):
        sums(make_model(torch, module=module), make_batch(4))
    sums(make_model(torch, module=module.eval()), make_batch(4))


@pytest.mark.peers
def test_losses_that_look_at_values_are_refused(torch):
    def looks(module, example):
        given = loss(module, example)
        return given if given.item() > 0 else -given

    with pytest.raises(InputError, match="may not look at values"):
        sums(make_model(torch, loss=looks), make_batch(4))
    for wrong in (lambda m, e: m(e["x"]), lambda m, e: loss(m, e).double(), lambda m, e: 0.0):
        with pytest.raises(InputError, match="one float32 number"):
            _ = make_model(torch, loss=wrong, microbatch=2).program_digest


@pytest.mark.peers
def test_torch_memory_limit_is_kept(torch):
    module = torch.nn.Linear(5, 20_000, bias=False)

    def wide(module, example):
        return module(example["x"]).square().sum()

    changes = {"module": module, "loss": wide, "predict": None}
    model = make_model(torch, **changes, memory_limit="6MB")
    assert model.rows_at_once >= 2
    assert model.memory_of(model.rows_at_once) <= 6e6
    assert model.memory_of(2 * model.rows_at_once) > 6e6
    assert model.memory_of(4) >= 4 * 4 * 100_000  # the gradients alone
    with pytest.raises(InputError, match=r"needs \d+ MB, and memory_limit is 1 MB; raise it"):
        _ = make_model(torch, **changes, memory_limit="1MB").rows_at_once
    assert make_model(torch).rows_at_once == 128  # of a small model


@pytest.mark.peers
def test_torch_description_follows_the_model(torch):
    scale = torch.tensor(2.0)

    def scaled(module, example):
        return loss(module, example) * scale

    frozen = make_module(torch)
    frozen[0].requires_grad_(False)
    other = make_module(torch)
    other[0].requires_grad_(False)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    usual = make_model(torch, microbatch=4).describe()
    assert make_model(torch, microbatch=4).describe() == usual
    found = [make_model(torch, microbatch=4, **c).describe() for c in ({"loss": scaled}, {"module": frozen})]
    scale += 1
    found += [make_model(torch, microbatch=4, **c).describe() for c in ({"loss": scaled}, {"module": other})]
    found.append(make_model(torch, microbatch=2).describe())
    programs = [one["program"] for one in (usual, *found)]
    assert len(set(programs)) == len(programs)
    assert usual["torch"] == torch.__version__


# ---- what an example looks like --------------------------------------------------------------------------------------


@pytest.mark.peers
def test_shapes_come_from_the_schema_alone(torch):
    assert [(e.name, e.shape, e.whole) for e in make_model(torch).entries] == [("x", (5,), False), ("label", (), True)]
    assert make_model(torch).classes == (0, 1, 2)
    with pytest.raises(InputError, match="must return probabilities"):
        make_model(torch, predict=lambda m, e: m(e["x"]))
    with pytest.raises(InputError, match="module must be a"):
        make_model(torch, module=3)


@pytest.mark.peers
def test_rows_that_cannot_be_encoded_add_nothing(torch):
    import coowned as co
    from coowned.torch import TorchModel

    def encode(row):
        numbers = [float(word) for word in row["note"].split()]
        return {"x": torch.tensor(numbers or [0.0] * 5)}

    model = TorchModel(
        module=make_module(torch), loss=loss, predict=predict, columns=["label"], encode=encode, encode_columns=["note"]
    )
    rows = [
        ("1 2 3 4 5", 1),
        ("1 2 3", 1),
        ("one", 2),
        (None, 0),
        ("1 2 3 4 nan", 0),
        ("1 2 3 4 5", 9),
        ("5 4 3 2 1", 0),
    ]
    table = {"users": [["u"]] * len(rows), "note": [note for note, _ in rows], "label": [label for _, label in rows]}
    examples = co.from_table(table)
    fitted = model.for_schema(examples.payload.schema)
    read = model.reader(fitted)(examples)
    assert read.usable.tolist() == [True, False, False, False, False, False, True]
    assert read.arrays["x"][[0, 6]].tolist() == [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
    assert not read.arrays["x"][1:6].any()
    with pytest.raises(InputError, match="encode must take a row without content"):
        TorchModel(module=make_module(torch), loss=loss, encode=lambda row: row["note"][0]).for_schema(SCHEMA)
    with pytest.raises(InputError, match="encode reads column 'body', which the data do not have; they have x, label"):
        TorchModel(module=make_module(torch), loss=loss, encode=lambda row: {"x": row["body"]}).for_schema(SCHEMA)
    with pytest.raises(InputError, match="no column 'body'"):
        TorchModel(module=make_module(torch), loss=loss, encode=encode, encode_columns=["body"]).for_schema(SCHEMA)


VOCABULARY: dict[str, int] = {}


def number_of(word):
    return VOCABULARY.setdefault(word, len(VOCABULARY))


class Numbers:
    """Numbers words in the order in which it sees them."""

    def __init__(self):
        self.seen: dict[str, int] = {}

    def __call__(self, row):
        return {"word": self.seen.setdefault(row["note"], len(self.seen))}

    def of(self, row):
        return self(row)


@pytest.mark.peers
def test_one_rows_key_reaches_no_encoder(torch, tmp_path):
    """In JSON lines one person's key makes a column: what `encode` makes of another's row must not tell."""

    from coowned.torch import TorchModel

    def tokens_of(rows, **settings):
        (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        examples = read_jsonl(tmp_path / "d.jsonl", users="users")
        model = TorchModel(
            module=torch.nn.Embedding(50, 4), loss=lambda m, e: m(e["words"]).sum(), columns=[],
            encode=lambda row: {"words": [len(" ".join(map(str, row.values())))]}, **settings,
        )  # fmt: skip
        _, table, _ = model.task(examples.payload.schema, folder=tmp_path, is_private=True).read(examples)
        return table.arrays["words"].tolist()

    rows = [{"users": ["a"], "note": "hello"}, {"users": ["b"], "note": "hi"}]
    more = [rows[0], {**rows[1], "zoo": "1"}]
    assert tokens_of(rows, encode_columns=["note"]) == tokens_of(more, encode_columns=["note"]) == [[5], [2]]
    with pytest.raises(InputError, match="name the columns that encode reads"):
        tokens_of(more)


def encoders_that_remember():
    vocabulary: dict[str, int] = {}
    last = ["", ""]

    def of_the_row_before(row):
        last[:] = last[1], row["note"]
        return {"word": len(last[0])}

    def counted(row, seen=[0]):  # noqa: B006
        seen[0] += 1
        return {"word": seen[0]}

    return {
        "around it": lambda row: {"word": vocabulary.setdefault(row["note"], len(vocabulary))},
        "global": lambda row: {"word": VOCABULARY.setdefault(row["note"], len(VOCABULARY))},
        "of a helper": lambda row: {"word": number_of(row["note"])},
        "of its object": Numbers(),
        "of a method": Numbers().of,
        "the row before": of_the_row_before,
        "a counter": counted,
    }


@pytest.mark.peers
@pytest.mark.parametrize("kind", encoders_that_remember())
def test_an_encoder_that_remembers_is_refused(torch, kind):
    import coowned as co
    from coowned.torch import TorchModel

    def table_by(encode):
        module = torch.nn.Embedding(100, 1)
        spec = TorchModel(
            module=module, loss=lambda m, e: m(e["word"]).sum(), encode=encode, encode_columns=["note"], columns=[]
        )
        return spec.reader(spec.for_schema(examples.payload.schema))(examples)

    notes = [f"{'word ' * (i % 7)}{i % 50}" for i in range(200)]
    examples = co.from_table({"users": [["u"]] * 200, "note": notes})
    VOCABULARY.clear()
    with pytest.raises(InputError, match=r"keeps what it has seen .* This is about the code, not about that row"):
        table_by(encoders_that_remember()[kind])

    fixed, cache = {note: number for number, note in enumerate(dict.fromkeys(notes))}, {}

    def remembers_harmlessly(row):
        if row["note"] not in cache:
            cache[row["note"]] = fixed.get(row["note"], 99)
        return {"word": cache[row["note"]]}

    assert table_by(remembers_harmlessly).arrays["word"].tolist() == [fixed[note] for note in notes]
    assert len(cache) == len(fixed) + 1


@pytest.mark.peers
@pytest.mark.parametrize("kind", encoders_that_remember())
def test_an_encoder_that_remembers_other_pieces_is_refused(torch, kind, tmp_path):
    """Files of one row each, so that no piece has two rows to be read in another order."""
    import polars as pl

    from coowned.attribution.sources import DataSource
    from coowned.content.splits import split_examples
    from coowned.torch import TorchModel

    def load(encode):
        module = torch.nn.Embedding(100, 1)
        spec = TorchModel(
            module=module, loss=lambda m, e: m(e["word"]).sum(), encode=encode, encode_columns=["note"], columns=[]
        )
        examples = DataSource(path=tmp_path, users=["users"], example_id="id").read(content=False)
        assert examples.content is not None
        task = spec.task(examples.schema, folder=tmp_path, is_private=False)
        return task.load(examples, split_examples(examples.graph))

    notes = [f"{'word ' * (i % 7)}{i}" for i in range(20)]
    for i, note in enumerate(notes):
        pl.DataFrame({"id": [i], "users": [["u"]], "note": [note]}).write_parquet(tmp_path / f"{i:02}.parquet")
    VOCABULARY.clear()
    with pytest.raises(InputError, match="keeps what it has seen"):
        load(encoders_that_remember()[kind])
    assert load(lambda row: {"word": len(row["note"])}).private_log == {"unusable_rows": 0}
