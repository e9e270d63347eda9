"""Where results that took long are kept: never content, never keys, always safe to delete."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """COOWNED_CACHE, else `$XDG_CACHE_HOME/coowned` or `~/.cache/coowned`; None where COOWNED_CACHE is "off"."""
    chosen = os.environ.get("COOWNED_CACHE")
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "off") else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "coowned"
