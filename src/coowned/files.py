"""Output files that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from coowned.errors import InputError

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)  # the last from /proc


def check_writable(folder: Path, place: Path | None = None) -> None:
    """Refuses, with InputError, a folder in which nothing can be made; `place` is what was to be made there.

    Guarantees:
      - Every verb that writes answers with exit code 2 and one sentence.   (test_unwritable_places)
    """
    if not os.access(folder, os.W_OK):
        raise _unwritable(folder, place)


@contextlib.contextmanager
def making(place: Path) -> Iterator[None]:
    """The same for the folder that `place` is to be made in, where only trying tells; a full disk's OSError passes."""
    check_writable(place.parent, place)
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise _unwritable(place.parent, place) from None


def _unwritable(folder: Path, place: Path | None) -> InputError:
    what = f"{folder}:" if place is None else f"{place}: the folder {folder}"
    return InputError(f"{what} cannot be written to; choose another")


def write_file(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Replaces one file whole or not at all, and waits until the disk has it.

    Guarantees:
      - After an error the old file is as it was, and nothing is left behind.   (test_failed_write_leaves_the_old_file)

    Args:
      content: the bytes, or a function that writes them.
      mode: permissions, less those the process's umask takes away.
      temporary: what the file is called while it is written, beside `path`; default: a name of its own.
    """
    part = temporary or path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the temporary name
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_files(*targets: str | os.PathLike[str]) -> Iterator[list[Path]]:
    """Gives a temporary path beside each target; on a clean exit all take their targets' places, else none does.

    Guarantees:
      - After an error, an interrupt or a full disk no target has changed and nothing is left behind.
        (test_nothing_half_written, test_failure_while_taking_places_is_undone)
      - A folder of Parquet files left by an earlier run is replaced as a whole, any other refused.
        (test_folder_is_replaced, test_folder_with_other_things_is_kept)

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> with whole_files(folder / "a.txt") as (temporary,):
      ...     _ = temporary.write_text("all of it")
      >>> [path.name for path in folder.iterdir()]
      ['a.txt']
    """
    places = [Path(target) for target in targets]
    for place in places:
        _check_target(place)
    with contextlib.ExitStack() as rooms:
        # Beside the target, so that taking its place is one rename on the same disk.
        temporary = []
        for place in places:
            with making(place):
                room = tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent)
            temporary.append(Path(rooms.enter_context(room)) / place.name)
        yield temporary
        for path in temporary:
            _flush(path)
        with contextlib.ExitStack() as undo:
            for path, place in zip(temporary, places, strict=True):
                _take_place(path, place, undo)
            undo.pop_all()


def _check_target(place: Path) -> None:
    if not place.name or place.name == "..":
        raise InputError(f"{place}: not the name of a file; name the file to write")
    if os.path.lexists(place) and not place.is_file() and not place.is_dir():
        raise InputError(f"{place}: neither a file nor a folder (a device or a broken link); name another place")
    if not place.parent.is_dir():
        raise InputError(f"{place}: the folder {place.parent} does not exist; make it first")
    if place.is_dir():
        foreign = [
            file.name for file in place.iterdir() if not file.name.endswith(".parquet") and file.name[0] not in "._"
        ]
        if foreign:
            raise InputError(f"{place}: a folder that holds other things ({sorted(foreign)[0]}); name another place")


def _take_place(path: Path, place: Path, undo: contextlib.ExitStack) -> None:
    """Moves path to place; what was there is kept aside, and undo puts it back."""
    kept = path.with_name(f"{path.name}.replaced")
    if (place.is_dir() and not place.is_symlink()) or (path.is_dir() and os.path.lexists(place)):
        os.rename(place, kept)
        undo.callback(_put_back, kept, place)
    elif os.path.lexists(place):
        with contextlib.suppress(OSError):  # a disk without links: then the old file cannot be put back
            os.link(place, kept, follow_symlinks=False)
            undo.callback(os.replace, kept, place)
    else:
        undo.callback(_remove, place)
    os.replace(path, place)


def _put_back(kept: Path, place: Path) -> None:
    _remove(place)
    os.rename(kept, place)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
