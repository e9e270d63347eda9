"""Labels: declared classes, the columns that can hold them, and the index of each label."""

import numpy as np
import pyarrow as pa
import pytest

from coowned.content.labels import check_label_column, class_indices, declared_classes
from coowned.errors import InputError


@pytest.mark.parametrize("classes", [1, 0, True, 2.5, "ab", ["a"], ["a", "a"], ["a", 1], [True, False], [0.5, 1.5]])
def test_bad_classes(classes):
    with pytest.raises(InputError, match="classes"):
        declared_classes(classes)


@pytest.mark.parametrize(
    ("kind", "classes", "match"),
    [
        (pa.string(), (0, 1), r"holds text: declare its classes"),
        (pa.dictionary(pa.int32(), pa.string()), (0, 1), r"holds text: declare its classes"),
        (pa.int64(), ("a", "b"), "declare them as the data spell them"),
        (pa.list_(pa.int64()), (0, 1), "declare them as the data spell them"),
    ],
)
def test_columns_that_cannot_hold_the_classes(kind, classes, match):
    with pytest.raises(InputError, match=match):
        check_label_column(pa.schema({"y": kind}), "y", classes)
    with pytest.raises(InputError, match="no column 'z', which the model reads; they have y"):
        check_label_column(pa.schema({"y": kind}), "z", classes)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_texts(kind):
    check_label_column(pa.schema({"y": kind}), "y", ("b", "a"))
    column = pa.chunked_array([pa.array(["a", "B", None]).cast(kind), pa.array(["b"]).cast(kind)])
    np.testing.assert_array_equal(class_indices(column, ("b", "a")), [1, np.nan, np.nan, 0])


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.float64()])
def test_numbers(kind):
    check_label_column(pa.schema({"y": kind}), "y", (0, 1, 2))
    column = pa.chunked_array([pa.array([2, 0, 3, None]).cast(kind)])
    np.testing.assert_array_equal(class_indices(column, (0, 1, 2)), [2, 0, np.nan, np.nan])


def test_neighbouring_large_numbers_are_different_classes():
    column = pa.chunked_array([[2**24, 2**24 + 1, 2**31 + 1]])  # the first two are one number in float32
    np.testing.assert_array_equal(class_indices(column, (2**24 + 1, 2**31)), [np.nan, 0, np.nan])


def test_labels_depend_on_their_own_cell():
    """Not on what others hold: nothing is collected."""
    whole = pa.chunked_array([["x", "ham", None, "spam", "ham"]])
    alone = [class_indices(whole.slice(row, 1), ("spam", "ham"))[0] for row in range(5)]
    np.testing.assert_array_equal(class_indices(whole, ("spam", "ham")), alone)


def test_nothing_but_nulls():
    check_label_column(pa.schema({"y": pa.null()}), "y", (0, 1))
    assert np.isnan(class_indices(pa.chunked_array([pa.nulls(3)]), (0, 1))).all()
