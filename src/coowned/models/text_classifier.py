"""A linear text classifier on hashed n-grams: no vocabulary, no download."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.content.columns import (
    check_label_column,
    check_text_columns,
    declared_classes,
    joined_text,
    read_labels,
    text_column,
)
from coowned.content.hashed_text import SparseTable, check_ngrams, hash_texts
from coowned.errors import InputError
from coowned.exact.grid import Grid
from coowned.exact.sparse_sums import ONE, SparseRows, clipped_sparse_sums
from coowned.models.linear import Classifier
from coowned.models.model import Model, Table, Task

if TYPE_CHECKING:
    from coowned.models.probes import CanaryContent, SparseContent


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextClassifier(Classifier):
    """A linear classifier on hashed words and character n-grams (`coowned.content.hashed_text`).

    Which features a text has is fixed by a public hash: nothing is learned from private text, and there is no file to
    get. A row has length 1 beside the intercept's feature, so that a gradient is at most sqrt(2) long for two classes
    and 2 for more; a clip norm of 1 clips little, and one beyond that only adds noise.

    Guarantees:
      - The clipped gradient is that of `coowned.exact.sparse_sums`, all classes, weights and intercepts together.
                                                                          (test_gradient_is_that_of_the_mechanism)
      - No gradient is longer than sqrt(2), or 2 for more than two classes.   (test_gradients_are_short)
      - Text is read after selection, one example by itself.   (test_unselected_texts_are_not_read,
        test_a_row_depends_on_its_own_text)
      - `from_arrays(to_arrays(p))` is p.                                 (test_arrays_round_trip)

    Attributes:
      text: the column, or columns that are read one after another.
      label: the column with the label.
      classes: what labels there are, as the data spell them, or how many (0, 1, ...); default: 0 and 1.
      num_features: how many the words are hashed to.
      word_ngrams: the shortest and the longest run of words; empty for none.
      character_ngrams: the shortest and the longest run of characters within a word; empty for none.
      max_characters: of a text that are read.

    Example:
      >>> model = TextClassifier(num_features=2**10, classes=["work", "family", "club"])
      >>> model.shapes()
      {'coefficients': (3, 1025)}
    """

    kind: ClassVar[str] = "text-classifier"
    num_features: int = 2**14  # pyright: ignore[reportIncompatibleVariableOverride]
    text: str | Sequence[str] = "text"
    label: str = "label"
    classes: Any = 2  # becomes a tuple
    word_ngrams: tuple[int, ...] = (1, 2)
    character_ngrams: tuple[int, ...] = (3, 5)
    max_characters: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(text=self.text, label=self.label)
        if not isinstance(self.text, str):
            object.__setattr__(self, "text", tuple(self.text))
        for name in ("word_ngrams", "character_ngrams"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "classes", declared_classes(self.classes))
        check_ngrams(**self._hashing())

    def _hashing(self) -> dict[str, Any]:
        return {
            "num_features": self.num_features,
            "word_ngrams": self.word_ngrams or None,
            "character_ngrams": self.character_ngrams or None,
            "max_characters": self.max_characters,
        }

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        check_text_columns(schema, self.text)
        label = self.label if labels else None
        check_label_column(schema, label, self.classes)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            hashed = hash_texts(text_column(examples.payload, self.text), **self._hashing())
            table = SparseTable(
                graph=examples.graph,
                indices=hashed.indices,
                values=hashed.values,
                offsets=hashed.offsets,
                labels=read_labels(examples.payload, label, self.classes),
            )
            counts = {"truncated_texts": hashed.num_truncated, "empty_texts": hashed.num_empty}
            return self, table, {"unusable_rows": table.num_unusable, **counts}

        return Task(read=read)

    def check_data(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if not {"indices", "values", "labels"} <= shapes.keys():
            raise InputError(f"the model reads sparse rows (`SparseTable`), the data have {', '.join(shapes)}")

    def _clipped_sums(
        self, coefficients: npt.NDArray[np.float32], batch: dict[str, Any], mask: Any, grids: Sequence[Grid]
    ) -> tuple[npt.NDArray[np.int64], int]:
        rows = batch["features"] if "features" in batch else SparseRows.from_padded(batch["indices"], batch["values"])
        return clipped_sparse_sums(coefficients, rows, batch["labels"], mask, grids)

    def _example_features(self) -> str:
        comment = f"# {joined}\n" if (joined := joined_text(self.text)) else ""
        return (
            "import pyarrow as pa\n\n"
            "from coowned.content.hashed_text import ONE, hash_texts\n\n"
            f"{comment}"
            'hashed = hash_texts(pa.array(["Shall we meet on Thursday?"]), '
            f"{', '.join(f'{name}={value!r}' for name, value in self._hashing().items())})\n"
            f"features = np.zeros((1, {self._size}), np.float32)\n"
            "features[0, hashed.indices] = hashed.values / ONE\n"
        )

    def _products(self, weights: Any, batch: dict[str, Any]) -> Any:
        import jax.numpy as jnp

        values = batch["values"].astype(jnp.float32) / ONE  # (batch, width)
        # As a product and a sum, which XLA makes without an array of the size (classes, batch, width).
        return jnp.moveaxis((values * weights[..., batch["indices"]]).sum(axis=-1), -1, 0)

    def predict(self, parameters: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        """Predicts classes; the probability is NaN for a text without words."""
        import jax.numpy as jnp

        found, probability = super().predict(parameters, batch)
        return found, jnp.where((batch["values"] != 0).any(axis=1), probability, jnp.nan)

    def probabilities(self, parameters: dict[str, Any], batch: dict[str, Any]) -> Any:
        import jax.numpy as jnp

        some = (batch["values"] != 0).any(axis=1, keepdims=True)
        return jnp.where(some, super().probabilities(parameters, batch), jnp.nan)

    def worst_case(self) -> "SparseContent":
        from coowned.models.probes import SparseContent

        return SparseContent(self._size, *self._worst_labels())

    def with_canaries(self, users: int, per_user: int, clip_norm: float) -> "tuple[Model, CanaryContent]":
        from coowned.models.probes import sparse_canaries

        return self._widened(self._size + users), sparse_canaries(users, per_user, num_features=self._size)  # pyright: ignore[reportReturnType]
