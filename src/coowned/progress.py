"""Progress of long computations, and the wording of durations, counts and choices."""

import difflib
from collections.abc import Callable, Iterable

from coowned.errors import InputError

Progress = Callable[[float, str], None]
"""Called as progress(done, message): `done` is the finished part of the work, from 0 to 1."""


def silent(done: float, message: str) -> None:
    """Does nothing, as a progress callback."""


def reporting(progress: Progress | None) -> Progress:
    """Returns the given progress, `silent` for None; raises an error if it is not callable."""
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be callable as progress(done, message), not {progress!r}")
    return progress or silent


def duration(seconds: float) -> str:
    """Formats a duration in at most two units.

    >>> duration(0.04), duration(12.3), duration(125), duration(7260), duration(200_000)
    ('0.04 s', '12 s', '2 min 5 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    left, parts = round(seconds), []
    for name, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        whole, left = divmod(left, length)
        parts.append((whole, name))
    first = next(number for number, (whole, _) in enumerate(parts) if whole)
    return " ".join(f"{whole} {name}" for whole, name in parts[first : first + 2] if whole)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Formats a number with its noun.

    >>> counted(1, "user"), counted(1200, "copy", "copies")
    ('1 user', '1,200 copies')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def one_of(words: Iterable[str]) -> str:
    """Joins choices with commas and "or".

    >>> one_of(["poisson", "min-separation", "cyclic"])
    'poisson, min-separation or cyclic'
    """
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error about a word that is close to a known one; empty if it is close to none.

    >>> did_you_mean("zeroout", ["zero-out", "replace"])
    "; did you mean 'zero-out'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown word.

    >>> nearest("epsilom", ["epsilon", "delta"])
    "; did you mean 'epsilon'?"
    >>> nearest("x", ["epsilon", "delta"])
    '; choose epsilon or delta'
    """
    listed = [str(choice) for choice in known]
    return did_you_mean(word, listed) or (f"; choose {one_of(listed)}" if listed else "")
