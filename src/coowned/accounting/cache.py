"""Results that took long, kept on disk: one small JSON file each, named by a hash of everything the result depends on.

The folder is the `COOWNED_CACHE` environment variable, else `$XDG_CACHE_HOME/coowned` or `~/.cache/coowned`; the value
"off" switches it off. A file that cannot be read, is damaged or belongs to another question counts as absent; a folder
that cannot be written is no error.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import pathlib
from typing import Any

from coowned.cache import cache_folder, keep

ACCOUNTANT_VERSION = 2  # raise it whenever any epsilon or noise multiplier may change


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultCache:
    """Floats by question. `directory` None keeps nothing.

    Guarantees:
      - Another input or version is another entry.   (test_every_input_is_part_of_the_key)
      - Readers see a whole file or none.   (test_a_damaged_file_is_ignored, test_no_partial_file_is_left)
    """

    directory: pathlib.Path | None

    @classmethod
    def default(cls) -> "ResultCache":
        """The cache of this user, as the environment says."""
        return cls(directory=cache_folder())

    def get(self, question: dict[str, Any]) -> float | None:
        """The stored answer to exactly this question, or None."""
        key = _full_key(question)
        path = self._path(key)
        if path is None:
            return None
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            value = entry["value"]
            whole = entry["key"] == key and entry["check"] == _check(key, value)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return value if whole and isinstance(value, float) and math.isfinite(value) else None

    def put(self, question: dict[str, Any], value: float) -> None:
        """Stores an answer; whole or not at all."""
        key = _full_key(question)
        path = self._path(key)
        if path is None:
            return
        keep(path, json.dumps({"key": key, "value": value, "check": _check(key, value)}))

    def _path(self, key: dict[str, Any]) -> pathlib.Path | None:
        if self.directory is None:
            return None
        name = hashlib.sha256(_canonical(key).encode()).hexdigest()
        return pathlib.Path(self.directory) / "accounting" / f"{name}.json"


def _full_key(question: dict[str, Any]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("coowned", "numpy", "scipy")}
    return {**question, "accountant": ACCOUNTANT_VERSION, "versions": versions}


def _canonical(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)  # floats in their shortest exact form


def _check(key: dict[str, Any], value: float) -> str:
    return hashlib.sha256(f"{_canonical(key)} {value!r}".encode()).hexdigest()
