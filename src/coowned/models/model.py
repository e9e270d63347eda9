"""What the loop asks of a model."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from coowned.exact.grid import Grid

Parameters = dict[str, Any]
"""Arrays by name, all float32."""


class Model(Protocol):
    """A model the loop can train: where it starts, its clipped gradient, and what it says of an example.

    `gradient_sum`, `losses` and `predict` are called inside a compiled step, with arrays of JAX's, where `runs_in_jax`.
    """

    runs_in_jax: ClassVar[bool]
    """Whether `gradient_sum`, `losses` and `predict` are JAX's to compile; otherwise they take and give arrays of
    numpy."""
    many_models: ClassVar[bool]
    """Whether `losses` takes parameters with a leading axis for the models, and gives (batch, num_models) then."""

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """What the indices that `predict` gives mean, as the data spell the labels; None where it gives a number."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain values that name the model and make it again; part of what a resumed run must agree in."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter."""
        ...

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        """Where training starts."""
        ...

    def check_data(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuses data of other shapes with InputError."""
        ...

    def grid(self, clip_norm: float) -> Grid:
        """What the clipped gradients, and their noise, are rounded to."""
        ...

    def clipped_sum(
        self,
        parameters: Parameters,
        batch: dict[str, Any],
        mask: Any,
        grids: Sequence[Grid],
        devices: Sequence[Any] = (),
        scales: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        """({name: (num_models, *shape) exact sums in grid units}, number of clipped copies: private).

        What a copy adds must be an integer vector no longer than the grid's radius, and depend on that copy alone.

        Args:
          parameters: each (num_models, *shape).
          batch: arrays of numpy; what lies elsewhere is there as "features" (`coowned.content.data.InPlace`).
          mask: (batch,) True where the row is real.
          grids: of each model.
          devices: that share the work; none: the default one.
          scales: what gradients are multiplied by before they are clipped, with a leading axis for the models; None
            for models with `many_models`.
        """
        ...

    def gradient_sum(self, parameters: Parameters, batch: dict[str, Any], mask: Any) -> Parameters:
        """The plain sum of gradients of one model, for training without privacy."""
        ...

    def losses(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """((batch,) loss of each example, (batch,) whether it is predicted rightly)."""
        ...

    def predict(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """((batch,) int32 index of the class, (batch,) its probability); for a number its float32 value and NaN.

        Labels of the batch may be NaN. What cannot be predicted, because a value is missing or not finite, has a
        probability that is NaN; for a number it is NaN itself.
        """
        ...

    def probabilities(self, parameters: Parameters, batch: dict[str, Any]) -> Any:
        """(batch, classes) probability of every class, where there are classes; NaN where `predict` has NaN."""
        ...

    def to_arrays(self, parameters: Parameters) -> dict[str, npt.NDArray[np.float32]]:
        """The parameters as they are stored in a model file."""
        ...

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back; refuses arrays of another model with InputError."""
        ...


def sums_of_members(
    gradients: Callable[[Any, Any], Any],
    placed: Callable[[Parameters], Mapping[str, Any]],
    parameters: Parameters,
    batch: Mapping[str, Any],
    mask: Any,
    grids: Sequence[Grid],
    *,
    scales: Mapping[str, Any] | None,
    **settings: Any,
) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
    """What `Model.clipped_sum` gives, of a function for the gradients of one model: one member after another.

    Args:
      gradients: (what `placed` gives, rows of the batch) -> each row's gradients.
      placed: makes what `gradients` takes of one member's parameters, which have a leading axis of one model.
      parameters, batch, mask, grids, scales: as for `Model.clipped_sum`.
      settings: of `Microbatches`: shapes, microbatch, devices, ahead.
    """
    from coowned.exact.gradient_sums import Microbatches, clipped_gradient_sums

    division = Microbatches(**settings)

    def of_member(number: int) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        member = parameters if len(grids) == 1 else _member()(parameters, np.int32(number))
        own = None if scales is None else {name: array[number] for name, array in scales.items()}
        return clipped_gradient_sums(gradients, placed(member), batch, mask, grids[number], division, scales=own)

    if len(grids) == 1:
        sums, clipped = of_member(0)
        return {name: array[None] for name, array in sums.items()}, clipped
    members = [of_member(number) for number in range(len(grids))]
    sums = {name: np.stack([total[name] for total, _ in members]) for name in parameters}
    return sums, sum(clipped for _, clipped in members)


@functools.cache
def _member() -> Callable[[Parameters, Any], Parameters]:
    """(parameters, number) -> that model's, with a leading axis of one; one program for all members."""
    import jax

    return jax.jit(
        lambda parameters, number: {
            name: jax.lax.dynamic_slice_in_dim(array, number, 1) for name, array in parameters.items()
        }
    )


def num_scores(model: Model) -> int:
    """How many scores a linear model gives an example; 0 for any other."""
    return getattr(model, "num_scores", 0)


def num_parameters(model: Model) -> int:
    """How many numbers are trained, and get noise."""
    return sum(math.prod(shape) for shape in model.shapes().values())


def digest_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Names arrays by their names, types, shapes and bits."""
    hashed = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def compiled_for(model: Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls methods of a model, compiled where JAX computes them."""
    if not model.runs_in_jax:
        return function
    import jax

    return jax.jit(function)
