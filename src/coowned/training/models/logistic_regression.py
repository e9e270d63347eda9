"""Logistic regression with an intercept."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegression:
    """A linear model of 0/1 labels; the intercept is clipped and noised with the weights.

    Inside, weights and intercept are one row of num_features + 1 numbers, the intercept last: one stream of noise a
    model and step. Many models on one batch (a sweep) are rows of one matrix.

    Guarantees:
      - The clipped gradient is that of `coowned.mechanism.clipping`, weights and intercept together.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Example:
      >>> model = LogisticRegression(num_features=2)
      >>> model.to_arrays(model.initial())
      {'weights': array([0., 0.], dtype=float32), 'intercept': array(0., dtype=float32)}
    """

    on_host: ClassVar[bool] = True
    row_multiple: ClassVar[int] = 128
    num_features: int

    def __post_init__(self) -> None:
        validate.positive(num_features=self.num_features)

    def describe(self) -> dict[str, Any]:
        return {"kind": "logistic-regression", "num_features": int(self.num_features)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"coefficients": (self.num_features + 1,)}

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        return {"coefficients": np.zeros(self.num_features + 1, np.float32)}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found = shapes.get("features")
        if found != (self.num_features,) or "labels" not in shapes:
            raise InputError(
                f"the model has {self.num_features} features, the data have {found[0] if found else 'none'}; "
                "make the model with the data's num_features"
            )

    def gradient_sum(
        self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any, clip_norm: Any, *, compensated: bool = False
    ) -> tuple[dict[str, Any], Any]:
        """Coefficients (num_features + 1,), or (models, num_features + 1) with clip norms (models,).

        From arrays of numpy, the host's own loops sum clipped gradients (of many models without counting them); XLA
        sums all others.
        """
        import jax
        import jax.numpy as jnp

        from coowned.mechanism import clipping
        from coowned.mechanism.fused_clipping import RowsInPlace, fused_clipped_logistic_sum
        from coowned.mechanism.tiled_clipping import tiled_clipped_logistic_sums

        coefficients = parameters["coefficients"]
        weights, intercept = coefficients[..., :-1], coefficients[..., -1]
        on_host = isinstance(coefficients, np.ndarray) and isinstance(batch["features"], np.ndarray | RowsInPlace)
        if clip_norm is not None and on_host:
            given = batch["features"], batch["labels"], mask, clip_norm, batch.get("squared_norms")
            if coefficients.ndim == 1:
                (slope, total), clipped = fused_clipped_logistic_sum(weights, intercept, *given)
                summed = type(slope)(*(np.append(*parts) for parts in zip(slope, total, strict=True)))
            else:
                summed, clipped = tiled_clipped_logistic_sums(coefficients, *given, batch.get("stretches")), None
            return {"coefficients": summed if compensated else summed.rounded}, clipped
        if clip_norm is None:
            slope, total = _plain_sum(weights, intercept, batch["features"], batch["labels"], mask)
            clipped = jnp.zeros(intercept.shape, jnp.int32)
        else:
            summed = (
                clipping.clipped_logistic_gradient_sum
                if coefficients.ndim == 1
                else clipping.clipped_logistic_gradient_sums
            )
            (slope, total), clipped = summed(
                weights,
                intercept,
                batch["features"],
                batch["labels"],
                mask,
                clip_norm,
                batch.get("squared_norms"),
                compensated=compensated,
            )

        def join(slope, total):
            return jnp.concatenate([slope, total[..., None]], axis=-1)

        return {"coefficients": jax.tree.map(join, slope, total)}, clipped

    def rows_together(self, models: int) -> int:
        from coowned.mechanism import clipping

        return clipping.BLOCK if models == 1 else clipping.WIDE_BLOCK

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax.numpy as jnp

        coefficients = parameters["coefficients"]
        logits = batch["features"] @ coefficients[..., :-1].T + coefficients[..., -1]  # (batch[, models])
        labels = batch["labels"] if logits.ndim == 1 else batch["labels"][:, None]
        return jnp.logaddexp(0.0, logits) - labels * logits, (logits > 0) == (labels > 0.5)

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
        logits = features @ weights.T + intercept  # (batch[, models])
        wide = logits.ndim == 2
        residuals = jax.nn.sigmoid(logits) - (labels[:, None] if wide else labels)
        residuals = jnp.where(mask[:, None] if wide else mask, residuals, 0.0)
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
