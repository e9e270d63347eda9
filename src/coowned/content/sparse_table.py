"""Sparse rows of features in memory: what models of hashed texts are trained on."""

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.content.data import Draw, RowTable
from coowned.errors import InputError
from coowned.exact.sparse_sums import SparseRows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SparseTable(RowTable):
    """Integer rows of which few numbers are not zero, and labels: row r is values[offsets[r]:offsets[r + 1]].

    As arrays of a batch rows are padded to the longest one; a run with clipped gradients reads them where they lie.

    Guarantees:
      - `fill` gives row `rows[i]` for example i, and `in_place` the same.   (test_fill_gives_the_rows,
        test_rows_in_place_are_those_of_fill)
      - Two tables with other content, rows, graph or order of ids have other digests.   (test_digest_follows_content)

    Attributes:
      indices: (total,) integers, increasing within a row.
      values: (total,) integers, in units of 1 / ONE (`coowned.exact.sparse_sums`).
      offsets: (n + 1,) int64.
      labels: (n,) float32: 0 or 1, or the index of the class; NaN where it is none.
    """

    indices: npt.NDArray[Any] = dataclasses.field(repr=False)
    values: npt.NDArray[Any] = dataclasses.field(repr=False)
    offsets: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    labels: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        count, lengths = len(self.offsets) - 1, np.diff(self.offsets)
        if count < 0 or self.offsets[0] != 0 or lengths.min(initial=0) < 0 or self.offsets[-1] != self.values.size:
            raise InputError("offsets must increase from 0 to the number of values")
        validate.same_length(count, labels=self.labels)
        validate.same_length(self.values.size, indices=self.indices)
        self._check_rows(labels=self.labels)

    @functools.cached_property
    def _width(self) -> int:
        return max(1, int(np.diff(self.offsets).max(initial=1)))

    @property
    def num_unusable(self) -> int:
        """Rows with a label that is no class: for a private log alone."""
        return int(np.count_nonzero(~np.isfinite(self.labels)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"indices": (self._width,), "values": (self._width,), "labels": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {"indices": self.indices.dtype, "values": self.values.dtype, "labels": np.dtype(np.float32)}

    def in_place(self, examples: npt.NDArray[np.int64]) -> SparseRows:
        """Where the rows of these examples lie in memory."""
        return SparseRows(self.indices, self.values, self.offsets, self._rows_or_first(examples), self._width)

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(examples)
        out["labels"][: rows.size] = self.labels[rows]
        if "indices" in out:
            for name, array in self.in_place(examples).arrays().items():
                out[name][: rows.size] = array

    @property
    def digest(self) -> str:
        arrays = self.offsets, self.indices, self.values, self.labels
        return self._digest(str(self.indices.dtype), str(self.values.dtype), arrays=arrays)
