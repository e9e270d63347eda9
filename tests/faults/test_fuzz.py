"""Every kind of file we read, damaged in many ways: 1,000 cases here, 100,000 in `make fuzz`."""

import pytest
from tests.faults.fuzzing import Outcome, Target, damaged, fuzz, resealed, targets

from coowned.errors import InputError

CASES = 48  # of each target: 1,008 in all


@pytest.mark.full
@pytest.mark.parametrize("name", targets())
def test_damaged_files(name: str):
    outcome = fuzz(targets()[name](), CASES)
    assert outcome.failures == {}
    assert outcome.read + outcome.refused == CASES


def test_another_error_is_seen():
    """The fuzzer can fail: readers that raise something else, or never end, are found."""

    def read(folder):
        content = (folder / "a").read_bytes()
        if content != b"whole":
            raise InputError("refused") if len(content) > 5 else KeyError(content)

    outcome = fuzz(Target({"a": b"whole"}, read), 60)
    assert outcome.refused > 0
    assert any(failure.startswith("KeyError") for failure in outcome.failures)


def test_a_reader_that_does_not_end_is_seen(monkeypatch):
    monkeypatch.setattr("tests.faults.fuzzing.SECONDS", 0.05)

    def read(folder):
        damaged = (folder / "a").read_bytes() != b"whole"
        while damaged:
            pass

    outcome = fuzz(Target({"a": b"whole"}, read), 2)
    assert any(failure.startswith("TooSlow") for failure in outcome.failures)


def test_damage():
    assert damaged(b"abcd", [("flip", 0.5, 8, b"x")]) == b"abbd"
    assert damaged(b"abcd", [("truncate", 0.5, 1, b"x"), ("insert", 0.99, 1, b"xy")]) == b"axyb"
    assert damaged(b'{"a": [1, 2]}', [("value", 0.0, 1, b"")]) == b'{"a": true}'
    assert resealed(b'{"checksum": 1, "a": 2}') != b'{"checksum": 1, "a": 2}'
    assert Outcome().failures == {}
