"""Texts as training data: tokens with a label, or masked anew for every copy of every step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.columns import text_column
from coowned.content.data import Draw, RowTable, random_streams
from coowned.content.derived import Arrays, MappedFiles
from coowned.content.masking import Copies, Masked, Texts, Tokens, copy_texts, mask_texts, max_predictions
from coowned.content.text import TokenizedTexts, Vocabulary, tokenize
from coowned.errors import InputError
from coowned.exact.keys import Purpose

_PUBLIC_SEED = 1_810_048_050  # held-out examples are scored under reproducible masks


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedExamples(RowTable):
    """Tokens of every example of a graph.

    Attributes:
      texts: tokens of every row.
    """

    texts: TokenizedTexts

    def __post_init__(self) -> None:
        self._check_rows(texts=self.texts)

    @classmethod
    def from_examples(
        cls,
        examples: AttributedExamples,
        *,
        text: str | Sequence[str],
        vocabulary: Vocabulary,
        sequence_length: int,
        lowercase: bool = True,
        **more: Any,
    ) -> Self:
        """Tokenizes text columns of the payload, joined by newlines; `more`: the other attributes."""
        column = text_column(examples.payload, text)
        texts = tokenize(column, vocabulary, sequence_length=sequence_length, lowercase=lowercase)
        return cls(graph=examples.graph, texts=texts, **more)

    def stored(self) -> Arrays:
        return {"ids": self.texts.ids, "offsets": self.texts.offsets}

    def with_stored(self, graph: AttributionGraph, arrays: Arrays, mapped: MappedFiles | None) -> Self:
        texts = dataclasses.replace(self.texts, ids=arrays["ids"], offsets=arrays["offsets"])
        return dataclasses.replace(self, graph=graph, texts=texts, mapped=mapped, **self._beside_texts(arrays))

    def _beside_texts(self, arrays: Arrays) -> Arrays:
        return {}

    def counts(self) -> dict[str, int]:
        """Returns counts of what the texts hold: for a private log only."""
        return {"truncated_texts": self.texts.num_truncated, "empty_texts": self.texts.num_empty}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"tokens": (self.texts.sequence_length,), "lengths": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.int32)) | {"weights": np.dtype(np.float32)}

    @property
    def digest(self) -> str:
        return self._digest(self.texts.vocabulary.digest, self.texts.sequence_length)

    def _rows_in(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
        """Returns the rows of examples, which must have been read and fit `out`: compiled code checks no bounds."""
        rows = self._rows_of(np.ascontiguousarray(examples, np.int64))
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.texts)):
            raise InputError(f"examples must be in [0, {self.graph.num_examples})")
        for name, shape in self.shapes().items():
            if len(out[name]) < len(rows) or out[name].shape[1:] != shape:
                raise InputError(f"out[{name!r}] must be of shape ({len(rows)} or more, *{shape})")
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable(TokenizedExamples):
    """Token data for masked language modelling: `fill` masks the tokens.

    Masks of a training step follow from (run key, step, row in the whole table, copy number), those of an evaluation
    from the row alone: every model is then compared on the same ones. A text without tokens has length 0 and weights 0:
    its example is drawn and counted like any other, and adds nothing.

    Guarantees:
      - `fill` writes the tokens of row `rows[i]` for example i, in whatever part of the table.
        (test_fill_gives_the_tokens, test_part_equals_the_whole)
      - Masks are new in every step and every copy, and the same whenever they are asked for.
        (test_masks_are_new_for_every_step_and_copy)
      - What one example gets does not depend on what others hold.   (test_examples_do_not_depend_on_each_other)
      - Two tables with other tokens, rows, ids or attribution have other digests.   (test_token_digest_follows_content)
    Cost: `fill` takes some microseconds a copy, without Python's lock.

    Example:
      >>> from coowned import from_table
      >>> examples = from_table({"users": [["a"], ["b"]], "text": ["hello there", "hello"]})
      >>> vocabulary = Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there"))
      >>> table = TokenTable.from_examples(examples, text="text", vocabulary=vocabulary, sequence_length=8)
      >>> table.shapes()
      {'tokens': (8,), 'lengths': (), 'positions': (2,), 'targets': (2,), 'weights': (2,)}
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        most = max_predictions(self.texts.sequence_length)
        return {**super().shapes(), "positions": (most,), "targets": (most,), "weights": (most,)}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_in(examples, out)
        key, copy_numbers = random_streams(draw, Purpose.MASKS, count=len(rows), public_seed=_PUBLIC_SEED)
        vocabulary = self.texts.vocabulary
        tokens = Tokens(vocabulary.mask_id, vocabulary.pad_id, vocabulary.size)
        masked = Masked(**{name: out[name] for name in self.shapes()})
        mask_texts(key, Texts(self.texts.ids, self.texts.offsets), Copies(rows, copy_numbers), tokens, masked)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LabelledTokenTable(TokenizedExamples):
    """Tokens with the index of a class.

    An example without a text, or whose label is none of the classes, has the weight 0: it is drawn and counted like any
    other, and adds nothing.

    Guarantees:
      - `fill` gives tokens and label of row `rows[i]` for example i, in every step alike.
        (test_labelled_fill_gives_tokens_and_labels)
      - Two tables with other labels have other digests.   (test_labelled_digest_follows_the_labels)

    Attributes:
      labels: (rows of texts,) float32, NaN where it is none of the classes.

    Example:
      >>> from coowned import from_table
      >>> from coowned.content.columns import read_labels
      >>> examples = from_table({"users": [["a"], ["b"]], "text": ["hello", "there"], "y": ["ham", "eggs"]})
      >>> vocabulary = Vocabulary(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "there"))
      >>> labels = read_labels(examples.payload, "y", ["spam", "ham"])
      >>> table = LabelledTokenTable.from_examples(
      ...     examples, text="text", vocabulary=vocabulary, sequence_length=8, labels=labels
      ... )
      >>> table.labels, table.counts()["unusable_labels"]
      (array([ 1., nan], dtype=float32), 1)
    """

    labels: npt.NDArray[np.float32] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "labels", np.ascontiguousarray(self.labels, np.float32))
        validate.same_length(len(self.texts), labels=self.labels)

    def stored(self) -> Arrays:
        return {**super().stored(), "labels": self.labels}

    def _beside_texts(self, arrays: Arrays) -> Arrays:
        return {"labels": arrays["labels"]}

    def counts(self) -> dict[str, int]:
        return {**super().counts(), "unusable_labels": int(np.isnan(self.labels).sum())}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "labels": (), "weights": ()}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return {**super().dtypes(), "labels": np.dtype(np.float32)}

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_in(examples, out)
        batch = {name: array[: len(rows)] for name, array in out.items()}
        texts = self.texts
        copy_texts(texts.ids, texts.offsets, rows, texts.vocabulary.pad_id, batch["tokens"], batch["lengths"])
        batch["labels"][:] = self.labels[rows]
        batch["weights"][:] = np.isfinite(batch["labels"]) & (batch["lengths"] > 0)
