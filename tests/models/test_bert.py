"""BERT as it is specified: files that are missing, and from a public checkpoint to a classifier that predicts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import coowned as co
from coowned.audit.run_audit import audit_run
from coowned.content.text import SPECIAL_TOKENS, Vocabulary
from coowned.models.registry import model_class
from coowned.runs.config import TrainConfig

WORDS = ("cheap", "pills", "meeting", "lunch", "now")
ARCHITECTURE = {
    "model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
TINY = "google/bert_uncased_L-2_H-128_A-2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    (path / "config.json").write_text(json.dumps(ARCHITECTURE), encoding="utf-8")
    Vocabulary((*SPECIAL_TOKENS, *WORDS)).write(path / "vocab.txt")
    return path


def mails(count=120):
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        spam = number % 2
        words = random.choice(WORDS[:2] if spam else WORDS[2:4], 4)
        kind = ("ham", "spam")[spam] if number % 10 else "neither"  # a label that was not declared
        rows.append({"users": [f"u{number % 60}"], "body": " ".join(words), "kind": kind})
    return co.from_table(rows)


@pytest.mark.parametrize("kind", ["bert-masked-lm", "bert-classifier"])
def test_missing_files_are_refused_before_anything_is_read(kind, tmp_path):
    """Neither the data, which are not there either, nor any other file."""
    make = model_class(kind)
    with pytest.raises(co.InputError, match=rf"needs vocabulary or checkpoint; .*{TINY}.*learn_vocabulary"):
        make()
    with pytest.raises(co.InputError, match=rf"tiny: no such folder; .*vocab.txt and model.safetensors.*{TINY}"):
        make(checkpoint="tiny").check_files(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("not even JSON")
    with pytest.raises(co.InputError, match=f"tiny: there is no model.safetensors; .*save_pretrained.*{TINY}"):
        make(checkpoint="tiny").check_files(tmp_path)
    with pytest.raises(co.InputError, match=rf"words.txt: no such file; .*{TINY}.*learn_vocabulary"):
        make(vocabulary="words.txt").check_files(tmp_path)
    (tmp_path / "words.txt").write_text("")
    with pytest.raises(co.InputError, match=r"sizes.json: no such file; .*config.json of a BERT"):
        make(vocabulary="words.txt", architecture="sizes.json").check_files(tmp_path)
    text = f"""
    [data]
    path = "nowhere.parquet"
    [selection]
    contribution_bound = 1
    [privacy]
    epsilon = "none"
    [mechanism]
    kind = "dp-sgd"
    batch_size = 4
    iterations = 1
    [model]
    kind = "{kind}"
    checkpoint = "missing"
    [optimizer]
    learning_rate = 0.1
    """
    from coowned.runs.configured_run import run_configuration
    from coowned.runs.run_folder import RunFolder

    with RunFolder.open(tmp_path / "run") as opened, pytest.raises(co.InputError, match="missing: no such folder"):
        run_configuration(TrainConfig.from_toml(text, folder=tmp_path), opened)


@pytest.mark.full
def test_from_a_public_checkpoint_to_predictions(folder, tmp_path):
    """The masked model on public mails, then the classifier with a guarantee from its weights."""
    settings = {"selector": co.Greedy(contribution_bound=2), "batch_size": 24, "iterations": 3}
    masked = co.BertMaskedLM(
        text="body", vocabulary=str(folder / "vocab.txt"), architecture=str(folder / "config.json"), sequence_length=8
    )
    co.fit(mails(), masked, privacy=co.PrivacySettings(public=True), folder=tmp_path / "public", **settings)
    spec = co.BertClassifier(
        text="body", label="kind", classes=["ham", "spam"], checkpoint=str(tmp_path / "public"), sequence_length=8
    )
    start = spec.task(mails().payload.schema, folder=folder, is_private=True).initial
    assert start is not None
    assert set(start) >= {"bert.pooler.dense.weight", "classifier.weight"}
    run = co.fit(mails(), spec, epsilon=8.0, delta=1e-5, adjacency="zero-out", folder=tmp_path / "run", **settings)
    new = [{"body": "cheap pills"}, {"body": ""}, {"body": "lunch"}]
    found = run.predict(new)
    assert set(found["prediction"].drop_nulls()) <= {"ham", "spam"}
    assert found["prediction"].is_null().to_list() == [False, True, False]
    assert found.equals(co.open_run(tmp_path / "run").predict(new))
    assert run.private_log()["unusable_labels"] > 0
    exported = run.export(tmp_path / "exported")
    described = json.loads((exported / "config.json").read_text())
    assert described["architectures"] == ["BertForSequenceClassification"]
    assert described["id2label"] == {"0": "ham", "1": "spam"}


@pytest.mark.full
def test_frozen_weights_stay(folder, tmp_path):
    """Through an interruption to a prediction and an audit; what is stored is the whole model."""
    spec = co.BertClassifier(
        text="body", label="kind", classes=["ham", "spam"], vocabulary=str(folder / "vocab.txt"),
        architecture=str(folder / "config.json"), sequence_length=8, trainable=["bert.encoder.*", "bert.p*", "cl*"],
    )  # fmt: skip
    schema = mails().payload.schema
    everything = dataclasses.replace(spec, trainable=None).task(schema, folder=folder, is_private=True)
    start = everything.read(mails())[0].initial()
    settings = {
        "selector": co.Greedy(contribution_bound=2),
        "batch_size": 24,
        "iterations": 6,
        "run": co.RunSettings(checkpoint_every=2),
    }
    private = {"epsilon": 8.0, "delta": 1e-5, "adjacency": "zero-out", "seed": 3, **settings}

    def stop(row):
        if row["step"] > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        co.fit(mails(), spec, folder=tmp_path / "run", on_metrics=stop, **private)
    run = co.fit(mails(), spec, folder=tmp_path / "run", **private)
    whole = co.fit(mails(), spec, folder=tmp_path / "whole", **private).arrays()
    found = run.arrays()
    assert found.keys() == start.keys()
    frozen = {name for name in start if name.startswith("bert.embeddings.")}
    for name, array in found.items():
        assert array.tobytes() == whole[name].tobytes(), name
        assert np.array_equal(array, start[name]) == (name in frozen), name
    assert run.record.num_parameters == sum(array.size for name, array in found.items() if name not in frozen)
    assert set(run.predict([{"body": "cheap pills"}])["prediction"]) <= {"ham", "spam"}
    audit = audit_run(tmp_path / "run", trials=1000, seed=1)
    assert audit.holds
    assert not audit.stand_in  # the last bias is trained: its own gradients are clipped


def test_columns_are_checked_by_the_schema(folder):
    spec = co.BertClassifier(vocabulary=str(folder / "vocab.txt"), sequence_length=8)
    schema = pa.schema({"text": pa.string(), "label": pa.string()})
    with pytest.raises(co.InputError, match="holds text: declare its classes"):
        spec.task(schema, folder=folder, is_private=True)
    with pytest.raises(co.InputError, match="no column 'label'"):
        spec.task(pa.schema({"text": pa.string()}), folder=folder, is_private=True)
    spec.task(pa.schema({"text": pa.string()}), folder=folder, is_private=True, labels=False)
    with pytest.raises(co.InputError, match="classes"):
        co.BertClassifier(vocabulary="vocab.txt", classes=1)
