"""Resident memory of this process, as Linux counts it.

Not `getrusage(RUSAGE_SELF).ru_maxrss`: a process inherits that from the one that started it.
"""

from pathlib import Path


def resident() -> int:
    """Bytes of resident memory now."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes of resident memory so far."""
    return _status("VmHWM")


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
