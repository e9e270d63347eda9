"""One training step: a batch and noise, prepared in time; an exact sum; and a program that reads only their sum.

What a step gets is a pure function of the step, so timing changes no bit. Arrays are reused: a slot comes back only
when the step that read it has ended, since a device may read the host's memory in place.

Sum, noise and program are apart: what comes after the noise is post-processing, and is compiled once, whatever the
batch was.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads
from coowned.content.data import Draw, TrainingData, rows_in_place
from coowned.exact.grid import Grid
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream, release
from coowned.mechanism.batching import Batches
from coowned.models.model import Model, compiled_for
from coowned.training.optimizers import Arrays, Rates, Rule, State, compiled_scales, compiled_update
from coowned.training.workers import ALONE, Share, Workers, summed

_ALIGNMENT = 64  # bytes: what a device needs to read the host's memory without a copy


class StepInput(NamedTuple):
    """The input of one step."""

    step: int
    batch: dict[str, Any]  # arrays (physical size, ...), their padding zero; features may be `InPlace`
    mask: npt.NDArray[np.bool_]  # (physical size,)
    copies: int  # how many were drawn for all workers, empty ones included; secret
    noise: dict[str, npt.NDArray[np.int64]] | None  # (num_models, *shape)
    slot: Any  # give it back with `Feeder.release`


@dataclasses.dataclass(eq=False, repr=False)
class Feeder:
    """An iterator over the inputs of the steps from `start` to `stop`, in order.

    An input is made when it is asked for, on the caller's thread. The caller asks for the next right after dispatching
    a step, so that it is made while the device computes. With `in_place` the host computes: features that lie in memory
    are not copied, and the next input is made by one of the threads that compute, before it joins the others.

    Guarantees:
      - The same inputs whatever the timing and the number of arrays.   (test_timing_changes_nothing)
      - Arrays that a step still reads are never written to.   (test_arrays_are_not_reused_early)
    Cost: four batches of memory at most.
    """

    data: TrainingData
    batches: Batches
    noise: NoiseStream | None
    _: dataclasses.KW_ONLY
    run_key: RunKey
    start: int
    stop: int
    in_place: bool = False
    share: Share | None = None  # of the batch that is this worker's; None: all
    _free: list[dict[int, dict[str, npt.NDArray[Any]]]] = dataclasses.field(default_factory=list, init=False)

    def __iter__(self) -> Iterator[StepInput]:
        steps = range(self.start, self.stop)
        if not self.in_place:
            yield from map(self._make, steps)
            return
        coming = None
        try:
            for step in steps:
                step_input = self._make(step) if coming is None else coming.result()
                coming = threads.step_workers().submit(self._make, step + 1) if step + 1 < self.stop else None
                yield step_input
        finally:
            if coming is not None:  # if it has begun, it ends by itself, and its arrays are dropped
                coming.cancel()

    def release(self, step_input: StepInput) -> None:
        """Frees the arrays of an input whose step has ended."""
        self._free.append(step_input.slot)

    def _make(self, step: int) -> StepInput:
        slot = self._free.pop() if self._free else {}
        drawn = self.batches.batch(step)
        copies = drawn.num_copies
        if self.share is not None:
            drawn = self.share.of(drawn, batch_size=self.batches.batch_size, multiple_of=self.batches.multiple_of)
        size, count = drawn.physical_size, drawn.num_copies
        in_place = rows_in_place(self.data, drawn.examples) if self.in_place else None
        if size not in slot:
            if len(slot) >= 4:  # rare sizes do not pile up
                slot.clear()
            kinds = self.data.dtypes()
            elsewhere = () if in_place is None else in_place.names
            shapes = {name: shape for name, shape in self.data.shapes().items() if name not in elsewhere}
            slot[size] = {name: _aligned((size, *shape), kinds[name]) for name, shape in shapes.items()}
        arrays = slot[size]
        draw = Draw(self.run_key, step, drawn.copy_numbers[:count])
        self.data.fill(drawn.examples[:count], {name: array[:count] for name, array in arrays.items()}, draw)
        batch: dict[str, Any] = arrays if in_place is None else {**arrays, "features": in_place}
        for array in arrays.values():
            array[count:] = 0
        noise = None if self.noise is None else self.noise.next()
        return StepInput(step, batch, drawn.mask, copies, noise, slot)


def _aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * kind.itemsize
    buffer = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % _ALIGNMENT
    return buffer[begin : begin + size].view(kind).reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step of all models of a run.

    Guarantees:
      - What moves the parameters is a function of the noisy sum and of public numbers alone, by one program for all
        batches.   (test_one_program_whatever_the_batch, test_the_padded_size_leaves_no_trace)

    Attributes:
      batch_size: the public one.
      grids: of each model; None: gradients are not clipped and have no noise.
      devices: that share the work on clipped gradients; none: the default one.
      workers: the processes that each have a part of the batch.
    """

    model: Model
    rule: Rule
    rates: Rates
    batch_size: int
    grids: tuple[Grid, ...] | None
    devices: tuple[Any, ...] = ()
    workers: Workers = ALONE

    def __call__(
        self, state: State, batch: Arrays, mask: Any, noise: Arrays | None, drawn: int | None = None
    ) -> tuple[State, Any]:
        """Returns (the state after one step, number of clipped copies).

        Args:
          state: before the step.
          batch, mask: of this worker's copies.
          noise: the row of the step; None: none.
          drawn: how many copies all workers have together; needed where there are several.
        """
        update = compiled_update(self.rule)
        if self.grids is None:
            gradients, clipped = compiled_mean(self.model)(state[0], batch, mask, np.float32(self.batch_size))
            return update(state, gradients, self.rates), clipped
        scales = compiled_scales(self.rule)(state)
        given = () if scales is None else (scales,)
        sums, clipped = self.model.clipped_sum(state[0], batch, mask, self.grids, self.devices, *given)
        if self.workers.count > 1:
            sums, clipped = summed(self.workers, sums, clipped, mask, drawn)
        units = np.array([grid.unit for grid in self.grids])
        return update(state, release(sums, noise, units, self.batch_size), self.rates, *given), clipped


@functools.lru_cache(maxsize=32)
def compiled_mean(model: Model) -> Callable[..., tuple[Arrays, Any]]:
    """Compiles: (parameters, batch, mask, batch size) -> (every model's sum of plain gradients over the batch size, 0).

    The 0 is the number of clipped copies. As a result of the same program it is ready only when the batch has been
    read: the loop waits for it before the batch's memory is used again.
    """
    import jax
    import jax.numpy as jnp

    def mean(parameters: Arrays, batch: Arrays, mask: Any, batch_size: Any) -> tuple[Arrays, Any]:
        def sums(own: Arrays) -> Arrays:
            return {name: total / batch_size for name, total in model.gradient_sum(own, batch, mask).items()}

        if len(next(iter(parameters.values()))) > 1:
            over_members = jax.vmap(sums) if model.many_models else functools.partial(jax.lax.map, sums)
            return over_members(parameters), jnp.int32(0)
        alone = sums({name: array[0] for name, array in parameters.items()})  # a branch under vmap computes both ways
        return {name: array[None] for name, array in alone.items()}, jnp.int32(0)

    return compiled_for(model, mean)


@functools.lru_cache(maxsize=32)
def compiled_loss(model: Model) -> Callable[..., Any]:
    """Compiles: (parameters of one model, batch, mask) -> mean loss of the real rows."""
    return compiled_for(model, functools.partial(_mean_loss, model))


@functools.lru_cache(maxsize=32)
def compiled_total_loss(model: Model) -> Callable[..., tuple[Any, Any]]:
    """Compiles: (parameters of one model, batch, mask) -> (total loss of the real rows, how many have one)."""
    return compiled_for(model, functools.partial(_total_loss, model))


def _mean_loss(model: Model, parameters: Arrays, batch: Arrays, mask: Any) -> Any:
    import jax.numpy as jnp

    total, count = _total_loss(model, parameters, batch, mask)
    return total / jnp.maximum(1, count)


def _total_loss(model: Model, parameters: Arrays, batch: Arrays, mask: Any) -> tuple[Any, Any]:
    import jax.numpy as jnp

    losses, _ = model.losses({name: array[0] for name, array in parameters.items()}, batch)
    counted = jnp.isfinite(losses) & mask
    return jnp.where(counted, losses, 0).sum(), counted.sum()


def gathered(batch: Arrays) -> Arrays:
    """Copies features stored elsewhere into the batch."""
    rows = batch.get("features")
    if rows is None or not hasattr(rows, "arrays"):
        return batch
    return {name: array for name, array in batch.items() if name != "features"} | rows.arrays()
