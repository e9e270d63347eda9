"""Gaussian noise with full tails, independent (DP-SGD) or correlated by a banded strategy (DP-MF).

A normal is the inverse of the distribution function at a 64-bit word (127 bits in the tail), in float64, cast to
float32 at the very end: values up to 13.1 can occur, where float32 `jax.random.normal` ends at 5.42. The rows of C^-1 z
are made on the host, one a step, by a recurrence over the last num_bands - 1 rows; a compiled training step gets them
as an input.

A checkpoint need not hold noise: the rows follow from the run key, and a stream that starts at step t replays the t
rows before it. Where the model is so large that replaying is dear, `rows()` can be stored instead (as secret as the run
key) and given back; both are bit-identical to never having stopped.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError
from coowned.mechanism.kernels import (
    WORDS,
    correlated_row,
    normals_with_tails,
)
from coowned.mechanism.keys import Purpose, RunKey
from coowned.threads import run_all

if TYPE_CHECKING:
    import optax

ROUNDING_FACTOR = 1 + 1e-5  # for the rounding of clipping and of a sum's blocks: the noise is this much larger
_PART = 128 * WORDS  # numbers one thread makes before it takes the next part


_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30


def noise_scale(*, noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
    """What unit noise is multiplied by before it is added to the sum of clipped gradients over batch_size.

    It is clip_norm * noise_multiplier / batch_size times 1 + 1e-5, rounded up to a float32, so that no cast to
    float32 makes it smaller.

    >>> noise_scale(noise_multiplier=2.0, clip_norm=0.5, batch_size=100)
    0.01000010035932064
    """
    validate.positive_number(clip_norm=clip_norm)
    validate.in_range(0, math.inf, open_high=True, noise_multiplier=noise_multiplier)
    validate.positive(batch_size=batch_size)
    exact = float(noise_multiplier) * float(clip_norm) / int(batch_size) * ROUNDING_FACTOR
    if noise_multiplier and not _SMALLEST_SCALE <= exact <= _LARGEST_SCALE:
        raise InputError(
            f"noise of scale {exact:.3g} cannot be had in float32, where small numbers become 0 and large ones "
            "infinite; "
            f"choose clip_norm ({clip_norm:g}), noise_multiplier and batch_size so that it is between 1e-30 and 1e30"
        )
    rounded = np.float32(exact)
    return float(rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(np.inf)))


def normals_from_words(words: npt.ArrayLike, more: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The normals that the random words stand for; `more` has 64 further bits for each, used in the tail alone.

    Guarantees:
      - Exact to 1e-14 relative to the distribution function, in the tail relative to z.   (test_normals_are_accurate)
      - |z| reaches 13; words of all zeros and all ones are finite.                        (test_extreme_words)

    >>> normals_from_words([0, 2**63, 2**63 - 1, 2**64 - 1], [0, 0, 0, 0])
    array([-1.31...e+01, 1.31...e+01, -6.79...e-20, 6.79...e-20])
    """
    words, more = np.asarray(words, np.uint64), np.asarray(more, np.uint64)
    out = np.empty(len(words))
    normals_with_tails(words, more, out)
    return out


class NoiseStream:
    """Rows of unit noise C^-1 z, one a step, for one or several configurations of a sweep.

    Guarantees:
      - z is a pure function of (run key, configuration, step, tensor); configurations share nothing.
        (test_rows_follow_from_the_key, test_configurations_are_uncorrelated)
      - A stream that starts at any step goes on bit by bit as the uninterrupted one.   (test_resume_is_bit_identical)
      - C times the rows is z but for one rounding to float32 a row.   (test_strategy_undoes_the_noise)
      - One band gives the noise of DP-SGD to the bit.   (test_one_band_is_dp_sgd)
      - A step is given out once: a stream cannot go back, so that it never serves two different gradients.
        (test_a_stream_never_goes_back)
      - The number of threads changes no bit.   (test_threads_change_nothing)
    Cost: O(num_bands * parameters) a step; memory num_bands * parameters * 4 bytes, whatever `iterations` is. The work
    is done without Python's lock, so that the next row can be made while a device computes.

    Args:
      run_key: where the normals come from.
      coefficients: of the strategy (`BandedStrategy.coefficients`), or (1.0,) for independent noise.
      shapes: name and shape of every tensor.
      iterations: number of rows there are.
      configurations: names; with more than one, arrays have a leading axis for them.
      start: the first step to be given out; earlier rows are replayed.
      rows: the result of `rows()` at that step, in place of replaying.
      threads: among which the work is split.

    Example:
      >>> stream = NoiseStream(RunKey.from_seed(0), coefficients=(1.0,), shapes={"w": (3,), "b": ()}, iterations=2)
      >>> stream.next()
      {'w': array([..., ..., ...], dtype=float32), 'b': array(..., dtype=float32)}
      >>> stream.step
      1

    References: Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153, Algorithm 9; Wichura (1988), AS 241.
    """

    def __init__(
        self,
        run_key: RunKey,
        *,
        coefficients: Sequence[float] | npt.NDArray[np.float64],
        shapes: Mapping[str, tuple[int, ...]],
        iterations: int,
        configurations: Sequence[str] = ("",),
        start: int = 0,
        rows: Mapping[str, npt.NDArray[np.float32]] | None = None,
        threads: int = 1,
    ):
        validate.positive(iterations=iterations, threads=threads)
        validate.integer(at_least=0, at_most=iterations, start=start)
        self._coefficients = np.array(coefficients, np.float64)
        if not len(self._coefficients) or self._coefficients[0] <= 0 or not np.isfinite(self._coefficients).all():
            raise InputError("coefficients must be finite numbers, the first above 0")
        if not configurations or len(set(configurations)) != len(configurations):
            raise InputError("configurations must be one or more different names: two of the same would share noise")
        self._run_key, self._shapes, self._iterations = run_key, dict(shapes), int(iterations)
        self._configurations, self._threads = tuple(configurations), int(threads)
        self._sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        self._kept = len(self._coefficients) - 1
        self._rings = {
            name: np.zeros((len(self._configurations), self._kept, size), np.float32)
            for name, size in self._sizes.items()
        }  # (configurations, num_bands - 1, size): row t is in place t mod (num_bands - 1)
        self._step = 0
        if rows is not None:
            self._restore(int(start), rows)
        elif self._kept:
            while self._step < start:
                self.next()
        self._step = int(start)

    @property
    def step(self) -> int:
        """The step whose row `next()` gives."""
        return self._step

    def next(self) -> dict[str, npt.NDArray[np.float32]]:
        """The row of this step for every tensor, each with a leading axis if there are several configurations."""
        if self._step >= self._iterations:
            raise InputError(f"all {self._iterations} rows of noise were given out; a run has no further step")
        step, self._step = self._step, self._step + 1
        count = len(self._configurations)
        if count == 1 and max(self._sizes.values()) <= _PART:  # as below, with less around it
            return {name: self._short_row(name, step) for name in self._shapes}
        rows, work = {}, []
        for name, size in self._sizes.items():
            rows[name] = np.empty((count, size), np.float32)
            for c, configuration in enumerate(self._configurations):
                key = self._run_key.derive(Purpose.NOISE, configuration=configuration, step=step, tensor=name)
                for at in range(0, size, _PART):
                    out = rows[name][c, at : min(at + _PART, size)]
                    work.append(functools.partial(self._fill, key, at, self._rings[name][c], step, out))
        small = sum(row.size for row in rows.values()) <= _PART
        run_all(work, threads=1 if small else self._threads)
        leading = () if count == 1 else (count,)
        return {name: row.reshape(leading + self._shapes[name]) for name, row in rows.items()}

    def _short_row(self, name: str, step: int) -> npt.NDArray[np.float32]:
        (configuration,) = self._configurations
        key = self._run_key.derive(Purpose.NOISE, configuration=configuration, step=step, tensor=name)
        row = np.empty(self._sizes[name], np.float32)
        self._fill(key, 0, self._rings[name][0], step, row)
        return row.reshape(self._shapes[name])

    def rows(self) -> dict[str, npt.NDArray[np.float32]]:
        """The last num_bands - 1 rows of every tensor, for a checkpoint that must not replay. As secret as the key."""
        return {name: ring.copy() for name, ring in self._rings.items()}

    def _fill(self, key, begin, ring, step, out) -> None:
        head = (step - 1) % self._kept if self._kept else 0
        correlated_row(key, begin, self._coefficients, ring, head, out)

    def _restore(self, step: int, rows: Mapping[str, npt.NDArray[np.float32]]) -> None:
        if rows.keys() != self._rings.keys():
            raise InputError(f"stored rows are of {sorted(rows)}, but the tensors are {sorted(self._rings)}")
        for name, ring in self._rings.items():
            if rows[name].shape != ring.shape or rows[name].dtype != np.float32:
                found = f"{rows[name].dtype} of shape {rows[name].shape}"
                raise InputError(f"stored rows of {name} are {found}, not float32 of shape {ring.shape}")
            ring[...] = rows[name]


def regrouping_factor(*, expected_copies: int, rows_together: int) -> float:
    """How much more noise there is where `rows_together` rows of a drawn batch are added in float32.

    A copy that is drawn moves those behind it by a place, so that all their blocks are other ones and are rounded
    otherwise. In whatever order the R rows of a block are added, the depths of the rows in the tree of these additions
    add up to at most R (R + 1) / 2 - 1 (that of one after another), and each addition is off by 2^-24 of the lengths
    below it; each product by 2^-24 of its own. With clip norms for lengths and what roundings add to them, a block is
    off by less than R (R + 4) / 2 · 2^-24; blocks are then added with their rounding kept. So a sum of B copies is off
    by less than B (R + 4) / 2 · 2^-24 clip norms with the copy, and by as much without it. More copies than B =
    `most_copies` are drawn in a step with a probability below 1e-20, which no delta counts.

    Guarantees:
      - Blocks of float32 additions, in any order, move by no more.   (test_any_order_of_additions_is_covered)
      - It covers the worst gradients known many times.   (test_regrouped_blocks_are_covered)
      - So many copies are not drawn.   (test_so_many_copies_are_not_drawn)

    >>> round(regrouping_factor(expected_copies=4096, rows_together=8), 6)
    1.00343
    """
    validate.positive(expected_copies=expected_copies, rows_together=rows_together)
    return 1 + most_copies(expected_copies) * (rows_together + 4) * 2.0**-24


def most_copies(expected_copies: int) -> int:
    """Exceeded with a probability below 1e-20 where so many are expected of independent coins (Bernstein)."""
    return expected_copies + math.ceil(10 * math.sqrt(expected_copies)) + 60


class NoiseState(NamedTuple):
    """The state of the optax transformations: how many steps were taken."""

    step: Any


def add_noise(scale: float) -> "optax.GradientTransformationExtraArgs":
    """An optax transformation that adds `scale` times the row it is given: for use inside a compiled step.

    `update(gradients, state, noise=row)`; the row has the structure of the gradients. Nothing is cast below float32.

    >>> import jax.numpy as jnp
    >>> transformation = add_noise(2.0)
    >>> state = transformation.init({"w": jnp.zeros(2)})
    >>> noisy, state = transformation.update({"w": jnp.ones(2)}, state, noise={"w": jnp.array([1.0, -1.0])})
    >>> noisy["w"].tolist(), int(state.step)
    ([3.0, -1.0], 1)
    """
    import jax
    import jax.numpy as jnp
    import optax

    factor = np.float32(scale)

    def init(params):
        del params
        return NoiseState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, noise, **unused):
        del params, unused
        added = jax.tree.map(lambda g, z: g + factor * jnp.asarray(z, jnp.float32), updates, noise)
        return added, NoiseState(state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def noise_from_key(
    run_key: RunKey,
    *,
    coefficients: Sequence[float] | npt.NDArray[np.float64],
    scale: float,
    iterations: int,
    configuration: str = "",
    start: int = 0,
) -> "optax.GradientTransformation":
    """An optax transformation that makes its own rows from the run key; for loops that are not compiled as a whole.

    The tensors are named by their paths in the parameters. `update` goes forward only: a state it has already served
    is refused, since the same noise under two different gradients would give both away.

    >>> import jax.numpy as jnp
    >>> transformation = noise_from_key(RunKey.from_seed(0), coefficients=(1.0,), scale=0.0, iterations=1)
    >>> state = transformation.init({"w": jnp.zeros(2)})
    >>> transformation.update({"w": jnp.ones(2)}, state)[0]["w"].tolist()
    [1.0, 1.0]
    """
    import jax
    import optax

    inner = add_noise(scale)
    streams: list[NoiseStream] = []

    def init(params):
        if streams and streams[0].step > start:
            raise InputError("this noise has been given out; a second run needs a run key of its own")
        shapes = {name: tuple(leaf.shape) for name, leaf in _named(jax, params)}
        stream = NoiseStream(
            run_key,
            coefficients=coefficients,
            shapes=shapes,
            iterations=iterations,
            configurations=(configuration,),
            start=start,
        )
        streams[:] = [stream]
        return NoiseState(start)

    def update(updates, state, params=None):
        stream = streams[0]
        if state.step != stream.step:
            raise InputError(f"the noise of step {state.step} was given out; the next is that of step {stream.step}")
        row = stream.next()
        noise = jax.tree.unflatten(jax.tree.structure(updates), [row[name] for name, _ in _named(jax, updates)])
        return inner.update(updates, state, params, noise=noise)

    return optax.GradientTransformation(init, update)


def _named(jax: Any, tree: Any) -> list[tuple[str, Any]]:
    name: Callable[[Any], str] = jax.tree_util.keystr
    return [(name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
