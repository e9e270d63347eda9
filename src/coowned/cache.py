"""Where results that took long are kept: never keys, always safe to delete.

Content is in `tokens/` alone (texts as numbers), which only its owner can read.
"""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path | None:
    """COOWNED_CACHE, else `$XDG_CACHE_HOME/coowned` or `~/.cache/coowned`; None where COOWNED_CACHE is "off"."""
    chosen = os.environ.get("COOWNED_CACHE")
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "off") else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "coowned"


def keep(place: Path, text: str) -> None:
    """Writes an entry whole or not at all; a cache that cannot be written is no error.

    Guarantees:
      - Readers see a whole file or none, and nothing is left of a write that failed.   (test_kept_whole_or_not_at_all)
    """
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
