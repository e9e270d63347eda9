"""Tables for the tests of commands."""

from pathlib import Path

import pytest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """60 messages of one or two of seven users each, as CSV."""
    file = tmp_path / "mail.csv"
    file.write_text("id,users\n" + "".join(f"m{i},u{i % 7};u{i % 5}\n" for i in range(60)))
    return file


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """300 examples of one or two of 40 users each, as CSV."""
    rows = "\n".join(f"{number},user{number % 40};user{number % 37}" for number in range(300))
    path = tmp_path / "data.csv"
    path.write_text(f"id,users\n{rows}\n", encoding="utf-8")
    return path
