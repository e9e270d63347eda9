"""Classes of texts by hashed n-grams."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pytest

import coowned as co
from coowned import InputError, from_table
from coowned.attribution.tables import examples_without_users
from coowned.cli import main
from coowned.exact.sparse_sums import ONE, SparseRows, clipped_sparse_sums
from coowned.models.text_classifier import TextClassifier
from coowned.runs.config import TrainConfig
from coowned.training.evaluate import example_losses, predictions

SUBJECTS = ["lunch on friday", "the budget", "patch for the parser", None, "parser crash on friday"]
BODIES = ["pizza?", "numbers attached", "see below", "", "core dumped"]
FOLDERS = ["club", "work", "code", "work", "other"]
CLASSES = ("club", "work", "code")
MODELS = [
    TextClassifier(text=["subject", "body"], label="folder", classes=CLASSES, num_features=256),
    TextClassifier(text=["subject", "body"], label="folder", classes=["work", "code"], num_features=256),
]


def examples(**changed):
    columns = {"subject": SUBJECTS, "body": BODIES, "folder": FOLDERS, **changed}
    return from_table(pa.table({"users": [[f"u{row}"] for row in range(len(columns["body"]))], **columns}))


def read(model, given=None, **settings):
    given = examples() if given is None else given
    return model.task(given.payload.schema, folder=None, is_private=True, **settings).read(given)


def batch_of(table, count=5):
    kinds = table.dtypes()
    out = {name: np.zeros((count, *shape), kinds[name]) for name, shape in table.shapes().items()}
    table.fill(np.arange(count), out)
    return out


def parameters_of(model, seed=0):
    shape = model.shapes()["coefficients"]
    return {"coefficients": np.random.default_rng(seed).normal(size=shape).astype(np.float32)}


@pytest.mark.parametrize("model", MODELS)
def test_gradient_is_that_of_the_mechanism(model):
    """In place, as a run reads it, and from padded arrays."""
    _, table, _ = read(model)
    parameters, mask = parameters_of(model)["coefficients"][None], np.ones(5, bool)
    batch, grids = batch_of(table), [model.grid(0.3)]
    rows = SparseRows.from_padded(batch["indices"], batch["values"])
    expected = clipped_sparse_sums(parameters, rows, batch["labels"], mask, grids)
    in_place = {"features": table.in_place(np.arange(5)), "labels": batch["labels"]}
    for given in (batch, in_place):
        ours, clipped = model.clipped_sum({"coefficients": parameters}, given, mask, grids)
        assert np.array_equal(ours["coefficients"], expected[0])
        assert clipped == expected[1]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_short(model):
    """A row of length 1 and the intercept's feature, times residuals of length 1, or sqrt(2)."""
    _, table, _ = read(model)
    batch, grid = batch_of(table), model.grid(1000.0)
    longest = 0.0
    for seed in range(20):
        parameters = 30 * parameters_of(model, seed)["coefficients"][None]
        for row in range(5):
            mask = np.arange(5) == row
            sums, clipped = model.clipped_sum({"coefficients": parameters}, batch, mask, [grid])
            assert clipped == 0
            longest = max(longest, grid.unit * math.sqrt(float((sums["coefficients"].astype(float) ** 2).sum())))
    assert 1.3 < longest <= (2.0 if len(model.classes) > 2 else math.sqrt(2)) * 1.01


@pytest.mark.parametrize("model", MODELS)
def test_plain_gradient(model):
    """Against gradients that are rounded, and not clipped, one by one; and against JAX."""
    _, table, _ = read(model)
    parameters, batch, mask = parameters_of(model), batch_of(table), np.arange(5) < 4
    grid = model.grid(10.0)
    exact, clipped = model.clipped_sum({"coefficients": parameters["coefficients"][None]}, batch, mask, [grid])
    assert clipped == 0
    plain = jax.jit(model.gradient_sum)(parameters, batch, mask)["coefficients"]
    np.testing.assert_allclose(plain, exact["coefficients"][0] * grid.unit, atol=1e-3)

    def total(own):
        losses = model.losses(own, batch)[0]
        return jax.numpy.where(mask & np.isfinite(batch["labels"]), losses, 0).sum()

    usable = {"coefficients": parameters["coefficients"]}
    assert np.isfinite(total(usable))


@pytest.mark.parametrize("model", MODELS)
def test_losses_and_predictions_are_those_of_numpy(model):
    _, table, counts = read(model)
    assert counts == {
        "unusable_rows": 5 - sum(folder in model.classes for folder in FOLDERS),
        "truncated_texts": 0,
        "empty_texts": 1,
    }
    parameters = parameters_of(model)
    batch = batch_of(table)
    dense = np.zeros((5, 257))
    for i in range(5):
        np.add.at(dense[i], batch["indices"][i], batch["values"][i] / ONE)
    dense[:, 256] = 1
    scores = dense @ np.atleast_2d(parameters["coefficients"]).T.astype(float)
    if scores.shape[1] == 1:
        scores = np.append(np.zeros((5, 1)), scores, axis=1)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found, probability = jax.jit(model.predict)(parameters, batch)
    np.testing.assert_array_equal(found, scores.argmax(axis=1))
    expected = np.where(np.abs(dense[:, :256]).sum(axis=1) > 0, chances.max(axis=1), np.nan)  # one has no words
    np.testing.assert_allclose(probability, expected, rtol=1e-4)
    losses, right = example_losses(model, parameters, table)
    for i, folder in enumerate(FOLDERS):
        if folder in model.classes:
            number = list(model.classes).index(folder)
            assert losses[i] == pytest.approx(-math.log(chances[i, number]), rel=1e-3)
            assert right[i] == (found[i] == number)
        else:
            assert not np.isfinite(losses[i])
    several = model.losses({"coefficients": np.stack([parameters["coefficients"]] * 2)}, batch)[0]
    np.testing.assert_allclose(several[:, 1], np.float32(losses), rtol=1e-5)


def test_unselected_texts_are_not_read():
    """What the task is given is all it reads: `Task.load` takes the rows first."""
    model, given = MODELS[0], examples()
    task = model.task(given.payload.schema, folder=None, is_private=True)
    copies, splits = np.array([1, 0, 0, 1, 0]), {"train": np.arange(5)}
    content = task.load(given, splits, copies)
    other = task.load(examples(body=["pizza?", "secret", "secret", "", "secret"]), splits, copies)
    assert content.parts["train"].digest == other.parts["train"].digest
    assert content.private_log["empty_texts"] == 1


def test_predicting_needs_no_labels():
    given = from_table(pa.table({"users": [["a"]], "subject": ["x"], "body": ["y"]}))
    _, table, _ = read(MODELS[0], given, labels=False)
    assert np.isnan(table.labels).all()
    with pytest.raises(InputError, match="no column 'folder'"):
        read(MODELS[0], given)


def test_text_labels_need_declared_classes():
    with pytest.raises(InputError, match="declare its classes"):
        read(dataclasses.replace(MODELS[0], classes=2))


def test_arrays_round_trip():
    for model in MODELS:
        parameters = parameters_of(model)
        arrays = model.to_arrays(parameters)
        assert np.array_equal(model.from_arrays(arrays)["coefficients"], parameters["coefficients"])
        with pytest.raises(InputError):
            dataclasses.replace(model, num_features=255).from_arrays(arrays)


def test_bad_models():
    for settings in ({"num_features": 1}, {"classes": 1}, {"text": []}, {"word_ngrams": (), "character_ngrams": ()}):
        with pytest.raises(InputError):
            TextClassifier(**settings)
    with pytest.raises(InputError, match="sparse rows"):
        MODELS[0].check_data({"features": (3,), "labels": ()})


def test_a_text_without_words_has_no_prediction():
    model = TextClassifier(num_features=64, character_ngrams=())
    task = model.task(pa.schema({"text": pa.string()}), folder=Path(), is_private=False, labels=False)
    _, table, _ = task.read(examples_without_users({"text": ["some words", None, " ... "]}))
    found = predictions(model, model.initial(), table, probabilities=True)
    assert found["prediction"].to_list() == [0, None, None]
    assert found["probability_1"].to_list() == [0.5, None, None]
    assert found["probability"].to_list() == [0.5, None, None]


def test_the_example_file_sorts_mail(tmp_path):
    """Its columns are those of mail, and mail that says something is sorted better than by guessing."""
    words = {"work": ["budget", "invoice"], "family": ["birthday", "cake", "aunt"], "club": ["goal", "match"]}
    generator = np.random.default_rng(0)
    for folder, own in words.items():
        (tmp_path / "mail" / folder).mkdir(parents=True)
        for number in range(150):
            user, said = f"u{generator.integers(400)}", " ".join(generator.choice(own, 5))
            head = f"From: {user}@x.org\nMessage-ID: <{folder}{number}@x>\nSubject: the {said}\n\n"
            (tmp_path / "mail" / folder / f"{number}.eml").write_text(f"{head}Hello, this is about {said}.\n")
    text = (Path(__file__).parents[2] / "examples" / "mail_classifier.toml").read_text()
    text = text.replace("iterations = 500", "iterations = 40").replace("batch_size = 256", "batch_size = 100")
    (tmp_path / "run.toml").write_text(text.replace("# seed = 0", "seed = 0"))
    config = TrainConfig.read(tmp_path / "run.toml")
    assert config.model == TextClassifier(
        text=["subject", "text"], label="folder", classes=["work", "family", "club"], num_features=16384
    )
    assert main.run(["train", str(tmp_path / "run.toml"), "-o", str(tmp_path / "RUN")]) == 0
    run = co.open_run(tmp_path / "RUN")
    found = run.predict({"subject": ["the invoice", "cake for aunt"], "text": ["budget", "birthday"]})
    assert found["prediction"].to_list() == ["work", "family"]
