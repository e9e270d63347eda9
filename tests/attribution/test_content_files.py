"""Content that stays in its files: the rows that reading everything gives."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coowned.attribution.content_files import ContentFiles
from coowned.attribution.sources import DataSource
from coowned.errors import InputError


@pytest.fixture
def folder(tmp_path):
    """Three files of several row groups; ids repeat across files, and some text is not UTF-8."""
    for number in range(3):
        ids = [f"m{(i * 2 + number) % 90}" for i in range(50)]
        table = pa.table(
            {
                "id": ids,
                "users": [[f"u{i % 7}", f"u{number}"] for i in range(50)],
                "text": pa.array([b"plain", b"\xff odd", None, b"more", b"x"] * 10).view(pa.string()),
                "numbers": pa.array([[1.0, float(i)] for i in range(50)], pa.list_(pa.float32(), 2)),
            }
        )
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=16)
    return tmp_path


@pytest.mark.parametrize("wanted", [[], [0], [89, 3, 44, 45, 7], list(range(90))[::-1]])
def test_pieces_are_the_rows(folder, wanted):
    source = DataSource(path=folder, example_id="id")
    whole, few = source.read(), source.read(content=False)
    assert few.schema.names == whole.schema.names
    rows = np.array(wanted, np.int64)
    expected, found = whole.payload.take(pa.array(rows)), {}
    for where, table in few.pieces(rows):
        assert table.schema.names == whole.schema.names
        found |= dict(zip(where.tolist(), table.to_pylist(), strict=True))
    assert [found[number] for number in range(len(rows))] == expected.to_pylist()


def test_content_is_left_in_the_files(folder):
    source = DataSource(path=folder, example_id="id")
    whole, few = source.read(), source.read(content=False)
    assert few.graph.digest == whole.graph.digest
    assert few.ids.equals(whole.ids)
    assert few.notes == whole.notes
    assert few.payload.num_columns == 0


def test_files_that_changed_are_refused(folder):
    """The same rows in another order: each would be attributed to somebody else's users."""
    examples = DataSource(path=folder, example_id="id").read(content=False)
    wanted = np.arange(examples.graph.num_examples)
    before = [table for _, table in examples.pieces(wanted)]
    assert sum(map(len, before)) == len(wanted)
    file = sorted(folder.glob("*.parquet"))[-1]
    table = pq.ParquetFile(file).read()
    pq.write_table(table.take(np.arange(len(table))[::-1]), file)
    with pytest.raises(InputError, match=f"{file.name}: changed after its ids and users were read"):
        list(examples.pieces(wanted))


def test_other_formats_are_read(tmp_path):
    (tmp_path / "data.csv").write_text("users,text\nann,hello\n")
    examples = DataSource(path=tmp_path / "data.csv").read(content=False)
    assert examples.content is None
    assert examples.payload["text"].to_pylist() == ["hello"]


def test_pairs_lose_their_user_column(tmp_path):
    pq.write_table(pa.table({"id": [1, 1, 2], "who": ["a", "b", "a"], "x": [1, 1, 2]}), tmp_path / "p.parquet")
    source = DataSource(path=tmp_path / "p.parquet", example_id="id", user="who")
    assert source.read(content=False).schema.names == source.read().schema.names == ["id", "x"]


def test_missing_columns_are_named_as_ever(folder):
    source = DataSource(path=folder, users="user")
    with pytest.raises(InputError, match="did you mean 'users'"):
        source.read(content=False)


def test_content_of_other_columns_does_not_stop_ids_and_users(folder):
    pq.write_table(pa.table({"id": ["z"], "users": [["u1"]], "other": [1]}), folder / "3.parquet")
    few = DataSource(path=folder, example_id="id").read(content=False)
    assert few.graph.num_examples == 91
    with pytest.raises(InputError, match=r"3\.parquet: its columns are"):
        _ = few.schema


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.parquet: cannot be read"):
        _ = ContentFiles(files=((tmp_path / "gone.parquet", 1),), states=(), rows=np.zeros(1, np.int64)).schema
