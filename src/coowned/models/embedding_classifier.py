"""A linear classifier of texts on the embeddings of a frozen public encoder."""

import dataclasses
from typing import ClassVar

from coowned.models.embeddings import EmbeddingModel
from coowned.models.logistic_regression import LogisticRegression


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingClassifier(EmbeddingModel, LogisticRegression):
    """A linear classifier on text embeddings of a public BERT-type encoder, scaled to length 1.

    The encoder is a folder from Hugging Face or sentence-transformers. It is run once a text, stays as it is, and is
    kept with the run: a run's folder and an exported model predict wherever they are.

    What it is not: private for text that the encoder was trained on. There the encoder is not public, and nothing is
    promised for these texts; the statement names the encoder and says what was declared of it.

    Guarantees:
      - The clipped gradient is that of `LogisticRegression` on the embeddings.   (test_it_is_the_linear_model_on_rows)
      - Text is read, and embedded, after selection, one example by itself.   (test_unselected_texts_are_not_embedded,
        test_a_row_depends_on_its_own_text_alone)
      - The statement names the encoder's weights by their SHA-256 and what was declared of them.
        (test_the_statement_names_the_encoder)
      - An exported model, and a run's folder that was moved, predict without the encoder's folder.
        (test_a_run_keeps_its_encoder)
      - Weights that a run of this package made from private data are refused, as is another digest than the declared
        one.   (test_encoders_that_are_refused)

    Attributes:
      text: the column, or columns that are read one after another.
      label: the column with the label.
      classes: what labels there are, as the data spell them, or how many (0, 1, ...); default: 0 and 1.
      encoder: the folder: config.json, model.safetensors, tokenizer.json or vocab.txt, and modules.json with
        1_Pooling/config.json where sentence-transformers saved it (else the mean of all tokens is taken).
      encoder_trained_on: in words for the statement: on what text the encoder was trained, as far as you know.
      encoder_sha256: that model.safetensors must have; default: whatever it has.
      sequence_length: tokens of a text that are read; default: as the encoder's files say.
      num_features: as the encoder's files say.

    Example:
      >>> EmbeddingClassifier(text="body", label="folder", classes=["work", "family"], encoder="MiniLM").classes
      ('work', 'family')
    """

    kind: ClassVar[str] = "embedding-classifier"
