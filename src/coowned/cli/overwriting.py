"""Whatever a verb reads must survive what it writes."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource


def files_of(source: "DataSource") -> list[str | os.PathLike[str]]:
    """What a verb with data options reads."""
    return [given for given in (source.path, source.aliases, source.unprotected) if given is not None]


def refuse_to_overwrite(inputs: Iterable[str | os.PathLike[str]], outputs: Iterable[Path | None]) -> None:
    """Refuses an output that is an input, lies in an input folder, or is another output; None writes nothing.

    A file in a data folder would be taken for data at the next reading.
    """
    read = [_place(given) for given in inputs]
    taken: set[Path] = set()
    for output in outputs:
        if output is None:
            continue
        place = output.resolve()
        if place in read:
            raise InputError(f"{output}: would overwrite what it is made from; name another place")
        if any(given.is_dir() and given in place.parents for given in read):
            raise InputError(f"{output}: lies inside the data folder and would be read as data; name another place")
        if place in taken:
            raise InputError(f"{output}: two results cannot be in one file; name another place for one of them")
        taken.add(place)


def refuse_to_replace(folders: Iterable[Path], output: Path | None, *, except_for: Iterable[str]) -> None:
    """Refuses an output that would replace a file inside one of the folders, other than one of these names in it."""
    if output is None:
        return
    place = output.resolve()
    for folder in folders:
        own = [folder.resolve() / name for name in except_for]
        if folder.resolve() in place.parents and os.path.lexists(output) and place not in own:
            raise InputError(f"{output}: would overwrite a file of the run; name another place")


def _place(given: str | os.PathLike[str]) -> Path:
    """The file behind a path or the address of a database."""
    return Path(str(given).removeprefix("sqlite:///")).resolve()
