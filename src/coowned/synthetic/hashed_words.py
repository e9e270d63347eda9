"""Turns texts into numbers without a vocabulary: words are counted by zlib's CRC-32, each text by itself."""

import re
import zlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from coowned import validate

_WORD = re.compile(r"[a-z]+")


def hashed_words(texts: Iterable[str], num_features: int) -> npt.NDArray[np.float32]:
    """(texts, num_features) float32 rows of norm at most 1.

    Nothing is fitted: the features of a text depend on that text alone, so that one person's words cannot change
    another's row.

    Guarantees:
      - A row depends on its own text alone.   (test_a_row_depends_on_its_text_alone)

    >>> hashed_words(["a cat", ""], 4).tolist()
    [[0.7071..., 0.0, 0.0, 0.7071...], [0.0, 0.0, 0.0, 0.0]]
    """
    validate.positive(num_features=num_features)
    texts = list(texts)
    counts = np.zeros((len(texts), num_features), np.float32)
    for row, text in enumerate(texts):
        for word in _WORD.findall(text.lower()):
            counts[row, zlib.crc32(word.encode()) % num_features] += 1
    return counts / np.maximum(1, np.linalg.norm(counts, axis=1, keepdims=True))
