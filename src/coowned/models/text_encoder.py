"""A frozen public encoder: one text, one row of length 1, by the network of `bert_network`."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import threads
from coowned.cache import keep_compiled_programs
from coowned.content.text import TokenizedTexts, tokenize
from coowned.extras import jax, jnp
from coowned.models import bert_network
from coowned.models.bert_files import BertConfig
from coowned.models.embedding_cache import EmbeddingCache
from coowned.models.encoder_files import EncoderFiles

_LOG = logging.getLogger(__name__)
_STEPS = ((64, 16), (256, 32), (1 << 30, 128))  # up to so many tokens a length is rounded up to a multiple
_KEPT_TOGETHER = 512  # embeddings


@dataclasses.dataclass(frozen=True, eq=False)
class TextEncoder:
    """Embeds texts as the encoder's files say: its network, the mean of all tokens or the first one, length 1.

    Guarantees:
      - A text's embedding is the same bits whatever other texts there are, and in whatever order: every text is run by
        itself, padded to a length that follows from its own.   (test_a_text_has_the_same_bits_in_any_company)
      - It is that of transformers and of sentence-transformers' recipe.   (test_embeddings_are_those_of_transformers)
      - A row has length 1, or is NaN where there is no text.   (test_rows_have_length_one)
      - What the cache holds is what would be computed; a damaged or missing one changes nothing.
        (test_the_cache_changes_no_bit)
    Cost: one pass of the network for each text that differs, once on a machine: embeddings are kept (`EmbeddingCache`).
    """

    files: EncoderFiles

    @classmethod
    def read(cls, folder: Path | str, *, sequence_length: int | None = None) -> "TextEncoder":
        """Reads an encoder's folder, that of a run, or an exported one."""
        return cls(EncoderFiles.read(Path(folder), sequence_length=sequence_length))

    @property
    def width(self) -> int:
        """How many numbers an embedding has."""
        return self.files.config.hidden_size

    def tokenize(self, texts: pa.ChunkedArray | pa.Array) -> TokenizedTexts:
        length, lowercase = self.files.sequence_length, self.files.lowercase
        return tokenize(texts, self.files.vocabulary, sequence_length=length, lowercase=lowercase)

    def embed(self, texts: Sequence[str | None]) -> npt.NDArray[np.float32]:
        """(texts, width) of length 1 each; NaN for a text without words."""
        return self.embed_tokens(self.tokenize(pa.array(texts, pa.large_string())))

    def embed_tokens(self, texts: TokenizedTexts) -> npt.NDArray[np.float32]:
        """(texts, width): the same of what `tokenize` gives."""
        found = np.full((len(texts), self.width), np.nan, np.float32)
        cache = EmbeddingCache(self.files.digest, self.width)
        places: dict[bytes, list[int]] = {}
        for row, (begin, end) in enumerate(zip(texts.offsets[:-1], texts.offsets[1:], strict=True)):
            if end > begin:
                places.setdefault(texts.ids[begin:end].astype(np.int32).tobytes(), []).append(row)
        for tokens, embedding in self._embeddings(list(places), cache):
            found[places[tokens]] = embedding
        return found

    def _embeddings(self, texts: list[bytes], cache: EmbeddingCache) -> Iterator[tuple[bytes, npt.NDArray[np.float32]]]:
        """(tokens, embedding) of each, from the cache or made now and kept."""
        missing, kept = [], cache.read(texts)
        for tokens in texts:
            if tokens in kept:
                yield tokens, kept[tokens]
            else:
                missing.append(tokens)
        missing.sort(key=len)  # texts of one length after another: a program is compiled when it is first needed
        for begin in range(0, len(missing), _KEPT_TOGETHER):
            some = missing[begin : begin + _KEPT_TOGETHER]
            made = dict(zip(some, self._compute(some), strict=True))
            cache.keep(made)
            _LOG.info("embedded %s of %s texts", f"{begin + len(some):,}", f"{len(missing):,}")
            yield from made.items()

    def _compute(self, texts: list[bytes]) -> list[npt.NDArray[np.float32]]:
        embed, parameters = _program(self.files.config, self.files.pooling), self._parameters

        def of_one(tokens: bytes) -> npt.NDArray[np.float32]:
            ids = np.frombuffer(tokens, np.int32)
            padded = np.zeros(_padded(ids.size, self.files.config.max_position_embeddings), np.int32)
            padded[: ids.size] = ids
            return np.asarray(embed(parameters, padded, np.int32(ids.size)))

        return threads.run_all([functools.partial(of_one, tokens) for tokens in texts])

    @functools.cached_property
    def _parameters(self) -> Any:
        keep_compiled_programs()
        return jax.device_put(self.files.parameters())


def _padded(length: int, most: int) -> int:
    """The tokens of the program that runs a text of this length: a function of the text alone."""
    step = next(step for upto, step in _STEPS if length <= upto)
    return min(most, -(-length // step) * step)


@functools.lru_cache(maxsize=8)
def _program(config: BertConfig, pooling: str) -> Callable[..., Any]:
    """(parameters, (padded length,) ids, how many are real) -> (width,) of length 1; one text, whatever the others."""

    @jax.jit
    def embed(parameters, tokens, length):
        places = jnp.arange(tokens.size if pooling == "mean" else 1)
        batch = {"tokens": tokens[None], "lengths": length[None]}
        rows = bert_network.encode(config, parameters, batch, places[None], bert_network.Tape())[0]
        pooled = jnp.where((places < length)[:, None], rows, 0.0).sum(axis=0)  # a mean, but for its length
        largest = jnp.maximum(jnp.abs(pooled).max(), jnp.finfo(jnp.float32).tiny)
        pooled /= largest  # whose square neither overflows nor vanishes
        return pooled / jnp.sqrt((pooled * pooled).sum())

    return embed
