"""What one step computes: gradients summed, noise added, the optimizer moved; compiled once for all runs alike."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from coowned.mechanism.fused_clipping import RowsInPlace
from coowned.training.model import Model
from coowned.training.optimizers import make_optimizer


@functools.lru_cache(maxsize=32)
def compiled_step(
    model: Model, optimizer: str, clips: bool, noisy: bool, many: bool, *, on_host: bool = False
) -> Callable[..., Any]:
    """((parameters, optimizer state), batch, mask, noise, settings) -> (the same after one step, copies clipped).

    For many plans the second is any number that is there when the step has ended. With `on_host` the model sums its
    clipped gradients outside of what XLA compiles, from a batch of the host's arrays.

    Numbers are arguments, not constants, so that runs that differ in them alone share what was compiled.
    """
    import jax
    import optax

    from coowned.mechanism.compensated import CompensatedSum, with_noise

    def update(learning_rate, gradients, optimizer_state, parameters):
        return make_optimizer(optimizer, learning_rate).update(gradients, optimizer_state, parameters)

    def add(summed, noise, settings):
        """The sum plus noise, over the batch size: rounded once, when the noise is in."""
        if not isinstance(summed, CompensatedSum):
            summed = CompensatedSum(summed, jax.numpy.zeros_like(summed))
        if not noisy:
            return summed.rounded / settings["batch_size"]
        scale = settings["noise_scale"] * settings["batch_size"]
        noise = scale.reshape(scale.shape + (1,) * (noise.ndim - scale.ndim)) * noise
        return with_noise(summed, noise) / settings["batch_size"]

    def finish(state, summed, noise, settings):
        parameters, optimizer_state = state
        gradients = {name: add(total, noise.get(name), settings) for name, total in summed.items()}
        updates, optimizer_state = (jax.vmap(update) if many else update)(
            settings["learning_rate"], gradients, optimizer_state, parameters
        )
        return optax.apply_updates(parameters, updates), optimizer_state

    def step(state, batch, mask, noise, settings):
        clip_norm = settings["clip_norm"] if clips else None
        summed, clipped = model.gradient_sum(state[0], batch, mask, clip_norm, compensated=clips)
        if many:  # nobody looks at the counts of a sweep: they are a pass over all factors
            clipped = jax.tree.leaves(summed)[0].ravel()[0]
        return finish(state, summed, noise, settings), clipped

    if not on_host:
        return jax.jit(step, donate_argnums=0)
    compiled = jax.jit(finish)

    def step_on_host(state, batch, mask, noise, settings):
        parameters = {name: np.asarray(array) for name, array in state[0].items()}
        clip_norm = np.asarray(settings["clip_norm"])
        summed, clipped = model.gradient_sum(parameters, batch, mask, clip_norm, compensated=True)
        return compiled(state, summed, noise, settings), clipped

    return step_on_host


@functools.lru_cache(maxsize=32)
def compiled_loss(model: Model) -> Callable[..., Any]:
    """(parameters, batch, mask) -> mean loss of the real rows."""
    import jax

    return jax.jit(functools.partial(_mean_loss, model))


def _mean_loss(model: Model, parameters: Any, batch: Any, mask: Any) -> Any:
    import jax.numpy as jnp

    losses, _ = model.losses(parameters, batch)
    counted = jnp.isfinite(losses) & (mask if losses.ndim == 1 else mask[:, None])
    return jnp.where(counted, losses, 0).sum(axis=0) / jnp.maximum(1, counted.sum(axis=0))


def gathered(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with rows that lie elsewhere copied into it."""
    return {name: array.gathered() if isinstance(array, RowsInPlace) else array for name, array in batch.items()}
