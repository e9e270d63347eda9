"""Logistic regression with an intercept."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.errors import InputError
from coowned.mechanism.grid import Grid
from coowned.training.data import FeatureTable, check_columns
from coowned.training.model import Model
from coowned.training.tasks import Specification, Table, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegression(Specification):
    """A linear model of 0/1 labels; the intercept is clipped and noised with the weights.

    Inside, weights and intercept are one row of num_features + 1 numbers, the intercept last: one stream of noise a
    model and step. Many models on one batch (a sweep) are rows of one matrix.

    Guarantees:
      - The clipped gradient is that of `coowned.mechanism.linear_sums`, weights and intercept together.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Attributes:
      num_features: how many there are; None: as many as the data have.
      features: the columns with them: one list column, or several columns of numbers.
      label: the column with the label, 0 or 1.

    Example:
      >>> model = LogisticRegression(num_features=2)
      >>> model.to_arrays(model.initial())
      {'weights': array([0., 0.], dtype=float32), 'intercept': array(0., dtype=float32)}
    """

    kind: ClassVar[str] = "logistic-regression"
    many_models: ClassVar[bool] = True
    num_features: int | None = None
    features: str | Sequence[str] = "features"
    label: str = "label"

    def __post_init__(self) -> None:
        validate.column_names(features=self.features, label=self.label)
        if self.num_features is not None:
            validate.positive(num_features=self.num_features)
        if not isinstance(self.features, str):
            object.__setattr__(self, "features", tuple(self.features))

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        label = self.label if labels else None
        check_columns(schema, features=self.features, label=label)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = FeatureTable.from_examples(
                examples, features=self.features, label=label, num_features=self.num_features
            )
            model = dataclasses.replace(self, num_features=table.features.shape[1])
            return model, table, {"unusable_rows": table.num_unusable}

        return Task(read=read)

    def from_run(self, folder: Path) -> Self:
        from coowned.training.run import RunRecord

        record = RunRecord.read(folder)
        return self if record is None else dataclasses.replace(self, num_features=record.model["num_features"])

    @property
    def classes(self) -> tuple[Any, ...] | None:
        return (0, 1)

    def describe(self) -> dict[str, Any]:
        return self.settings()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        assert self.num_features is not None
        return {"coefficients": (self.num_features + 1,)}

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.zeros(shape, np.float32) for name, shape in self.shapes().items()}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found = shapes.get("features")
        if found != (self.num_features,) or "labels" not in shapes:
            raise InputError(
                f"the model has {self.num_features} features, the data have {found[0] if found else 'none'}; "
                "make the model with the data's num_features"
            )

    def grid(self, clip_norm: float) -> Grid:
        return Grid.for_linear(clip_norm)

    def clipped_sum(
        self,
        parameters: dict[str, Any],
        batch: dict[str, Any],
        mask: Any,
        grids: Sequence[Grid],
        devices: Sequence[Any] = (),
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        """On the host, whatever devices there are."""
        from coowned.mechanism.linear_sums import clipped_linear_sums

        coefficients = np.asarray(parameters["coefficients"])
        norms = batch.get("norms")
        sums, clipped = clipped_linear_sums(coefficients, batch["features"], batch["labels"], mask, grids, norms)
        return {"coefficients": sums}, clipped

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        weights, intercept = parameters["coefficients"][:-1], parameters["coefficients"][-1]
        slope, total = _plain_sum(weights, intercept, batch["features"], batch["labels"], mask)
        return {"coefficients": jnp.append(slope, total)}

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax.numpy as jnp

        coefficients = parameters["coefficients"]
        logits = batch["features"] @ coefficients[..., :-1].T + coefficients[..., -1]  # (batch[, models])
        labels = batch["labels"] if logits.ndim == 1 else batch["labels"][:, None]
        return jnp.logaddexp(0.0, logits) - labels * logits, (logits > 0) == (labels > 0.5)

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        coefficients = parameters["coefficients"]
        logits = batch["features"] @ coefficients[:-1] + coefficients[-1]  # (batch,)
        probability = jnp.where(jnp.isfinite(logits), jax.nn.sigmoid(jnp.abs(logits)), jnp.nan)
        return (logits > 0).astype(jnp.int32), probability

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        coefficients = np.asarray(parameters["coefficients"], np.float32)
        return {"weights": coefficients[:-1].copy(), "intercept": coefficients[-1:].reshape(())}

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back."""
        if set(arrays) != {"weights", "intercept"} or arrays["weights"].shape != (self.num_features,):
            raise InputError(f"not the arrays of a logistic regression with {self.num_features} features")
        return {"coefficients": np.append(arrays["weights"], arrays["intercept"]).astype(np.float32)}


def _plain_sum(weights: Any, intercept: Any, features: Any, labels: Any, mask: Any) -> tuple[Any, Any]:
    """The gradient of the summed loss as anybody would write it, for training without privacy.

    An example that is not finite adds nothing. One look at the logits, which are not finite either then, tells whether
    there is any.
    """
    import jax
    import jax.numpy as jnp

    def plain(features, labels, mask):
        logits = features @ weights + intercept  # (batch,)
        residuals = jnp.where(mask, jax.nn.sigmoid(logits) - labels, 0.0)
        usual = jnp.isfinite(logits).all() & jnp.isfinite(labels).all()
        return usual, (residuals, features)

    def guarded():
        finite = jnp.isfinite(features).all(axis=1) & jnp.isfinite(labels)
        _, made = plain(jnp.where(finite[:, None], features, 0.0), jnp.where(finite, labels, 0.0), mask & finite)
        return product(*made)

    def product(residuals, features):
        return residuals.T @ features, residuals.sum(axis=0)

    usual, made = plain(features, labels, mask)
    return jax.lax.cond(usual, lambda: product(*made), guarded)
