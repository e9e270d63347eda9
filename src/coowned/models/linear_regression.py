"""Linear regression with an intercept, for a target with a public bound."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.models.linear import FeatureModel

if TYPE_CHECKING:
    from coowned.models.probes import CanaryContent


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRegression(FeatureModel):
    """A linear regression, trained by least squares.

    Targets are clipped to [-target_bound, target_bound], each by itself. Inside they are divided by the power of two at
    or above the bound, so that a clip norm near 1 and usual learning rates suit any unit; what is stored, predicted and
    reported is in the unit of the data. A loss is a squared error.

    Guarantees:
      - The clipped gradient is that of `coowned.exact.linear_sums` for clipped targets.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Attributes:
      target_bound: public: the largest absolute value a target can have, known without looking at the data.
      num_features: how many there are; None: as many as columns are named, or as the type of a list column says.
      features: the columns with them: one list column, or several columns of numbers.
      target: the column with the target.

    Example:
      >>> model = LinearRegression(num_features=2, target_bound=100.0)
      >>> model.to_arrays(model.initial())
      {'weights': array([0., 0.], dtype=float32), 'intercept': array(0., dtype=float32)}
    """

    kind: ClassVar[str] = "linear-regression"
    label_field: ClassVar[str] = "target"
    target_bound: float
    target: str = "target"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(target=self.target)
        validate.in_range(1e-30, 1e30, target_bound=self.target_bound)

    @property
    def _unit(self) -> float:
        mantissa, exponent = math.frexp(self.target_bound)
        return math.ldexp(1.0, exponent - (mantissa == 0.5))

    def _targets(self, labels: Any, numpy: Any) -> Any:
        """Returns clipped targets in units; non-finite ones become NaN."""
        clipped = numpy.clip(labels, -self.target_bound, self.target_bound) / self._unit
        return numpy.where(numpy.isfinite(labels), clipped, numpy.nan).astype(numpy.float32)

    def _answer(self) -> tuple[str, str]:
        bound = self.target_bound
        return (
            f"clipped to {bound:g} in size, it is the prediction of {self.target}",
            f"np.clip(scores, -{bound!r}, {bound!r})",
        )

    def labels_of(self, batch: dict[str, Any]) -> npt.NDArray[Any]:
        """Returns the targets as the loss sees them, in the unit of the data."""
        return self._unit * self._labels(batch)

    def _labels(self, batch: dict[str, Any]) -> npt.NDArray[np.float32]:
        return self._targets(np.asarray(batch["labels"], np.float32), np)

    def _residuals(self, scores: Any, labels: Any) -> Any:
        import jax.numpy as jnp

        return scores - self._targets(labels, jnp)

    def _loss(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Computes the squared error; no prediction counts as correct."""
        import jax.numpy as jnp

        return (self._unit * self._residuals(scores, labels)) ** 2, jnp.zeros(labels.shape, bool)

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax.numpy as jnp

        scores = self._unit * self.scores(parameters["coefficients"], batch)
        value = jnp.where(jnp.isfinite(scores), jnp.clip(scores, -self.target_bound, self.target_bound), jnp.nan)
        return value.astype(jnp.float32), jnp.full(value.shape, jnp.nan, jnp.float32)

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        arrays = super().to_arrays(parameters)
        return {name: np.asarray(np.float32(self._unit) * array) for name, array in arrays.items()}

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back."""
        scaled = super().from_arrays(arrays)
        return {name: array / np.float32(self._unit) for name, array in scaled.items()}

    def _worst_labels(self) -> tuple[tuple[float, ...], float, float, float]:
        return (self.target_bound / self._unit,), -self.target_bound, 0.0, 1e10

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[LinearRegression, CanaryContent]":
        model, content = super().with_canaries(users, per_user, clip_norm)
        labels = np.full(len(content), self.target_bound, np.float32)
        return model, dataclasses.replace(content, arrays={**content.arrays, "labels": labels})  # pyright: ignore[reportReturnType]
