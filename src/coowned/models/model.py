"""The interface between training and a model."""

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
    """A trainable model: its starting point, clipped gradients, losses and predictions.

    `gradient_sum`, `losses` and `predict` are called inside a compiled step, with arrays of JAX's, where `runs_in_jax`.
    """

    runs_in_jax: ClassVar[bool]
    """Whether `gradient_sum`, `losses` and `predict` are JAX's to compile; otherwise they take and give arrays of
    numpy."""
    many_models: ClassVar[bool]
    """Whether `losses` takes parameters with a leading axis for the models, and gives (batch, num_models) then."""

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """The labels that the indices of `predict` stand for, spelled as in the data; None for a regression."""
        ...

    def describe(self) -> dict[str, Any]:
        """Returns plain values that identify the model and can rebuild it; a resumed run must have the same."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and shape of every parameter."""
        ...

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the starting parameters."""
        ...

    def check_data(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises InputError for data of other shapes."""
        ...

    def grid(self, clip_norm: float) -> Grid:
        """Returns the grid to which clipped gradients and their noise are rounded."""
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
        """Returns ({name: (num_models, *shape) exact sums in grid units}, number of clipped copies: private).

        What a copy adds must be an integer vector no longer than the grid's radius, and depend on that copy alone.

        Args:
          parameters: each (num_models, *shape).
          batch: numpy arrays; rows read in place are under "features" (`coowned.content.data.InPlace`).
          mask: (batch,) True where the row is real.
          grids: of each model.
          devices: that share the work; none: the default one.
          scales: what gradients are multiplied by before they are clipped, with a leading axis for the models; None
            for models with `many_models`.
        """
        ...

    def gradient_sum(self, parameters: Parameters, batch: dict[str, Any], mask: Any) -> Parameters:
        """Computes the plain sum of gradients of one model, for training without privacy."""
        ...

    def losses(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Computes ((batch,) loss of each example, (batch,) whether it is predicted correctly)."""
        ...

    def predict(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Returns ((batch,) int32 index of the class, (batch,) its probability); for a regression (float32 value, NaN).

        Labels of the batch may be NaN. What cannot be predicted, because a value is missing or not finite, has a
        probability that is NaN; for a number it is NaN itself.
        """
        ...

    def probabilities(self, parameters: Parameters, batch: dict[str, Any]) -> Any:
        """Computes the (batch, classes) probabilities of a classifier; NaN where `predict` has NaN."""
        ...

    def to_arrays(self, parameters: Parameters) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the parameters as stored in a model file."""
        ...

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back; raises InputError for arrays of another model."""
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
    """Computes `Model.clipped_sum` from a function for the gradients of one model, one member after another.

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
    """Returns (parameters, number) -> that model's, with a leading axis of one; one program serves all members."""
    import jax

    return jax.jit(
        lambda parameters, number: {
            name: jax.lax.dynamic_slice_in_dim(array, number, 1) for name, array in parameters.items()
        }
    )


def num_scores(model: Model) -> int:
    """Returns how many scores a linear model has per example; 0 for any other model."""
    return getattr(model, "num_scores", 0)


def num_parameters(model: Model) -> int:
    """Returns the number of trained parameters, all of which get noise."""
    return sum(math.prod(shape) for shape in model.shapes().values())


def digest_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """Computes a digest of arrays: their names, types, shapes and bits."""
    hashed = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        hashed.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def compiled_for(model: Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls methods of a model, compiled if the model runs in JAX."""
    if not model.runs_in_jax:
        return function
    import jax

    return jax.jit(function)
