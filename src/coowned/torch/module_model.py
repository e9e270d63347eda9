"""A PyTorch module as the loop trains it: every copy's own gradient, by torch.func, and then the sums of all models."""

import contextlib
import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import interrupts
from coowned.content.example_table import KEY, USABLE
from coowned.errors import BatchCoupledLossError, InputError
from coowned.models.example_model import (
    MOST_ROWS,
    STAND_IN_ENTRIES,
    ExampleModel,
    largest_tensor,
    power_of_two,
)
from coowned.models.model import num_parameters
from coowned.models.parameter_trees import ParameterTree

_GRADIENTS = 2**25  # bytes of them in a microbatch: fewer rows cost more calls, more rows fall out of the caches
_FORWARD = 32  # rows worked on together where nothing is differentiated
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModuleModel(ExampleModel):
    """What `TorchModel` is for data of a given schema.

    `torch.func` gives the gradient of every copy of a microbatch; what follows (clip, round to the grid, add as
    integers) is the same host code as for any other model.

    Guarantees:
      - The clipped sum is that of the examples' own gradients, as JAX and Opacus have them.
        (test_sums_are_those_of_jax, test_gradients_are_those_of_opacus)
      - A copy's gradient does not depend on others: found out on made-up data before training.
        (test_coupled_losses_are_refused_by_perturbation, test_a_copy_adds_the_same_in_any_company_in_torch,
        test_a_copy_adds_the_same_in_any_place_in_torch)
      - Nor does an index out of range read or write another copy: the functions of PyTorch that let it, such as
        `F.embedding` on a table that differs between examples, are refused by name, and others on made-up indices.
        (test_unchecked_indices_are_refused, test_the_probe_finds_a_lookup_that_no_name_tells,
        test_indices_out_of_range_stay_in_their_example_in_torch)
      - A row for which the loss or the module raises (an index out of range) adds exactly zero and stops nothing; it
        has no loss and no prediction. What made-up rows raise too is reported, and memory that is missing.
        (test_rows_that_raise_add_nothing, test_errors_of_the_model_are_reported)
      - Only parameters with `requires_grad` are trained, clipped and noised.   (test_frozen_parameters_stay)
      - A microbatch's tensors need no more memory than the limit.   (test_torch_memory_limit_is_kept)
      - Another loss, frozen tensor, version of PyTorch or number of threads has another description: a run is not
        resumed with it.   (test_torch_description_follows_the_model)
    Cost: one gradient of every copy, and two passes over it on the host.

    Attributes:
      module: whose parameters are trained; it is never written to.
    """

    kind: ClassVar[str] = "torch"
    runs_in_jax: ClassVar[bool] = False
    module: Any = dataclasses.field(repr=False)

    # ---- what the loop asks

    def describe(self) -> dict[str, Any]:
        import torch

        return {**super().describe(), "torch": str(torch.__version__), "threads": torch.get_num_threads()}

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        """The plain sum, some examples at a time: for training without privacy."""
        import torch

        trained = {name: parameter.requires_grad_() for name, parameter in tensors(parameters).items()}
        losses = torch.func.vmap(self._loss, in_dims=(None, None, 0))

        def slopes(rows: Arrays) -> Any:
            given = tensors(rows)
            total = torch.where(given[USABLE], losses(trained, self._frozen, given), 0.0).sum()
            return torch.autograd.grad(total, list(trained.values()), materialize_grads=True)

        kept = np.asarray(mask) & np.asarray(batch[USABLE])
        sums = [np.zeros(parameter.shape, np.float32) for parameter in trained.values()]
        for rows in _in_parts({**self._rows(batch), USABLE: kept}, self.rows_at_once):
            for total, slope in zip(sums, self._without_failing(slopes, rows)[0], strict=True):
                total += slope.numpy()
        return dict(zip(trained, sums, strict=True))

    def stand_in(self) -> "ModuleModel":
        return linear_stand_in(self.shapes(), self.rows_at_once)

    # ---- one example, and many

    @functools.cached_property
    def _frozen(self) -> dict[str, Any]:
        """Parameters that are not trained, and buffers."""
        trained = self.tree.trained
        everything = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach() for name, tensor in everything if name not in trained}

    def _placed(self, parameters: Arrays) -> Mapping[str, Any]:
        trained = {name: np.asarray(array)[0] for name, array in parameters.items()}
        return {"trained": tensors(trained), "frozen": self._frozen}

    def _loss(self, trained: Arrays, frozen: Arrays, row: Arrays) -> Any:
        return self._call(self.loss, trained, frozen, row)

    def _predict(self, trained: Arrays, frozen: Arrays, row: Arrays) -> Any:
        return self._call(self.predictor, trained, frozen, row)

    def _call(self, function: Any, trained: Arrays, frozen: Arrays, row: Arrays) -> Any:
        """function(the module with these parameters, the example)."""
        import torch

        class Called(torch.nn.Module):
            def __init__(self, module: Any):
                super().__init__()
                self.module = module

            def forward(self, example: Arrays) -> Any:
                return function(self.module, example)

        tensors_by_name = {f"module.{name}": tensor for name, tensor in (*trained.items(), *frozen.items())}
        # vmap loops over the other kernels of attention.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), refuse_unchecked_indices():
            return torch.func.functional_call(Called(self.module), tensors_by_name, (self._example(row),))

    @property
    def _numpy(self) -> Any:
        return np

    def _over_rows(self, function: Callable[..., Any], parameters: Arrays, batch: Arrays) -> npt.NDArray[Any]:
        import torch

        trained, many = tensors(parameters), torch.func.vmap(function, in_dims=(None, None, 0))
        parts = []
        with torch.no_grad():
            for rows in _in_parts(self._rows(batch), _FORWARD):
                found, failing = self._without_failing(lambda own: many(trained, self._frozen, tensors(own)), rows)
                values = np.asarray(found)
                if failing.any():
                    values = np.where(failing.reshape(-1, *(1,) * (values.ndim - 1)), np.float32(np.nan), values)
                parts.append(values)
        return np.concatenate(parts)

    def _without_failing(self, compute: Callable[[Arrays], Any], rows: Arrays) -> tuple[Any, npt.NDArray[np.bool_]]:
        """(what `compute` gives, which rows it raises for): those are replaced by made-up rows, which are not usable.

        All others stay where they are, among as many rows as ever: no bit of theirs tells that one of them raised.
        """
        failing = np.zeros(len(rows[KEY]), bool)
        if (found := _attempt(compute, rows)) is not None:
            return found, failing
        made_up = self._made_up(failing.size)
        harmless = {name: made_up.get(name, failing.copy()) for name in rows}
        compute(harmless)  # an error of the model, whatever the content: it is reported

        def with_own(own: npt.NDArray[Any]) -> Arrays:
            chosen = {name: array.copy() for name, array in harmless.items()}
            for name, array in rows.items():
                chosen[name][own] = np.asarray(array)[own]
            return chosen

        def look_in(own: npt.NDArray[np.int64]) -> None:
            if _attempt(compute, with_own(own)) is None:
                if own.size == 1:
                    failing[own] = True
                else:
                    look_in(own[: own.size // 2])
                    look_in(own[own.size // 2 :])

        look_in(np.arange(failing.size))
        return compute(with_own(~failing)), failing

    # ---- the program of a microbatch

    def _program(self, rows: int) -> Any:
        """The gradients of so many rows: recorded once where that can be done, which saves calls."""
        if rows not in self._programs:
            from torch.fx.experimental.proxy_tensor import make_fx

            arguments = self._all_parameters(), tensors(self._made_up(rows))
            with self._readable_errors():
                self._gradients(*arguments)
            try:
                self._programs[rows] = make_fx(lambda parameters, rows: self._gradients(parameters, rows))(*arguments)
            except RuntimeError:  # it decides by values that are the same for all examples: parameters or positions
                self._programs[rows] = self._gradients
        recorded = self._programs[rows]
        program = getattr(
            recorded, "forward", recorded
        )  # to call it itself prints the line where a row's content fails

        def gradients(parameters: Mapping[str, Any], rows: Arrays) -> dict[str, npt.NDArray[np.float32]]:
            return {name: gradient.numpy() for name, gradient in program(parameters, tensors(rows)).items()}

        return gradients

    def _program_for_data(self) -> Any:
        program = super()._program_for_data()

        def gradients(parameters: Mapping[str, Any], rows: Arrays) -> dict[str, npt.NDArray[np.float32]]:
            found, failing = self._without_failing(functools.partial(program, parameters), rows)
            for gradient in found.values() if failing.any() else ():
                gradient[failing] = 0
            return found

        return gradients

    def _unless_it_raises(self, gradients: Any, parameters: Any, rows: Arrays) -> Arrays | None:
        return _attempt(functools.partial(gradients, parameters), rows)

    def _gradients(self, parameters: Mapping[str, Any], rows: Arrays) -> Any:  # pyright: ignore
        import torch

        slopes = torch.func.vmap(torch.func.grad(self._loss), in_dims=(None, None, 0))
        return slopes(parameters["trained"], parameters["frozen"], rows)

    @functools.cached_property
    def program_digest(self) -> str:
        """Names what is differentiated: the recorded program, or else the layers and gradients of made-up examples."""
        self._check_loss()
        size = self.rows_at_once
        gradients = self._program(size)
        recorded = self._programs[size]
        hashed = hashlib.sha256(self._frozen_digest.encode())
        if hasattr(recorded, "graph"):
            hashed.update(recorded.code.encode())
            for node in recorded.graph.nodes:
                if node.op == "get_attr":  # a constant
                    hashed.update(_bytes(getattr(recorded, node.target)))
        else:
            hashed.update(str(self.module).encode())
            for name, gradient in gradients(self._all_parameters(), self._made_up(size)).items():
                hashed.update(name.encode() + gradient.tobytes())
        return hashed.hexdigest()

    @functools.cached_property
    def _frozen_digest(self) -> str:
        hashed = hashlib.sha256()
        for name, tensor in sorted(self._frozen.items()):
            hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + _bytes(tensor))
        return hashed.hexdigest()

    def _check_loss(self) -> None:
        import torch

        rows = {name: array[0] for name, array in tensors(self._made_up(1)).items()}
        with torch.no_grad():
            result = self._loss(tensors(self.tree.trained), self._frozen, rows)
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or result.shape != () or result.dtype != torch.float32:
            shown = f"{result.dtype} of {tuple(result.shape)}" if is_tensor else type(result).__name__
            raise InputError(f"loss must return one float32 number for one example, not {shown}")

    @functools.cached_property
    def _is_independent(self) -> bool:
        before = self._frozen_digest
        independent = super()._is_independent
        del self.__dict__["_frozen_digest"]
        if self._frozen_digest != before:
            raise InputError(
                "the module writes to its buffers while it computes, so one example would change the gradients of "
                "others; use layers without running statistics, or module.eval()"
            )
        return independent

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "random" in str(error):
                raise InputError(
                    "the module draws random numbers (dropout), which would depend on the rest of the batch; turn it "
                    "off: module.eval(), or a dropout of 0"
                ) from error
            raise InputError(
                f"torch.func cannot differentiate this loss for many examples at once: {error}; a loss may not look at "
                "values (if, .item()) or write to tensors in place"
            ) from error

    # ---- memory

    def _most_rows(self) -> int:
        """Also no more than fit the memory limit as far as two rows tell: to measure many takes their memory."""
        one, two = self.memory_of(1), self.memory_of(2)
        fitting = 1 + (self.memory_limit - one) / max(1, two - one)
        return power_of_two(min(MOST_ROWS, _GRADIENTS / (4 * num_parameters(self)), fitting))

    def memory_of(self, rows: int) -> int:
        """Bytes that a microbatch takes at its peak: trained parameters, examples, and all that is computed."""
        arguments = self._all_parameters(), self._made_up(rows)
        counted = live_bytes()
        with self._readable_errors(), counted:
            self._gradients(arguments[0], tensors(arguments[1]))
        size = num_parameters(self)
        return counted.peak + 4 * size + 16 * size  # parameters; sums on the host: float64, then int64


def linear_stand_in(shapes: Mapping[str, Sequence[int]], microbatch: int) -> ModuleModel:
    """A model of these parameters whose loss is linear in them, so that an example says what its gradient is.

    As `coowned.models.example_model.linear_stand_in`, in PyTorch.
    """
    import torch

    names = {name: name.replace(".", "/") for name in shapes}  # a parameter's name has no dot
    module = torch.nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(names[name], torch.nn.Parameter(torch.zeros(shape)))
    largest = names[largest_tensor(shapes)]

    def loss(module: Any, example: Arrays) -> Any:
        parameters = {name: getattr(module, name).reshape(-1) for name in names.values()}
        spread = sum((torch.cos(torch.arange(flat.numel())) * flat).sum() for flat in parameters.values())
        along = parameters[largest].gather(0, example["coordinate"].reshape(1))[0]
        return example["length"] * along + example["everywhere"] * spread

    tree = ParameterTree.of({names[name]: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return ModuleModel(loss=loss, tree=tree, entries=STAND_IN_ENTRIES, microbatch=microbatch, module=module)


def tensors(arrays: Arrays) -> dict[str, Any]:
    """Copies as tensors; integers as int64, which PyTorch looks up and counts with."""
    import torch

    found = {}
    for name, values in arrays.items():
        array = np.asarray(values)
        found[name] = torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    return found


def refuse_unchecked_indices() -> Any:
    """A context that refuses, with BatchCoupledLossError, the functions that content takes out of its own example.

    `vmap` puts the tables of all examples one below the other, so that an index out of range reads another example's,
    and adds to its gradient. Most functions check each index against its own table; these do not.
    """
    from torch.overrides import TorchFunctionMode

    class RefuseUncheckedIndices(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "").split(".")[0].strip("_")
            if name in _UNCHECKED and _UNCHECKED[name].is_used(args, kwargs):
                raise BatchCoupledLossError(
                    f"the loss calls {name} with indices that differ between examples: PyTorch does not check such "
                    f"indices, and one out of range reaches into other examples; {_UNCHECKED[name].instead}"
                )
            return func(*args, **kwargs)

    return RefuseUncheckedIndices()


class _Unchecked(NamedTuple):
    """Which calls of a function are refused: those with enough arguments that differ between examples."""

    instead: str
    names: tuple[str, ...] = ()  # of the arguments that count; none: all of them do
    first: int | None = 0  # position of the first of them; None: they have names only
    least: int = 1
    only_with: tuple[str, ...] = ()  # of words among the arguments, without which PyTorch checks

    def is_used(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        from torch.utils._pytree import tree_leaves

        if self.only_with and not any(
            value in self.only_with for value in (*args, *kwargs.values()) if isinstance(value, str)
        ):
            return False
        named = [value for name, value in kwargs.items() if not self.names or name in self.names]
        placed = () if self.first is None else args[self.first : self.first + (len(self.names) or len(args))]
        alone = args if self.first == len(args) == 1 else ()  # repeat_interleave(repeats)
        return sum(map(_is_batched, tree_leaves((*placed, *named) or alone))) >= self.least


_UNCHECKED = {
    "embedding": _Unchecked("use torch.index_select(table, 0, indices)", least=2),
    "embedding_bag": _Unchecked("use bags of one length, without offsets", ("offsets",), first=2),
    "index_fill": _Unchecked("use scatter, or torch.where", least=2),
    "bincount": _Unchecked("use torch.nn.functional.one_hot(indices, count).sum(0)"),
    "ctc_loss": _Unchecked("it cannot be trained with a guarantee", least=2),
    "repeat_interleave": _Unchecked("use torch.index_select(table, 0, indices)", ("repeats",), first=1),
    "segment_reduce": _Unchecked("use scatter_add", ("lengths", "indices", "offsets"), first=None),
    "grid_sample": _Unchecked("use padding_mode='zeros'", ("grid",), first=1, only_with=("border", "reflection")),
}
"""By name, without underscores at its ends, in functions and methods alike."""


def _is_batched(value: Any) -> bool:
    """Whether it is a tensor that `vmap` has a value of for each example."""
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(value) if hasattr(value, "untyped_storage") else False:
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False


def _attempt(compute: Callable[[Arrays], Any], rows: Arrays) -> Any:
    """What `compute` gives, or None if it raises; an interrupt and missing memory do not count, and are raised on."""
    try:
        return compute(rows)
    except MemoryError:
        raise
    except Exception:
        interrupts.check()
        return None


def _in_parts(batch: Arrays, size: int) -> Iterator[Arrays]:
    arrays, count = {name: np.asarray(array) for name, array in batch.items()}, len(next(iter(batch.values())))
    for begin in range(0, max(1, count), size):
        yield {name: array[begin : begin + size] for name, array in arrays.items()}


def live_bytes() -> Any:
    """A context that counts the bytes of tensors made inside it; `peak` is the most that were alive at once."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now, self.peak, self._known = 0, 0, weakref.WeakSet()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if hasattr(tensor, "untyped_storage"):
                    self._count(tensor.untyped_storage())
            return result

        def _count(self, storage: Any) -> None:
            if storage in self._known:
                return
            self._known.add(storage)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, size)

        def _freed(self, size: int) -> None:
            self.now -= size

    return LiveBytes()


def _bytes(tensor: Any) -> bytes:
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
