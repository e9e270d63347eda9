"""Shared parts of linear models: one score, or one per class, from a row of features and an intercept."""

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.accounting.privacy_guarantee import model_metadata
from coowned.attribution.examples import AttributedExamples
from coowned.content.columns import check_label_column, feature_width
from coowned.content.data import FeatureTable
from coowned.errors import InputError
from coowned.exact.grid import Grid
from coowned.exact.linear_sums import clipped_linear_sums
from coowned.models.model import Model, Specification, Table, Task

if TYPE_CHECKING:
    from coowned.models.probes import CanaryContent, LinearContent

CANARY_LENGTH = 4.0  # of a canary's features, in clip norms: clipped, and not learned in a single step


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearModel(Specification, abc.ABC):
    """A linear model; the intercept is clipped and noised with the weights.

    Inside, weights and intercept are one row of num_features + 1 numbers, the intercept last, or one for each class:
    one stream of noise a model and step. Many models on one batch (a sweep) have a leading axis.

    A subclass says what its loss is (`_loss`, `_residuals`) and how features are multiplied (`_products`).
    """

    many_models: ClassVar[bool] = True
    runs_in_jax: ClassVar[bool] = True
    num_features: int | None = None

    def __post_init__(self) -> None:
        if self.num_features is not None:
            validate.positive(num_features=self.num_features)

    @property
    def classes(self) -> Any:
        """The labels; None for a regression."""
        return None

    @property
    def num_scores(self) -> int:
        """The number of scores: 1, or the number of classes if there are more than two."""
        count = len(self.classes or ())
        return count if count > 2 else 1

    @property
    def _size(self) -> int:
        assert self.num_features is not None
        return self.num_features

    def describe(self) -> dict[str, Any]:
        settings = self.settings()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def usage(self) -> str:
        meaning, answer = self._answer()
        return (
            f"A score is the features times the weights, plus the intercept; {meaning}.\n\n"
            "```python\n"
            "import numpy as np\n"
            "from safetensors.numpy import load_file\n"
            f"{self._example_features()}\n"
            'parameters = load_file("model.safetensors")\n'
            'scores = features @ parameters["weights"].T + parameters["intercept"]\n'
            f"print({answer})\n"
            "```\n"
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        classes = (self.num_scores,) if self.num_scores > 1 else ()
        return {"coefficients": (*classes, self._size + 1)}

    def initial(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: np.zeros(shape, np.float32) for name, shape in self.shapes().items()}

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        found = shapes.get("features")
        if found != (self.num_features,) or "labels" not in shapes:
            raise InputError(
                f"the model has {self.num_features} features, the data have {found[0] if found else 'none'}; create "
                "the model with the data's num_features"
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
        scales: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, npt.NDArray[np.int64]], int]:
        """Computes the clipped sums on the host, whatever devices there are; rows are integers and are not scaled."""
        del scales
        sums, clipped = self._clipped_sums(np.asarray(parameters["coefficients"]), batch, mask, grids)
        return {"coefficients": sums}, clipped

    def gradient_sum(self, parameters: dict[str, Any], batch: dict[str, Any], mask: Any) -> dict[str, Any]:
        """Computes the sum of gradients without clipping; examples that are not finite add nothing."""
        import jax
        import jax.numpy as jnp

        def slopes_of(content: dict[str, Any]) -> tuple[Any, Any]:
            return jax.vjp(lambda coefficients: self.scores(coefficients, content), parameters["coefficients"])

        scores, slopes = slopes_of(batch)
        residuals = self._residuals(scores, batch["labels"])
        usable = (jnp.isfinite(scores) & jnp.isfinite(residuals)).reshape(mask.size, -1).all(axis=1)
        residuals = jnp.where(_beside(usable & mask, residuals), residuals, 0.0)

        def guarded() -> Any:
            clean = {name: jnp.where(_beside(usable, array), array, 0) for name, array in batch.items()}
            return slopes_of(clean)[1](residuals)[0]

        return {"coefficients": jax.lax.cond(usable.all(), lambda: slopes(residuals)[0], guarded)}

    def scores(self, coefficients: Any, batch: dict[str, Any]) -> Any:
        """Computes the (batch[, classes]) scores of one model."""
        return self._products(coefficients[..., :-1], batch) + coefficients[..., -1]

    def losses(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax

        coefficients = parameters["coefficients"]

        def of_one(member: Any) -> tuple[Any, Any]:
            return self._loss(self.scores(member, batch), batch["labels"])

        if coefficients.ndim == len(self.shapes()["coefficients"]):
            return of_one(coefficients)
        return jax.vmap(of_one, out_axes=1)(coefficients)  # (batch, models)

    def to_arrays(self, parameters: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        coefficients = np.asarray(parameters["coefficients"], np.float32)
        return {"weights": coefficients[..., :-1].copy(), "intercept": coefficients[..., -1].copy()}

    def from_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads `to_arrays` back."""
        shape = self.shapes()["coefficients"]
        if set(arrays) != {"weights", "intercept"} or arrays["weights"].shape != (*shape[:-1], shape[-1] - 1):
            raise InputError(f"not the arrays of a {self.kind} with {self.num_features} features")
        joined = np.concatenate([arrays["weights"], np.asarray(arrays["intercept"])[..., None]], axis=-1)
        return {"coefficients": joined.astype(np.float32)}

    def worst_case(self) -> "LinearContent":
        from coowned.models.probes import LinearContent

        return LinearContent(self._size, *self._worst_labels())

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[Model, CanaryContent]":
        from coowned.models.probes import feature_canaries

        content = feature_canaries(users, per_user, num_features=self._size, length=CANARY_LENGTH * clip_norm)
        return self._widened(self._size + users), content  # pyright: ignore[reportReturnType]

    def _widened(self, num_features: int) -> Self:
        """Returns the same model with more features, whatever columns they come from."""
        return dataclasses.replace(self, num_features=num_features)

    @abc.abstractmethod
    def _example_features(self) -> str:
        """Returns Python code that makes `features` (rows, num_features) of one example."""

    @abc.abstractmethod
    def _answer(self) -> tuple[str, str]:
        """Returns (the meaning of a score in words, Python code that turns `scores` into predictions)."""

    @abc.abstractmethod
    def _clipped_sums(
        self, coefficients: npt.NDArray[np.float32], batch: dict[str, Any], mask: Any, grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int64], int]: ...

    def _products(self, weights: Any, batch: dict[str, Any]) -> Any:
        """Computes (batch[, classes]) features times weights."""
        return batch["features"] @ weights.T

    @abc.abstractmethod
    def _residuals(self, scores: Any, labels: Any) -> Any:
        """Computes the derivative of an example's loss by its scores; NaN for an invalid label."""

    @abc.abstractmethod
    def _loss(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        """Computes ((batch,) loss, (batch,) whether predicted correctly)."""

    @abc.abstractmethod
    def _worst_labels(self) -> tuple[tuple[float, ...], float, float, float]:
        """Returns the parameters of `LinearContent`: residuals at zero scores, labels, and a huge feature."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureModel(LinearModel):
    """A linear model on numeric columns."""

    label_field: ClassVar[str]  # names the column that is predicted
    features: str | Sequence[str] = "features"

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(features=self.features)
        if isinstance(self.features, str):
            return
        object.__setattr__(self, "features", tuple(self.features))
        if len(self.features) > 1 and self.num_features not in (None, len(self.features)):
            raise InputError(
                f"num_features is {self.num_features}, but features names {len(self.features)}; give only one"
            )

    def from_run(self, folder: Path) -> Self:
        trained = json.loads(model_metadata(folder / "model.safetensors")["model"])
        return dataclasses.replace(self, num_features=trained["num_features"])

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        label = getattr(self, self.label_field) if labels else None
        check_label_column(schema, label, self.classes)
        width = feature_width(schema, self.features, self.num_features)
        model: Any = dataclasses.replace(self, num_features=width)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = FeatureTable.from_examples(
                examples, features=self.features, label=label, num_features=self.num_features, classes=self.classes
            )
            return model, table, {"unusable_rows": table.num_unusable}

        return Task(read=read)

    def _widened(self, num_features: int) -> Self:
        return dataclasses.replace(self, num_features=num_features, features="features")

    def _example_features(self) -> str:
        columns = self.features
        named = f"the list in column {columns}" if isinstance(columns, str) else f"the columns {', '.join(columns)}"
        return f"\nfeatures = np.zeros((1, {self._size}), np.float32)  # {named}, in this order\n"

    def _clipped_sums(
        self, coefficients: npt.NDArray[np.float32], batch: dict[str, Any], mask: Any, grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int64], int]:
        labels, norms, is_number = self._labels(batch), batch.get("norms"), self.classes is None
        return clipped_linear_sums(coefficients, batch["features"], labels, mask, grids, norms, squared_loss=is_number)

    def _labels(self, batch: dict[str, Any]) -> Any:
        """Returns (batch,) labels as `clipped_linear_sums` takes them."""
        return batch["labels"]


class Classifier(LinearModel):
    """Loss and predictions of a classifier: one score for two classes, else one per class."""

    classes: Any

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        scores = self.scores(parameters["coefficients"], batch)
        if self.num_scores == 1:
            probability = jnp.where(jnp.isfinite(scores), jax.nn.sigmoid(jnp.abs(scores)), jnp.nan)
            return (scores > 0).astype(jnp.int32), probability
        return scores.argmax(axis=1).astype(jnp.int32), jax.nn.softmax(scores).max(axis=1)

    def probabilities(self, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp

        scores = self.scores(parameters["coefficients"], batch)
        if self.num_scores > 1:
            return jax.nn.softmax(scores)
        both = jax.nn.sigmoid(jnp.stack([-scores, scores], axis=1))
        return jnp.where(jnp.isfinite(scores)[:, None], both, jnp.nan)

    def _answer(self) -> tuple[str, str]:
        if self.num_scores == 1:
            meaning = f"the probability of class {self.classes[1]!r} (and not {self.classes[0]!r}) is its sigmoid"
            return meaning, "1 / (1 + np.exp(-scores))"
        classes = f"np.array({list(self.classes)!r})"
        return "the class with the largest one is predicted", f"{classes}[scores.argmax(axis=1)]"

    def _residuals(self, scores: Any, labels: Any) -> Any:
        import jax

        if self.num_scores == 1:
            return jax.nn.sigmoid(scores) - labels
        return jax.nn.softmax(scores) - _one_hot(labels, self.num_scores)

    def _loss(self, scores: Any, labels: Any) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        if self.num_scores == 1:
            return jnp.logaddexp(0.0, scores) - labels * scores, (scores > 0) == (labels > 0.5)
        loss = jax.nn.logsumexp(scores, axis=1) - (scores * _one_hot(labels, self.num_scores)).sum(axis=1)
        return loss, scores.argmax(axis=1) == labels

    def _worst_labels(self) -> tuple[tuple[float, ...], float, float, float]:
        if self.num_scores == 1:
            return (0.5,), 0.0, 0.5, 1e20
        even = 1 / self.num_scores
        return (even - 1, *(even,) * (self.num_scores - 1)), 0.0, float("nan"), 1e10


def _beside(rows: Any, array: Any) -> Any:
    """Reshapes (batch,) rows to broadcast against an array of the batch."""
    return rows.reshape(-1, *(1,) * (array.ndim - 1))


def _one_hot(labels: Any, classes: int) -> Any:
    """Returns (batch, classes) indicators; NaN in the row of an invalid label."""
    import jax.numpy as jnp

    hot = (labels[:, None] == jnp.arange(classes)).astype(jnp.float32)
    return jnp.where(hot.any(axis=1, keepdims=True), hot, jnp.nan)
