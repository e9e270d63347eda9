"""Training of PyTorch modules: per-example gradients by torch.func, then the sums that all models share."""

import contextlib
import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import interrupts
from coowned.content.example_table import KEY, USABLE
from coowned.errors import InputError
from coowned.models.example_model import (
    MOST_ROWS,
    STAND_IN_ENTRIES,
    ExampleModel,
    largest_tensor,
    power_of_two,
)
from coowned.models.model import num_parameters
from coowned.models.parameter_trees import ParameterTree
from coowned.torch.index_rule import refuse_unchecked_indices

_GRADIENTS = 2**25  # bytes of them in a microbatch: fewer rows cost more calls, more rows fall out of the caches
_FORWARD = 32  # rows worked on together where nothing is differentiated
Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModuleModel(ExampleModel):
    """The model of a `TorchModel` for data of a given schema.

    `torch.func` gives the gradient of every copy of a microbatch; what follows (clip, round to the grid, add as
    integers) is the same host code as for any other model.

    Guarantees:
      - The clipped sum is that of the examples' own gradients, as JAX and Opacus have them.
        (test_sums_are_those_of_jax, test_gradients_are_those_of_opacus)
      - A copy's gradient does not depend on others: found out on made-up data before training.
        (test_coupled_losses_are_refused_by_perturbation, test_a_copy_adds_the_same_in_any_company_in_torch,
        test_a_copy_adds_the_same_in_any_place_in_torch)
      - Nor does an index out of range read or write another copy: an operation that takes integers of an example and
        is not known to check them, such as `F.embedding` on a table that differs between examples, is refused by name;
        made-up indices out of range are tried besides. Operations of other libraries are refused.
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
        """Computes the plain sum of gradients in microbatches, for training without privacy."""
        import torch

        trained = {name: parameter.requires_grad_() for name, parameter in tensors(parameters).items()}
        losses = torch.func.vmap(self._loss, in_dims=(None, None, 0))

        def slopes(rows: Arrays) -> Any:
            given = tensors(rows)
            with refuse_unchecked_indices(given):
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
        """The parameters that are not trained, and buffers."""
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
        """Calls a function with the module, with these parameters, and the example."""
        import torch

        class Called(torch.nn.Module):
            def __init__(self, module: Any):
                super().__init__()
                self.module = module

            def forward(self, example: Arrays) -> Any:
                return function(self.module, example)

        tensors_by_name = {f"module.{name}": tensor for name, tensor in (*trained.items(), *frozen.items())}
        # vmap loops over the other kernels of attention.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(Called(self.module), tensors_by_name, (self._example(row),))

    @property
    def _numpy(self) -> Any:
        return np

    def _over_rows(self, function: Callable[..., Any], parameters: Arrays, batch: Arrays) -> npt.NDArray[Any]:
        import torch

        trained, many = tensors(parameters), torch.func.vmap(function, in_dims=(None, None, 0))

        def compute(own: Arrays) -> Any:
            given = tensors(own)
            with refuse_unchecked_indices(given):
                return many(trained, self._frozen, given)

        parts = []
        with torch.no_grad():
            for rows in _in_parts(self._rows(batch), _FORWARD):
                found, failing = self._without_failing(compute, rows)
                values = np.asarray(found)
                if failing.any():
                    values = np.where(failing.reshape(-1, *(1,) * (values.ndim - 1)), np.float32(np.nan), values)
                parts.append(values)
        return np.concatenate(parts)

    def _without_failing(self, compute: Callable[[Arrays], Any], rows: Arrays) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Returns (results of `compute`, rows for which it raises); made-up rows replace those.

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
        """Returns the gradient program for this many rows, recorded once if possible, which saves calls."""
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
        with refuse_unchecked_indices(rows):
            return slopes(parameters["trained"], parameters["frozen"], rows)

    @functools.cached_property
    def program_digest(self) -> str:
        """A digest of what is differentiated: the recorded program, or else layers and example gradients."""
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
        """Returns a size within the memory limit, estimated from two rows since measuring many uses their memory."""
        one, two = self.memory_of(1), self.memory_of(2)
        fitting = 1 + (self.memory_limit - one) / max(1, two - one)
        return power_of_two(min(MOST_ROWS, _GRADIENTS / (4 * num_parameters(self)), fitting))

    def memory_of(self, rows: int) -> int:
        """Measures the peak bytes of a microbatch: trained parameters, examples, and all that is computed."""
        arguments = self._all_parameters(), self._made_up(rows)
        counted = live_bytes()
        with self._readable_errors(), counted:
            self._gradients(arguments[0], tensors(arguments[1]))
        size = num_parameters(self)
        return counted.peak + 4 * size + 16 * size  # parameters; sums on the host: float64, then int64


def linear_stand_in(shapes: Mapping[str, Sequence[int]], microbatch: int) -> ModuleModel:
    """Returns a model with these parameters and a linear loss, so that an example determines its gradient.

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
    """Converts arrays to tensors; integers to int64, which PyTorch's lookups and counts need."""
    import torch

    found = {}
    for name, values in arrays.items():
        array = np.asarray(values)
        found[name] = torch.tensor(array.astype(np.int64) if array.dtype.kind in "iu" else array)
    return found


def _attempt(compute: Callable[[Arrays], Any], rows: Arrays) -> Any:
    """Computes, or returns None on an exception; interrupts and missing memory are raised."""
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
    """Returns a context that counts the bytes of tensors created inside; `peak` is the most alive at once."""
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
