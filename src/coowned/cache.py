"""A disk cache of expensive results, readable by its owner only.

The folder also holds what others put there: arrays derived from content (`derived/`, `embeddings/`), as secret as the
content, and which run each key has served (`keys/`). Deleting it costs time, and with `keys/` the protection against
a second use of a key.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from coowned.codec import checksum
from coowned.errors import CoownedError
from coowned.files import write_file

Result = TypeVar("Result")


def cache_folder() -> Path | None:
    """Returns COOWNED_CACHE, else `$XDG_CACHE_HOME/coowned` or `~/.cache/coowned`; None if COOWNED_CACHE is "off"."""
    chosen = os.environ.get("COOWNED_CACHE")
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "off") else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "coowned"


def cached(
    kind: str,
    question: dict[str, Any],
    make: Callable[[], Result],
    *,
    encode: Callable[[Result], str],
    decode: Callable[[str], Result],
) -> Result:
    """Returns the result of `make`, or its earlier result for the same question.

    Guarantees:
      - Another input, or another version of coowned, numpy or scipy, is another entry.
        (test_every_input_is_part_of_the_key, test_other_versions_are_other_entries)
      - A damaged file, or one of another question, is recomputed.   (test_a_damaged_file_is_made_anew)
      - A folder that cannot be written is no error.   (test_a_folder_that_cannot_be_made_is_no_error)

    Args:
      kind: the folder of the entry.
      question: everything the result depends on, as plain values.
      encode, decode: the result as text and back; `decode` refuses with ValueError or CoownedError.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    versions = {name: importlib.metadata.version(name) for name in ("coowned", "numpy", "scipy")}
    key = checksum({"question": question, "versions": versions})
    path = folder / kind / f"{key}.txt"
    with contextlib.suppress(OSError, ValueError, TypeError, CoownedError):
        check, _, text = path.read_text(encoding="utf-8").partition("\n")
        if check == _check(key, text):
            return decode(text)
    result = make()
    text = encode(result)
    keep(path, f"{_check(key, text)}\n{text}".encode())
    return result


def keep(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes an entry whole or not at all, for its owner alone; a cache that cannot be written is no error.

    Guarantees:
      - Readers see a whole file or none, and nothing is left of a write that failed.   (test_kept_whole_or_not_at_all)
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, content, mode=0o600)


def keep_compiled_programs() -> None:
    """Makes JAX cache compiled programs in this folder for later processes, unless another one is configured.

    Guarantees:
      - A folder set by JAX's own settings or variables is kept.   (test_another_place_stays)
      - A program that was compiled once on this machine is not compiled again.   (test_programs_are_kept)
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = cache_folder()
    if folder is None or jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return
    with contextlib.suppress(OSError):
        programs = folder / "programs"
        programs.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is in it will be run
        jax.config.update("jax_compilation_cache_dir", str(programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small ones add up
        compilation_cache.reset_cache()  # otherwise JAX ignores the folder if it has compiled anything before


def _check(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()
