"""A record, shared by a user's processes on this machine, of the run that each secret key has served."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from coowned.cache import cache_folder
from coowned.errors import InputError

_HELD: dict[tuple[int, str], list[int]] = {}  # by process and key: the open record, and how many hold it now


@contextlib.contextmanager
def claimed(fingerprint: str, run: str) -> Iterator[None]:
    """Locks a key for a run; raises InputError if another process holds it, or if it has served another run.

    Guarantees:
      - Of two processes that read one key only one trains with it at a time.   (test_a_key_in_use_is_refused)
      - A process that comes later trains the same run or none.   (test_another_run_is_refused_later)
      - A process that is killed leaves no lock.   (test_a_killed_process_holds_nothing)
    What it is not: protection across machines that share no cache folder, or where nothing can be written.

    Args:
      fingerprint: names the key.
      run: names the run: plan, model, data and where training starts.
    """
    own = os.getpid(), fingerprint  # a fork holds nothing
    if own not in _HELD:  # otherwise `RunKey.bind` has compared the runs of this process
        handle = _open(fingerprint)
        if handle is None:
            yield
            return
        try:
            _claim(handle, hashlib.sha256(run.encode()).hexdigest().encode())
        except BaseException:
            os.close(handle)
            raise
        _HELD[own] = [handle, 0]
    held = _HELD[own]
    held[1] += 1
    try:
        yield
    finally:
        held[1] -= 1
        if not held[1]:
            del _HELD[own]
            os.close(held[0])  # and with it the lock


def forget(fingerprints: Iterable[str]) -> None:
    """Removes the records of keys that are about to be destroyed, where there are any."""
    for fingerprint in fingerprints:
        with contextlib.suppress(OSError):
            (_folder() / fingerprint).unlink()


def _folder() -> Path:
    return (cache_folder() or Path(tempfile.gettempdir()) / f"coowned-{os.getuid()}") / "keys"


def _open(fingerprint: str) -> int | None:
    """Opens the record of a key; returns None if no file can be written."""
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(_folder() / fingerprint, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    return None


def _claim(handle: int, run: bytes) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
    except OSError:
        raise InputError(
            "another process is training with this run key: with other data, the same noise would be added to two "
            "different gradients and reveal both; wait for it, start several workers with --processes or torchrun, or "
            "use RunKey.from_operating_system() for each run"
        ) from None
    served = os.read(handle, len(run) + 1)
    if served and served != run:
        raise InputError(
            "this run key was used by another run, in another process: the same noise added to two different gradients "
            "reveals both; use RunKey.from_operating_system() for each run"
        )
    if not served:
        os.write(handle, run)
        os.fsync(handle)
