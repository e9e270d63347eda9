"""Compiled loops that are kept on disk, and made again when any file of the mechanism changes.

Numba looks at a function's own file alone: a loop that calls one of another file would go on with the old one.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without Python's lock, kept on disk for as long as no file of this folder changes.

    Guarantees:
      - A change in another file of the mechanism is seen.   (test_a_change_in_another_file_is_seen)
    What it is not: for loops that call files of other folders.
    """

    def compile_later(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy", **options)(function)
        try:
            dispatcher.enable_caching()
        except RuntimeError:  # there is no file, as in a console
            return dispatcher
        kept: Any = getattr(dispatcher._cache, "_cache_file", None)
        if not hasattr(kept, "_source_stamp"):  # not a public part of numba: without it nothing is kept
            return numba.njit(nogil=True, error_model="numpy", **options)(function)
        kept._source_stamp = (kept._source_stamp, _stamps(Path(__file__).parent))
        return dispatcher

    return compile_later


@functools.cache
def _stamps(folder: Path) -> tuple[tuple[str, str], ...]:
    """(name, digest) of every source file: times and sizes may be the same after a change."""
    return tuple((path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(folder.glob("*.py")))
