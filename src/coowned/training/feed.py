"""Batches and noise, prepared while the device computes.

What a step gets is a pure function of the step, so timing changes no bit. Arrays are reused: a slot comes back only
when the step that read it has ended, since a device may read the host's memory in place.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import threads
from coowned.content.data import Draw, TrainingData, rows_in_place
from coowned.exact.keys import RunKey
from coowned.exact.noise import NoiseStream
from coowned.mechanism.batching import Batches
from coowned.training.workers import Share

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
