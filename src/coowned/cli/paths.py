"""Paths of a verb: the certificate next to S, and outputs that never overwrite inputs."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource
    from coowned.certificate import ContributionCertificate

PathOrURL = str | os.PathLike[str]


def files_of(source: "DataSource") -> list[PathOrURL]:
    return [path for path in (source.path, source.aliases, source.unprotected) if path is not None]


def refuse_to_overwrite(
    inputs: Iterable[PathOrURL], outputs: Iterable[PathOrURL | None], *, replace: bool = True
) -> None:
    """Refuses an output that is an input, is inside an input folder, or is another output; None is no output.

    A file in a data folder would be read as data next time. Without `replace` an output that exists is
    refused too; what exists at a URL of another file system is not looked at here.
    """
    read = [_resolved(path_or_url) for path_or_url in inputs]
    written: set[str] = set()
    for output in outputs:
        if output is None:
            continue
        path = _resolved(output)
        if path in read:
            raise InputError(f"{output}: would overwrite its own input; choose another path")
        if any(path.startswith(f"{folder}/") and ("://" in folder or Path(folder).is_dir()) for folder in read):
            raise InputError(f"{output}: is inside the data folder and would be read as data; choose another path")
        if path in written:
            raise InputError(f"{output}: two outputs have this path; choose another path for one of them")
        if not replace and os.path.lexists(path):
            raise_exists(output)
        written.add(path)


def raise_exists(output: PathOrURL) -> None:
    raise InputError(f"{output}: already exists; choose another path, or give --overwrite to replace it")


def refuse_to_replace(folders: Iterable[Path], output: Path | None, *, except_for: Iterable[str]) -> None:
    """Refuses an output that would replace a file inside one of the folders, other than one of these names in it."""
    if output is None:
        return
    path = output.resolve()
    for folder in folders:
        allowed = [folder.resolve() / name for name in except_for]
        if folder.resolve() in path.parents and os.path.lexists(output) and path not in allowed:
            raise InputError(f"{output}: would overwrite a file of the run; choose another path")


def _resolved(path_or_url: PathOrURL) -> str:
    """Returns one spelling of each path or URL, so that two can be compared; a SQLite URL becomes its file."""
    path = str(path_or_url).removeprefix("sqlite:///").removeprefix("file://")
    return path.rstrip("/") if "://" in path else str(Path(path).resolve())


def read_certificate(path: Path) -> "ContributionCertificate":
    """Reads a certificate file; what cannot be read is bad input."""
    from coowned.certificate import ContributionCertificate

    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the certificate ({error.strerror}); give --certificate FILE") from error
    return ContributionCertificate.from_json(text, name=str(path))
