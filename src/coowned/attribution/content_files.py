"""Content that stays in Parquet files until some of its rows are read."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from coowned.attribution.identifiers import is_text, one_line
from coowned.attribution.options import DataOptions
from coowned.attribution.tables import valid_table, with_inferred_types
from coowned.errors import InputError
from coowned.files import FileStates, file_states

_ROWS_AT_ONCE = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContentFiles:
    """Rows of Parquet files, any of which can be read in one pass.

    Guarantees:
      - The pieces hold every row that was asked for once, as reading all files at once gives it.
        (test_pieces_are_the_rows)
      - Files that changed after their ids and users were read are refused: a row could be another's by then.
        (test_files_that_changed_are_refused)
    Cost: one pass over the row groups that hold such rows; memory of a row group's pages and of one piece.

    Attributes:
      files: the files, and how many rows each has.
      states: of the files, before their ids and users were read.
      rows: (num_examples,) the row of each example, counted over all files.
      left_out: columns that are no content.
      inferred: cells are read one by one, whatever the types of their columns.
    """

    files: tuple[tuple[Path, int], ...]
    states: FileStates = dataclasses.field(repr=False)
    rows: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    left_out: tuple[str, ...] = ()
    inferred: bool = False

    @functools.cached_property
    def schema(self) -> pa.Schema:
        """The columns of all files; files with other columns are an error."""
        found = []
        for path, _ in self.files:
            with opened_parquet(path) as opened:
                found.append(opened.schema_arrow)
        whole = one_schema([path for path, _ in self.files], found)
        kept = pa.schema([field for field in whole if field.name not in self.left_out], metadata=whole.metadata)
        return with_inferred_types(kept.empty_table()).schema if self.inferred else kept

    def pieces(self, examples: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], pa.Table]]:
        """Yields (indices into `examples`, table of their rows), in the order of the files."""
        wanted = self.rows[examples]
        order = np.argsort(wanted, kind="stable")
        wanted, begin = wanted[order], 0
        for path, count in self.files:
            low, high = np.searchsorted(wanted, (begin, begin + count))
            if low < high:
                for first, table in self._rows_of(path, wanted[low:high] - begin):
                    yield order[low + first : low + first + table.num_rows], table
            begin += count
        if (states := file_states(*(path for path, _ in self.files))) != self.states:
            changed = next(now[0] for now, before in zip(states, self.states, strict=True) if now != before)
            raise InputError(
                f"{changed}: changed after its ids and users were read; run again, on a copy if it goes on changing"
            )

    def _rows_of(self, path: Path, wanted: npt.NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
        """Yields (index of the first, table) of increasing rows of one file."""
        with opened_parquet(path) as opened:
            ends = np.cumsum([opened.metadata.row_group(i).num_rows for i in range(opened.num_row_groups)])
            for group, end in enumerate(ends.tolist()):
                begin = end - opened.metadata.row_group(group).num_rows
                if np.searchsorted(wanted, begin) == np.searchsorted(wanted, end):
                    continue
                batches = opened.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=self.schema.names)
                for batch in batches:
                    low, high = np.searchsorted(wanted, (begin, begin + batch.num_rows))
                    if low < high:
                        rows = pa.array(wanted[low:high] - begin)
                        yield low, self._valid(pa.Table.from_batches([batch]).take(rows), path)
                    begin += batch.num_rows

    def _valid(self, table: pa.Table, path: Path) -> pa.Table:
        """Converts rows to the common schema; invalid UTF-8 is replaced, as in data that are read at once."""
        table = valid_table(table, DataOptions(users=[]), f"{path}: ")
        columns = [table.column(field.name) for field in self.schema]
        columns = [
            column if is_text(column.type) else column.cast(field.type)
            for field, column in zip(self.schema, columns, strict=True)
        ]
        return pa.table(columns, names=self.schema.names).replace_schema_metadata(self.schema.metadata)


def one_schema(files: Sequence[str | Path], schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Returns the common schema of these files; raises an error for files with other columns or types."""
    together = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if schema.names != schemas[0].names:
            raise InputError(
                f"{file}: its columns are {schema.names}, those of {files[0]} are {schemas[0].names}; "
                "all files of a folder need the same columns"
            )
        try:
            if schema != schemas[0]:
                together = pa.unify_schemas([together, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise InputError(
                f"{file}: its column types differ from those of {files[0]} ({one_line(error)}); "
                "all files of a folder need the same types"
            ) from error
    return together


def open_parquet(path: Path, encoded: Sequence[str] = ()) -> pyarrow.parquet.ParquetFile:
    """Opens a Parquet file without prefetching, so that peak memory is the rows read and the current pages.

    Args:
      encoded: columns of text that are read as a dictionary and codes.
    """
    return pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False, read_dictionary=list(encoded))


@contextlib.contextmanager
def opened_parquet(path: Path, encoded: Sequence[str] = ()) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opens a Parquet file like `open_parquet`; raises InputError if it cannot be read."""
    try:
        with open_parquet(path, encoded) as opened:
            yield opened
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error).rstrip('.')}); write it again") from error
