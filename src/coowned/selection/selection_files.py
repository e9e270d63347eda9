"""Writes selections and schedules as Parquet, told apart by their columns, and caches selections on disk."""

import dataclasses
import hashlib
import io
import os
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.table_files import read_parquet_table
from coowned.codec import decode_json, encode_json
from coowned.errors import CertificateMismatchError, InputError
from coowned.files import cache_folder, cached
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.selection.user_bounds import UserBounds

BOUNDS = "coowned-user-bounds"  # entry of the metadata: of the file, or of the column `copies` where Spark wrote it
_SPARK_SCHEMA = "org.apache.spark.sql.parquet.row.metadata"


def write_selection(path: str | os.PathLike[str], graph: AttributionGraph, selected: Selection | Schedule) -> None:
    """Writes what `encode_selection` gives.

    Guarantees:
      - A new file is readable by its owner alone.   (test_selections_are_private)
    """
    content = encode_selection(graph, selected)
    # Readable by its owner alone: membership in a training set is private.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def encode_selection(graph: AttributionGraph, selected: Selection | Schedule) -> bytes:
    """Encodes S as Parquet of `example_id, copies`, in input order, or of `batch, position, example_id`.

    Ids keep the type of the input. A selection with groups has a column `group` too. Bounds of single users are in the
    file's metadata, so that what is read back can be recounted against them.
    """
    selected.check_graph(graph)
    if isinstance(selected, Schedule):
        batch, position = np.indices(selected.batches.shape, dtype=np.int32).reshape(2, -1)
        columns = {"batch": batch, "position": position, "example_id": graph.ids_of(selected.batches.ravel())}
    else:
        rows = np.flatnonzero(selected.copies)
        columns = {"example_id": graph.ids_of(rows), "copies": selected.copies[rows].astype(np.int32)}
        if selected.groups is not None:
            columns["group"] = selected.groups[rows].astype(np.int32)
    table, buffer = pa.table(columns), io.BytesIO()
    if isinstance(selected, Selection) and selected.user_bounds is not None:
        table = table.replace_schema_metadata({BOUNDS: encode_json(selected.user_bounds.to_dict())})
    pyarrow.parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_selection(path: str | os.PathLike[str], graph: AttributionGraph) -> Selection | Schedule:
    """Reads what `write_selection` or the Spark engine wrote, one file or a folder, back onto its graph.

    Guarantees:
      - What was written comes back, whatever the type of the ids.       (test_selection_round_trip)
      - Unknown and duplicate ids are refused.           (test_unknown_and_repeated_ids)
    """
    stored = read_parquet_table(path)
    table = pl.DataFrame(pl.from_arrow(stored))
    names = set(table.columns)
    if {"batch", "position", "example_id"} <= names:
        return _read_schedule(table, graph, path)
    if not {"example_id", "copies"} <= names:
        raise InputError(
            f"{path}: a selection has the columns example_id and copies, but this file has {sorted(names)}; "
            "give the S.parquet that `coowned select` wrote"
        )
    rows = _rows_of(table["example_id"], graph, path)
    repeated = np.flatnonzero(pl.Series(rows).is_duplicated().to_numpy())
    if len(repeated):
        first, again = np.flatnonzero(rows == rows[repeated[0]])[:2]
        raise InputError(f"{path}: rows {first} and {again} have the same example_id; put its copies in one row")
    copies = np.zeros(graph.num_examples, dtype=np.int64)
    copies[rows] = _integer_column(table, "copies", 1, path)
    groups = None
    if "group" in names:
        groups = np.full(graph.num_examples, -1, dtype=np.int64)
        groups[rows] = _integer_column(table, "group", 0, path)
    selection = Selection.from_copies(graph, copies, groups=groups)
    bounds = _stored_bounds(stored.schema.metadata or {}, path)
    return selection if bounds is None else dataclasses.replace(selection, user_bounds=bounds)


def decode_bounds(text: str | bytes, path: str | os.PathLike[str]) -> UserBounds:
    """Reads bounds of single users from the metadata of a selection."""
    named = f"{path}: bounds of single users"
    return UserBounds.from_dict(decode_json(dict[str, Any], text, name=named, remedy="write the file again"))


def _stored_bounds(metadata: dict[bytes, bytes], path: str | os.PathLike[str]) -> UserBounds | None:
    text: str | bytes | None = metadata.get(BOUNDS.encode())
    if (of_spark := metadata.get(_SPARK_SCHEMA.encode())) is not None:
        schema = decode_json(dict[str, Any], of_spark, name=f"{path}: schema", remedy="write the file again")
        text = next((one["metadata"].get(BOUNDS) for one in schema["fields"] if one["name"] == "copies"), None)
    return None if text is None else decode_bounds(text, path)


def _integer_column(table: pl.DataFrame, name: str, at_least: int, path: str | os.PathLike[str]) -> np.ndarray:
    """Reads (rows,) int64, each in [at_least, 2^31)."""
    column = table[name]
    if not column.dtype.is_integer():
        raise InputError(f"{path}: column {name!r} must contain integers, not {column.dtype}; write the file again")
    wrong = ~column.is_between(at_least, 2**31 - 1).fill_null(False)
    if wrong.any():
        row = int(wrong.arg_true()[0])
        raise InputError(
            f"{path}: {name} must be at least {at_least} and below 2^31, not {column[row]} at row {row}; write the "
            "file again"
        )
    return column.cast(pl.Int64).to_numpy()


def _read_schedule(table: pl.DataFrame, graph: AttributionGraph, path: str | os.PathLike[str]) -> Schedule:
    batch, position = _integer_column(table, "batch", 0, path), _integer_column(table, "position", 0, path)
    iterations, batch_size = int(batch.max(initial=-1)) + 1, int(position.max(initial=-1)) + 1
    slots = batch * batch_size + position  # (rows,)
    filled = len(slots) == iterations * batch_size and np.array_equal(np.sort(slots), np.arange(len(slots)))
    if not filled:
        raise InputError(
            f"{path}: the schedule has missing or duplicate slots; give each of the batches 0..{iterations - 1} "
            f"the positions 0..{batch_size - 1} once"
        )
    batches = np.empty(len(slots), dtype=np.int64)
    batches[slots] = _rows_of(table["example_id"], graph, path)
    return Schedule.from_batches(graph, batches.reshape(iterations, batch_size))


def _rows_of(ids: pl.Series, graph: AttributionGraph, path: str | os.PathLike[str]) -> np.ndarray:
    """Returns the (len(ids),) row of each id in the graph; 7 and "7" are the same id."""
    if not (ids.dtype.is_integer() or ids.dtype in (pl.String, pl.Categorical, pl.Null)):
        raise InputError(
            f"{path}: column 'example_id' must contain integers or text, not {ids.dtype}; write the file again"
        )
    known = (
        pl.Series("id", graph.ids_of(np.arange(graph.num_examples))).cast(pl.String).to_frame().with_row_index("row")
    )
    wanted = pl.DataFrame({"id": ids.cast(pl.String)})
    rows = wanted.join(known, on="id", how="left", maintain_order="left")["row"]
    if rows.null_count():
        row = int(rows.is_null().arg_true()[0])
        raise CertificateMismatchError(
            f"{path}: example {ids[row]!r} at row {row} is not in the data; check the data and --example-id"
        )
    return rows.to_numpy().astype(np.int64)


def select_once(graph: AttributionGraph, selector: Selector[Selection], *, seed: int = 0) -> Selection:
    """Selects like `selector.select`, but reuses an earlier selection for this graph, these settings and this seed.

    Guarantees:
      - A cached selection equals a fresh one; a damaged file is recomputed.   (test_kept_selection_equals_a_fresh_one)
    What it is not: a proof. A selection read back is certified like any other.
    """
    if cache_folder() is None:  # a graph's digest takes long
        return selector.select(graph, seed=seed)
    # The digest does not depend on the order of rows, the stored indices do: the ids in row order are part of the key.
    order = hashlib.sha256()
    if graph.example_ids is not None:
        for value in graph.example_ids.buffers():
            order.update(b"none" if value is None else memoryview(value))
    return cached(
        "selections",
        {"graph": graph.digest, "order": order.hexdigest(), "seed": seed, **selector.settings()},
        lambda: selector.select(graph, seed=seed),
        encode=Selection.to_json,
        decode=lambda text: Selection.from_json(text, graph),
    )
