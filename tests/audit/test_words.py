"""Random bits at their sources. Honest keys may alarm falsely with probability 1e-6."""

import secrets

import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.audit.words import audit_key_source, audit_noise_tail


def test_keys_pass():
    assert audit_key_source(alpha=1e-6, keys=2**14).holds


def repeated_bits(size):
    return 8 * secrets.token_bytes(4)


def few_bits(size):
    """32 random bits, however well they are spread."""
    import hashlib

    return hashlib.sha256(secrets.token_bytes(4)).digest()


def constant_bit(size):
    return bytes([secrets.token_bytes(1)[0] | 1]) + secrets.token_bytes(31)


def counter():
    numbers = iter(range(2**30))
    return lambda size: next(numbers).to_bytes(32, "little")


@pytest.mark.parametrize("source", [repeated_bits, constant_bit, counter(), lambda size: bytes(32)])
def test_wrong_key_sources_are_caught(source, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", _only_for_keys(source))
    assert not audit_key_source(alpha=1e-6, keys=2**12).holds


def test_keys_of_few_random_bits_are_caught(monkeypatch):
    """With 2^18 keys; missed with probability exp(-8) = 3e-4 over runs of this test."""
    monkeypatch.setattr(secrets, "token_bytes", _only_for_keys(few_bits))
    found = audit_key_source(alpha=1e-6)
    assert [check.name for check in found.failures] == ["keys whose first 64 bits are equal"]


def _only_for_keys(source):
    honest = secrets.token_bytes
    return lambda size: source(size) if size == 32 else honest(size)


def test_a_short_tail_is_caught(monkeypatch):
    assert audit_noise_tail().holds
    planted_bugs.short_tail(monkeypatch)
    found = audit_noise_tail()
    assert not found.holds
    largest = next(check for check in found.checks if check.name == "largest value")
    assert largest.observed == pytest.approx(5.42, abs=0.01)
    assert np.isfinite(largest.observed)
