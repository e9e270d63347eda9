"""The interface of models: specification and task, then content and the model that training calls, once S is chosen."""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.data import TrainingData
from coowned.content.derived import Arrays, KeptArrays, MappedFiles, derive
from coowned.content.splits import USUAL_FRACTIONS, graphs_of_splits
from coowned.exact.grid import Grid

Parameters = dict[str, Any]
"""Arrays by name, all float32."""


class Model(Protocol):
    """A trainable model: its starting point, clipped gradients, losses and predictions.

    `gradient_sum`, `losses` and `predict` are called inside a compiled step, with arrays of JAX's, where `runs_in_jax`.
    """

    runs_in_jax: ClassVar[bool]
    """Whether `gradient_sum`, `losses` and `predict` are JAX's to compile; otherwise they take and give arrays of
    numpy."""
    many_models: ClassVar[bool]
    """Whether `losses` takes parameters with a leading axis for the models, and gives (batch, num_models) then."""

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """The labels that the indices of `predict` stand for, spelled as in the data; None for a regression."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns plain values that identify the model and can rebuild it; a resumed run must have the same."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter."""
        ...

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the starting parameters."""
        ...

    def check_data(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises InputError for data of other shapes."""
        ...

    def grid(self, clip_norm: float) -> Grid:
        """Returns the grid to which clipped gradients and their noise are rounded."""
        ...

    def clipped_sum(
        self,
        parameters: Parameters,
        batch: dict[str, Any],
        mask: Any,
        grids: Sequence[Grid],
        devices: Sequence[Any] = (),
        scales: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        """Returns ({name: (num_models, *shape) exact sums in grid units}, number of clipped copies: private).

        What a copy adds must be an integer vector no longer than the grid's radius, and depend on that copy alone.

        Args:
          parameters: each (num_models, *shape).
          batch: numpy arrays; rows read in place are under "features" (`coowned.content.data.InPlace`).
          mask: (batch,) True where the row is real.
          grids: of each model.
          devices: that share the work; none: the default one.
          scales: what gradients are multiplied by before they are clipped, with a leading axis for the models; None
            for models with `many_models`.
        """
        ...

    def gradient_sum(self, parameters: Parameters, batch: dict[str, Any], mask: Any) -> Parameters:
        """Computes the plain sum of gradients of one model, for training without privacy."""
        ...

    def losses(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Computes ((batch,) loss of each example, (batch,) whether it is predicted correctly)."""
        ...

    def predict(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Returns ((batch,) int32 index of the class, (batch,) its probability); for a regression (float32 value, NaN).

        Labels of the batch may be NaN. What cannot be predicted, because a value is missing or not finite, has a
        probability that is NaN; for a number it is NaN itself.
        """
        ...

    def probabilities(self, parameters: Parameters, batch: dict[str, Any]) -> Any:
        """Computes the (batch, classes) probabilities of a classifier; NaN where `predict` has NaN."""
        ...

    def to_arrays(self, parameters: Parameters) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the parameters as stored in a model file."""
        ...

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back; raises InputError for arrays of another model."""
        ...


def sums_of_members(
    gradients: Callable[[Any, Any], Any],
    placed: Callable[[Parameters], Mapping[str, Any]],
    parameters: Parameters,
    batch: Mapping[str, Any],
    mask: Any,
    grids: Sequence[Grid],
    *,
    scales: Mapping[str, Any] | None,
    **settings: Any,
) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
    """Computes `Model.clipped_sum` from a function for the gradients of one model, one member after another.

    Args:
      gradients: (what `placed` gives, rows of the batch) -> each row's gradients.
      placed: makes what `gradients` takes of one member's parameters, which have a leading axis of one model.
      parameters, batch, mask, grids, scales: as for `Model.clipped_sum`.
      settings: of `Microbatches`: shapes, microbatch, devices, ahead.
    """
    from coowned.exact.gradient_sums import Microbatches, clipped_gradient_sums

    division = Microbatches(**settings)

    def of_member(number: int) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        member = parameters if len(grids) == 1 else _member()(parameters, np.int32(number))
        own = None if scales is None else {name: array[number] for name, array in scales.items()}
        return clipped_gradient_sums(gradients, placed(member), batch, mask, grids[number], division, scales=own)

    if len(grids) == 1:
        sums, clipped = of_member(0)
        return {name: array[None] for name, array in sums.items()}, clipped
    members = [of_member(number) for number in range(len(grids))]
    sums = {name: np.stack([total[name] for total, _ in members]) for name in parameters}
    return sums, sum(clipped for _, clipped in members)


@functools.cache
def _member() -> Callable[[Parameters, Any], Parameters]:
    """Returns (parameters, number) -> that model's, with a leading axis of one; one program serves all members."""
    import jax

    return jax.jit(
        lambda parameters, number: {
            name: jax.lax.dynamic_slice_in_dim(array, number, 1) for name, array in parameters.items()
        }
    )


def num_scores(model: Model) -> int:
    """Returns how many scores a linear model has per example; 0 for any other model."""
    return getattr(model, "num_scores", 0)


def num_parameters(model: Model) -> int:
    """Returns the number of trained parameters, all of which get noise."""
    return sum(math.prod(shape) for shape in model.shapes().values())


def digest_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Computes a digest of arrays: their names, types, shapes and bits."""
    hashed = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def compiled_for(model: Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls methods of a model, compiled if the model runs in JAX."""
    if not model.runs_in_jax:
        return function
    import jax

    return jax.jit(function)


class Table(TrainingData, Protocol):
    """Training data in a dataclass, with the row of each example, so that any part of its graph can be cut out."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rows(self) -> npt.NDArray[np.int64] | None: ...

    def stored(self) -> Arrays: ...

    def with_stored(self, graph: AttributionGraph, arrays: Arrays, mapped: MappedFiles | None) -> Self: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """A model with its training and evaluation data.

    Attributes:
      parts: the data of each split.
      private_log: counts of what the examples hold, for those who may see the data alone.
    """

    model: Model
    parts: Mapping[str, TrainingData]
    private_log: Mapping[str, int] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The training task of a specification, before any content is read.

    Attributes:
      read: makes a table of some examples, the model for it, and counts of what they hold.
      initial: where training starts; None for the model's own start.
      files: name and content of what belongs beside model.safetensors, so that others can open it.
    """

    read: Callable[[AttributedExamples], tuple[Model, Table, dict[str, int]]]
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def load(
        self,
        examples: AttributedExamples,
        splits: Mapping[str, npt.NDArray[np.int64]],
        copies: npt.NDArray[Any] | None = None,
        *,
        kept: KeptArrays | None = None,
    ) -> Content:
        """Reads the content of selected and of held-out examples, and of no other.

        Guarantees:
          - Content of examples of the train split that were not selected is not read.
            (test_content_is_read_after_selection, test_unselected_rows_are_not_read)
          - Held-out examples have the same rows whatever was selected, so that all models are compared on the same
            masks.   (test_held_out_rows_do_not_depend_on_the_selection)

        Args:
          examples: with the payload.
          splits: examples of "train" and of the held-out splits.
          copies: (examples of the train split,) how often each was selected; None reads them all.
          kept: where arrays go that are derived from content in files; None: to the disk, for now.
        """
        train = splits["train"]
        used = train if copies is None else train[np.asarray(copies) > 0]
        wanted = np.concatenate([*(part for name, part in splits.items() if name != "train"), used])
        rows = np.full(examples.graph.num_examples, -1, np.int64)
        rows[wanted] = np.arange(wanted.size)
        model, table, counts = self._read(examples, wanted, kept)
        parts = {
            name: dataclasses.replace(table, graph=graph, rows=rows[splits[name]])
            for name, graph in graphs_of_splits(examples.graph, splits).items()
        }
        return Content(model=model, parts=parts, private_log=counts)

    def _read(
        self, examples: AttributedExamples, wanted: npt.NDArray[np.int64], kept: KeptArrays | None
    ) -> tuple[Model, Table, dict[str, int]]:
        """Reads the table of these examples in this order, in pieces if content is in files."""
        graph = examples.graph.subgraph(wanted)
        if examples.content is None:
            payload = examples.payload.take(pa.array(wanted))
            return self.read(dataclasses.replace(examples, graph=graph, payload=payload))
        model, like, counts = self.read_nothing(examples)
        if not wanted.size:
            return model, like, counts

        def pieces() -> Iterator[tuple[npt.NDArray[np.int64], Arrays, Mapping[str, int]]]:
            for where, payload in examples.pieces(wanted):
                few = dataclasses.replace(examples, graph=graph.subgraph(where), payload=payload, content=None)
                _, table, counts = self.read(few)
                yield where, table.stored(), counts

        with contextlib.nullcontext(kept) if kept else KeptArrays.for_now() as place:
            mapped = place.get(lambda folder: derive(pieces(), wanted.size, folder, place.key))
        return model, like.with_stored(graph, mapped.arrays, mapped), counts | mapped.counts

    def read_nothing(self, examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
        """Reads an empty table of this schema."""
        nobody = examples.graph.subgraph(np.empty(0, np.int64))
        return self.read(
            dataclasses.replace(examples, graph=nobody, payload=examples.schema.empty_table(), content=None)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specification(abc.ABC):
    """A model's settings and the columns it reads: `[model]` of a configuration, or the model given to `co.fit`.

    A subclass is a frozen dataclass whose fields are the keys of `[model]`, with one line in `models/registry.py`.
    Where the trained model needs nothing more, it is the model too.
    """

    kind: ClassVar[str]
    splits: ClassVar[tuple[float, float, float]] = USUAL_FRACTIONS
    """Shares of train, validation and test, unless others are asked for."""

    def check_files(self, folder: Path) -> None:
        """Raises InputError for missing files, and says where to get them; called before data are read."""
        del folder

    @abc.abstractmethod
    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        """Returns the task for data of this schema; raises InputError if the schema or a file does not fit.

        Args:
          schema: of the payload; no content is read here, and none can refuse later.
          folder: what relative paths of the specification are relative to.
          is_private: refuse to start from weights that were made from private data. False only where the run claims
            nothing at all.
          labels: False to predict: the label column need not exist, and labels are NaN.
        """

    def from_run(self, folder: Path) -> Self:
        """Returns the same specification with its files, if it needs any, taken from the folder of a finished run."""
        del folder
        return self

    def settings(self) -> dict[str, Any]:
        """Returns `[model]` of a configuration file: `kind`, and the fields that have a value."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **{name: value for name, value in fields.items() if value is not None}}

    def usage(self) -> str:
        """Returns usage instructions for an exported model, as Markdown; the Python code runs in the model's folder."""
        return (
            "`model.safetensors` holds the trained parameters by name:\n\n"
            "```python\n"
            "from safetensors.numpy import load_file\n\n"
            'parameters = load_file("model.safetensors")\n'
            "print({name: array.shape for name, array in parameters.items()})\n"
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """Rebuilds the model whose `describe` gave these values besides its kind."""
        return cls(**described)  # pyright: ignore[reportReturnType]
