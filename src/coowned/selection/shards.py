"""Shards: the selected and held-out rows with their content, in files of which training reads some rows at a time.

docs/reference/file-formats.md describes the layout, which every engine writes alike.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from coowned import codec, validate
from coowned.attribution.content_files import ContentFiles, opened_parquet
from coowned.attribution.digest import RowSums
from coowned.attribution.examples import unify
from coowned.attribution.graph import Absent, AttributionGraph
from coowned.attribution.identifiers import may_repeat, utf8_buffers
from coowned.errors import CertificateMismatchError, InputError
from coowned.files import FileStates, file_states
from coowned.selection.order import hash_seed, hash_text

pc: Any = pyarrow.compute  # its functions are created at import, so type checkers do not see them

SHARDS = 1024  # virtual: an example is in one of them, whatever the number of folders, files or workers
GROUPS = 64  # folders
MANIFEST, SELECTION, CERTIFICATE, SUMMARY = "manifest.json", "S.parquet", "S.certificate.json", "graph.json"
SHARD, ID, POSITION, USERS = "coowned_shard", "coowned_id", "coowned_position", "coowned_users"
OWN_COLUMNS = (SHARD, ID, POSITION, USERS)  # beside the data's own
SEED = 6_117_820_935_522_413  # of the hash: a stream of its own
SPLITS = ("train", "validation", "test")
SPLIT_SEED = 5_765_402_168_410_517  # of the hash that splits: it must not follow the selectors' order of ties
_BITS = 54  # that are dropped of a hash of 64
_REMEDY = "write the shards again with `coowned select --shards`"
_FILE_BYTES = 1 << 22  # read at once to compute a file's hash


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file, by its path in the folder."""

    path: str
    rows: int
    bytes: int
    sha256: str


class AbsentRows(msgspec.Struct, frozen=True, kw_only=True):
    """Examples of the train split that are not in S, of which no shard has a row.

    Attributes:
      users: how many users are in no row of any shard.
      lanes: the sum of their digests (`coowned.attribution.digest`), four numbers below 2^64 as text.
    """

    examples: int
    users: int
    lanes: tuple[str, str, str, str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a folder of shards, written last.

    Guarantees:
      - What is written is read back; a changed file is refused.   (test_manifest_round_trip)

    Attributes:
      graph_digest, selection_digest: as in the certificate of S.
      splits: shares of train, validation and test; the shards hold all of the last two.
      types_inferred: cells of content are read one by one, since the data declare no types (CSV, JSONL, SQL).
      groups: folders; shard s is in folder s % groups.
      shard_rows: (SHARDS,) rows of every virtual shard.
    """

    format: Literal["coowned-shards-1"] = "coowned-shards-1"
    graph_digest: str
    selection_digest: str
    splits: tuple[float, float, float]
    types_inferred: bool
    groups: int
    shard_rows: tuple[int, ...]
    absent: AbsentRows
    files: tuple[ShardFile, ...]
    checksum: str = ""

    def __post_init__(self) -> None:
        if len(self.shard_rows) != SHARDS or sum(self.shard_rows) != sum(file.rows for file in self.files):
            raise InputError(f"{MANIFEST}: its numbers of rows contradict each other; {_REMEDY}")

    def to_json(self) -> str:
        """Returns one JSON object with a checksum over all of it."""
        return codec.encode_json(msgspec.structs.replace(self, checksum=self.digest), indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest."""
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); give a folder of shards") from error
        found = codec.decode_json(cls, text, name=str(path), remedy=_REMEDY)
        if found.checksum != found.digest:
            raise InputError(f"{path}: changed after it was written (its checksum is wrong); {_REMEDY}")
        return found

    @property
    def digest(self) -> str:
        """A digest of the content of the shards."""
        return codec.checksum(msgspec.structs.replace(self, checksum=""))

    def check_certificate(self, graph_digest: str, selection_digest: str) -> None:
        """Raises an error for an S that the shards were not written for."""
        if (self.graph_digest, self.selection_digest) != (graph_digest, selection_digest):
            raise CertificateMismatchError(f"the shards are of another S than its certificate's; {_REMEDY}")


class ShardedRows(NamedTuple):
    """The rows of a folder of shards, in the order of the data: graph and ids in memory, content in files."""

    graph: AttributionGraph
    content: ContentFiles
    manifest: Manifest


def shards_of(graph: AttributionGraph) -> npt.NDArray[np.int64]:
    """Returns the (num_examples,) virtual shard of every example: the first ten bits of a hash of its id.

    On Spark: shiftrightunsigned(xxhash64(SEED, id as text), 54).

    >>> graph = AttributionGraph.from_users_per_example([[0]] * 4096)
    >>> len(np.unique(shards_of(graph)))
    1010
    """
    offsets, data = utf8_buffers(graph.example_ids, length=graph.num_examples)
    return (hash_ids(offsets, data, graph.num_examples, SEED) >> np.uint64(_BITS)).astype(np.int64)


def split_ends(fractions: Sequence[float]) -> list[int]:
    """Returns where, among the hashes of ids by SPLIT_SEED, the train and the validation split end."""
    if len(fractions) != len(SPLITS):
        raise InputError(f"splits must be three numbers, one each for {', '.join(SPLITS)}, not {len(fractions)}")
    for fraction in fractions:
        validate.in_range(0, 1, splits=fraction)
    if abs(sum(fractions) - 1) > 1e-9 or fractions[0] == 0:
        raise InputError(f"splits must add up to 1, the first above 0, not {list(fractions)}")
    return [min(2**64 - 1, int(2.0**53 * edge) << 11) for edge in np.cumsum(fractions)[:2]]


def hash_ids(
    offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], count: int, seed: int
) -> npt.NDArray[np.uint64]:
    """Computes (count,) 64-bit hashes of texts in a buffer."""
    return _hash_ids(offsets, data, count, hash_seed(np.int64(seed)))


@numba.njit(cache=True, nogil=True)
def _hash_ids(offsets, data, count, key):
    hashes = np.empty(count, np.uint64)
    for i in range(count):
        hashes[i] = hash_text(data, offsets[i], offsets[i + 1], key)
    return hashes


def group_folder(group: int) -> str:
    """Returns the folder of a group, as named by Spark's `partitionBy("group")`."""
    return f"group={group}"


def file_entry(folder: Path, path: Path, rows: int) -> ShardFile:
    """Returns a file's entry in the manifest."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_FILE_BYTES):
            digest.update(piece)
    return ShardFile(
        path=path.relative_to(folder).as_posix(), rows=rows, bytes=path.stat().st_size, sha256=digest.hexdigest()
    )


def read_shards(folder: Path) -> ShardedRows:
    """Checks every shard, and reads ids and users; content stays in the files.

    Guarantees:
      - A file that is missing, was changed or does not belong there is refused by its name.   (test_damaged_shards)
      - An example that occurs twice, or in the wrong shard, is refused.   (test_rows_in_wrong_places)
      - The graph has the digest of the one that S was selected from.   (test_shards_of_another_graph)
    Cost: one pass over the files; memory for ids and users.
    """
    manifest = Manifest.read(folder)
    states = _checked_files(folder, manifest)
    parts, files = [], []
    for file in manifest.files:
        path = folder / file.path
        with opened_parquet(path, [f"{USERS}.list.element"]) as opened:
            there = opened.schema_arrow.names
            if missing := [name for name in OWN_COLUMNS if name not in there]:
                raise InputError(f"{path}: no column {missing[0]}; {_REMEDY}")
            if opened.metadata.num_rows != file.rows:
                raise InputError(f"{path}: {opened.metadata.num_rows} rows, not {file.rows}; {_REMEDY}")
            # One by one: each has a dictionary of users of its own, and Arrow reads no lists of several.
            parts += [opened.read_row_group(group, list(OWN_COLUMNS)) for group in range(opened.num_row_groups)]
        files.append((path, file.rows))
    if not parts:
        raise InputError(f"{folder}: the shards hold no row; {_REMEDY}")
    table = pa.concat_tables(parts, promote_options="permissive")
    order = np.argsort(np.asarray(table[POSITION]), kind="stable")
    graph = _graph(table, order, manifest.absent)
    _check_rows(folder, graph, np.asarray(table[SHARD])[order], manifest)
    del table, parts
    pa.default_memory_pool().release_unused()  # which Arrow would keep for itself
    content = ContentFiles(
        files=tuple(files), states=states, rows=order, left_out=OWN_COLUMNS, inferred=manifest.types_inferred
    )
    return ShardedRows(graph, content, manifest)


def _checked_files(folder: Path, manifest: Manifest) -> FileStates:
    """Returns the states of the files that were checked."""
    known = {file.path: file for file in manifest.files}
    there = {path.relative_to(folder).as_posix() for path in folder.glob("group=*/*.parquet")}
    if foreign := sorted(there - known.keys()):
        raise InputError(f"{folder / foreign[0]}: not a file of these shards; remove it, or {_REMEDY}")
    if missing := sorted(known.keys() - there):
        raise InputError(f"{folder / missing[0]}: this shard is missing; copy it here, or {_REMEDY}")
    states = file_states(*(folder / name for name in known))
    for name, file in known.items():
        if (folder / name).stat().st_size != file.bytes or file_entry(folder, folder / name, file.rows) != file:
            raise InputError(f"{folder / name}: this shard was changed or is damaged; copy it again, or {_REMEDY}")
    return states


def _graph(table: pa.Table, order: npt.NDArray[np.int64], absent: AbsentRows) -> AttributionGraph:
    """Makes the graph of the rows in this order."""
    ids = table.column(ID)
    if may_repeat(ids) and (repeated := len(ids) - len(ids.unique())):
        there = "1 example of the shards is" if repeated == 1 else f"{repeated} examples of the shards are"
        raise InputError(f"{there} there twice; {_REMEDY}")
    users, keys = unify(pc.list_flatten(table.column(USERS)))
    lengths = np.asarray(pc.list_value_length(table.column(USERS)), np.int64)
    graph = AttributionGraph.from_csr(
        np.concatenate([[0], np.cumsum(lengths)]), users, num_users=len(keys), example_ids=ids, user_keys=keys
    ).subgraph(order)
    sums = RowSums(absent.examples, tuple(map(int, absent.lanes)))
    return dataclasses.replace(graph, absent=Absent(sums, absent.users))


def _check_rows(folder: Path, graph: AttributionGraph, said: npt.NDArray[Any], manifest: Manifest) -> None:
    shards = shards_of(graph)
    wrong = np.flatnonzero(shards != said)
    if wrong.size:
        raise InputError(f"{folder}: an example of shard {shards[wrong[0]]} is in shard {said[wrong[0]]}; {_REMEDY}")
    counts = np.bincount(shards, minlength=SHARDS)
    wrong = np.flatnonzero(counts != np.array(manifest.shard_rows))
    if wrong.size:
        first = int(wrong[0])
        raise InputError(
            f"{folder}: shard {first} has {counts[first]} rows, not {manifest.shard_rows[first]}; {_REMEDY}"
        )


def absent_rows(graph: AttributionGraph, kept: npt.NDArray[np.int64], users: int) -> AbsentRows:
    """Returns the examples of a graph that are not kept, as a summary.

    Args:
      users: how many users are in no row of any shard.
    """
    whole, own = graph.digest_sums(), graph.subgraph(kept).digest_sums()
    lanes = tuple(str((a - b) % 2**64) for a, b in zip(whole.lanes, own.lanes, strict=True))
    assert len(lanes) == 4
    return AbsentRows(examples=whole.count - own.count, users=users, lanes=lanes)


def write_shards(
    folder: Path,
    pieces: Any,
    graph: AttributionGraph,
    *,
    groups: int = GROUPS,
    buffer_bytes: int = 1 << 27,
) -> tuple[tuple[ShardFile, ...], tuple[int, ...]]:
    """Writes the rows of a graph in Parquet files; returns their entries, and the rows of every shard.

    Cost: memory of `buffer_bytes` and one row group of each file.

    Args:
      pieces: (examples, table of their content), every example of the graph once.
      graph: of the rows that are written.
    """
    shards, keys = shards_of(graph), graph.user_keys
    assert keys is not None
    writers: dict[int, Any] = {}
    waiting: dict[int, list[pa.Table]] = {}
    held, rows = 0, np.zeros(groups, np.int64)

    def flush() -> None:
        for group, tables in waiting.items():
            table = pa.concat_tables(tables)
            if group not in writers:
                path = folder / group_folder(group) / "part-0.parquet"
                path.parent.mkdir()
                writers[group] = pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
            writers[group].write_table(table)
        waiting.clear()

    try:
        for examples, table in pieces:
            if taken := sorted({*OWN_COLUMNS, "group"} & {*table.column_names}):
                raise InputError(f"the data have a column named {taken[0]}; rename it before writing shards")
            own = _own_columns(graph, keys, examples, shards[examples])
            whole = pa.table({**own, **dict(zip(table.column_names, table.columns, strict=True))})
            whole = whole.replace_schema_metadata(table.schema.metadata)
            group_of = shards[examples] % groups
            order = np.argsort(group_of, kind="stable")
            begins = np.searchsorted(group_of[order], np.arange(groups + 1))
            whole = whole.take(pa.array(order))
            rows += np.diff(begins)
            for group in np.flatnonzero(np.diff(begins)).tolist():
                part = whole.slice(begins[group], begins[group + 1] - begins[group])
                waiting.setdefault(group, []).append(part)
            held += whole.nbytes
            if held > buffer_bytes:
                flush()
                held = 0
        flush()
    finally:
        for writer in writers.values():
            writer.close()
    files = tuple(
        file_entry(folder, folder / group_folder(group) / "part-0.parquet", int(rows[group]))
        for group in sorted(writers)
    )
    return files, tuple(np.bincount(shards, minlength=SHARDS).tolist())


def _own_columns(
    graph: AttributionGraph, keys: pa.Array, examples: npt.NDArray[np.int64], shards: npt.NDArray[np.int64]
) -> Mapping[str, Any]:
    few = graph.subgraph(examples)
    users = pa.LargeListArray.from_arrays(pa.array(few.indptr), keys.cast(pa.large_string()).take(pa.array(few.users)))
    return {
        SHARD: pa.array(shards.astype(np.int32)),
        ID: graph.ids_of(examples),
        POSITION: pa.array(examples),
        USERS: users,
    }


def refuse_bounds(*, individual: bool) -> None:
    """Raises an error for an S with individual bounds: who is in no row could not be recounted by their bound."""
    if individual:
        raise InputError(
            "shards cannot hold an S with bounds of single users, since the users of unselected examples are not in "
            "them; train on the data, or leave out the bounds"
        )


def check_splits(manifest: Manifest, splits: Sequence[float]) -> None:
    """Raises an error for fractions of the splits that are not those of the shards."""
    if [float(share) for share in splits] != [float(share) for share in manifest.splits]:
        listed = ", ".join(f"{share:g}" for share in manifest.splits)
        raise InputError(f"[data] splits: the shards were written for splits = [{listed}]; set the same")
