"""One training step: an exact sum, a row of noise, and a program that reads only their sum.

The three are apart: what comes after the noise is post-processing, and is compiled once, whatever the batch was.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from coowned.exact.grid import Grid
from coowned.exact.noise import release
from coowned.models.model import Model, compiled_for
from coowned.training.optimizers import Arrays, Rates, Rule, State, compiled_scales, compiled_update
from coowned.training.workers import ALONE, Workers, summed


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
