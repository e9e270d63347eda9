"""The Hugging Face layout: what is written is read back, and what cannot be used is refused by name."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coowned.errors import InputError
from coowned.models.bert_files import BertConfig, describe_config, parameters_from, read_bert_folder
from coowned.models.bert_model import BertModel

CONFIG = BertConfig(vocab_size=9, hidden_size=4, intermediate_size=6, max_position_embeddings=8, layer_norm_eps=1e-7)
MODEL = BertModel.masked_lm(config=CONFIG, sequence_length=8)
WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"word{number}\n" for number in range(9)))
    return path


def write_bert_folder(folder, config, arrays, vocabulary_file, head=MODEL.head):
    """The three files that a finished run has too."""
    folder.mkdir()
    (folder / "config.json").write_text(describe_config(config, head), encoding="utf-8")
    save_file(
        {name: np.asarray(array) for name, array in arrays.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    shutil.copyfile(vocabulary_file, folder / "vocab.txt")


@pytest.fixture
def folder(tmp_path, vocabulary):
    write_bert_folder(tmp_path / "model", CONFIG, MODEL.to_arrays(MODEL.initial()), vocabulary)
    return tmp_path / "model"


def test_folder_round_trip(folder, vocabulary):
    config, arrays = read_bert_folder(folder, MODEL.head)
    assert config == CONFIG
    expected = MODEL.initial()
    assert set(arrays) == set(expected)
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
    assert (folder / "vocab.txt").read_bytes() == vocabulary.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "vocab.txt"]
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_older_names_and_other_heads():
    expected = MODEL.initial()
    stored = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in expected.items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in stored
    stored |= {
        "bert.pooler.dense.weight": np.zeros((4, 4), np.float32),
        "cls.seq_relationship.bias": np.zeros(2, np.float32),
        "bert.embeddings.position_ids": np.arange(8)[None],
        "cls.predictions.decoder.weight": expected[WORDS].copy(),
        "cls.predictions.decoder.bias": stored.pop("cls.predictions.bias"),
    }
    found = parameters_from(CONFIG, MODEL.head, stored)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_half_precision_becomes_float32():
    stored = {name: array.astype(np.float16) for name, array in MODEL.initial().items()}
    assert all(array.dtype == np.float32 for array in parameters_from(CONFIG, MODEL.head, stored).values())


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (WORDS, np.zeros((10, 4)), r"word_embeddings.weight has the shape \(10, 4\), .* asks for \(9, 4\)"),
        (WORDS, np.zeros((9, 4), np.int64), "floating-point"),
        (WORDS, np.full((9, 4), np.nan), "finite"),
        ("cls.predictions.decoder.weight", np.ones((9, 4)), "tied"),
        ("cls.predictions.decoder.bias", np.ones(9), "tied"),
        ("classifier.weight", np.ones(9), "classifier.weight is not a tensor of this BERT"),
        ("bert.encoder.layer.2.output.dense.bias", np.ones(4), "layer.2.output.dense.bias is not a tensor"),
    ],
)
def test_tensors_that_do_not_fit(name, array, message):
    with pytest.raises(InputError, match=message):
        MODEL.from_arrays({**MODEL.initial(), name: array})


def change_config(folder, **changes):
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value != "gone"}))


BAD_SETTINGS = [
    ({"model_type": "roberta"}, "'roberta', not a BERT"),
    ({"hidden_size": "gone"}, "no hidden_size"),
    ({"hidden_size": 5}, "config.json: hidden_size"),
    ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ({"is_decoder": True}, "is_decoder"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ({"hidden_size": 8}, r"model.safetensors: .*word_embeddings.weight has the shape \(9, 4\)"),
    ({"vocab_size": 8}, "vocab.txt: 9 words, but the model has 8"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS)
def test_bad_folders(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(InputError, match=message):
        read_bert_folder(folder, MODEL.head)


def test_bad_files(folder, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        read_bert_folder(tmp_path / "nowhere", MODEL.head)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        read_bert_folder(folder, MODEL.head)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model.safetensors; .*save_pretrained.*google/bert_uncased_L-2_H-128_A-2"):
        read_bert_folder(folder, MODEL.head)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(InputError, match="not a readable JSON file"):
        read_bert_folder(folder, MODEL.head)
    (folder / "config.json").write_text("[]")
    with pytest.raises(InputError, match="'list', not a BERT"):
        read_bert_folder(folder, MODEL.head)
    (folder / "vocab.txt").unlink()
    with pytest.raises(InputError, match=r"no vocab.txt"):
        read_bert_folder(folder, MODEL.head)


def test_old_configurations_name_less(folder):
    """The first BERT-Tiny names neither its kind nor its epsilon."""
    change_config(folder, model_type="gone", layer_norm_eps="gone", position_embedding_type="gone", hidden_act="gone")
    assert read_bert_folder(folder, MODEL.head)[0].layer_norm_eps == 1e-12


def test_weights_say_what_transformers_asks_for(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")  # and reading does not
    assert read_bert_folder(folder, MODEL.head)[0] == CONFIG
