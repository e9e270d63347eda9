"""What all audits of one process share."""

import functools
from collections.abc import Iterator

import pytest

from coowned.exact import normals


@pytest.fixture(scope="session", autouse=True)
def _tails_are_computed_once() -> Iterator[None]:
    """Every audit asks for the same tails of a normal, to many digits: most of its time where trials are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normals, "upper_tail", functools.cache(normals.upper_tail))
        yield
