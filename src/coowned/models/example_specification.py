"""Specifications of custom models by the loss of ONE example: from a schema to the entries of an example."""

import abc
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import is_text, one_line
from coowned.attribution.tables import types_are_inferred
from coowned.content.columns import column_type
from coowned.content.example_table import KEY, USABLE, ExampleColumn, ExampleTable, columns_of, numeric_columns
from coowned.errors import InputError
from coowned.models.example_model import ExampleModel, refuse_collectives
from coowned.models.model import Model, Specification, Table, Task
from coowned.models.parameter_trees import ParameterTree

_LABELS = ("label", "labels", "y")  # entries that are taken for the class where none is named
_MOST_TRIES = 400  # shapes tried to find the one that a loss takes
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
Kinds = Mapping[str, tuple[tuple[int, ...] | None, bool]]
"""By entry of an example: its shape, None where lists may have any length, and whether it holds integers."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExampleSpecification(Specification):
    """The parts that `JaxModel` and PyTorch's `TorchModel` share: from a schema to the entries of an example.

    Attributes:
      loss: of one example.
      predict: of one example: the probabilities of the classes, or one number.
      columns, shapes, integers, label, classes, memory_limit, microbatch, origin: as `JaxModel` says.
    """

    loss: Callable[..., Any]
    predict: Callable[[Any, Any], Any] | None = None
    columns: Mapping[str, str] | Sequence[str] | None = None
    shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    integers: Sequence[str] = ()
    label: str | None = None
    classes: int | Sequence[Any] | None = None
    memory_limit: str | int = "1GB"
    microbatch: int | None = None
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    softmax: ClassVar[str]  # what turns scores into probabilities, for an error

    def __post_init__(self) -> None:
        for name in ("loss", "predict"):
            if not callable(getattr(self, name)) and (name == "loss" or self.predict is not None):
                raise InputError(f"{name} must be a function, not {getattr(self, name)!r}")
        if self.microbatch is not None:
            validate.positive(microbatch=self.microbatch)
        if isinstance(self.classes, int):
            validate.integer(at_least=2, classes=self.classes)
        bytes_of(self.memory_limit)

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        del folder
        model = self.for_schema(schema, labels=labels)
        if is_private:  # before anything is read; that the parameters are public is the caller's word
            model.check_independence()
        table_of = self.reader(model)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = table_of(examples)
            return model, table, {"unusable_rows": table.num_unusable}

        return Task(read=read)

    def reader(self, model: ExampleModel) -> Callable[[AttributedExamples], ExampleTable]:
        """Returns a function that reads the content of some examples; it is called once for each piece of the data."""
        return lambda examples: ExampleTable.from_examples(examples, model.entries)

    # ---- what depends on the library that computes

    @abc.abstractmethod
    def parameter_tree(self) -> ParameterTree:
        """Returns the parameters, split into trained and frozen leaves."""

    @abc.abstractmethod
    def make_model(self, **settings: Any) -> ExampleModel:
        """Returns the model with these settings, besides the loss and the predictor."""

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], tree: ParameterTree, example: Mapping[str, Any]) -> Any:
        """Evaluates `loss` or `predict` for an example; only the shape of the result is used."""

    @abc.abstractmethod
    def probabilities(self, tree: ParameterTree, example: Mapping[str, npt.NDArray[Any]]) -> Any:
        """Evaluates `predict` for an example under the starting parameters."""

    def lengths(self, tree: ParameterTree) -> list[int]:
        """Returns candidate lengths for lists of undeclared length, in increasing order: the axes of the parameters."""
        return sorted({size for array in (*tree.trained.values(), *tree.frozen.values()) for size in array.shape})

    def more_entries(self, schema: pa.Schema) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Returns entries of an example that are not columns of the data: shape, and whether they hold integers."""
        del schema
        return {}

    # ---- from a schema to entries

    def for_schema(self, schema: pa.Schema, *, labels: bool = True) -> ExampleModel:
        """Returns the model for data of this schema; without labels only the columns `predict` reads are needed."""
        tree = self.parameter_tree()
        columns, more, label, spelled, named = self._entries(schema, labels=labels)
        plain = {
            name: column for name, column in columns.items() if name not in more and not (spelled and name == label)
        }
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        kinds = columns_of(schema, plain, shapes, self.integers)
        kinds |= {name: more.get(name, ((), True)) for name in columns if name not in plain}
        why_missing = functools.partial(self._why_missing, schema)
        try:
            found, output = self._traced(tree, kinds, label, labels=labels, all_known=named, why_missing=why_missing)
        except Exception as error:
            if isinstance(error, InputError) or not types_are_inferred(schema):
                raise
            raise InputError(
                f"the model cannot be computed ({type(error).__name__}: {one_line(error)}). CSV, JSONL, SQL and Python "
                "lists declare no types: name the entries that are integers, integers=[...], and give the shapes of "
                "lists, shapes={...}; or store the data as Parquet"
            ) from error
        classes = self.class_names(output)
        if classes is not None and labels and self.predict is not None:
            self._check_probabilities(tree, found, kinds)
        entries = tuple(
            ExampleColumn(
                name=name,
                column=columns[name],
                shape=found[name],
                whole=kinds[name][1] or (name == label and bool(classes)),
                classes=classes or () if name == label and name not in more else (),
            )
            for name in columns
            if name in found
        )
        return self.make_model(
            tree=tree,
            entries=entries,
            classes=classes,
            label=label if label in found else None,
            memory_limit=bytes_of(self.memory_limit),
            microbatch=self.microbatch,
            origin=self.origin,
        )

    def _entries(self, schema: pa.Schema, *, labels: bool) -> "_Entries":
        """Returns the entries that an example may have, and which of them is the label."""
        columns = self._columns(schema)
        if not labels:
            columns = {name: column for name, column in columns.items() if column in schema.names}
        more = self.more_entries(schema)
        columns |= dict.fromkeys(more, "")
        declared = not types_are_inferred(schema)
        named = declared or self.columns is not None  # otherwise one row's key may make a column
        known = columns if named else more
        label = self.label or next((name for name in _LABELS if name in known), None)
        if label is None and not named and labels and (self.predict is not None or self.classes is not None):
            raise InputError(
                "name the column of the label, label=...: CSV, JSONL, SQL and Python lists declare no types, so a name "
                "such as 'label' may be in one row only"
            )
        if label is not None and label not in columns and labels:
            raise InputError(
                f"label is {label!r}, which is not an entry of an example; choose from {', '.join(columns)}"
            )
        spelled = declared and label in columns and label not in more and is_text(column_type(schema, columns[label]))
        if spelled and self.classes is None:
            raise InputError(
                f"column {columns[str(label)]!r} holds text: declare its classes, classes=[...]; collecting them from "
                "the data would reveal them"
            )
        return _Entries(columns, more, label, spelled, named)

    def for_table(self, table: ExampleTable) -> ExampleModel:
        """Returns the model for arrays in memory, whose classes are indices already."""
        kinds = table.dtypes()
        fields = {}
        for name, shape in table.shapes().items():
            if name not in (KEY, USABLE):
                fields[name] = pa.int32() if kinds[name] == np.int32 else pa.float32()
                for size in reversed(shape):
                    fields[name] = pa.list_(fields[name], size)
        return self.for_schema(pa.schema(fields))

    def settings(self) -> dict[str, Any]:
        """Returns the kind only, since functions are not part of a configuration file."""
        return {"kind": self.kind}

    def _columns(self, schema: pa.Schema) -> dict[str, str]:
        """Returns the column of each entry that an example may have."""
        if isinstance(self.columns, Mapping):
            return dict(self.columns)
        if isinstance(self.columns, str):
            raise InputError(f"columns must be a list of columns or a mapping, not {self.columns!r}")
        columns = {name: name for name in (numeric_columns(schema) if self.columns is None else self.columns)}
        label = self.label or next((name for name in _LABELS if name in schema.names), None)
        if self.columns is None and label in schema.names and is_text(column_type(schema, str(label))):
            columns[str(label)] = str(label)
        return columns

    def _why_missing(self, schema: pa.Schema, name: str) -> str:
        """Explains why an example has no entry of this name, and which entries it has."""
        columns = self._columns(schema)
        if self.columns is not None and name not in columns:
            return f"the model reads example[{name!r}], and columns names only {', '.join(columns)}; name it there"
        column = columns.get(name, name)
        if column not in schema.names:
            there = ", ".join(schema.names) or "no columns"
            return f"the data have no column {column!r}, which the model reads; they have {there}"
        return f"the model reads column {column!r}, which holds {schema.field(column).type}, not numbers; convert it"

    def _traced(
        self,
        tree: ParameterTree,
        kinds: Kinds,
        label: str | None,
        *,
        labels: bool,
        all_known: bool,
        why_missing: Callable[[str], str],
    ) -> tuple[dict[str, tuple[int, ...]], Any]:
        """Calls both functions; returns (the shape of each entry that they use, what `predict` returns).

        Entries whose length nobody says have each length that a parameter has, until one of them fits. Unless all
        columns of numbers are known, entries must be asked for by name.
        """
        unknown = [] if self.columns is None else [name for name, (shape, _) in kinds.items() if shape is None]
        fitting: list[tuple[RecordingExample, Any]] = []
        failure: Exception | None = None
        tries = _lengths(unknown, self.lengths(tree))
        while tries:
            example = RecordingExample(kinds, tries.pop(), self.zeros, all_known, why_missing)
            try:
                fitting.append((example, self._called(tree, example, label, labels=labels)))
            except UnknownLengthError as missing:
                unknown.append(str(missing))
                tries, fitting = _lengths(unknown, self.lengths(tree)), []
            except Exception as error:  # each library has a class of its own for shapes that do not fit
                if not unknown or isinstance(error, InputError):
                    raise
                failure = error
        if len({tuple(found.used.items()) for found, _ in fitting}) != 1:
            raise InputError(
                f"the schema does not give the length of the lists of {', '.join(unknown)}, and "
                f"{'several lengths fit' if fitting else 'no length of a parameter fits'}; pass "
                f"shapes={{{unknown[0]!r}: (length,)}}, or store them as fixed-size lists"
            ) from (None if fitting else failure)
        example, output = fitting[0]
        return (example.used if self.columns is None or not labels else example.all_shapes()), output

    def _called(self, tree: ParameterTree, example: "RecordingExample", label: str | None, *, labels: bool) -> Any:
        """Calls both functions with an example; returns the result of `predict`."""
        with refuse_collectives():
            output = None if self.predict is None else self.call(self.predict, tree, example)
            if labels:
                if self.class_names(output):  # a class is its index, whatever the type of its column
                    example.whole.add(label)
                self.call(self.loss, tree, example)
            return output

    @abc.abstractmethod
    def zeros(self, shape: tuple[int, ...], whole: bool) -> Any:
        """Returns an array of the library's, of float32 or of integers."""

    def _check_probabilities(self, tree: ParameterTree, shapes: Mapping[str, tuple[int, ...]], kinds: Kinds) -> None:
        """Raises an error if `predict` returns scores instead of probabilities, on made-up examples."""
        example = {name: np.ones(shape, np.int32 if kinds[name][1] else np.float32) for name, shape in shapes.items()}
        probabilities = np.asarray(self.probabilities(tree, example), np.float64)
        total = probabilities.sum() if probabilities.ndim else 1.0
        if np.isfinite(probabilities).all() and not (
            abs(total - 1) < 1e-3 and (probabilities >= 0).all() and (probabilities <= 1 + 1e-6).all()
        ):
            raise InputError(
                f"predict must return probabilities, but returned {probabilities.tolist()} for a synthetic example; "
                f"end it with {self.softmax}"
            )

    def class_names(self, output: Any) -> tuple[Any, ...] | None:
        """Returns the class names for the outputs of `predict`."""
        classes = () if self.classes is None else self.classes
        named = tuple(range(classes)) if isinstance(classes, int) else tuple(np.asarray(classes, object).tolist())
        shape = None if output is None else getattr(output, "shape", None)
        if output is None:
            return named or None
        if shape is None or len(shape) > 1:
            raise InputError(f"predict must return the probabilities of the classes, or one number, not {output}")
        if len(shape) == 0:
            if named and len(named) != 2:
                raise InputError(
                    f"predict returns one number, but there are {len(named)} classes; return all probabilities"
                )
            return named or None
        if named and len(named) != shape[0]:
            raise InputError(f"predict returns {shape[0]} probabilities, but there are {len(named)} classes")
        return named or tuple(range(shape[0]))


class _Entries(NamedTuple):
    """The entries that an example may have."""

    columns: dict[str, str]  # of the data, by entry; "" for an entry that is no column
    more: Mapping[str, tuple[tuple[int, ...], bool]]  # entries that are no column, with shape and whether integers
    label: str | None
    spelled: bool  # the label is text
    named: bool  # the columns are known without looking at any row


class UnknownLengthError(Exception):
    """An error for an entry of unknown length; the message is its name."""


class RecordingExample(Mapping[str, Any]):
    """An example that records which entries are used; lists of unknown length have the given lengths."""

    def __init__(
        self,
        kinds: Kinds,
        lengths: Mapping[str, int],
        zeros: Callable[[tuple[int, ...], bool], Any],
        all_known: bool,
        why_missing: Callable[[str], str],
    ):
        self._kinds, self._lengths, self._zeros, self._all_known = kinds, lengths, zeros, all_known
        self._why_missing = why_missing
        self.whole: set[str | None] = {name for name, (_, whole) in kinds.items() if whole}
        self.used: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._kinds:
            raise InputError(self._why_missing(name))
        self.used[name] = shape = self._shape(name)
        return self._zeros(shape, name in self.whole)

    def __iter__(self) -> Iterator[str]:
        if not self._all_known:
            raise InputError(
                "the model uses all entries of an example, and the data declare no types that say which columns hold "
                "numbers; pass columns=[...]"
            )
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in self._kinds}

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._kinds[name][0]
        if shape is not None:
            return shape
        if name not in self._lengths:
            raise UnknownLengthError(name)
        return (self._lengths[name],)


def _lengths(unknown: Sequence[str], sizes: Sequence[int]) -> list[dict[str, int]]:
    """Returns every way to assign one of these sizes to each of the lists, if there are not too many."""
    ways = itertools.islice(itertools.product(sizes, repeat=len(unknown)), _MOST_TRIES)
    return [dict(zip(unknown, lengths, strict=True)) for lengths in ways]


def bytes_of(limit: str | int) -> int:
    """Returns a memory limit in bytes.

    >>> bytes_of("1.5GB"), bytes_of("512 MiB"), bytes_of(1000)
    (1500000000, 536870912, 1000)
    """
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit) if isinstance(limit, str) else None
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise InputError(f'memory_limit must be a number of bytes or a text such as "1GB", not {limit!r}')
    return int(float(found[1]) * _UNITS[found[2].upper()])
