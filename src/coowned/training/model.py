"""What the loop asks of a model."""

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

Parameters = dict[str, Any]
"""Arrays by name, all float32."""


class Model(Protocol):
    """A model the loop can train: where it starts, its clipped gradient, and what it says of an example.

    The functions of JAX arrays are called inside a compiled step. `gradient_sum` without a clip norm is for training
    without privacy alone.
    """

    on_host: ClassVar[bool]
    """Whether clipped gradients are summed faster from the host's arrays than in a compiled step. `gradient_sum` must
    then take numpy arrays, and `coowned.mechanism.fused_clipping.RowsInPlace` for features."""

    row_multiple: ClassVar[int]
    """Batches are padded to a multiple of so many rows: what a copy adds must not depend on how many others there are,
    and compiled code may be another one for few rows."""

    def describe(self) -> dict[str, Any]:
        """Plain values that name the model; part of what a resumed run must agree in."""
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

    def gradient_sum(
        self, parameters: Parameters, batch: dict[str, Any], mask: Any, clip_norm: Any, *, compensated: bool = False
    ) -> tuple[Parameters, Any]:
        """The sum over the batch of clipped gradients and the number clipped (private); clip_norm None: not clipped.

        With `compensated` each clipped sum is a `coowned.mechanism.compensated.CompensatedSum`.
        """
        ...

    def rows_together(self, models: int) -> int:
        """How many examples' clipped gradients a compiled `gradient_sum` adds up before roundings are kept."""
        ...

    def losses(self, parameters: Parameters, batch: dict[str, Any]) -> tuple[Any, Any]:
        """((batch,) loss of each example, (batch,) whether it is predicted rightly)."""
        ...

    def to_arrays(self, parameters: Parameters) -> dict[str, npt.NDArray[np.float32]]:
        """The parameters as they are stored in a model file."""
        ...
