"""Arrays made of pieces of content, in files that are mapped."""

import json
import threading

import numpy as np
import pytest

from coowned.content import derived
from coowned.content.derived import KeptArrays, MappedFiles, derive
from coowned.errors import InputError

LENGTHS = np.array([3, 0, 2, 5, 1, 0, 4])


def whole():
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    total = int(offsets[-1])
    return {
        "offsets": offsets,
        "indices": np.arange(total, dtype=np.uint16),
        "values": -np.arange(total, dtype=np.int16),
        "labels": np.arange(7, dtype=np.float32),
        "a/strange name": np.arange(21, dtype=np.int32).reshape(7, 3),
    }


def piece(rows):
    rows, arrays = np.array(rows), whole()
    some = np.concatenate([np.arange(*arrays["offsets"][row : row + 2]) for row in rows])
    found = {name: array[some if name in ("indices", "values") else rows] for name, array in arrays.items()}
    return (
        rows,
        {**found, "offsets": np.concatenate([[0], np.cumsum(LENGTHS[rows])])},
        {"empty": int((LENGTHS[rows] == 0).sum())},
    )


def test_pieces_make_the_whole(tmp_path):
    derive([piece([6, 2]), piece([1]), piece([0, 5, 4, 3])], 7, tmp_path, "key")
    found = MappedFiles.open(tmp_path, "key")
    assert found is not None
    for name, array in whole().items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert found.counts == {"empty": 2}
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin"] * 5 + [".json"]


def test_pieces_of_two_types_are_refused(tmp_path):
    first, second = piece([0]), piece([1])
    second[1]["labels"] = second[1]["labels"].astype(np.float64)
    with pytest.raises(InputError, match="two pieces of content"):
        derive([first, second], 2, tmp_path, "key")


@pytest.mark.parametrize("rows", [[[0, 1], [3]], [[0, 1], [1, 2]], []])
def test_missing_and_repeated_rows_are_refused(tmp_path, rows):
    """Files that are written to between the reading of ids and of content."""
    with pytest.raises(InputError, match="the data changed while they were read"):
        derive(map(piece, rows), 3, tmp_path, "key")


def test_rows_without_numbers(tmp_path):
    _, arrays, counts = piece([1, 5])
    derive([(np.arange(2), arrays, counts)], 2, tmp_path, "key")
    found = MappedFiles.open(tmp_path, "key")
    assert found is not None
    assert found.arrays["indices"].size == 0
    found.touch(10**6)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "index", "key"])
def test_damaged_arrays_are_made_anew(tmp_path, damage):
    made = []

    def make(folder):
        made.append(folder)
        derive([piece(range(7))], 7, folder, "key")

    place = KeptArrays(tmp_path, "key")
    expected = place.get(make).arrays["labels"].copy()
    path = max((tmp_path / "key").glob("*.bin"), key=lambda file: file.stat().st_size)
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        path.unlink()
    elif damage == "index":
        (tmp_path / "key" / "index.json").write_text("{}")
    else:
        index = tmp_path / "key" / "index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"key": "other"}))
    np.testing.assert_array_equal(place.get(make).arrays["labels"], expected)
    assert len(made) == 2
    place.get(make)
    assert len(made) == 2


def test_derived_once(tmp_path):
    made, place = [], KeptArrays(tmp_path, "key")

    def make(folder):
        made.append(folder)
        derive([piece(range(7))], 7, folder, "key")

    threads = [threading.Thread(target=place.get, args=(make,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_what_failed_leaves_nothing(tmp_path):
    def make(folder):
        (folder / "half").write_text("x")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        KeptArrays(tmp_path, "key").get(make)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def resident():
    """Bytes of files that are in this process's memory now."""
    with open("/proc/self/status") as lines:
        [line] = [line for line in lines if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024


def test_memory_of_mapped_rows(tmp_path, monkeypatch):
    rows = np.zeros((4096, 2048), np.float32)  # 32 MB
    derive([(np.arange(4096), {"features": rows}, {})], 4096, tmp_path, "key")
    grown = {}
    for budget in (1 << 22, 1 << 29):
        monkeypatch.setattr(derived, "_BUDGET", budget)
        found, before = MappedFiles.open(tmp_path, "key"), resident()
        assert found is not None
        most = 0
        for row in range(0, 4096, 16):
            found.touch(16)
            assert not found.arrays["features"][row : row + 16].any()
            most = max(most, resident() - before)
        grown[budget] = most
        del found
    assert grown[1 << 22] < 16 << 20
    assert grown[1 << 29] > 24 << 20
