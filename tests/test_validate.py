"""The guards: every wrong value is one sentence that names the argument."""

import math
from fractions import Fraction

import numpy as np
import pytest

from coowned import InputError, validate


@pytest.mark.parametrize("value", [1, 7, np.int32(3), np.uint64(9), 10**400])
def test_positive_takes_whole_numbers(value):
    assert validate.positive(count=value) is None


@pytest.mark.parametrize("value", [0, -1, 1.0, True, np.bool_(True), "1", None, math.nan, [1]])
def test_positive_refuses_the_rest(value):
    with pytest.raises(InputError, match="count must be an integer of at least 1, not"):
        validate.positive(count=value)


def test_integer_has_both_ends():
    validate.integer(at_least=0, at_most=3, a=0, b=3)
    with pytest.raises(InputError, match="b must be an integer of at least 0 and at most 3, not 4"):
        validate.integer(at_least=0, at_most=3, a=0, b=4)


@pytest.mark.parametrize("value", [0.5, 3, np.float32(2), Fraction(1, 3), 10**400])
def test_positive_number_takes_finite_numbers(value):
    assert validate.positive_number(sigma=value) is None


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, -math.inf, True, "1", None, 1j])
def test_positive_number_refuses_the_rest(value):
    with pytest.raises(InputError, match="sigma must be a finite number above 0"):
        validate.positive_number(sigma=value)


def test_in_range_ends():
    validate.in_range(0, 1, p=0.0)
    validate.in_range(0, 1, p=1)
    with pytest.raises(InputError, match=r"p must be a number in \(0, 1\], not 0"):
        validate.in_range(0, 1, open_low=True, p=0)
    with pytest.raises(InputError, match=r"p must be a number in \[0, 1\), not 1"):
        validate.in_range(0, 1, open_high=True, p=1)
    for wrong in (math.nan, True, "0.5", None, 10**400):
        with pytest.raises(InputError, match="p must be a number in"):
            validate.in_range(0, 1, p=wrong)


def test_one_of_lists_the_choices():
    validate.one_of(("hash", "input"), ties="hash")
    for wrong in ("Hash", None, 3, np.array(["hash"])):
        with pytest.raises(InputError, match="ties must be one of 'hash', 'input', not"):
            validate.one_of(("hash", "input"), ties=wrong)
    with pytest.raises(InputError, match=r"not 'inputs'; did you mean 'input'\?$"):
        validate.one_of(("hash", "input"), ties="inputs")


def test_local_path_refuses_addresses():
    validate.local_path(path="a/S.parquet", shards=None)
    with pytest.raises(InputError, match="shards: hdfs://head/S is an address, which only Spark reads; copy it"):
        validate.local_path(shards="hdfs://head/S")


def test_same_length_and_seed():
    validate.same_length(2, a=[1, 2], b="xy")
    with pytest.raises(InputError, match="b must have 2 entries, not 3"):
        validate.same_length(2, a=[1, 2], b=[1, 2, 3])
    validate.seed(2**63 - 1)
    for wrong in (-1, 2**63, 0.0, True):
        with pytest.raises(InputError, match="seed must be"):
            validate.seed(wrong)
