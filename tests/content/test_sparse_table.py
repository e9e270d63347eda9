"""Sparse rows as training data."""

import dataclasses

import numpy as np
import pytest

from coowned import AttributionGraph, InputError
from coowned.content.data import rows_in_place, with_norms
from coowned.content.sparse_table import SparseTable

GRAPH = AttributionGraph.from_users_per_example([[0], [1], [2]])
TABLE = SparseTable(
    graph=GRAPH,
    indices=np.array([1, 5, 2], np.uint16),
    values=np.array([7, -8, 9], np.int16),
    offsets=np.array([0, 2, 2, 3]),
    labels=np.float32([1, 0, np.nan]),
)


def filled(data, examples):
    kinds = data.dtypes()
    out = {name: np.full((len(examples), *shape), 3, kinds[name]) for name, shape in data.shapes().items()}
    data.fill(np.array(examples), out)
    return out


def test_fill_gives_the_rows():
    out = filled(TABLE, [2, 0, 1, 0])
    assert out["indices"].tolist() == [[2, 0], [1, 5], [0, 0], [1, 5]]
    assert out["values"].tolist() == [[9, 0], [7, -8], [0, 0], [7, -8]]
    np.testing.assert_array_equal(out["labels"], np.float32([np.nan, 1, 0, 1]))
    part = dataclasses.replace(TABLE, graph=GRAPH.subgraph([0, 1]), rows=np.array([2, -1]))
    assert filled(part, [0])["values"].tolist() == [[9, 0]]
    with pytest.raises(InputError, match="not selected"):
        filled(part, [1])


def test_rows_in_place_are_those_of_fill():
    part = dataclasses.replace(TABLE, rows=np.array([1, 2, 0]))
    for data in (TABLE, part):
        examples = np.array([2, 1, 1, 0])
        place = rows_in_place(with_norms(data), examples)
        assert place is not None
        out = filled(data, examples)
        for name, array in place.arrays().items():
            assert np.array_equal(array, out[name])
            assert array.dtype == data.dtypes()[name]


def test_digest_follows_content():
    other_ids = AttributionGraph.from_users_per_example([[0], [1], [2]], example_ids=["b", "a", "c"])
    changed = [
        dataclasses.replace(TABLE, values=TABLE.values + np.int16(1)),
        dataclasses.replace(TABLE, indices=TABLE.indices + np.uint16(1)),
        dataclasses.replace(TABLE, labels=TABLE.labels[::-1].copy()),
        dataclasses.replace(TABLE, offsets=np.array([0, 1, 2, 3])),
        dataclasses.replace(TABLE, rows=np.array([0, 1, 2])),
        dataclasses.replace(TABLE, graph=other_ids),
    ]
    digests = [table.digest for table in [TABLE, *changed]]
    assert len(set(digests)) == len(digests)
    assert dataclasses.replace(TABLE).digest == TABLE.digest


def test_unusable_labels_are_counted():
    assert TABLE.num_unusable == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"offsets": np.array([0, 2, 1, 3])},
        {"offsets": np.array([0, 2, 2])},
        {"offsets": np.array([1, 2, 2, 3])},
        {"labels": np.zeros(2, np.float32)},
        {"indices": np.array([1, 5])},
        {"rows": np.array([0, 0, 1])},
    ],
)
def test_bad_tables(changed):
    with pytest.raises(InputError):
        dataclasses.replace(TABLE, **changed)
