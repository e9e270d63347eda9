"""Files on disk: their first bytes, atomic output, which appears completely or not at all, and a cache of results.

The cache is readable by its owner only. Its folder also holds what others put there: arrays derived from content
(`derived/`, `embeddings/`), as secret as the content, and which run each key has served (`keys/`). Deleting it costs
time, and with `keys/` the protection against a second use of a key.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from coowned.codec import checksum
from coowned.errors import CoownedError, InputError

FileStates = tuple[tuple[str, int, int], ...]
"""Name, size and time of change of every file."""
_HEAD = 1 << 16  # bytes read to detect the kind of a file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)  # the last from /proc


def check_writable(folder: Path, target: Path | None = None) -> None:
    """Raises InputError for a folder in which nothing can be created; `target` is what was to be created.

    Guarantees:
      - Every verb that writes answers with exit code 2 and one sentence.   (test_unwritable_places)
    """
    if not os.access(folder, os.W_OK):
        raise _unwritable(folder, target)


@contextlib.contextmanager
def refusing_unwritable(target: Path) -> Iterator[None]:
    """Raises InputError for a target in an unwritable folder; the OSError of a full disk passes."""
    check_writable(target.parent, target)
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise _unwritable(target.parent, target) from None


def _unwritable(folder: Path, target: Path | None) -> InputError:
    subject = f"{folder}:" if target is None else f"{target}: the folder {folder}"
    return InputError(f"{subject} cannot be written to; choose another")


def write_file(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Replaces one file atomically, and waits until it is on disk.

    Guarantees:
      - After an error the old file is as it was, and nothing is left behind.   (test_failed_write_leaves_the_old_file)

    Args:
      content: the bytes, or a function that writes them.
      mode: permissions, less those the process's umask takes away.
      temporary: path of the file while it is written; default: a unique name next to `path`.
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
    """Yields a temporary path next to each target; on a clean exit all replace their targets, else none does.

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
    paths = [Path(target) for target in targets]
    for target in paths:
        check_target(target)
    with _naming(paths), contextlib.ExitStack() as rooms:
        # Beside the target, so that replacing it is one rename on the same disk.
        temporary = []
        for target in paths:
            with refusing_unwritable(target):
                folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
            temporary.append(Path(rooms.enter_context(folder)) / target.name)
        yield temporary
        for path in temporary:
            _flush(path)
        with contextlib.ExitStack() as undo:
            for path, target in zip(temporary, paths, strict=True):
                _move(path, target, undo)
            undo.pop_all()


def is_full(error: OSError) -> bool:
    """Returns whether the disk or a quota is full; libraries keep the number of the error or its words."""
    return error.errno in _FULL or "No space left on device" in str(error)


@contextlib.contextmanager
def _naming(targets: list[Path]) -> Iterator[None]:
    """Makes the error of a full disk name the first target instead of a temporary file or nothing."""
    try:
        yield
    except OSError as error:
        inside = error.filename is None or any(f".{target.name}." in str(error.filename) for target in targets)
        if not (is_full(error) and inside):
            raise
        number = error.errno or errno.ENOSPC
        raise OSError(number, os.strerror(number), str(targets[0])) from error


def check_parent(target: Path) -> None:
    """Raises an error for a path in a folder that does not exist."""
    if not target.parent.exists():
        raise InputError(f"{target}: the folder {target.parent} does not exist; create it first")
    if not target.parent.is_dir():
        raise InputError(f"{target}: {target.parent} is not a folder; choose another path")


def check_target(target: Path) -> None:
    """Raises an error for a path that cannot be written, before anything is computed for it."""
    if not target.name or target.name == "..":
        raise InputError(f"{target}: not a file name; give the path of the file to write")
    if os.path.lexists(target) and not target.is_file() and not target.is_dir():
        raise InputError(f"{target}: neither a file nor a folder (a device or a broken link); choose another path")
    check_parent(target)
    if target.is_dir():
        names = sorted(file.name for file in target.iterdir())
        foreign = next((name for name in names if not name.endswith(".parquet") and name[0] not in "._"), None)
        if foreign is not None:
            raise InputError(f"{target}: a folder with other files in it ({foreign}); choose another path")


def _move(path: Path, target: Path, undo: contextlib.ExitStack) -> None:
    """Moves path to target; the old target is kept aside, and undo restores it."""
    kept = path.with_name(f"{path.name}.replaced")
    if (target.is_dir() and not target.is_symlink()) or (path.is_dir() and os.path.lexists(target)):
        os.rename(target, kept)
        undo.callback(_put_back, kept, target)
    elif os.path.lexists(target):
        with contextlib.suppress(OSError):  # a disk without links: then the old file cannot be put back
            os.link(target, kept, follow_symlinks=False)
            undo.callback(os.replace, kept, target)
    else:
        undo.callback(remove, target)
    os.replace(path, target)


def _put_back(kept: Path, target: Path) -> None:
    remove(target)
    os.rename(kept, target)


def remove(target: Path) -> None:
    """Removes a file, a link or a folder with all that is in it, if there is one."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read_head(file: Path, length: int = _HEAD) -> bytes:
    """Returns the first bytes of a file, enough to detect its kind."""
    try:
        with file.open("rb") as opened:
            return opened.read(length)
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(path: object, error: Exception) -> InputError:
    """Returns the error for a path that cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{path}: cannot be read ({reason}); check the path and its permissions")


def file_states(*paths: str | os.PathLike[str]) -> FileStates:
    """Returns the states of files, and of all files in folders, in the order of their names."""
    found: list[tuple[str, os.stat_result]] = []
    for root in map(Path, paths):
        try:
            files = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
            found += [(str(file), file.stat()) for file in files]
        except OSError as error:
            raise unreadable(root, error) from error
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)


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
        if check == checksum_of(key, text):
            return decode(text)
    result = make()
    text = encode(result)
    keep(path, f"{checksum_of(key, text)}\n{text}".encode())
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


def checksum_of(key: str, text: str) -> str:
    return hashlib.sha256(f"{key} {text}".encode()).hexdigest()
