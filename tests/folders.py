"""The content of a folder."""

from pathlib import Path


def names(folder: Path) -> list[str]:
    """Returns the sorted names of all files and folders in a folder."""
    return sorted(path.name for path in folder.iterdir())
