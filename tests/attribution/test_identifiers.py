"""Ids and keys: integers or text, checked once."""

# ruff: noqa: E501 (tables of cases: one case a line)

import itertools

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from tests.attribution.attributed import invalid_text

from coowned import InputError
from coowned.attribution.identifiers import as_identifiers, check_valid, text_or_integers, utf8_buffers


def test_identifiers_are_checked():
    with pytest.raises(InputError, match="ids must have 3 entries, one for each row, not 2"):
        as_identifiers(["a", "b"], name="ids", length=3)
    with pytest.raises(InputError, match="ids has no value at row 1; fill in every row"):
        as_identifiers(["a", None], name="ids", length=2)
    with pytest.raises(InputError, match="ids must be unique, but row 1 and row 3 are both 'x'"):
        as_identifiers(["a", "x", "b", "x"], name="ids", length=4)
    with pytest.raises(InputError, match="are both '7'"):
        as_identifiers([7, "7"], name="ids", length=2)  # 7 and "7" are the same id
    with pytest.raises(InputError, match="are both 7"):
        as_identifiers(np.array([7, 7]), name="ids", length=2)
    assert as_identifiers(None, name="ids", length=5) is None


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        ("a", "b"),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        pl.Series(["a", "b"]),
        pl.Series(["a", "b"], dtype=pl.Categorical),
        pa.array(["a", "b"]),
        pa.array(["a", "b"], pa.large_string()),
        pa.array(["a", "b"], pa.string_view()),
        pa.array(["a", "b"]).dictionary_encode(),
        pa.array(["x", "a", "b", "y"]).slice(1, 2),
        pa.chunked_array([["a"], ["b"]]),
        pa.chunked_array([pa.array(["a"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()]),
    ],
)
def test_every_kind_of_text(values):
    found = as_identifiers(values, name="ids", length=2)
    assert found.type == pa.large_string()
    assert found.to_pylist() == ["a", "b"]


@pytest.mark.parametrize(
    "values",
    [
        [3, -4],
        np.array([3, -4], dtype=np.int8),
        np.array([3, -4], dtype=">i8"),
        pl.Series([3, -4]),
        pa.array([3, -4], pa.int16()),
        pa.array([3, -4]).dictionary_encode(),
        pa.chunked_array([[3], [-4]]),
    ],
)
def test_every_kind_of_integer(values):
    found = as_identifiers(values, name="ids", length=2)
    assert found.type == pa.int64()
    assert found.to_pylist() == [3, -4]


def test_large_integers():
    small = text_or_integers(pa.array([1, 2**63 - 1], pa.uint64()), name="ids")
    assert (small.type, small.to_pylist()) == (pa.int64(), [1, 2**63 - 1])
    large = text_or_integers(pa.array([1, 2**64 - 1], pa.uint64()), name="ids")
    assert large.to_pylist() == ["1", str(2**64 - 1)]
    assert text_or_integers([1, 2**70], name="ids").to_pylist() == ["1", str(2**70)]


@pytest.mark.parametrize(
    "values",
    [[1.5], [True], [b"x"], [None, 2.0], np.array([1.0]), np.array([b"x"]), pa.array([1.5]), pa.array([True]),
     pa.array([[1]]), pa.array([b"x"]), "abc", np.zeros((2, 2), int), [["a"]], ["\ud800"], [np.datetime64("2020-01-01")]],
)  # fmt: skip
def test_other_kinds_are_refused(values):
    with pytest.raises(InputError, match=r"^ids "):
        text_or_integers(values, name="ids")


def test_empty():
    for values in (
        [],
        np.array([], dtype=int),
        pa.array([], pa.string()),
        pa.chunked_array([], pa.string()),
        pa.array([]),
    ):
        assert len(as_identifiers(values, name="ids", length=0)) == 0
    offsets, data = utf8_buffers(pa.array([], pa.large_string()), length=0)
    assert (offsets.tolist(), data.tolist()) == ([0], [])


def test_utf8_buffers_of_slices_and_numbers():
    def texts(array, length):
        offsets, data = utf8_buffers(array, length=length)
        return [bytes(data[a:b]).decode() for a, b in itertools.pairwise(offsets)]

    assert texts(pa.array(["x", "é", "", "日本"], pa.large_string()).slice(1), 3) == ["é", "", "日本"]
    assert texts(pa.array([7, -12]), 2) == ["7", "-12"]
    assert texts(None, 3) == ["0", "1", "2"]


def test_invalid_text_is_found():
    text = [b"fine"] * 100
    text[63] = b"\xff"
    with pytest.raises(InputError, match="column 'x' is not UTF-8 at row 63; correct it"):
        check_valid(invalid_text(text), "column 'x'")
    with pytest.raises(InputError, match="at row 163"):
        check_valid(pa.chunked_array([pa.array(["a"] * 100), invalid_text(text)]), "column 'x'")
    lists = pa.ListArray.from_arrays(pa.array([0, 10, 62, 64, 100]), invalid_text(text))
    with pytest.raises(InputError, match="at row 2;"):
        check_valid(lists, "column 'x'")
    with pytest.raises(InputError, match="ids is not UTF-8 at row 63"):
        text_or_integers(invalid_text(text), name="ids")
    bad_dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 5]), pa.array(["a"]), safe=False)
    with pytest.raises(InputError, match="is not valid Arrow data"):
        check_valid(bad_dictionary, "column 'x'")
