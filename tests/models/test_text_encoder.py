"""A frozen public encoder: what it makes of a text, and how that is kept."""

import json
import stat

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.tiny_encoder import CONFIG, WORDS, write_encoder

from coowned.errors import InputError
from coowned.models import text_encoder
from coowned.models.text_encoder import EmbeddingCache, TextEncoder

TEXTS = ["Hello there", "the budget is paid!", "", None, " ".join(WORDS * 3), "aunt", "hello THERE", "a cake"]


@pytest.fixture
def uncached(monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")


@pytest.mark.usefixtures("uncached")
def test_rows_have_length_one(encoder_folder):
    rows = TextEncoder.read(encoder_folder).embed(TEXTS)
    assert rows.shape == (8, 16)
    empty = np.array([not text for text in TEXTS])
    assert np.isnan(rows[empty]).all()
    np.testing.assert_allclose(np.linalg.norm(rows[~empty], axis=1), 1, atol=1e-6)
    assert np.array_equal(rows[0], rows[6])  # in small letters
    assert np.linalg.norm(rows[0] - rows[1]) > 0.1


@pytest.mark.usefixtures("uncached")
@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(8)), count=st.integers(1, 8))
def test_a_text_has_the_same_bits_in_any_company(encoder_folder, order, count):
    encoder = TextEncoder.read(encoder_folder)
    whole, some = encoder.embed(TEXTS), [TEXTS[row] for row in order[:count]]
    assert encoder.embed(some).tobytes() == whole[list(order[:count])].tobytes()


@pytest.mark.usefixtures("uncached")
def test_padding_to_another_length_than_the_texts_own_is_noticed(encoder_folder, monkeypatch):
    """The law above would see it: with weights of this size other shapes do give other bits."""
    encoder, words = TextEncoder.read(encoder_folder), [" ".join(WORDS[:n]) for n in range(1, 15)]
    before = encoder.embed(words)
    monkeypatch.setattr(text_encoder, "_padded", lambda length, most: 48)
    after = encoder.embed(words)
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert after.tobytes() != before.tobytes()


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooling_is_that_of_the_files(tmp_path, pooling):
    """Against the network's own rows, without padding."""
    from coowned.models import bert_network

    encoder = TextEncoder.read(write_encoder(tmp_path / pooling, pooling=pooling))
    tokens = encoder.tokenize(pa.array(["the budget is paid!"]))
    ids = tokens.ids.astype(np.int32)[None]
    batch = {"tokens": ids, "lengths": np.int32([ids.size])}
    places = np.arange(ids.size)[None]
    rows = np.asarray(
        bert_network.encode(CONFIG, encoder.files.parameters(), batch, places, bert_network.Tape())[0], np.float64
    )
    expected = rows[0] if pooling == "cls" else rows.mean(axis=0)
    np.testing.assert_allclose(encoder.embed_tokens(tokens)[0], expected / np.linalg.norm(expected), atol=1e-5)


@pytest.mark.usefixtures("uncached")
def test_texts_are_cut_where_the_files_say(tmp_path):
    folder = write_encoder(tmp_path / "short", sequence_length=6)
    encoder = TextEncoder.read(folder)
    words = WORDS[:12]
    assert encoder.embed([" ".join(words)]).tobytes() == encoder.embed([" ".join(words[:4])]).tobytes()
    longer = TextEncoder.read(folder, sequence_length=9)
    assert (
        longer.embed([" ".join(words)]).tobytes()
        == encoder.__class__(longer.files).embed([" ".join(words[:7])]).tobytes()
    )
    assert longer.files.digest != encoder.files.digest
    assert longer.files.sha256 == encoder.files.sha256


def test_a_tokenizer_file_comes_first(encoder_folder, tmp_path):
    other = write_encoder(tmp_path / "json")
    words = (other / "vocab.txt").read_text().splitlines()
    described = {
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": {word: number for number, word in enumerate(words)}},
    }
    (other / "tokenizer.json").write_text(json.dumps(described))
    (other / "vocab.txt").unlink()
    assert TextEncoder.read(other).files.digest == TextEncoder.read(encoder_folder).files.digest
    described["normalizer"]["type"] = "NFC"
    (other / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="only BERT's own WordPiece"):
        TextEncoder.read(other)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "there is no config.json"),
        ("vocab.txt", None, r"no tokenizer.json or vocab.txt; an encoder is a folder"),
        ("config.json", {"model_type": "mpnet"}, "describes 'mpnet'"),
        ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Pooling"}, {"type": "x.Dense"}], "Dense; only a"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling by lasttoken"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "a prompt is put before"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "sequence_length"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, file, content, message):
    folder = write_encoder(tmp_path / "other")
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        TextEncoder.read(folder)


def test_damaged_weights_are_refused(tmp_path):
    folder = write_encoder(tmp_path / "other")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not readable as safetensors"):
        TextEncoder.read(folder).embed(["a"])


# ---- the cache


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embeddings"


def test_the_cache_changes_no_bit(encoder_folder, cache, monkeypatch):
    """Filled, half filled, damaged, deleted, or a folder where the file should be."""
    encoder = TextEncoder.read(encoder_folder)
    first = encoder.embed(TEXTS[:3]).tobytes()
    (file,) = cache.iterdir()
    with monkeypatch.context() as counting:
        computed = []
        counting.setattr(TextEncoder, "_compute", lambda self, texts: computed.append(texts) or [])
        assert encoder.embed(TEXTS[:3]).tobytes() == first
        assert computed == []
    whole = encoder.embed(TEXTS).tobytes()
    for content in (b"not a table" * 500, b""):
        file.write_bytes(content)
        assert encoder.embed(TEXTS).tobytes() == whole
        assert encoder.embed(TEXTS).tobytes() == whole
    file.unlink()
    file.mkdir()
    assert encoder.embed(TEXTS).tobytes() == whole
    monkeypatch.setenv("COOWNED_CACHE", "off")
    assert encoder.embed(TEXTS).tobytes() == whole


def test_the_cache_is_its_owners(encoder_folder, cache):
    TextEncoder.read(encoder_folder).embed(TEXTS)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()] == [0o600]
    (content,) = (file.read_bytes() for file in cache.iterdir())
    assert b"hello" not in content.lower()


def test_damaged_entries_are_made_anew(cache):
    kept = EmbeddingCache("e", 3)
    kept.keep({b"one": np.float32([1, 2, 3]), b"two": np.float32([4, 5, 6])})
    assert {tokens: row.tolist() for tokens, row in kept.read([b"one", b"two", b"three"]).items()} == {
        b"one": [1, 2, 3],
        b"two": [4, 5, 6],
    }
    (file,) = cache.iterdir()
    content = file.read_bytes()
    place = content.index(np.float32([4, 5, 6]).tobytes())
    file.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    assert list(kept.read([b"one", b"two"])) == [b"one"]


def test_another_encoder_has_another_cache(cache, monkeypatch):
    EmbeddingCache("e", 1).keep({b"one": np.float32([1])})
    assert EmbeddingCache("f", 1).read([b"one"]) == {}
    assert EmbeddingCache("e", 2).read([b"one"]) == {}
    monkeypatch.setattr("coowned.models.text_encoder._PROGRAM", 2)
    assert EmbeddingCache("e", 1).read([b"one"]) == {}
    assert len(list(cache.iterdir())) == 1
