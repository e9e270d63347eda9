"""Several workers train what one trains: the same bits, and nothing where they do not belong together."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from tests.small_world import NUM_FEATURES, Small
from tests.training.thread_workers import together

from coowned import JaxModel, TextClassifier, from_table
from coowned.content.data import with_norms
from coowned.content.text import SPECIAL_TOKENS, Vocabulary
from coowned.content.token_table import TokenTable
from coowned.errors import CertificateMismatchError, InputError
from coowned.exact.keys import RunKey
from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel
from coowned.models.logistic_regression import LogisticRegression
from coowned.selection.shards import SHARDS, shards_of
from coowned.synthetic.logistic_data import LogisticData, WorldData
from coowned.training.loop import Trainer, train
from coowned.training.plan import Checkpoint
from coowned.training.workers import ALONE, Share, agree, send, summed

MODEL = LogisticRegression(num_features=NUM_FEATURES)


class Enough(Exception):
    pass


def trained(plan, data, workers=ALONE, *, model=MODEL, start=None, stop=None):
    """(the parameters, the metrics, the last checkpoint) of one worker."""
    trainer = Trainer([plan], model, workers=workers)
    state, rows, first, kept = trainer.initial_state(model.initial()), [], 0, []
    begun = trainer.sent(start if workers.rank == 0 else None, state)
    if begun is not None:
        state, rows, first = trainer.restore(state, begun)

    def after(step, current, log):
        kept[:] = [Checkpoint(step + 1, trainer.tensors(current, log)), current]
        if stop is not None and step + 1 == stop:
            raise Enough

    try:
        state = trainer.run(with_norms(data), state, rows, start=first, after=after)
    except Enough:
        state = kept[1]
    return trainer.released(state), rows, kept[0]


def same(first, second):
    return all(np.array_equal(first[name].view(np.uint32), second[name].view(np.uint32)) for name in first)


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf", "cyclic-dp-mf", "random-allocation"])
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_workers_gives_the_same_bits(small, kind, count):
    plan = small.plan(kind)
    alone, metrics, _ = trained(plan, small.data)
    for parameters, rows, _ in together(count, lambda workers: trained(plan, small.data, workers)):
        assert same(parameters, alone)
        for found, expected in zip(rows, metrics, strict=True):
            assert found.copies == expected.copies
            assert int(found.clipped) == int(expected.clipped)
            np.testing.assert_allclose(float(found.loss), float(expected.loss), rtol=1e-5)
    other = dataclasses.replace(plan, run_key=RunKey.from_seed(99))
    assert not same(trained(other, small.data)[0], alone)


def square_loss(parameters, example, key):
    import jax

    score = parameters["w"] @ example["x"] + parameters["b"]
    return (score + 0.1 * jax.random.normal(key) - example["y"]) ** 2


VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *(f"w{number}" for number in range(20))))
BERT = {
    "config": BertConfig(
        vocab_size=VOCABULARY.size, hidden_size=8, num_hidden_layers=1, intermediate_size=8, max_position_embeddings=12
    ),
    "sequence_length": 12,
    "microbatch": 4,
}


@functools.cache
def content_of(kind):
    """(a small data set of two or one users an example, a model of this kind)."""
    rows = [
        {
            "users": [f"u{i % 120}", f"u{(7 * i + 1) % 120}"][: 1 + (i % 3 == 0)],
            "text": " ".join(f"w{(i * j) % 20}" for j in range(1 + i % 9)),
            "y": i % 2,
            "x": [np.sin(i), np.cos(2 * i)],
        }
        for i in range(300)
    ]
    examples = from_table(rows)
    if kind == "bert":
        table = TokenTable.from_examples(examples, text="text", vocabulary=VOCABULARY, sequence_length=12)
        return Small(examples.graph, None, table), BertModel.masked_lm(**BERT)  # type: ignore[arg-type]
    if kind == "text":
        specification = TextClassifier(text="text", label="y", num_features=64)
    else:
        start = {"w": np.ones(2, np.float32), "b": np.zeros((), np.float32)}
        specification = JaxModel(loss=square_loss, parameters=start, shapes={"x": [2]}, columns=["x", "y"])
    task = specification.task(examples.schema, folder=Path(), is_private=True)
    model, table, _ = task.read(examples)
    return Small(examples.graph, None, table), model  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ["dp-sgd", "dp-mf", "cyclic-dp-mf", "random-allocation"])
@pytest.mark.parametrize("kind", ["text", "own", pytest.param("bert", marks=pytest.mark.full)])
def test_every_model_has_the_same_bits(kind, mechanism):
    small, model = content_of(kind)
    plan = small.plan(mechanism, iterations=6)
    alone, *_ = trained(plan, small.data, model=model)
    assert not same(alone, model.initial())
    for count in (2, 3):
        found = together(count, lambda workers: trained(plan, small.data, workers, model=model))
        assert all(same(parameters, alone) for parameters, *_ in found)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2), (1, 3)])
def test_resumed_on_another_number(small, before, after):
    plan = small.plan()
    alone, *_ = trained(plan, small.data)
    stopped = together(before, lambda workers: trained(plan, small.data, workers, stop=5))
    checkpoint = stopped[0][2]
    assert checkpoint.step == 5
    resumed = together(after, lambda workers: trained(plan, small.data, workers, start=checkpoint))
    assert all(same(parameters, alone) for parameters, *_ in resumed)


def copies_of(batch):
    return list(zip(batch.examples[batch.mask], batch.copy_numbers[batch.mask], strict=True))


def test_every_copy_is_one_workers(small):
    plan = small.plan()
    batches, shards = plan.batches(), shards_of(small.graph)
    assert shards.min() >= 0
    assert shards.max() < SHARDS
    for count in range(2, 6):
        for step in range(plan.iterations):
            drawn = batches.batch(step)
            settings = {"batch_size": batches.batch_size, "multiple_of": batches.multiple_of}
            parts = [Share(shards, rank, count).of(drawn, **settings) for rank in range(count)]
            assert sorted(copy for part in parts for copy in copies_of(part)) == sorted(copies_of(drawn))
            assert all(part.physical_size % batches.multiple_of == 0 for part in parts)


def test_shards_follow_the_ids(small):
    some = np.arange(7, 300, 3)
    assert np.array_equal(shards_of(small.graph.subgraph(some)), shards_of(small.graph)[some])


def test_a_wrong_count_stops_the_run():
    sums, mask = {"w": np.ones((1, 2), np.int64)}, np.array([True, True, False])
    right = together(2, lambda workers: summed(workers, sums, 1, mask, 4))
    assert all(found["w"].tolist() == [[2, 2]] and clipped == 2 for found, clipped in right)
    with pytest.raises(CertificateMismatchError, match="2 workers hold 4 copies of a step for which 3 were drawn"):
        together(2, lambda workers: summed(workers, sums, 1, mask, 3))


def test_coins_with_keys_of_their_own_stop_the_run(small):
    plan = small.plan()

    def work(workers):
        key = RunKey.from_seed(workers.rank)
        return trained(dataclasses.replace(plan, run_key=key), small.data, workers)

    with pytest.raises(CertificateMismatchError, match="nothing was released"):
        together(2, work)


def test_workers_that_differ_are_refused():
    together(3, lambda workers: agree(workers, {"code": "a", "data set": "b"}))
    with pytest.raises(InputError, match="worker 2 has another data set than worker 0"):
        together(3, lambda workers: agree(workers, {"code": "a", "data set": f"b{workers.rank // 2}"}))


@pytest.mark.parametrize("content", [b"", b"x", b"12345678", bytes(range(256)) * 5])
def test_worker_0_sends_bytes(content):
    assert together(3, lambda workers: send(workers, content if workers.rank == 0 else None)) == [content] * 3
    assert send(ALONE, content) == content


class Memory:
    """A folder in memory."""

    is_begun = False

    def __init__(self, workers):
        self.workers = workers

    def begin(self, run):
        self.run = run

    def save(self, step, tensors):
        pass

    def finish(self, models, files):
        pass


def test_other_data_are_refused_before_the_first_step(small):
    plan, stepped = small.plan(), []
    other = WorldData.part(LogisticData(num_features=NUM_FEATURES).attach(small.graph, seed=6))

    def work(workers):
        data = other if workers.rank else small.data
        train(plan, MODEL, data, folder=Memory(workers), on_metrics=stepped.append)

    with pytest.raises(InputError, match="worker 1 has another data set"):
        together(2, work)
    assert not stepped


def test_floating_point_sums_are_refused(small):
    plan = small.plan(guarantee=None, clip_norm=None)
    with pytest.raises(InputError, match="several processes need a clip_norm"):
        together(2, lambda workers: train(plan, MODEL, small.data, folder=Memory(workers)))
