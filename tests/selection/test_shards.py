"""Shards of rows: what is read back, and what is refused by name."""

import dataclasses
import hashlib

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coowned import Greedy, certify
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError
from coowned.selection.shards import (
    GROUPS,
    MANIFEST,
    SHARDS,
    Manifest,
    absent_rows,
    file_entry,
    read_shards,
    shards_of,
    write_shards,
)

COUNT = 300


@pytest.fixture
def graph():
    return AttributionGraph.from_users_per_example(
        [[i % 40, (7 * i) % 50] for i in range(COUNT)],
        example_ids=[f"m{i}" for i in range(COUNT)],
        user_keys=[f"u{i}" for i in range(50)],
    )


@pytest.fixture
def written(graph, tmp_path):
    """(the folder, S, its certificate, the rows of the shards)."""
    selected = Greedy(contribution_bound=2).select(graph)
    certificate, rows = certify(graph, selected), np.flatnonzero(selected.copies)
    kept, folder = graph.subgraph(rows), tmp_path / "DIR"
    folder.mkdir()
    table = pa.table({"x": rows.astype(np.float32)})
    pieces = [
        (np.arange(len(rows))[part], table.take(np.arange(len(rows))[part])) for part in (slice(5, None), slice(5))
    ]
    files, counts = write_shards(folder, pieces, kept)
    manifest = Manifest(
        graph_digest=graph.digest,
        selection_digest=certificate.selection_digest,
        splits=(1.0, 0.0, 0.0),
        types_inferred=False,
        groups=GROUPS,
        shard_rows=counts,
        absent=absent_rows(graph, rows, kept.num_users - len(np.unique(kept.users))),
        files=files,
    )
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder, selected, certificate, rows


def test_read_back(graph, written):
    folder, selected, certificate, rows = written
    found = read_shards(folder)
    assert found.graph.example_ids.to_pylist() == graph.example_ids.take(pa.array(rows)).to_pylist()
    [content] = [dict(zip(where.tolist(), table["x"].to_pylist(), strict=True)) for where, table in [whole(found)]]
    assert [content[i] for i in range(len(rows))] == rows.tolist()
    assert found.graph.digest == graph.digest
    again = dataclasses.replace(
        certify(found.graph, type(selected).from_copies(found.graph, selected.copies[rows])), origin=certificate.origin
    )
    certificate.check_recount(again)
    assert isinstance(again, ContributionCertificate)
    assert again.copies_per_user == certificate.copies_per_user
    assert (again.num_users, again.num_examples) == (graph.num_users, graph.num_examples)


def whole(found):
    pieces = list(found.content.pieces(np.arange(found.graph.num_examples)))
    return np.concatenate([where for where, _ in pieces]), pa.concat_tables(table for _, table in pieces)


def test_rows_are_in_the_folder_of_their_group(written):
    folder, *_ = written
    for path in folder.glob("group=*/*.parquet"):
        shards = pq.read_table(path)["coowned_shard"].to_numpy()
        assert set(shards % GROUPS) == {int(path.parent.name.removeprefix("group="))}


def test_manifest_round_trip(written):
    path = written[0] / MANIFEST
    manifest = Manifest.read(written[0])
    assert manifest.checksum == manifest.digest
    path.write_text(path.read_text().replace('"types_inferred": false', '"types_inferred": true'))
    with pytest.raises(InputError, match="checksum is wrong"):
        Manifest.read(written[0])
    path.unlink()
    with pytest.raises(InputError, match="give a folder of shards"):
        Manifest.read(written[0])


@pytest.mark.parametrize("damage", ["missing", "changed", "cut", "foreign"])
def test_damaged_shards(written, damage):
    folder = written[0]
    path = sorted(folder.glob("group=*/*.parquet"))[3]
    content = bytearray(path.read_bytes())
    name = path.relative_to(folder).as_posix()
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        content[40] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        name = "group=1/more.parquet"
        (folder / "group=1").mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=name) as raised:
        read_shards(folder)
    assert {"missing": "is missing", "foreign": "not a file of these"}.get(damage, "damaged") in str(raised.value)


def rewritten(folder, change, **more):
    """The first file with other rows, and a manifest that knows of it."""
    manifest = Manifest.read(folder)
    first = manifest.files[0]
    pq.write_table(change(pq.read_table(folder / first.path)), folder / first.path)
    files = (
        file_entry(folder, folder / first.path, pq.read_metadata(folder / first.path).num_rows),
        *manifest.files[1:],
    )
    (folder / MANIFEST).write_text(msgspec.structs.replace(manifest, files=files, **more).to_json())


def test_rows_in_wrong_places(written):
    folder = written[0]
    manifest = Manifest.read(folder)

    def twice(table):
        return pa.concat_tables([table, table.slice(0, 1)])

    counts = list(manifest.shard_rows)
    counts[pq.read_table(folder / manifest.files[0].path)["coowned_shard"][0].as_py()] += 1
    rewritten(folder, twice, shard_rows=tuple(counts))
    with pytest.raises(InputError, match="1 example of the shards is there twice"):
        read_shards(folder)


def test_rows_of_another_shard(written):
    def moved(table):
        shards = (table["coowned_shard"].to_numpy() + 1) % SHARDS
        return table.set_column(0, "coowned_shard", pa.array(shards, pa.int32()))

    rewritten(written[0], moved)
    with pytest.raises(InputError, match="an example of shard"):
        read_shards(written[0])


def test_shards_of_another_graph(graph, written):
    """Another user of one example: digest and recount both tell."""

    def other(table):
        users = table["coowned_users"].to_pylist()
        users[0] = [*users[0], "u49"]
        return table.set_column(3, "coowned_users", pa.array(users, pa.large_list(pa.large_string())))

    rewritten(written[0], other)
    assert read_shards(written[0]).graph.digest != graph.digest


def test_another_selection_is_refused(written):
    manifest = Manifest.read(written[0])
    manifest.check_certificate(manifest.graph_digest, manifest.selection_digest)
    with pytest.raises(CertificateMismatchError, match="another S"):
        manifest.check_certificate(manifest.graph_digest, hashlib.sha256(b"").hexdigest())


def test_a_column_of_ours_is_refused(graph, tmp_path):
    pieces = [(np.arange(COUNT), pa.table({"coowned_id": np.arange(COUNT)}))]
    with pytest.raises(InputError, match="column named coowned_id"):
        write_shards(tmp_path, pieces, graph)


def test_buffers_change_no_row(graph, tmp_path):
    """However often rows are written out, each time with other users in the file's dictionary."""
    found = []
    for buffer_bytes in (1, 1 << 27):
        folder = tmp_path / str(buffer_bytes)
        folder.mkdir()
        pieces = [(rows, pa.table({"x": rows})) for rows in np.array_split(np.arange(COUNT), 7)]
        files, counts = write_shards(folder, pieces, graph, buffer_bytes=buffer_bytes)
        found.append([pq.read_table(folder / file.path).to_pylist() for file in files])
        assert sum(counts) == COUNT
        manifest = Manifest(
            graph_digest=graph.digest,
            selection_digest="0",
            splits=(1.0, 0.0, 0.0),
            types_inferred=False,
            groups=GROUPS,
            shard_rows=counts,
            absent=absent_rows(graph, np.arange(COUNT), 0),
            files=files,
        )
        (folder / MANIFEST).write_text(manifest.to_json())
        assert read_shards(folder).graph.digest == graph.digest
        assert np.array_equal(np.bincount(shards_of(graph), minlength=SHARDS), counts)
    assert found[0] == found[1]
