"""One step: a clipped sum, a row of noise, and a program that sees nothing but both together.

The three are apart: what comes after the noise is post-processing, and is compiled once for all runs alike.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from coowned.mechanism.fused_clipping import RowsInPlace
from coowned.training.model import Model
from coowned.training.optimizers import make_optimizer

Arrays = dict[str, Any]
State = tuple[Arrays, Any]
"""(parameters, optimizer state), every array with a leading axis for the models."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of all models of a run.

    Attributes:
      clipped_sum: (parameters, batch, mask, clip_norms) -> ({name: (num_models, *shape)}, number of clipped copies).
        For several models, whose counts nobody reads, any number that is there when the sum is.
      update: (state, sums, noise, settings) -> state: adds, divides by the public batch size and moves the parameters.
    """

    clipped_sum: Callable[[Arrays, Arrays, Any, Any], tuple[Arrays, Any]]
    update: Callable[[State, Arrays, Arrays, Arrays], State]

    def __call__(self, state: State, batch: Arrays, mask: Any, noise: Arrays, settings: Arrays) -> tuple[State, Any]:
        """(the state after one step, number of clipped copies)."""
        sums, clipped = self.clipped_sum(state[0], batch, mask, settings["clip_norm"])
        return self.update(state, sums, noise, settings), clipped


@functools.lru_cache(maxsize=32)
def compiled_step(
    model: Model, optimizer: str, clips: bool, noisy: bool, num_models: int, *, on_host: bool = False
) -> Step:
    """The step of `num_models` models; numbers are arguments, so that runs that differ in them alone share it.

    With `on_host` the model sums its clipped gradients outside of what XLA compiles, from a batch of the host's arrays.
    """
    import jax

    def clipped_sum(parameters: Arrays, batch: Arrays, mask: Any, clip_norms: Any) -> tuple[Arrays, Any]:
        if num_models > 1:
            sums, _ = model.gradient_sum(parameters, batch, mask, clip_norms if clips else None, compensated=clips)
            return sums, jax.tree.leaves(sums)[0].ravel()[0]
        alone = {name: array[0] for name, array in parameters.items()}
        sums, clipped = model.gradient_sum(alone, batch, mask, clip_norms[0] if clips else None, compensated=clips)
        return jax.tree.map(lambda leaf: leaf[None], sums), clipped

    def clipped_sum_on_host(parameters: Arrays, batch: Arrays, mask: Any, clip_norms: Any) -> tuple[Arrays, Any]:
        here = {name: np.asarray(array) for name, array in parameters.items()}
        return clipped_sum(here, batch, mask, np.asarray(clip_norms))

    return Step(clipped_sum_on_host if on_host else jax.jit(clipped_sum), _update(optimizer, noisy))


@functools.lru_cache(maxsize=32)
def _update(optimizer: str, noisy: bool) -> Callable[[State, Arrays, Arrays, Arrays], State]:
    import jax
    import optax

    from coowned.mechanism.compensated import CompensatedSum, with_noise

    def mean(total: Any, noise: Any, settings: Arrays) -> Any:
        """The sum plus noise, over the batch size: rounded once, when the noise is in."""
        if not isinstance(total, CompensatedSum):
            total = CompensatedSum(total, jax.numpy.zeros_like(total))
        if not noisy:
            return total.rounded / settings["batch_size"]
        scale = settings["noise_scale"] * settings["batch_size"]  # (num_models,)
        noise = scale.reshape(scale.shape + (1,) * (noise.ndim - 1)) * noise
        return with_noise(total, noise) / settings["batch_size"]

    def move(learning_rate: Any, gradients: Arrays, state: State) -> State:
        updates, optimizer_state = make_optimizer(optimizer, learning_rate).update(gradients, state[1], state[0])
        return optax.apply_updates(state[0], updates), optimizer_state  # pyright: ignore[reportReturnType]

    def update(state: State, sums: Arrays, noise: Arrays, settings: Arrays) -> State:
        gradients = {name: mean(total, noise.get(name), settings) for name, total in sums.items()}
        return jax.vmap(move)(settings["learning_rate"], gradients, state)

    return jax.jit(update, donate_argnums=0)


@functools.lru_cache(maxsize=32)
def compiled_loss(model: Model) -> Callable[..., Any]:
    """(parameters of one model, batch, mask) -> mean loss of the real rows."""
    import jax

    return jax.jit(functools.partial(_mean_loss, model))


def _mean_loss(model: Model, parameters: Arrays, batch: Arrays, mask: Any) -> Any:
    import jax.numpy as jnp

    losses, _ = model.losses({name: array[0] for name, array in parameters.items()}, batch)
    counted = jnp.isfinite(losses) & mask
    return jnp.where(counted, losses, 0).sum() / jnp.maximum(1, counted.sum())


def gathered(batch: Arrays) -> Arrays:
    """The batch with rows that lie elsewhere copied into it."""
    return {name: array.gathered() if isinstance(array, RowsInPlace) else array for name, array in batch.items()}
