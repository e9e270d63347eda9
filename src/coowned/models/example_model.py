"""A loss of one example on the columns it reads, trained with exact clipped sums in microbatches."""

import contextlib
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned.content.example_table import KEY, LARGEST, USABLE, ExampleColumn
from coowned.errors import BatchCoupledLossError, InputError, MemoryLimitError
from coowned.exact.grid import Grid
from coowned.files import keep_compiled_programs
from coowned.models.model import digest_arrays, num_parameters, sums_of_members
from coowned.models.parameter_trees import ParameterTree

if TYPE_CHECKING:
    from coowned.models.probes import CanaryContent, StandInContent

_NEAR = 2**22  # bytes of gradients that a near cache holds: the host reads each of them twice
MOST_ROWS = 128  # of a microbatch: a batch is padded to a multiple of it
_KEPT = 4  # times the memory of a microbatch: what threads have freed may stay with the allocator
_AT_ONCE = 256  # examples of an evaluation that are worked on together
_CALLBACK = re.compile(r"custom_call @\w*callback")
_ADDRESS = re.compile(r"""(?<!["<])0x[0-9a-f]{6,}\b""")  # of an object in memory; "0x...": the bytes of a constant
Arrays = Mapping[str, Any]
STAND_IN_ENTRIES = (
    ExampleColumn(name="coordinate", column="coordinate", whole=True),
    ExampleColumn(name="length", column="length"),
    ExampleColumn(name="everywhere", column="everywhere"),
)
"""What an example of `linear_stand_in` holds."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExampleModel:
    """The model of a `JaxModel` for data of a given schema.

    Guarantees:
      - What a copy adds is an integer vector no longer than the clip norm.   (test_no_example_adds_more)
      - It does not depend on other copies: a loss that mixes examples is refused before training, on made-up data.
        (test_coupled_losses_are_refused, test_an_example_counts_the_same_in_any_company)
      - Nor does an index out of range take one copy into another: such indices are among the made-up data.
        (test_coupling_by_an_index_out_of_range_is_refused, test_indices_out_of_range_stay_in_their_example)
      - Nor on its place in a microbatch: where that changes the gradient of a made-up row, each copy has a place of
        its own, whoever else was drawn.   (test_an_example_counts_the_same_in_any_place)
      - The clipped sum is that of the examples' own gradients.   (test_equals_jax_privacy)
      - Microbatches of every size give the same integers, as far as XLA gives the same gradients.
        (test_microbatches_give_the_same_integers)
      - A microbatch needs no more memory than the limit, as XLA counts it, sums on the host included; a process that
        has its programs grows by no more.   (test_memory_limit_is_kept, test_memory_that_is_measured)
      - Another loss, frozen parameter or microbatch has another description: a run is not resumed with it.
        (test_description_follows_the_model)
      - A row that cannot be used, and a gradient that is not finite, add exactly zero.   (test_unusable_adds_zero)
      - `from_arrays(to_arrays(p))` is p.   (test_arrays_round_trip)
    Cost: one gradient of every copy, and two passes over it on the host.

    Attributes:
      tree: the parameters, taken apart.
      entries: what an example holds.
      predictor: `predict` of a `JaxModel`; None: it predicts nothing.
      classes: what the label and the probabilities stand for; None for a number.
      label: the entry that holds the class; None: accuracy is not known.
      loss, memory_limit, microbatch, origin: as `JaxModel` says.
    """

    kind: ClassVar[str] = "python"
    many_models: ClassVar[bool] = False
    runs_in_jax: ClassVar[bool] = True
    loss: Callable[..., Any]
    tree: ParameterTree = dataclasses.field(repr=False)
    entries: tuple[ExampleColumn, ...]
    predictor: Callable[[Any, Any], Any] | None = None
    classes: tuple[Any, ...] | None = None
    label: str | None = None
    memory_limit: int = 10**9
    microbatch: int | None = None
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _programs: dict[int, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)  # by rows

    # ---- what the loop asks

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "program": self.program_digest,
            "frozen": digest_arrays(self.tree.frozen),
            "parameters": {name: list(shape) for name, shape in self.shapes().items()},
            "entries": {entry.name: [entry.column, list(entry.shape), entry.dtype.name] for entry in self.entries},
            "classes": None if self.classes is None else list(self.classes),
            "microbatch": self.rows_at_once,
            **self.origin,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.tree.trained.items()}

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: array.copy() for name, array in self.tree.trained.items()}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for entry in self.entries:
            if shapes.get(entry.name) != entry.shape:
                raise InputError(
                    f"the model takes {entry.name!r} of shape {entry.shape}, the data have "
                    f"{shapes.get(entry.name, 'none')}; make both from the same columns"
                )
        if KEY not in shapes or USABLE not in shapes:
            raise InputError("a custom model is trained on an ExampleTable; create one from the arrays")

    def grid(self, clip_norm: float) -> Grid:
        return Grid.for_gradients(clip_norm)

    def clipped_sum(
        self,
        parameters: dict[str, Any],
        batch: dict[str, Any],
        mask: Any,
        grids: Sequence[Grid],
        devices: Sequence[Any] = (),
        scales: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        self.check_independence()
        rows, kept = self._rows(batch), np.asarray(mask) & np.asarray(batch[USABLE])
        if not self._is_same_everywhere:
            rows, kept = at_own_places(rows, kept, self.rows_at_once)
        return sums_of_members(
            self._gradients if devices else self._program_for_data(),
            self._placed,
            parameters,
            rows,
            kept,
            grids,
            scales=scales,
            shapes=self.shapes(),
            microbatch=self.rows_at_once,
            devices=devices,
        )

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        """Computes the plain sum of gradients in microbatches, for training without privacy."""
        import jax
        import jax.numpy as jnp

        from coowned.models import microbatches

        def loss(own: Arrays, rows: Arrays) -> Any:
            losses = jax.vmap(functools.partial(self._loss, own, self.tree.frozen))(rows)
            return jnp.where(rows[USABLE], losses, 0).sum()

        rows = {**self._rows(batch), USABLE: mask & batch[USABLE]}
        return microbatches.gradient_sum(loss, parameters, rows, _AT_ONCE)

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        numpy = self._numpy
        losses = numpy.where(batch[USABLE], self._over_rows(self._loss, parameters, batch), numpy.nan)
        if self._class_label is None:
            return losses, numpy.zeros(len(losses), bool)
        return losses, self.predict(parameters, batch)[0] == batch[self._class_label]

    def labels_of(self, batch: dict[str, Any]) -> npt.NDArray[Any] | None:
        """Returns the classes of a batch; None for a regression, whose loss is arbitrary."""
        return None if self._class_label is None else np.where(batch[USABLE], batch[self._class_label], np.nan)

    @property
    def _class_label(self) -> str | None:
        """The entry that predictions are compared with."""
        return None if self.classes is None or self.predictor is None else self.label

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        numpy, usable = self._numpy, batch[USABLE]
        found = self._predicted(parameters, batch)
        if self.classes is None:
            return numpy.where(usable, found, numpy.nan), numpy.full(len(found), numpy.nan, numpy.float32)
        return found.argmax(axis=1).astype(numpy.int32), numpy.where(usable, found.max(axis=1), numpy.nan)

    def probabilities(self, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        return self._numpy.where(batch[USABLE][:, None], self._predicted(parameters, batch), self._numpy.nan)

    def _predicted(self, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        """Computes (batch,) numbers, or (batch, classes) probabilities."""
        if self.predictor is None:
            raise InputError("the model has no predict function; pass predict=...")
        found = self._over_rows(self._predict, parameters, batch).astype(self._numpy.float32)
        if self.classes is not None and found.ndim == 1:
            return self._numpy.stack([1 - found, found], axis=1)
        return found

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the trained parameters by their paths in the tree; frozen ones are not included."""
        return {name: np.asarray(array, np.float32) for name, array in parameters.items()}

    def from_arrays(self, arrays: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back."""
        return self.tree.read(arrays)

    def stand_in(self) -> "ExampleModel":
        """Returns a model for audits: the same parameters, microbatch and clipper, and a loss with known gradients."""
        return linear_stand_in(self.shapes(), self.rows_at_once)

    def worst_case(self) -> "StandInContent":
        """Returns the worst-case content of a stand-in."""
        from coowned.models.probes import StandInContent

        tensor = largest_tensor(self.shapes())
        return StandInContent(tensor, math.prod(self.shapes()[tensor]))

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[ExampleModel, CanaryContent]":
        """Returns canaries of random numbers, since nothing more specific is known about the model."""
        from coowned.models.probes import random_canaries

        del clip_norm
        return self, random_canaries(self.entries, users, per_user, classes=len(self.classes or ()), seed=0)

    # ---- one example, and many

    def _example(self, row: Arrays) -> dict[str, Any]:
        return {entry.name: row[entry.name] for entry in self.entries}

    def _rows(self, batch: Arrays) -> dict[str, Any]:
        return {**self._example(batch), KEY: batch[KEY]}

    def _loss(self, trained: Arrays, frozen: Arrays, row: Arrays) -> Any:
        import jax

        key = jax.random.wrap_key_data(row[KEY], impl="threefry2x32")
        return self.loss(self.tree.whole(trained, frozen), self._example(row), key)

    def _predict(self, trained: Arrays, frozen: Arrays, row: Arrays) -> Any:
        assert self.predictor is not None
        return self.predictor(self.tree.whole(trained, frozen), self._example(row))

    @property
    def _numpy(self) -> Any:
        """The numpy-like module that `losses` and `predict` compute with."""
        import jax.numpy as jnp

        return jnp

    def _over_rows(self, function: Callable[..., Any], parameters: Arrays, batch: Arrays) -> Any:
        """Applies a function of trained parameters, frozen ones and one row to each row."""
        import jax

        from coowned.models import microbatches

        many = jax.vmap(functools.partial(function, parameters, self.tree.frozen))
        return microbatches.over_parts(many, self._rows(batch), _AT_ONCE)

    def _placed(self, parameters: Arrays) -> Mapping[str, Any]:
        """Returns all parameters as the programs take them."""
        return {"trained": parameters, "frozen": self._frozen}

    @functools.cached_property
    def _frozen(self) -> dict[str, Any]:
        """The frozen parameters, placed on the device once and not with every microbatch."""
        import jax

        return jax.device_put(self.tree.frozen)

    @functools.cached_property
    def _gradients(self) -> Any:
        """A compiled function: (parameters with a leading axis of one model, rows) -> every row's gradients."""
        import jax

        def gradients(parameters: Arrays, rows: Arrays) -> Any:
            trained = {name: array[0] for name, array in parameters["trained"].items()}
            return jax.vmap(jax.grad(self._loss), in_axes=(None, None, 0))(trained, parameters["frozen"], rows)

        return jax.jit(gradients)

    def _program(self, rows: int) -> Any:
        """Returns the gradient program for this many rows, compiled for the default device."""
        if rows not in self._programs:
            keep_compiled_programs()
            self._programs[rows] = self._gradients.lower(self._all_parameters(), self._made_up(rows)).compile()
        return self._programs[rows]

    def _program_for_data(self) -> Any:
        """Returns the program of a microbatch for real rows, which may be less well-behaved than made-up ones."""
        return self._program(self.rows_at_once)

    # ---- checks before training, on made-up data of the data's shapes

    @functools.cached_property
    def program_digest(self) -> str:
        """A digest of what is differentiated: the program for one example, with every constant in it.

        Refuses, with InputError, a loss that is not one float32 number or that calls back into Python.
        """
        import jax

        row = {name: array[0] for name, array in self._made_up(1).items()}
        with refuse_collectives():
            result = jax.eval_shape(self._loss, self.tree.trained, self.tree.frozen, row)
        if jax.tree.structure(result) != jax.tree.structure(0) or result.shape != () or result.dtype != np.float32:
            raise InputError(f"loss must return one float32 number for one example, not {result}")
        lowered = jax.jit(jax.grad(self._loss)).lower(self.tree.trained, self.tree.frozen, row).as_text()
        if _CALLBACK.search(lowered):
            raise InputError(
                "the loss calls back into Python (a callback, or jax.debug.print), which could keep data of an "
                "example; remove that"
            )
        return hashlib.sha256(_ADDRESS.sub("", lowered).encode()).hexdigest()

    @functools.cached_property
    def rows_at_once(self) -> int:
        """The size of a microbatch: no more examples than fit the memory limit or a cache."""
        if self.microbatch is not None:
            return self.microbatch
        size = self._most_rows()
        while (needed := self.memory_of(size)) > self.memory_limit:
            if size == 1:
                raise MemoryLimitError(
                    f"the gradient of one example needs {needed / 1e6:,.0f} MB, and memory_limit is "
                    f"{self.memory_limit / 1e6:,.0f} MB; raise it, or make the model smaller"
                )
            size = min(size // 2, power_of_two(size * self.memory_limit / needed))
        return size

    def _most_rows(self) -> int:
        return power_of_two(min(MOST_ROWS, _NEAR / (4 * num_parameters(self))))

    def memory_of(self, rows: int) -> int:
        """Estimates the bytes of a microbatch of this many rows: parameters, examples, gradients and temporaries."""
        size = num_parameters(self)
        try:
            used = self._program(rows).memory_analysis()
            device = used.argument_size_in_bytes + _KEPT * (used.output_size_in_bytes + used.temp_size_in_bytes)
        except (AttributeError, NotImplementedError, RuntimeError):  # not every backend tells
            inputs = sum(array.nbytes for array in self._made_up(rows).values())
            device = 4 * size * (_KEPT * 2 * rows + 1) + 16 * _KEPT * inputs
        return device + 16 * size  # sums on the host: float64, then int64

    def check_independence(self) -> None:
        """Raises BatchCoupledLossError if the gradient of one row changes when others do."""
        _ = self._is_independent

    @functools.cached_property
    def _is_independent(self) -> bool:
        _ = self.program_digest
        size = self.rows_at_once
        if size == 1:
            return True
        batch, gradients = self._made_up(size), self._program(size)
        for parameters in self._probed_parameters():
            usual = _on_host(gradients(parameters, batch))
            for row in (0, size - 1):
                for scale in (0.0, 1.0, 1e3):
                    others = _with_row(self._made_up(size, seed=1, scale=scale), row, batch)
                    _refuse_changes(usual, _on_host(gradients(parameters, others)), np.arange(size) == row)
        self._check_out_of_range(size)
        return True

    def _check_out_of_range(self, size: int) -> None:
        """Repeats the check with rows that hold invalid indices; such a row may also raise.

        Where examples lie one after another in memory, the first may reach into any other, and the last by -1. Of the
        powers of the number of rows one lies in the others' part, whatever the length of each.
        """
        batch, gradients = self._made_up(size), self._program(size)
        *_, parameters = self._probed_parameters()
        usual = _on_host(gradients(parameters, batch))
        beyond = [size**power for power in range(32) if size**power < LARGEST]
        for entry in self.entries:
            for row, value in (*((0, value) for value in (*beyond, LARGEST)), (size - 1, -1), (size - 1, -LARGEST)):
                others = self._made_up(size, seed=1)
                others[entry.name][row] = value
                odd = self._unless_it_raises(gradients, parameters, _with_row(batch, row, others))
                if odd is not None:
                    _refuse_changes(usual, _on_host(odd), np.arange(size) != row)
                    again = self._unless_it_raises(gradients, parameters, others)
                    _refuse_changes(_on_host(odd), _on_host(again or {}), np.arange(size) == row)

    def _unless_it_raises(self, gradients: Any, parameters: Any, rows: Arrays) -> Arrays | None:
        """Computes gradients, or returns None where a row's content raises; XLA has no such errors."""
        return gradients(parameters, rows)

    @functools.cached_property
    def _is_same_everywhere(self) -> bool:
        """Whether made-up rows have bitwise the same gradients in every position of a microbatch.

        Libraries multiply matrices by kernels for some rows at a time, and add in another order in the last ones.
        """
        size = self.rows_at_once
        batch, gradients = self._made_up(size), self._program(size)
        for parameters in self._probed_parameters():
            usual = _on_host(gradients(parameters, batch))
            for shift in (2**exponent for exponent in range((size - 1).bit_length())):
                moved = _on_host(gradients(parameters, {name: np.roll(a, shift, axis=0) for name, a in batch.items()}))
                if any(np.roll(moved[name], -shift, axis=0).tobytes() != usual[name].tobytes() for name in usual):
                    return False
        return True

    def _probed_parameters(self) -> Iterator[Mapping[str, Any]]:
        """Yields the starting parameters, whose zeros may hide dependences of the gradients, and some near them."""
        generator = np.random.default_rng(0)
        for distance in (0.0, 0.1):
            near = {
                name: np.asarray(array + distance * generator.standard_normal(array.shape), np.float32)
                for name, array in self.tree.trained.items()
            }
            yield self._placed({name: array[None] for name, array in near.items()})

    def _all_parameters(self) -> Mapping[str, Any]:
        return self._placed({name: array[None] for name, array in self.tree.trained.items()})

    def _made_up(self, rows: int, *, seed: int = 0, scale: float = 1.0) -> dict[str, npt.NDArray[Any]]:
        """Makes a batch of random numbers: normal, or 0 and 1 (any class) for integers."""
        generator = np.random.default_rng(seed)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for entry in self.entries:
            if entry.whole:
                arrays[entry.name] = generator.integers(0, 2, (rows, *entry.shape), np.int32)
            else:
                values = scale * generator.standard_normal((rows, *entry.shape), np.float32)
                arrays[entry.name] = np.asarray(values, np.float32)
        return {**arrays, KEY: generator.integers(0, 2**32, (rows, 2), np.uint32)}


def at_own_places(
    rows: Arrays, mask: npt.NDArray[np.bool_], size: int
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_]]:
    """Reorders and pads a batch so that every copy has a fixed position in its microbatch of `size`.

    The position is derived from the copy's key, which does not depend on the other copies drawn. Copies with the same
    position go to different microbatches, so there are as many microbatches as copies share one position at most,
    about n / size for a batch of n much larger than size.
    """
    kept = np.flatnonzero(mask)
    places = np.asarray(rows[KEY])[kept, 0].astype(np.int64) % size
    order, shared = np.argsort(places, kind="stable"), np.bincount(places, minlength=size)
    turns = np.arange(kept.size) - np.repeat(np.cumsum(shared) - shared, shared)
    to, count = turns * size + places[order], int(shared.max()) * size
    moved = {name: np.zeros((count, *np.shape(array)[1:]), np.asarray(array).dtype) for name, array in rows.items()}
    for name, array in rows.items():
        moved[name][to] = np.asarray(array)[kept[order]]
    real = np.zeros(count, bool)
    real[to] = True
    return moved, real


def linear_stand_in(shapes: Mapping[str, Sequence[int]], microbatch: int) -> ExampleModel:
    """Returns a model with these parameters and a linear loss, so that an example determines its gradient.

    The gradient of {"coordinate": j, "length": a, "everywhere": b} is a at number j of the largest parameter, plus b
    times the cosine of its number at every number of every parameter.
    """
    import jax.numpy as jnp

    largest = largest_tensor(shapes)

    def loss(parameters: Arrays, example: Arrays, key: Any) -> Any:
        del key
        spread = sum(
            (jnp.cos(jnp.arange(math.prod(shapes[name]))) * array.ravel()).sum() for name, array in parameters.items()
        )
        along = parameters[largest].ravel()[example["coordinate"]]
        return example["length"] * along + example["everywhere"] * spread

    tree = ParameterTree.of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return ExampleModel(loss=loss, tree=tree, entries=STAND_IN_ENTRIES, microbatch=microbatch)


def largest_tensor(shapes: Mapping[str, Sequence[int]]) -> str:
    """Returns the name of the parameter with the most entries, the first if several have as many."""
    return max(sorted(shapes), key=lambda name: math.prod(shapes[name]))


@contextlib.contextmanager
def refuse_collectives() -> Iterator[None]:
    """Raises BatchCoupledLossError for a loss traced inside that uses a batch axis."""
    try:
        yield
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise BatchCoupledLossError(
            f"the loss uses other examples of the batch ({error}), but it sees only one; use layers without batch "
            "statistics, such as layer norm or group norm"
        ) from error


def _with_row(batch: Arrays, row: int, given: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Returns a copy of a batch in which one row is replaced by that of another batch."""
    changed = {name: array.copy() for name, array in batch.items()}
    for name, array in changed.items():
        array[row] = given[name][row]
    return changed


def _refuse_changes(usual: Arrays, changed: Arrays, rows: npt.NDArray[np.bool_]) -> None:
    """Raises BatchCoupledLossError if the gradient of one of these unchanged rows differs."""
    for name, gradient in usual.items():
        if name not in changed or gradient[rows].tobytes() != changed[name][rows].tobytes():
            raise BatchCoupledLossError(
                f"the gradient of one example at {name!r} changed when other examples of the batch did; clipping would "
                "not bound one example's contribution. Remove what mixes examples (batch statistics, custom batching "
                "rules, lookups that an index out of range takes into another example)"
            )


def _on_host(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    return {name: np.asarray(array) for name, array in arrays.items()}


def power_of_two(number: float) -> int:
    """Returns the largest power of two at or below the number, and at least 1."""
    return 2 ** max(0, math.floor(math.log2(max(1, number))))
