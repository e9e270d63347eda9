"""Linear regression on the text embeddings of a frozen public encoder."""

import dataclasses
from typing import ClassVar

from coowned.models.embeddings import EmbeddingModel
from coowned.models.linear_regression import LinearRegression


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingRegression(EmbeddingModel, LinearRegression):
    """A linear regression on text embeddings of a public BERT-type encoder, scaled to length 1.

    Guarantees:
      - The clipped gradient is that of `LinearRegression` on the embeddings.   (test_it_is_the_linear_model_on_rows)

    Attributes:
      text, encoder, encoder_trained_on, encoder_sha256, sequence_length, num_features: as for `EmbeddingClassifier`.
      target, target_bound: as for `LinearRegression`.

    Example:
      >>> EmbeddingRegression(text="review", target="stars", target_bound=5.0, encoder="MiniLM").target
      'stars'
    """

    kind: ClassVar[str] = "embedding-regression"
