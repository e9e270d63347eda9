"""Computing on a batch in parts of equal shape, in JAX, so that one small program handles them all.

A part is rows that follow one another, which is fastest to read; or, where they are `spread`, rows from all over the
batch, so that a batch divided among devices is divided in every part.
"""

from collections.abc import Callable
from typing import Any

from coowned.errors import jax, jnp


def in_parts(batch: Any, most: int, *, spread: bool = False) -> tuple[Callable[[Any], Any], int]:
    """Returns (the rows of a part by its number, the number of parts): at most `most` rows each, padded with zeros."""
    count = len(jax.tree.leaves(batch)[0])
    parts = max(1, -(-count // most))
    size = max(1, -(-count // parts))
    shape, axis = ((size, parts), 1) if spread else ((parts, size), 0)

    def divide(array: Any) -> Any:
        filled = jnp.pad(array, ((0, parts * size - count), *((0, 0),) * (array.ndim - 1)))
        return filled.reshape(*shape, *array.shape[1:])

    divided = jax.tree.map(divide, batch)

    def rows(part: Any) -> Any:
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, part, axis, keepdims=False), divided)

    return rows, parts


def over_parts(function: Callable[[Any], Any], batch: Any, most: int, *, spread: bool = False) -> Any:
    """Applies a function of some rows to all parts; the results are in the order of the batch."""
    count = len(jax.tree.leaves(batch)[0])
    rows, parts = in_parts(batch, most, spread=spread)
    found = jax.lax.map(lambda part: function(rows(part)), jnp.arange(parts))  # (parts, rows of a part, ...)

    def joined(array: Any) -> Any:
        ordered = array.swapaxes(0, 1) if spread else array
        return ordered.reshape(-1, *array.shape[2:])[:count]

    return jax.tree.map(joined, found)


def gradient_sum(
    loss: Callable[[Any, Any], Any], parameters: Any, batch: Any, most: int, *, spread: bool = False
) -> Any:
    """Sums the gradients of `loss(parameters, rows)`, the summed loss of some rows, over all parts."""
    rows, parts = in_parts(batch, most, spread=spread)

    def add(part: Any, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(parameters, rows(part)))

    return jax.lax.fori_loop(0, parts, add, jax.tree.map(jnp.zeros_like, parameters))
