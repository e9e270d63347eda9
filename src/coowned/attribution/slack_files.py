"""Slack's export as it lies on the disk: a folder, or the zip that Slack gives, from which nothing is extracted."""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from coowned.attribution.identifiers import one_line
from coowned.errors import InputError

LISTS = ("channels.json", "groups.json", "dms.json", "mpims.json")
_LARGEST_FILE = 1 << 30  # one day of one channel; more is no export
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


class SlackFiles:
    """The JSON files of an export, by their names below its root ("general/2024-01-31.json").

    The root is where the list of channels is: at the top, or in the one folder that a new zip was made of.
    """

    def __init__(self, path: str | os.PathLike[str], sizes: dict[str, int], archive: zipfile.ZipFile | None):
        self.path = Path(path)
        self._archive = archive
        root = _root_of(sizes)
        if root is None:
            raise InputError(
                f"{self.path}: not a Slack export: there is no {', '.join(LISTS[:-1])} or {LISTS[-1]} in it; "
                "give the folder or zip as Slack made it"
            )
        self._root = root
        self.sizes = {name.removeprefix(root): size for name, size in sizes.items() if name.startswith(root)}

    def list_of_objects(self, name: str) -> list[dict[str, Any]]:
        """Reads a file that must be a JSON list of objects."""
        place = f"{self.path}: {name}"
        if self.sizes[name] > _LARGEST_FILE:
            raise InputError(f"{place}: has {self.sizes[name]:,} bytes, which no day of a channel has; check the file")
        content = self._read(name, place)
        try:
            values = json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise InputError(f"{place}: not UTF-8 at byte {error.start}; get the export anew") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: not JSON ({one_line(error)}); get the export anew") from None
        if not isinstance(values, list):
            raise InputError(f"{place}: not a JSON list; get the export anew")
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise InputError(f"{place}, entry {number}: not a JSON object; get the export anew")
        return values

    def _read(self, name: str, place: str) -> bytes:
        try:
            if self._archive is None:
                return (self.path / f"{self._root}{name}").read_bytes()
            return self._archive.read(f"{self._root}{name}")
        except _ZIP_ERRORS as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise InputError(f"{place}: cannot be read ({reason}); get the export anew") from error


@contextlib.contextmanager
def open_export(path: str | os.PathLike[str]) -> Iterator[SlackFiles]:
    """Opens an export for reading."""
    place = Path(path)
    if place.is_dir():
        yield SlackFiles(place, _files_below(place), None)
        return
    if not place.is_file():
        raise InputError(f"{place}: no such file or folder; check the path")
    try:
        archive = zipfile.ZipFile(place)
    except _ZIP_ERRORS as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{place}: not a folder, and no zip can be read there ({reason}); check the path") from error
    with archive:
        yield SlackFiles(place, _entries_of(archive), archive)


def looks_like_slack(path: str | os.PathLike[str]) -> bool:
    """True for a folder or zip with users.json and channels.json as Slack places them.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> looks_like_slack(folder)
      False
      >>> for name in ("users.json", "channels.json"):
      ...     _ = (folder / name).write_text("[]")
      >>> looks_like_slack(folder)
      True
    """
    place = Path(path)
    try:
        if place.is_dir():
            return any((root / "channels.json").is_file() and (root / "users.json").is_file() for root in _roots(place))
        if not zipfile.is_zipfile(place):
            return False
        with zipfile.ZipFile(place) as archive:
            sizes = _entries_of(archive)
            root = _root_of(sizes)
            return root is not None and f"{root}channels.json" in sizes and f"{root}users.json" in sizes
    except _ZIP_ERRORS:
        return False


def _roots(folder: Path) -> list[Path]:
    below = [path for path in folder.iterdir() if path.name[0] not in "._"]
    return [folder, *(below if len(below) == 1 and below[0].is_dir() else [])]


def _files_below(folder: Path) -> dict[str, int]:
    try:
        return {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file() and file.name[0] not in "._"
        }
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror}); check who may read it") from error


def _entries_of(archive: zipfile.ZipFile) -> dict[str, int]:
    return {
        entry.filename: entry.file_size
        for entry in archive.infolist()
        if not entry.is_dir() and not entry.filename.startswith("__MACOSX/")
    }


def _root_of(names: dict[str, int]) -> str | None:
    """Where the lists of conversations are: "" or "folder/"; None where there is none or more than one such place."""
    paths = [PurePosixPath(name) for name in names]
    found = {str(path.parent) for path in paths if path.name in LISTS and len(path.parts) <= 2}
    if "." in found:
        return ""
    return f"{found.pop()}/" if len(found) == 1 else None
