"""Embeddings of texts, kept on disk for their owner alone: as secret as the texts, and always safe to delete."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coowned.cache import cache_folder

_PROGRAM = 1  # of `text_encoder`: another number where other bits come out
_AT_ONCE = 500  # keys of a query
_CHECK = 8  # bytes


@dataclasses.dataclass(frozen=True)
class EmbeddingCache:
    """One file an encoder, in which every text has its own entry: a digest of its tokens, and its embedding.

    An entry is written when a text is embedded, and texts are embedded when their content is read: after S was chosen,
    certified and accounted for. It is looked up by the text's own digest, so it says nothing that the text does not.

    Guarantees:
      - The file is readable by its owner alone, as are those that SQLite makes beside it.
        (test_the_cache_is_its_owners)
      - An entry of another text, encoder, processor or version of JAX is never used, nor one that was damaged.
        (test_another_encoder_has_another_cache, test_damaged_entries_are_made_anew)
      - A cache that cannot be read or written, or is deleted, is no error.   (test_the_cache_changes_no_bit)
    What it is not: covered by any guarantee. Delete the folder `embeddings` of the cache when the texts are deleted.

    Attributes:
      encoder: its digest.
      width: numbers of an embedding.
    """

    encoder: str
    width: int

    @property
    def path(self) -> Path | None:
        """The file; None where nothing is kept."""
        folder = cache_folder()
        about = [self.encoder, _PROGRAM, importlib.metadata.version("jaxlib"), platform.machine(), os.cpu_count()]
        name = hashlib.sha256(repr(about).encode()).hexdigest()[:32]
        return None if folder is None else folder / "embeddings" / f"{name}.sqlite"

    def read(self, texts: Sequence[bytes]) -> dict[bytes, npt.NDArray[np.float32]]:
        """Embeddings by tokens, of those that are there."""
        found: dict[bytes, npt.NDArray[np.float32]] = {}
        keys = {_key(tokens): tokens for tokens in texts}
        wanted = list(keys)

        def look_up(table: sqlite3.Connection) -> None:
            for begin in range(0, len(wanted), _AT_ONCE):
                some = wanted[begin : begin + _AT_ONCE]
                query = f"SELECT key, entry FROM embeddings WHERE key IN ({','.join('?' * len(some))})"
                for key, entry in table.execute(query, some):
                    content, check = entry[:-_CHECK], entry[-_CHECK:]
                    if len(content) == 4 * self.width and check == _check(key, content):
                        found[keys[key]] = np.frombuffer(content, np.float32)

        path = self.path
        if path is not None and path.exists():
            _with_table(path, look_up)
        return found

    def keep(self, embeddings: Mapping[bytes, npt.NDArray[np.float32]]) -> None:
        """Adds entries, all or none."""
        entries = []
        for tokens, embedding in embeddings.items():
            key, content = _key(tokens), np.ascontiguousarray(embedding, np.float32).tobytes()
            entries.append((key, content + _check(key, content)))
        if (path := self.path) is not None:
            _with_table(
                path, lambda table: table.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", entries)
            )


def _with_table(path: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    """Does some work on the table in a file, all or nothing; what goes wrong with the file is no error."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite's own files get the same permissions
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as table, table:  # one transaction
            table.execute("CREATE TABLE IF NOT EXISTS embeddings (key BLOB PRIMARY KEY, entry BLOB) WITHOUT ROWID")
            work(table)
    except sqlite3.OperationalError:  # full, locked, not writable
        pass
    except sqlite3.DatabaseError:  # not a table, or not any more
        with contextlib.suppress(OSError):
            path.unlink()
    except OSError:
        pass


def _key(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=32, person=b"coowned-embed-1").digest()


def _check(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(key + content, digest_size=_CHECK).digest()
