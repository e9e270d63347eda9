"""Sums that keep what rounding takes from them, until the noise is in.

A float32 sum of B gradients of length C is known to B C 2^-24 at best: for a large batch far more than the noise's
factor 1 + 1e-5 is for, and it moves with every other copy. So the sum is carried as two float32 numbers, the noise is
added to both, and only what is released is rounded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class CompensatedSum(NamedTuple):
    """total + rest, both float32 and of one shape: about twice as many digits as either."""

    total: Any  # an array of JAX's or of numpy's
    rest: Any

    @property
    def rounded(self) -> Any:
        return self.total + self.rest


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(a + b rounded, what the rounding took), exactly (Knuth).

    >>> [float(part) for part in two_sum(jnp.float32(2**24), jnp.float32(1))]
    [16777216.0, 1.0]
    """
    total = a + b
    seen = total - a
    return total, (a - (total - seen)) + (b - seen)


def add_up(values: jax.Array) -> CompensatedSum:
    """The sum over the first axis.

    Guarantees:
      - It is off by less than 2^-40 of the sum of absolute values, for up to 2^16 of them.   (test_sums_of_many)

    >>> [float(part) for part in add_up(jnp.float32([2**24, 1, 1]))]
    [16777218.0, 0.0]
    """
    if not values.shape[0]:
        nothing = jnp.zeros(values.shape[1:], values.dtype)
        return CompensatedSum(nothing, nothing)
    total, rest = values, jnp.zeros_like(values)
    while total.shape[0] > 1:
        half = total.shape[0] // 2
        added, lost = two_sum(total[:half], total[half : 2 * half])
        lost = lost + (rest[:half] + rest[half : 2 * half])
        if total.shape[0] % 2:
            added, lost = jnp.concatenate([added, total[2 * half :]]), jnp.concatenate([lost, rest[2 * half :]])
        total, rest = added, lost
    return CompensatedSum(*two_sum(total[0], rest[0]))


def with_noise(summed: CompensatedSum, noise: jax.Array) -> jax.Array:
    """The sum plus noise, rounded once.

    Guarantees:
      - It is what the exact sum plus the noise is rounded to, but for a last digit.   (test_noise_before_rounding)
    """
    total, lost = two_sum(summed.total, noise)
    return total + (lost + summed.rest)
