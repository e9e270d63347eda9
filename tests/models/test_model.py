"""From a configuration to a model and its content, for text."""

import json
import shutil
import stat

import numpy as np
import polars as pl
import pytest
from experiments.private_abstracts import configuration, made_up_corpus
from safetensors.numpy import load_file, save_file

from coowned.accounting import privacy_guarantee
from coowned.content.splits import split_examples
from coowned.errors import ConfigError, InputError
from coowned.models.bert_files import refuse_private_checkpoint
from coowned.report.export import export_model
from coowned.report.page import write_report
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder

ARCHITECTURE = {
    "model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    made_up_corpus(place)
    (place / "config.json").write_text(json.dumps(ARCHITECTURE), encoding="utf-8")
    return place


def config_of(corpus, *, privacy='epsilon = "none"', model=None, **changes):
    settings = {
        "path": "texts.parquet", "privacy": privacy, "bound": 2, "seed": 0, "clip_norm": 1.0, "learning_rate": 1e-2,
        "batch_size": 16, "iterations": 4, "sequence_length": 12,
        "model": model or 'vocabulary = "vocab.txt"\narchitecture = "config.json"',
    } | changes  # fmt: skip
    text = configuration(**settings)
    return TrainConfig.from_toml(text, folder=corpus)


def run(config, folder):
    with RunFolder.open(folder) as opened:
        return run_configuration(config, opened)


@pytest.fixture(scope="module")
def public_run(corpus):
    folder = corpus.parent / "public-run"
    run(config_of(corpus, privacy="public = true", clip_norm=None), folder)
    return folder


@pytest.mark.full
def test_public_run_is_a_checkpoint_for_a_private_one(corpus, public_run, tmp_path):
    assert {"config.json", "vocab.txt", "model.safetensors"} <= {file.name for file in public_run.iterdir()}
    config = config_of(corpus, privacy="epsilon = 8\ndelta = 1e-5", model=f'checkpoint = "{public_run}"')
    trained = run(config, tmp_path / "private")
    assert trained.plan.guarantee is not None
    assert trained.plan.guarantee.epsilon <= 8
    start = config.task(config.source().read().payload.schema).initial
    assert start is not None
    for name, array in trained.parameters.items():
        assert array.shape == start[name].shape
    tested = pl.read_parquet(tmp_path / "private" / "test.parquet")
    assert tested["users_per_example"].to_list()[0] == "all"
    assert tested["loss"][0] > 0


@pytest.mark.full
def test_checkpoint_of_private_data_is_refused(corpus, tmp_path):
    without_privacy = tmp_path / "without"
    run(config_of(corpus), without_privacy)
    with pytest.raises(InputError, match="not declared public"):
        refuse_private_checkpoint(without_privacy)
    config = config_of(corpus, privacy="epsilon = 8\ndelta = 1e-5", model=f'checkpoint = "{without_privacy}"')
    with pytest.raises(InputError, match="not declared public"):
        config.task(config.source().read().payload.schema)
    (without_privacy / "guarantee.json").write_text('{"format": "coowned-guarantee-1"}', encoding="utf-8")
    with pytest.raises(InputError, match="composed"):
        refuse_private_checkpoint(without_privacy)


def copied(run_folder, place):
    """What a model needs to be opened, without the claim beside it."""
    place.mkdir()
    for name in ("config.json", "vocab.txt", "model.safetensors"):
        shutil.copy(run_folder / name, place / name)
    return place


@pytest.mark.full
@pytest.mark.parametrize(
    ("privacy", "match"), [("epsilon = 8\ndelta = 1e-5", "composed"), ('epsilon = "none"', "not declared public")]
)
def test_copied_weights_of_private_data_are_refused(corpus, tmp_path, monkeypatch, privacy, match):
    run(config_of(corpus, privacy=privacy), tmp_path / "run")
    copy = copied(tmp_path / "run", tmp_path / "copy")
    for later in ("epsilon = 8\ndelta = 1e-5", "public = true"):  # else the claim would be lost in a public run
        config = config_of(corpus, privacy=later, model=f'checkpoint = "{copy}"')
        with pytest.raises(InputError, match=match):
            config.task(config.source().read().payload.schema)
    config = config_of(corpus, model=f'checkpoint = "{copy}"')  # a run that claims nothing may start anywhere
    assert config.task(config.source().read().payload.schema).initial
    (copy / "guarantee.json").write_text('{"format": "coowned-no-guarantee-1", "public": true}', encoding="utf-8")
    with pytest.raises(InputError, match=match):  # another run's claim beside them does not help
        refuse_private_checkpoint(copy)
    (copy / "guarantee.json").unlink()
    monkeypatch.setattr(privacy_guarantee, "model_metadata", lambda weights: {})
    assert refuse_private_checkpoint(copy) is None  # the statement inside is what tells


@pytest.mark.full
def test_copied_weights_of_public_data_and_from_elsewhere(public_run, tmp_path):
    copy = copied(public_run, tmp_path / "copy")
    assert refuse_private_checkpoint(copy) is None
    weights = load_file(copy / "model.safetensors")
    for metadata in (None, {"format": "pt"}):
        save_file(weights, copy / "model.safetensors", metadata=metadata)
        assert refuse_private_checkpoint(copy) is None
    (copy / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        refuse_private_checkpoint(copy)


@pytest.mark.full
def test_private_log(corpus, tmp_path):
    """How many texts were cut or empty is content: in a file of its owner's, and in nothing that leaves."""
    for name in ("vocab.txt", "config.json"):
        shutil.copy(corpus / name, tmp_path / name)
    texts = pl.read_parquet(corpus / "texts.parquet").with_row_index()
    long = pl.when(pl.col("index") < 20).then(pl.col("text") + " " + pl.col("text")).otherwise("text")
    kept = pl.when(pl.col("index") >= 3).then(long)
    texts.with_columns(text=kept).drop("index").write_parquet(tmp_path / "texts.parquet")
    place = tmp_path / "run"
    config = config_of(tmp_path, privacy="public = true", clip_norm=None)
    trained = run(config, place)
    file = place / "private-log.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["covered_by_guarantee"] is False
    assert "Never release them." in file.read_text(encoding="utf-8")
    splits = split_examples(config.source().read().graph, config.splits)
    unread = splits["train"][trained.plan.selected.copies == 0]
    rows = np.setdiff1d(np.arange(len(texts)), unread)
    assert (stored["truncated_texts"], stored["empty_texts"]) == (np.sum((rows >= 3) & (rows < 20)), np.sum(rows < 3))
    assert stored["empty_texts"] > 0
    assert "private-log.json" not in export_model(place, tmp_path / "exported")
    for release in (True, False):
        page = write_report(place, tmp_path / "page.html", release=release)
        assert "truncated_texts" not in page.read_text(encoding="utf-8")


def test_a_checkpoint_from_elsewhere_is_the_callers_word(tmp_path):
    assert refuse_private_checkpoint(tmp_path) is None  # no guarantee.json: nothing can be told


def test_cased_vocabulary(corpus, tmp_path):
    words = pl.read_parquet(corpus / "texts.parquet")
    words.with_columns(pl.lit("Cat cat").alias("text")).write_parquet(tmp_path / "texts.parquet")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, "cat", "Cat"]) + "\n", encoding="utf-8")
    for lowercase, first in ((True, 5), (False, 6)):
        config = config_of(tmp_path, model=f'vocabulary = "vocab.txt"\nlowercase = {str(lowercase).lower()}')
        examples = config.source().read()
        rows = {"train": np.arange(examples.graph.num_examples)}
        table = config.task(examples.payload.schema).load(examples, rows).parts["train"]
        assert table.texts.ids[:4].tolist() == [2, first, 5, 3]  # pyright: ignore[reportAttributeAccessIssue]


def test_text_has_its_own_split(corpus):
    config = config_of(corpus)
    assert config.splits == [0.9, 0.05, 0.05]


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ('architecture = "config.json"', "needs vocabulary"),
        ('vocabulary = "vocab.txt"\narchitecture = "a"\ncheckpoint = "b"', "give only one of the two"),
        ('vocabulary = "vocab.txt"\nfeatures = "x"', "has no key 'features'"),
    ],
)
def test_contradictions(corpus, model, match):
    with pytest.raises(ConfigError, match=match):
        config_of(corpus, model=model)


def test_too_long_for_the_model(corpus):
    config = config_of(corpus, sequence_length=17)
    with pytest.raises(ConfigError, match="16 positions"):
        config.task(config.source().read().payload.schema)


def test_vocabulary_larger_than_the_model(corpus, tmp_path):
    small = tmp_path / "config.json"
    small.write_text(json.dumps(ARCHITECTURE | {"vocab_size": 10}), encoding="utf-8")
    config = config_of(corpus, model=f'vocabulary = "vocab.txt"\narchitecture = "{small}"')
    with pytest.raises(ConfigError, match="room for 10"):
        config.task(config.source().read().payload.schema)


@pytest.mark.full
def test_interrupted_text_run_is_resumed(corpus, tmp_path):
    """Masks, coins and noise follow from the key: the run that stopped ends in the bits of the one that did not."""
    config = config_of(corpus, privacy="epsilon = 8\ndelta = 1e-5")
    seeded = config.text + "[run]\nseed = 7\ncheckpoint_every = 2\n"
    config = TrainConfig.from_toml(seeded, folder=corpus)
    run(config, tmp_path / "whole")

    with RunFolder.open(tmp_path / "stopped") as opened:
        save = opened.save

        def save_and_stop(step, tensors):
            save(step, tensors)
            raise KeyboardInterrupt

        opened.save = save_and_stop
        with pytest.raises(KeyboardInterrupt):
            run_configuration(config, opened)
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    run(config, tmp_path / "stopped")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name])
