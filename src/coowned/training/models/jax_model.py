"""Any model in JAX: a loss of one example, a tree of parameters, and a function that predicts."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.errors import InputError
from coowned.training.example_table import (
    KEY,
    USABLE,
    ExampleColumn,
    ExampleTable,
    columns_of,
    holds_text,
    numeric_columns,
)
from coowned.training.model import Model
from coowned.training.models.example_model import ExampleModel, refuse_collectives
from coowned.training.models.parameter_trees import ParameterTree, Trainable
from coowned.training.tasks import Specification, Table, Task

_LABELS = ("label", "labels", "y")  # entries that are taken for the class where none is named
_MOST_TRIES = 400  # shapes tried to find the one that a loss takes
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JaxModel(Specification):
    """A model of one's own: `loss(parameters, example, key)` of ONE example, in JAX.

    `example` is a dictionary of arrays without a batch axis: float32, or int32 for whole numbers. `key` is a key of
    `jax.random` for dropout and the like: new for every copy of every step, and fixed in evaluations. Gradients of
    every copy are clipped one by one, all trained parameters together; `ExampleModel` says what holds.

    Guarantees:
      - Only the schema and the parameters decide what an example looks like: no content is looked at.
        (test_lengths_follow_from_the_parameters)
      - A loss that mixes examples is refused before anything is read.   (test_refused_before_anything_is_read)

    Attributes:
      loss: (parameters, example, key) -> a float32 number.
      parameters: any tree, where training starts; leaves that are not arrays of floating-point numbers are not trained.
      predict: (parameters, example) -> the probabilities of the classes; of two also that of the second alone, with
        `classes`; or the one number of a regression.
      columns: the column of the data that each entry of an example is read from, or a list of columns; default: the
        columns of numbers that `loss` and `predict` ask for by name (all of them, if they copy the whole example).
      shapes: of entries whose lists may have any length; where it is left out and only one length goes with the
        parameters, it is that.
      trainable: which parameters are trained: a function of a path such as "layers/0/w", or a tree of booleans.
      label: the entry that holds the class (default: "label", "labels" or "y"): accuracy is counted by it.
      classes: as the data spell them, or how many there are (0, 1, ...); default: as many as `predict` gives
        probabilities. A label that is none of them makes its row unusable.
      memory_limit: of a microbatch: "1GB", or bytes.
      microbatch: examples differentiated together; default: found from the memory limit.
      origin: plain values for the run's record that say where the functions come from.

    Example:
      >>> def loss(parameters, example, key):
      ...     return (example["x"] @ parameters["w"] - example["target"]) ** 2
      >>> model = JaxModel(loss=loss, parameters={"w": np.zeros(3)})
      >>> schema = pa.schema({"x": pa.list_(pa.float64()), "target": pa.float32(), "text": pa.string()})
      >>> [(entry.name, entry.shape) for entry in model.for_schema(schema).entries]
      [('x', (3,)), ('target', ())]
    """

    kind: ClassVar[str] = "python"
    loss: Callable[[Any, Any, Any], Any]
    parameters: Any = dataclasses.field(repr=False)
    predict: Callable[[Any, Any], Any] | None = None
    columns: Mapping[str, str] | Sequence[str] | None = None
    shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    trainable: Trainable = None
    label: str | None = None
    classes: int | Sequence[Any] | None = None
    memory_limit: str | int = "1GB"
    microbatch: int | None = None
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

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

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = ExampleTable.from_examples(examples, model.entries)
            return model, table, {"unusable_rows": table.num_unusable}

        return Task(read=read)

    def for_schema(self, schema: pa.Schema, *, labels: bool = True) -> ExampleModel:
        """The model for data of this schema; without labels only what `predict` reads need be there."""
        tree = ParameterTree.of(self.parameters, self.trainable)
        asked = self._columns(schema)
        if not labels:
            asked = {name: column for name, column in asked.items() if column in schema.names}
        label = self.label or next((name for name in _LABELS if name in asked), None)
        if label is not None and label not in asked and labels:
            raise InputError(f"label is {label!r}, which is no entry of an example; there are {', '.join(asked)}")
        spelled = label in asked and holds_text(schema, asked[label])
        if spelled and self.classes is None:
            raise InputError(
                f"column {asked[str(label)]!r} holds text: say which classes there are, classes=[...]; they are not "
                "collected from the data, which would give them away"
            )
        plain = {name: column for name, column in asked.items() if not (spelled and name == label)}
        kinds = columns_of(schema, plain, {name: tuple(shape) for name, shape in self.shapes.items()})
        kinds |= {name: ((), True) for name in asked if name not in plain}
        found, gives = self._traced(tree, kinds, label, labels=labels)
        classes = self._classes(gives)
        if classes is not None and labels:
            self._check_probabilities(tree, found, kinds)
        entries = tuple(
            ExampleColumn(
                name=name,
                column=asked[name],
                shape=found[name],
                whole=kinds[name][1] or (name == label and bool(classes)),
                classes=classes or () if name == label else (),
            )
            for name in asked
            if name in found
        )
        return ExampleModel(
            loss=self.loss,
            tree=tree,
            entries=entries,
            predictor=self.predict,
            classes=classes,
            label=label if label in found else None,
            memory_limit=bytes_of(self.memory_limit),
            microbatch=self.microbatch,
            origin=self.origin,
        )

    def for_table(self, table: ExampleTable) -> ExampleModel:
        """The model for arrays in memory; classes are then indices already."""
        kinds = table.dtypes()
        fields = {}
        for name, shape in table.shapes().items():
            if name not in (KEY, USABLE):
                fields[name] = pa.int32() if kinds[name] == np.int32 else pa.float32()
                for size in reversed(shape):
                    fields[name] = pa.list_(fields[name], size)
        return self.for_schema(pa.schema(fields))

    def settings(self) -> dict[str, Any]:
        """Nothing but the kind: functions are not in a configuration file."""
        return {"kind": self.kind}

    def _columns(self, schema: pa.Schema) -> dict[str, str]:
        """The column of each entry that an example may have."""
        if isinstance(self.columns, Mapping):
            return dict(self.columns)
        if isinstance(self.columns, str):
            raise InputError(f"columns must be a list of columns or a mapping, not {self.columns!r}")
        own = {name: name for name in (numeric_columns(schema) if self.columns is None else self.columns)}
        label = self.label or next((name for name in _LABELS if name in schema.names), None)
        if self.columns is None and label in schema.names and holds_text(schema, str(label)):
            own[str(label)] = str(label)
        return own

    def _traced(
        self,
        tree: ParameterTree,
        kinds: Mapping[str, tuple[tuple[int, ...] | None, bool]],
        label: str | None,
        *,
        labels: bool,
    ) -> tuple[dict[str, tuple[int, ...]], Any]:
        """(the shape of each entry that is used, what `predict` gives), by tracing both functions.

        Entries whose length nobody says have each length that a parameter has, until one of them fits.
        """
        import jax

        def attempt(lengths: Mapping[str, int]) -> tuple["_Asked", Any]:
            example, predict, gives = _Asked(kinds, lengths), self.predict, None
            if predict is not None:
                gives = jax.eval_shape(lambda t, f: predict(tree.whole(t, f), example), tree.trained, tree.frozen)
            if labels:
                key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
                if self._classes(gives):  # a class is its index, whatever the type of its column
                    example.whole.add(label)
                jax.eval_shape(lambda t, f, k: self.loss(tree.whole(t, f), example, k), tree.trained, tree.frozen, key)
            return example, gives

        unknown = [] if self.columns is None else [name for name, (shape, _) in kinds.items() if shape is None]
        fitting: list[tuple[_Asked, Any]] = []
        tries = _lengths(unknown, tree.sizes)
        while tries:
            lengths = tries.pop()
            try:
                with refuse_collectives():
                    fitting.append(attempt(lengths))
            except _UnknownLengthError as missing:
                unknown.append(str(missing))
                tries, fitting = _lengths(unknown, tree.sizes), []
            except (TypeError, ValueError, IndexError) as error:
                if not unknown or isinstance(error, InputError):
                    raise
        if len({tuple(found.used.items()) for found, _ in fitting}) != 1:
            raise InputError(
                f"the schema does not say how long the lists of {', '.join(unknown)} are, and "
                f"{'several lengths fit' if fitting else 'no length of a parameter fits'}; say it: "
                f"shapes={{{unknown[0]!r}: (length,)}}, or store them as fixed-size lists"
            )
        example, gives = fitting[0]
        return (example.used if self.columns is None or not labels else example.all_shapes()), gives

    def _check_probabilities(
        self,
        tree: ParameterTree,
        shapes: Mapping[str, tuple[int, ...]],
        kinds: Mapping[str, tuple[tuple[int, ...] | None, bool]],
    ) -> None:
        """Refuses scores instead of probabilities, on a made-up example and the parameters that were given."""
        if self.predict is None:
            return
        example = {name: np.ones(shape, np.int32 if kinds[name][1] else np.float32) for name, shape in shapes.items()}
        given = np.asarray(self.predict(tree.whole(tree.trained, tree.frozen), example), np.float64)
        total = given.sum() if given.ndim else 1.0
        if np.isfinite(given).all() and not (
            abs(total - 1) < 1e-3 and (given >= 0).all() and (given <= 1 + 1e-6).all()
        ):
            raise InputError(
                f"predict must give probabilities, and gave {given.tolist()} for a made-up example; end it with "
                "jax.nn.softmax, or jax.nn.sigmoid for one of two classes"
            )

    def _classes(self, gives: Any) -> tuple[Any, ...] | None:
        """What the numbers that `predict` gives stand for."""
        given = () if self.classes is None else self.classes
        named = tuple(range(given)) if isinstance(given, int) else tuple(np.asarray(given, object).tolist())
        shape = None if gives is None else getattr(gives, "shape", None)
        if gives is None:
            return named or None
        if shape is None or len(shape) > 1:
            raise InputError(f"predict must give the probabilities of the classes, or one number, not {gives}")
        if shape == ():
            if named and len(named) != 2:
                raise InputError(
                    f"predict gives one number, and there are {len(named)} classes; give all probabilities"
                )
            return named or None
        if named and len(named) != shape[0]:
            raise InputError(f"predict gives {shape[0]} probabilities, and there are {len(named)} classes")
        return named or tuple(range(shape[0]))


class _UnknownLengthError(Exception):
    """An entry was asked for whose length is not known; the message is its name."""


class _Asked(Mapping[str, Any]):
    """An example that notes which entries are asked for; lists of unknown length have the given lengths."""

    def __init__(self, kinds: Mapping[str, tuple[tuple[int, ...] | None, bool]], lengths: Mapping[str, int]):
        self._kinds, self._lengths = kinds, lengths
        self.whole: set[str | None] = {name for name, (_, whole) in kinds.items() if whole}
        self.used: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> Any:
        import jax.numpy as jnp

        if name not in self._kinds:
            raise InputError(
                f"the model asks for example[{name!r}], which is not in the data; there are {', '.join(self._kinds)}"
            )
        self.used[name] = shape = self._shape(name)
        return jnp.zeros(shape, jnp.int32 if name in self.whole else jnp.float32)

    def __iter__(self) -> Iterator[str]:
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
            raise _UnknownLengthError(name)
        return (self._lengths[name],)


def _lengths(unknown: Sequence[str], sizes: Sequence[int]) -> list[dict[str, int]]:
    """Every way to give each of them one of these lengths, as far as they are not too many to try."""
    ways = itertools.islice(itertools.product(sizes, repeat=len(unknown)), _MOST_TRIES)
    return [dict(zip(unknown, lengths, strict=True)) for lengths in ways]


def bytes_of(limit: str | int) -> int:
    """A memory limit in bytes.

    >>> bytes_of("1.5GB"), bytes_of("512 MiB"), bytes_of(1000)
    (1500000000, 536870912, 1000)
    """
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit) if isinstance(limit, str) else None
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise InputError(f'memory_limit must be a number of bytes or a text such as "1GB", not {limit!r}')
    return int(float(found[1]) * _UNITS[found[2].upper()])
