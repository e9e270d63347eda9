"""PyTorch modules as models: a loss of one example and a prediction function, given in memory or made by a file."""

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.identifiers import is_text
from coowned.attribution.tables import spelled, types_are_inferred
from coowned.content.columns import column_type
from coowned.content.example_table import ExampleTable, number_array
from coowned.errors import BatchCoupledLossError, InputError, require
from coowned.models.example_model import ExampleModel
from coowned.models.example_specification import ExampleSpecification
from coowned.models.model import Model
from coowned.models.parameter_trees import ParameterTree
from coowned.models.python_model import PythonModel
from coowned.torch.module_model import ModuleModel, linear_stand_in, tensors

_AT_ONCE = 1024  # rows that are encoded together
_AGAIN = 64  # rows that are encoded again
Encode = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TorchModel(ExampleSpecification):
    """A PyTorch module and `loss(module, example)` of ONE example.

    `example` is a dictionary of tensors without a batch axis: float32, or int64 for integers. A module that wants
    a batch is given one of one: `module(example["x"][None])`. Parameters with `requires_grad` are trained; the others
    and all buffers stay as they are. `ModuleModel` says what holds of the gradients.

    Guarantees:
      - Only the schema, and what `encode` makes of a row without content, decide what an example looks like.
        (test_shapes_come_from_the_schema_alone)
      - A key that one row has gives no other row an entry: `encode` gets the columns that were named.
        (test_one_rows_key_reaches_no_encoder)
      - A row that `encode` fails on, or makes other shapes of, adds nothing and stops nothing.
        (test_rows_that_cannot_be_encoded_add_nothing)
      - An `encode` that remembers rows, so that one changes what another becomes, is refused where some rows show it.
        (test_an_encoder_that_remembers_is_refused, test_an_encoder_that_remembers_other_pieces_is_refused)
      - Layers that mix examples and random layers are refused, by name, before anything is read.
        (test_batch_norm_is_refused, test_dropout_is_refused)
      - So are layers whose parameters have no shape yet.   (test_lazy_layers_are_refused)

    Attributes:
      module: where training starts; it is never written to, `load_trained` puts trained parameters into one.
      loss: (module, example) -> one float32 number.
      predict: (module, example) -> the probabilities of the classes; of two also that of the second alone, with
        `classes`; or the one number of a regression.
      encode: (row) -> named arrays of fixed shapes: for text. A row is a dictionary of the columns in
        `encode_columns`; what it gives are entries of the example beside the columns of numbers.
      encode_columns: that a row has; default: all, where the data declare types (Parquet, Arrow).
      columns, shapes, integers, label, classes, memory_limit, microbatch, origin: as for `coowned.JaxModel`.
    """

    kind: ClassVar[str] = "torch"
    softmax: ClassVar[str] = "torch.softmax, or torch.sigmoid for one of two classes"
    module: Any = dataclasses.field(repr=False)  # a torch.nn.Module
    encode: Encode | None = None
    encode_columns: tuple[str, ...] | list[str] | None = None

    def __post_init__(self) -> None:
        import torch

        super().__post_init__()
        if not isinstance(self.module, torch.nn.Module):
            raise InputError(f"module must be a torch.nn.Module, not {type(self.module).__name__}")
        if self.encode is not None and not callable(self.encode):
            raise InputError(f"encode must be a function of a row, not {self.encode!r}")
        _refuse_batch_statistics(self.module)

    def parameter_tree(self) -> ParameterTree:
        import torch

        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                raise InputError(
                    f"{name!r} has no shape yet: the module has a lazy layer (such as LazyLinear); call the "
                    "module on one made-up example before training, or use a layer of a given size"
                )
        trained = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        for name, parameter in trained.items():
            if parameter.dtype != torch.float32:
                raise InputError(
                    f"parameter {name!r} is {parameter.dtype}; what is trained must be float32: cast or freeze it"
                )
            if parameter.device.type != "cpu":
                raise InputError(
                    f"parameter {name!r} is on {parameter.device}; training runs on the processor: module.cpu()"
                )
        if not trained:
            raise InputError("no parameter is trained: all of the module's have requires_grad=False")
        return ParameterTree.of({name: parameter.detach().numpy() for name, parameter in trained.items()})

    def lengths(self, tree: ParameterTree) -> list[int]:
        return sorted({size for parameter in self.module.parameters() for size in parameter.shape})

    def make_model(self, **settings: Any) -> ExampleModel:
        return ModuleModel(loss=self.loss, predictor=self.predict, module=self.module, **settings)

    def zeros(self, shape: tuple[int, ...], whole: bool) -> Any:
        import torch

        return torch.zeros(shape, dtype=torch.int64 if whole else torch.float32)

    def call(self, function: Callable[..., Any], tree: ParameterTree, example: Mapping[str, Any]) -> Any:
        import torch

        with torch.no_grad():
            return function(self.module, example)

    def probabilities(self, tree: ParameterTree, example: Mapping[str, npt.NDArray[Any]]) -> Any:
        assert self.predict is not None
        return self.call(self.predict, tree, tensors(example))

    # ---- text and whatever else is no number

    def more_entries(self, schema: pa.Schema) -> dict[str, tuple[tuple[int, ...], bool]]:
        return {name: (array.shape, array.dtype == np.int32) for name, array in self._encoded_nothing(schema).items()}

    def reader(self, model: ExampleModel) -> Callable[[AttributedExamples], ExampleTable]:
        if self.encode is None:
            return super().reader(model)
        # Before the first piece: what `encode` has kept of earlier pieces must not be taken for what it came with.
        return functools.partial(self._table, model, fresh_copy(self.encode))

    def _table(self, model: ExampleModel, as_it_was: Encode, examples: AttributedExamples) -> ExampleTable:
        assert self.encode is not None
        payload = examples.payload
        nothing = self._encoded_nothing(payload.schema)
        wanted = {entry.name: nothing[entry.name] for entry in model.entries if entry.name in nothing}
        count = payload.num_rows
        arrays = {name: np.zeros((count, *array.shape), array.dtype) for name, array in wanted.items()}
        usable = np.zeros(count, bool)
        for number, row in enumerate(self._rows(payload)):
            if (encoded := _fitting(self.encode, row, wanted)) is not None:
                usable[number] = True
                for name, array in arrays.items():
                    array[number] = encoded[name]
        self._encode_again(payload, arrays, usable, wanted, as_it_was)
        for entry in model.entries:
            if entry.name not in nothing:
                arrays[entry.name], good = entry.read(payload)
                usable &= good
        return ExampleTable(graph=examples.graph, arrays=arrays, usable=usable)

    def _encode_again(
        self, payload: pa.Table, arrays: Mapping[str, Any], usable: Any, wanted: Mapping[str, Any], as_it_was: Encode
    ) -> None:
        """Raises an error if `encode` gives other results for some rows in reverse order, chosen by their numbers."""
        assert self.encode is not None
        again = np.unique(np.linspace(0, max(0, usable.size - 1), _AGAIN).astype(np.int64))[: usable.size][::-1]
        rows = list(self._rows(payload.take(again)))
        for encode in (self.encode, fresh_copy(as_it_was)):
            for number, row in zip(again.tolist(), rows, strict=True):
                encoded = _fitting(encode, row, wanted)
                found = {name: np.zeros_like(array[number]) for name, array in arrays.items()} | (encoded or {})
                if (encoded is not None) != usable[number] or any(
                    found[name].tobytes() != array[number].tobytes() for name, array in arrays.items()
                ):
                    name = getattr(self.encode, "__qualname__", type(self.encode).__name__)
                    raise InputError(
                        f"encode ({name}) gave something else for a row when rows came in another order: it keeps what "
                        "it has seen (a vocabulary that grows, a counter) or draws random numbers: one person's "
                        "text changes what another's becomes. This is about the code, not about that row: fix "
                        "vocabulary and seeds before reading data"
                    )

    def _encoded_nothing(self, schema: pa.Schema) -> dict[str, npt.NDArray[Any]]:
        """Encodes a row of empty texts, zeros and empty lists, to find the shapes."""
        if self.encode is None:
            return {}
        if not self.encode_columns and types_are_inferred(schema):
            raise InputError(
                "name the columns that encode reads, encode_columns=[...]: CSV, JSONL, SQL and Python lists declare no "
                "types, so one row's key could add a column to every row"
            )
        kinds = {name: column_type(schema, name) for name in self.encode_columns or schema.names}
        row = {name: "" if types_are_inferred(schema, name) else _nothing(kind) for name, kind in kinds.items()}
        try:
            return _encoded(self.encode, row)
        except Exception as error:
            if isinstance(error, KeyError) and (missing := error.args[0]) not in row:
                raise InputError(
                    f"encode reads column {missing!r}, which the data do not have; they have {', '.join(row) or 'none'}"
                ) from error
            raise InputError(
                f"encode must take a row without content, which says what shapes an example has; for {row} it raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _rows(self, payload: pa.Table) -> Iterator[dict[str, Any]]:
        columns = payload.select(list(self.encode_columns)) if self.encode_columns else payload
        for number, name in enumerate(columns.column_names):
            if types_are_inferred(payload.schema, name):  # each cell as text, whatever the others made of its column
                columns = columns.set_column(number, name, spelled(columns.column(number)))
        for piece in columns.to_batches(max_chunksize=_AT_ONCE):
            yield from piece.to_pylist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFactory(PythonModel):
    """A reference to a function that returns a `TorchModel`: `[model] kind = "torch"`; otherwise as `PythonModel`."""

    kind: ClassVar[str] = "torch"
    returns: ClassVar[str] = "coowned.torch.TorchModel"

    def load(self, folder: Path) -> tuple[ExampleSpecification, bytes]:
        require("torch", "a model of kind 'torch'")
        return super().load(folder)

    def usage(self) -> str:
        return (
            "`model.safetensors` holds the trained parameters under the names that the module's `state_dict()` has; "
            "what was frozen is not in it:\n\n"
            "```python\n"
            "from safetensors.torch import load_file\n\n"
            'parameters = load_file("model.safetensors")  # module.load_state_dict(parameters, strict=False)\n'
            "print({name: tuple(tensor.shape) for name, tensor in parameters.items()})\n"
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """Returns a stand-in for audits, with the same parameters and microbatch, that also runs in PyTorch."""
        require("torch", "the audit of a PyTorch model")
        return linear_stand_in(described["parameters"], described["microbatch"])


def _refuse_batch_statistics(module: Any) -> None:
    """Raises an error for layers that normalize by the batch, where one example would change what others add."""
    import torch

    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise BatchCoupledLossError(
                f"layer {name!r} is a {type(layer).__name__}, whose output for one example depends on others of the "
                "batch: clipping would not bound its contribution; use GroupNorm or LayerNorm, or freeze public "
                "statistics with module.eval()"
            )


def _encoded(encode: Encode, row: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    return {name: number_array(name, np.asarray(value)[None])[0] for name, value in encode(row).items()}


def _fitting(encode: Encode, row: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]] | None:
    """Encodes a row; returns None if it cannot be encoded to the wanted shapes and types."""
    try:
        encoded = _encoded(encode, row)
    except Exception:  # whatever it is, it came of this row's content alone
        return None
    kinds = {name: (array.shape, array.dtype) for name, array in encoded.items()}
    return encoded if all(kinds.get(name) == (a.shape, a.dtype) for name, a in wanted.items()) else None


def _nothing(kind: pa.DataType) -> Any:
    if is_text(kind):
        return ""
    if pa.types.is_boolean(kind):
        return False
    if pa.types.is_integer(kind):
        return 0
    if pa.types.is_floating(kind):
        return 0.0
    return [] if pa.types.is_nested(kind) else None


def fresh_copy(function: Any) -> Any:
    """Copies a function with everything it refers to: globals, closure variables, defaults, objects it belongs to.

    Functions that it calls by name are copied in the same way. Modules, classes, arrays, networks and what cannot be
    copied are shared.
    """
    return _copied(function, {})


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """Copies a value; made: copies by the identity of the original, as in `copy.deepcopy`."""
    import torch

    if id(value) in made:
        return made[id(value)]
    if isinstance(value, types.FunctionType):
        return _copied_function(value, made)
    if isinstance(value, (types.ModuleType, type, np.ndarray, torch.Tensor, torch.nn.Module)):
        return value
    try:
        return copy.deepcopy(value, made)
    except Exception:  # an open file, a lock
        return value


def _copied_function(function: types.FunctionType, made: dict[int, Any]) -> types.FunctionType:
    around = function.__closure__ or ()
    names = made.setdefault(id(function.__globals__), dict(function.__globals__))
    cells = tuple(types.CellType() for _ in around)
    copied = types.FunctionType(function.__code__, names, function.__name__, None, cells)
    made[id(function)] = copied
    copied.__defaults__ = _copied(function.__defaults__, made)
    copied.__kwdefaults__ = _copied(function.__kwdefaults__, made)
    copied.__dict__.update(_copied(function.__dict__, made))
    for name in _names_in(function.__code__) & names.keys():
        names[name] = _copied(function.__globals__[name], made)
    for cell, original in zip(cells, around, strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            cell.cell_contents = _copied(original.cell_contents, made)
    return copied


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
