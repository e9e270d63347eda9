"""Logistic regression with an intercept, of two classes or more."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.errors import InputError
from coowned.mechanism.grid import Grid
from coowned.training.columns import check_number_columns
from coowned.training.data import FeatureTable
from coowned.training.labels import check_label_column, declared_classes
from coowned.training.model import Model
from coowned.training.models.linear import Classifier
from coowned.training.tasks import Table, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegression(Classifier):
    """A linear model of classes: the logistic loss for two, softmax's cross-entropy for more.

    Guarantees:
      - The clipped gradient is that of `coowned.mechanism.linear_sums`, all classes, weights and intercepts together.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Attributes:
      num_features: how many there are; None: as many as the data have, which is then taken as public.
      features: the columns with them: one list column, or several columns of numbers.
      label: the column with the label.
      classes: what labels there are, as the data spell them, or how many (0, 1, ...); default: 0 and 1.

    Example:
      >>> model = LogisticRegression(num_features=2)
      >>> model.to_arrays(model.initial())
      {'weights': array([0., 0.], dtype=float32), 'intercept': array(0., dtype=float32)}
      >>> LogisticRegression(num_features=2, classes=["cat", "dog", "owl"]).shapes()
      {'coefficients': (3, 3)}
    """

    kind: ClassVar[str] = "logistic-regression"
    features: str | Sequence[str] = "features"
    label: str = "label"
    classes: Any = 2  # becomes a tuple

    def __post_init__(self) -> None:
        super().__post_init__()
        check_features(self)
        object.__setattr__(self, "classes", declared_classes(self.classes))

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        if labels:
            check_label_column(schema, self.label, self.classes)
        return feature_task(self, schema, label=self.label if labels else None, classes=self.classes)

    def _clipped_sums(
        self, coefficients: npt.NDArray[np.float32], batch: dict[str, Any], mask: Any, grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int64], int]:
        from coowned.mechanism.linear_sums import clipped_linear_sums

        return clipped_linear_sums(coefficients, batch["features"], batch["labels"], mask, grids, batch.get("norms"))

    def _widened(self, num_features: int) -> Self:
        return dataclasses.replace(self, num_features=num_features, features="features")


def check_features(spec: Any) -> None:
    """Checks the names of a specification's feature columns; a list of them becomes a tuple."""
    validate.column_names(features=spec.features)
    if not isinstance(spec.features, str):
        object.__setattr__(spec, "features", tuple(spec.features))
        if len(spec.features) > 1 and spec.num_features not in (None, len(spec.features)):
            raise InputError(f"num_features is {spec.num_features}, features names {len(spec.features)}; leave one out")


def feature_task(spec: Any, schema: pa.Schema, *, label: str | None, classes: Any) -> Task:
    """The task of a model that reads a table of features."""
    check_number_columns(schema, spec.features, lists=True)

    def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
        table = FeatureTable.from_examples(
            examples, features=spec.features, label=label, num_features=spec.num_features, classes=classes
        )
        model = dataclasses.replace(spec, num_features=table.features.shape[1])
        return model, table, {"unusable_rows": table.num_unusable}

    return Task(read=read)
