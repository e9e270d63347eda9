"""Training data: features and labels of a graph's examples, from memory or made on demand."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from coowned import threads, validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.identifiers import utf8_buffers
from coowned.content.columns import number_matrix, read_labels
from coowned.content.derived import Arrays, MappedFiles, digest_stored
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.exact.keys import Purpose, RunKey, StreamKey
from coowned.exact.linear_kernels import fill_norms
from coowned.exact.linear_sums import RowsInPlace, rows_are_contiguous
from coowned.exact.matrix_tiles import LINE, prefetch

_NUMBERS_A_THREAD = 4_000_000  # below this a thread costs more than it saves
_PIECE_EXAMPLES, _PIECE_NUMBERS = 4096, 2**22  # at most, of what is evaluated at once
_MAPPED_ROWS = 1024  # of files, that are read at once
_AHEAD, _LINES = 8, 8  # how many rows ahead, and how many lines of each, are prefetched


class Draw(NamedTuple):
    """The step and the copies that content is read for, which determine its randomness (the masks of a text).

    Content is filled in copy by copy, so that two copies of one example have masks of their own.
    """

    run_key: RunKey
    step: int
    copy_numbers: npt.NDArray[np.int32]  # (n,) which copy of its example each is


def random_streams(
    draw: Draw | None, purpose: Purpose, *, count: int, public_seed: int
) -> tuple[StreamKey, npt.NDArray[np.int32]]:
    """Returns (the key of a step's randomness, (count,) the stream number of each copy).

    Outside training both are public, and no step's, so that all models are compared under the same.
    """
    if draw is None:
        return RunKey.from_seed(public_seed).derive(purpose, configuration="evaluation"), np.zeros(count, np.int32)
    validate.same_length(count, copy_numbers=draw.copy_numbers)
    return draw.run_key.derive(purpose, step=draw.step), np.ascontiguousarray(draw.copy_numbers, np.int32)


class TrainingData(Protocol):
    """Content for the examples of `graph`: example i of the graph is example i here."""

    @property
    def graph(self) -> AttributionGraph: ...

    @property
    def digest(self) -> str:
        """A digest of the content: a run is resumed only on the same."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape, without the batch axis, of every array of a batch."""
        ...

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Returns the type of every array of a batch."""
        ...

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        """Writes the content of these examples into the first rows of each array of `out`; features may be left out.

        Without a draw the content is for evaluation: always the same.
        """
        ...


class InPlace(Protocol):
    """Rows in memory that host code reads in place instead of from arrays of the batch."""

    names: Any
    """The arrays of `TrainingData.shapes` that they stand for."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns a copy of the rows as arrays of a batch."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowTable:
    """Content in memory, one row per example, for all examples of a graph or for those that were read.

    Attributes:
      graph: whose examples these are.
      rows: (graph.num_examples,) the row of each example, -1 where it was not read; None where example i is row i.
      mapped: the files that the arrays lie in; None for arrays in memory.
    """

    graph: AttributionGraph
    rows: npt.NDArray[np.int64] | None = dataclasses.field(default=None, repr=False)
    mapped: MappedFiles | None = dataclasses.field(default=None, repr=False)

    def stored(self) -> Arrays:
        """Returns the arrays derived from content, with an entry for each row, for `with_stored`."""
        raise NotImplementedError(f"{type(self).__name__} is made of all rows at once")

    def with_stored(self, graph: AttributionGraph, arrays: Arrays, mapped: MappedFiles | None) -> Self:
        """Returns the same table with other rows."""
        return dataclasses.replace(self, graph=graph, **arrays, mapped=mapped)

    def _touch(self, count: int) -> None:
        if self.mapped is not None:
            self.mapped.touch(count)

    def _check_rows(self, **content: Sized) -> None:
        """Raises InputError for rows that do not exist or repeat; `content` has an entry for each row."""
        if self.rows is None:
            validate.same_length(self.graph.num_examples, **content)
            return
        validate.same_length(self.graph.num_examples, rows=self.rows)
        rows, available = self.rows, min(len(array) for array in content.values())
        if rows.dtype.kind not in "iu" or (rows.size and (rows.min() < -1 or rows.max() >= available)):
            raise InputError(f"rows must be integers in [-1, {available}): the row of each example, or -1 for none")
        read = rows[rows >= 0]
        if len(np.unique(read)) != len(read):
            raise InputError(
                "rows must not repeat: content shared by two examples would be in twice as many copies as were counted"
            )

    def _rows_of(self, examples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the rows of these examples; raises InputError if one was not read."""
        self._touch(len(examples))
        if self.rows is None:
            return examples
        rows = self.rows[examples]
        if rows.min(initial=0) < 0:
            raise InputError("an example was requested whose content was not read because it was not selected")
        return rows

    def _rows_or_first(self, examples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the rows of these examples and of padding, which asks for example 0, read or not."""
        self._touch(len(examples))
        return examples if self.rows is None else np.maximum(self.rows[examples], 0)

    def _digest(self, *about: Any) -> str:
        """Computes the digest, each time anew since callers might have written to their arrays."""
        # Nobody writes to mapped files, and they were checked when they were opened.
        arrays = self.mapped.digest if self.mapped is not None else digest_stored(self.stored())
        content = json.dumps([self.graph.digest, *about, arrays, self.rows is not None])
        hashed = hashlib.blake2b(content.encode(), digest_size=32, person=b"coowned-data-2")
        for array in (*row_order(self.graph), *(() if self.rows is None else (self.rows,))):
            hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
        return hashed.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureTable(RowTable):
    """Features and labels in memory.

    A value that is missing or not finite is kept as it is: its example then adds exactly zero to every gradient, so
    that what one example holds never changes what another does.

    Guarantees:
      - `fill` gives row `rows[i]` of the arrays for example i.   (test_fill_gives_the_rows)
      - Two tables with other content, rows, graph or order of ids have other digests.   (test_digest_follows_content,
        test_digest_follows_the_order_of_the_ids)
    Cost: `fill` copies the rows once, without Python's lock.

    Attributes:
      features: (n, num_features) float32.
      labels: (n,) float32: 0 or 1, the index of the class, or the target of a regression.
      rows: as `RowTable` has it.

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["a"], ["b"]], "features": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
      >>> FeatureTable.from_examples(examples, features="features", label="label", num_features=2).shapes()
      {'features': (2,), 'labels': ()}
    """

    features: npt.NDArray[np.float32] = dataclasses.field(repr=False)
    labels: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        features, labels = np.asarray(self.features), np.asarray(self.labels)
        if features.ndim != 2 or features.shape[1] == 0 or features.dtype.kind not in "fiu":
            raise InputError(
                f"features must be numbers of shape (examples, num_features), not {features.dtype} of {features.shape}"
            )
        if labels.shape != features.shape[:1] or labels.dtype.kind not in "fiub":
            raise InputError(
                f"labels must be {len(features)} numbers, one per row of features, not of shape {labels.shape}"
            )
        object.__setattr__(self, "features", np.ascontiguousarray(features, np.float32))
        object.__setattr__(self, "labels", np.ascontiguousarray(labels, np.float32))
        self._check_rows(features=features)

    @classmethod
    def from_examples(
        cls,
        examples: AttributedExamples,
        *,
        features: str | Sequence[str],
        label: str | None,
        num_features: int | None = None,
        classes: Sequence[str | int] | None = (0, 1),
    ) -> "FeatureTable":
        """Reads features from one list column or several columns of numbers, and a column of labels.

        Without a label all labels are NaN. Lists have `num_features` numbers, by default as many as their type says;
        the width is public. Without classes a label is a number.

        Guarantees:
          - Only the schema can refuse: a label that is no class, or a list of another length, makes its own row
            unusable and changes no other.   (test_only_the_schema_refuses)
        """
        labels = read_labels(examples.payload, label, classes)
        matrix = number_matrix(examples.payload, features, num_features)
        return cls(graph=examples.graph, features=matrix, labels=labels)

    @property
    def num_unusable(self) -> int:
        """The number of rows with a missing or non-finite value or an unknown label: for a private log only."""
        unusable = 0
        for begin in range(0, len(self.labels), 4096):
            piece = slice(begin, begin + 4096)
            finite = np.isfinite(self.labels[piece]) & np.isfinite(self.features[piece]).all(axis=1)
            unusable += int(np.count_nonzero(~finite))
        return unusable

    def stored(self) -> Arrays:
        return {"features": self.features, "labels": self.labels}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"features": (self.features.shape[1],), "labels": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.float32))

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(examples)
        _gather(self.features, rows, self.labels[:, None], rows, out)

    def in_place(self, examples: npt.NDArray[np.int64]) -> RowsInPlace | None:
        """Returns the features of these examples in place; None if they are not contiguous in memory.

        Guarantees:
          - They are the rows that `fill` copies.   (test_rows_in_place_are_those_of_fill)
        """
        if not rows_are_contiguous(self.features):
            return None
        return RowsInPlace(self.features, self._rows_or_first(examples))

    def with_norms(self) -> "WithNorms":
        """Returns the table together with its rows' norms."""
        rows = self._rows_or_first(np.arange(self.graph.num_examples))
        norms = np.empty(rows.size, np.float32)

        def fill(begin: int, end: int) -> None:
            self._touch(end - begin)
            fill_norms(self.features, rows[begin:end], norms[begin:end])

        parts = threads.cores() if self.mapped is None else max(threads.cores(), -(-rows.size // _MAPPED_ROWS))
        threads.over_ranges(fill, rows.size, parts=parts)
        sides = np.stack([self.labels[rows], norms], axis=1)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(FeatureTable)}
        return WithNorms(**own, sides=sides)

    @property
    def digest(self) -> str:
        return self._digest()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WithNorms(FeatureTable):
    """A table with the norms of its rows, so that clipping need not read the features for them.

    Made when a run begins, and for that run alone: norms of what an array held before it was written
    over would void the clip norm.

    Guarantees:
      - The norm given with a row is that row's, rounded up.   (test_norms_are_those_of_the_rows)
      - Content that was written over before a run has its own norms in it.   (test_norms_follow_what_was_written_over)
    Cost: one pass over the features and 8 bytes an example.

    Attributes:
      sides: (graph.num_examples, 2) labels and norms, side by side since they are fetched together.
    """

    sides: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        """Skips the checks, which the original table has passed."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "norms": ()}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        _gather(self.features, self._rows_of(examples), self.sides, examples, out)


def with_norms(data: TrainingData) -> TrainingData:
    """Returns the data for clipped gradients: features together with their rows' norms; other data unchanged."""
    return getattr(data, "with_norms", lambda: data)()


def content_pieces(data: TrainingData) -> Iterator[tuple[int, dict[str, npt.NDArray[Any]]]]:
    """Yields (number of examples, arrays) of all examples in order, in pieces, for evaluation.

    All pieces have one shape, so that one compiled program reads them; the last is padded with zeros. Each has its own
    arrays, since a device may read the host's memory in place while the next is filled. No examples are one piece of
    padding.
    """
    total, shapes, kinds = data.graph.num_examples, data.shapes(), data.dtypes()
    numbers_each = sum(math.prod(shape) for shape in shapes.values())
    size = max(1, min(_PIECE_EXAMPLES, _PIECE_NUMBERS // numbers_each, total))
    for begin in range(0, max(1, total), size):
        examples = np.arange(begin, min(begin + size, total))
        arrays = {name: np.zeros((size, *shape), kinds[name]) for name, shape in shapes.items()}
        data.fill(examples, {name: array[: len(examples)] for name, array in arrays.items()})
        yield len(examples), arrays


def rows_in_place(data: TrainingData, examples: npt.NDArray[np.int64]) -> InPlace | None:
    """Returns the content of these examples in place, for data that support it."""
    return getattr(data, "in_place", lambda examples: None)(examples)


def _gather(
    features: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    sides: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int64],
    out: dict[str, npt.NDArray[Any]],
) -> None:
    """Fills out with rows of features, if it has room for them, and with rows of `sides`."""
    labels = out["labels"][: rows.size]
    gather_sides(sides, indices, labels, out["norms"][: rows.size] if sides.shape[1] > 1 else labels[:0])
    into = out.get("features")
    if into is not None:
        parts = max(1, min(threads.cores(), rows.size * into.shape[1] // _NUMBERS_A_THREAD))
        threads.over_ranges(lambda a, b: gather_rows(features, rows[a:b], into[a:b]), rows.size, parts=parts)


@compiled()
def gather_rows(source, rows, out):
    """Sets out[i] = source[rows[i]]. Rows lie scattered: the first lines of each are prefetched."""
    width = source.shape[1]
    for i in range(rows.size):
        if i + _AHEAD < rows.size:
            for j in range(0, min(width, _LINES * LINE), LINE):
                prefetch(source, rows[i + _AHEAD], j)  # pyright: ignore[reportCallIssue]
        row = rows[i]
        for j in range(width):
            out[i, j] = source[row, j]


@compiled()
def gather_sides(sides, indices, out_labels, out_norms):
    """Sets out_labels[i] = sides[indices[i], 0], and out_norms[i] = sides[indices[i], 1] if there are norms."""
    for i in range(indices.size):
        if i + _AHEAD < indices.size:
            prefetch(sides, indices[i + _AHEAD], 0)  # pyright: ignore[reportCallIssue]
        out_labels[i] = sides[indices[i], 0]
        if out_norms.size:
            out_norms[i] = sides[indices[i], 1]


def row_order(graph: AttributionGraph) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the ids in row order, which a graph's digest ignores but content depends on."""
    offsets, data = utf8_buffers(graph.example_ids, length=graph.num_examples)
    return np.diff(offsets), data[offsets[0] : offsets[-1]]
