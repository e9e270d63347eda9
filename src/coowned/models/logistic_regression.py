"""Logistic regression with an intercept, for two classes or more."""

import dataclasses
from typing import Any, ClassVar

from coowned import validate
from coowned.content.columns import declared_classes
from coowned.models.linear import Classifier, FeatureModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticRegression(FeatureModel, Classifier):
    """A linear classifier: the logistic loss for two classes, softmax cross-entropy for more.

    Guarantees:
      - The clipped gradient is that of `coowned.exact.linear_sums`, all classes, weights and intercepts together.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Attributes:
      num_features: how many there are; None: as many as columns are named, or as the type of a list column says.
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
    label_field: ClassVar[str] = "label"
    label: str = "label"
    classes: Any = 2  # becomes a tuple

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(label=self.label)
        object.__setattr__(self, "classes", declared_classes(self.classes))
