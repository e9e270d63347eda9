"""A public encoder of a few numbers, made on the spot, in the layout of sentence-transformers."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from coowned.content.text import SPECIAL_TOKENS
from coowned.models.bert_files import BertConfig, describe_config
from coowned.models.bert_model import BertModel
from coowned.models.bert_network import MaskedLMHead

WORDS = [
    "hello",
    "there",
    "budget",
    "invoice",
    "meeting",
    "birthday",
    "cake",
    "aunt",
    "goal",
    "match",
    "the",
    "is",
    "a",
    "we",
    "eat",
    "pay",
    "##s",
    "##ed",
    "!",
]
CONFIG = BertConfig(
    vocab_size=len(SPECIAL_TOKENS) + len(WORDS),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=64,
)


def write_encoder(folder: Path, *, pooling: str = "mean", sequence_length: int = 40, scale: float = 10.0) -> Path:
    """Writes config, weights, vocabulary and sentence-transformers' files; small random weights, times `scale`."""
    (folder / "1_Pooling").mkdir(parents=True)
    model = BertModel.masked_lm(config=CONFIG, sequence_length=16)
    arrays = {
        name.removeprefix("bert."): array * np.float32(scale if array.ndim == 2 else 1)
        for name, array in model.initial().items()
        if name.startswith("bert.")
    }
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(describe_config(CONFIG, MaskedLMHead(max_predictions=1)))
    named = {
        "config.json": {**config, "architectures": ["BertModel"]},
        "sentence_bert_config.json": {"max_seq_length": sequence_length, "do_lower_case": False},
        "tokenizer_config.json": {"do_lower_case": True, "tokenizer_class": "BertTokenizer"},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": CONFIG.hidden_size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
        },
    }
    for name, content in named.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in (*SPECIAL_TOKENS, *WORDS)), encoding="utf-8")
    return folder
