"""Linear models on the embeddings of a frozen public encoder."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.report.readme import run_readme

import coowned as co
from coowned import InputError
from coowned.accounting.privacy_guarantee import model_metadata
from coowned.accounting.statement import encoder_sentences
from coowned.cli import main
from coowned.models.embedding_classifier import EmbeddingClassifier
from coowned.models.embedding_regression import EmbeddingRegression
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.text_encoder import TextEncoder

WORDS = {"work": ["budget", "invoice", "meeting"], "family": ["birthday", "cake", "aunt"]}
TRAINED_ON = "a made-up corpus"


@pytest.fixture(scope="module")
def mail():
    generator = np.random.default_rng(0)
    rows = []
    for number in range(300):
        label = ("work", "family")[number % 2]
        said = " ".join(generator.choice(WORDS[label], 3))
        rows.append(
            {"users": [f"u{generator.integers(200)}"], "body": f"the {said}", "folder": label, "stars": number % 5}
        )
    return rows


def classifier(folder, **changed):
    settings = {"text": "body", "label": "folder", "classes": ["work", "family"], **changed}
    return EmbeddingClassifier(encoder=str(folder), encoder_trained_on=TRAINED_ON, **settings)


def read(model, rows, **settings):
    examples = co.from_table(rows)
    return model.task(examples.payload.schema, folder=Path(), is_private=True, **settings).read(examples)


def fit(model, rows, **settings):
    return co.fit(
        co.from_table(rows),
        model,
        epsilon=8.0,
        delta=1e-6,
        adjacency="zero-out",
        selector=co.Greedy(contribution_bound=2),
        batch_size=60,
        iterations=40,
        learning_rate=0.2,
        **settings,
    )


@pytest.fixture(scope="module")
def run(encoder_folder, mail, tmp_path_factory):
    return fit(classifier(encoder_folder), mail, folder=tmp_path_factory.mktemp("runs") / "RUN", seed=0)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_it_is_the_linear_model_on_rows(encoder_folder, mail, kind):
    """Integer for integer, of the embeddings as one list column."""
    if kind == "classes":
        ours: object = classifier(encoder_folder)
        plain: object = LogisticRegression(num_features=16, label="folder", classes=["work", "family"])
    else:
        ours = EmbeddingRegression(text="body", target="stars", target_bound=3.0, encoder=str(encoder_folder))
        plain = LinearRegression(num_features=16, target="stars", target_bound=3.0)
    model, table, counts = read(ours, mail)
    assert counts == {"unusable_rows": 0, "truncated_texts": 0, "empty_texts": 0}
    rows = TextEncoder.read(encoder_folder).embed([row["body"] for row in mail])
    assert np.array_equal(table.features, rows)
    columns = {name: [row[name] for row in mail] for name in ("users", "folder", "stars")}
    listed = pa.array(list(rows), pa.list_(pa.float32(), 16))
    _, expected, _ = read(plain, pa.table({**columns, "features": listed}))
    assert np.array_equal(table.labels, expected.labels)
    coefficients = np.random.default_rng(1).normal(size=(1, *model.shapes()["coefficients"])).astype(np.float32)
    batch = {"features": table.features, "labels": table.labels}
    given = {"coefficients": coefficients}, batch, np.ones(300, bool), [model.grid(0.5)]
    sums, clipped = model.clipped_sum(*given)
    expected_sums, expected_clipped = plain.clipped_sum(*given)
    assert np.array_equal(sums["coefficients"], expected_sums["coefficients"])
    assert clipped == expected_clipped > 0


def test_a_row_depends_on_its_own_text_alone(encoder_folder, mail):
    changed = [{**row, "body": "goal!"} if number else row for number, row in enumerate(mail)]
    ours, others = (read(classifier(encoder_folder), rows)[1].features for rows in (mail, changed))
    assert ours[0].tobytes() == others[0].tobytes()
    assert not np.array_equal(ours[1], others[1])


def test_unselected_texts_are_not_embedded(encoder_folder, mail, monkeypatch):
    seen = []

    def embed_tokens(self, texts):
        seen.append(len(texts))
        return np.ones((len(texts), 16))

    monkeypatch.setattr(TextEncoder, "embed_tokens", embed_tokens)
    examples = co.from_table(mail)
    task = classifier(encoder_folder).task(examples.payload.schema, folder=Path(), is_private=True)
    assert seen == []
    task.load(examples, {"train": np.arange(300)}, (np.arange(300) < 7).astype(int))
    assert seen == [7]


def test_a_model_is_learned(run):
    found = run.predict({"body": ["the budget", "cake aunt", "", None, "invoice invoice"]})
    assert found["prediction"].to_list() == ["work", "family", None, None, "work"]
    assert run.evaluations()["test"]["accuracy"][0] > 0.9


def test_the_statement_names_the_encoder(encoder_folder, run):
    digest = hashlib.sha256((encoder_folder / "model.safetensors").read_bytes()).hexdigest()
    (sentence,) = encoder_sentences(run.record.model)
    assert f"SHA-256 of its weights: {digest}" in sentence
    assert f'trained on "{TRAINED_ON}"' in sentence
    assert sentence in run.statement()
    assert sentence in model_metadata(run.folder / "model.safetensors")["statement"]
    (silent,) = encoder_sentences({"encoder_sha256": digest})
    assert "what it was trained on is not said" in silent
    assert "encoder" not in run.guarantee.statement()


def test_a_run_keeps_its_encoder(encoder_folder, mail, tmp_path):
    """Predicting needs neither the encoder's folder nor the place where the run was made."""
    gone = shutil.copytree(encoder_folder, tmp_path / "encoder")
    made = fit(classifier(gone), mail, folder=tmp_path / "RUN")
    texts = {"body": ["the budget", "cake aunt"]}
    expected = made.predict(texts)
    shutil.rmtree(gone)
    shutil.move(tmp_path / "RUN", tmp_path / "MOVED")
    moved = co.open_run(tmp_path / "MOVED")
    assert moved.predict(texts).equals(expected)
    assert TextEncoder.read(tmp_path / "MOVED").files.digest == TextEncoder.read(encoder_folder).files.digest
    exported = moved.export(tmp_path / "EXPORTED")
    assert (exported / "encoder.safetensors").read_bytes() == (encoder_folder / "model.safetensors").read_bytes()
    assert str(tmp_path) not in (exported / "README.md").read_text()
    assert str(tmp_path).encode() not in (exported / "model.safetensors").read_bytes()
    assert 0 < float(run_readme(exported).strip("[]\n ")) < 1  # a probability


def test_encoders_that_are_refused(encoder_folder, mail, run, tmp_path):
    def refused(model, message):
        with pytest.raises(InputError, match=message):
            read(model, mail)

    refused(classifier(tmp_path / "nowhere"), "no such folder; an encoder is a folder with")
    refused(dataclasses.replace(classifier(encoder_folder), encoder=""), "encoder must name a folder")
    refused(classifier(encoder_folder, encoder_sha256="0" * 64), "declared is 0000")
    refused(classifier(encoder_folder, text="subject"), "no column 'subject'")
    private = shutil.copytree(encoder_folder, tmp_path / "private")
    shutil.copyfile(run.folder / "guarantee.json", private / "guarantee.json")
    refused(classifier(private), "has a guarantee of its own")
    for wrong in ({"encoder_sha256": "12"}, {"sequence_length": 2}, {"encoder_trained_on": "two\nlines"}, {"text": []}):
        with pytest.raises(InputError):
            EmbeddingClassifier(**{"encoder": "x", **wrong})


def test_train_takes_an_encoder(encoder_folder, mail, tmp_path):
    import polars as pl

    shutil.copytree(encoder_folder, tmp_path / "encoder")
    pl.DataFrame(mail).write_parquet(tmp_path / "mail.parquet")
    (tmp_path / "run.toml").write_text(f"""
[data]
format = "parquet"
users = "users"
path = "mail.parquet"
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8.0
delta = 1e-6
adjacency = "zero-out"
[mechanism]
kind = "dp-sgd"
batch_size = 60
iterations = 40
clip_norm = 1.0
[model]
kind = "embedding-classifier"
text = "body"
label = "folder"
classes = ["work", "family"]
encoder = "encoder"
encoder_trained_on = "{TRAINED_ON}"
[optimizer]
name = "adam"
learning_rate = 0.2
[run]
seed = 0
""")
    assert main.run(["train", str(tmp_path / "run.toml"), "-o", str(tmp_path / "RUN")]) == 0
    made = co.open_run(tmp_path / "RUN")
    assert made.predict({"body": ["invoice", "birthday"]})["prediction"].to_list() == ["work", "family"]
