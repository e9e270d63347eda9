"""Shared parts of linear models on embeddings: texts, and the frozen public encoder that embeds them."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.content.columns import check_label_column, check_text_columns, joined_text, read_labels, text_column
from coowned.content.data import FeatureTable
from coowned.errors import InputError
from coowned.models import bert_files
from coowned.models.linear import FeatureModel
from coowned.models.model import Model, Table, Task
from coowned.models.text_encoder import GET_AN_ENCODER, check_encoder_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingModel(FeatureModel):
    """A linear model on embeddings of length 1.

    An embedding is a public function of one text: each person's texts make rows of their own examples alone, so that
    accounting is that of any linear model. A text without words is a row without influence.
    """

    features: ClassVar[str] = "embedding"  # pyright: ignore[reportIncompatibleVariableOverride]
    text: str | Sequence[str] = "text"
    encoder: str = ""
    encoder_trained_on: str = ""
    encoder_sha256: str = ""
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(text=self.text)
        if not isinstance(self.text, str):
            object.__setattr__(self, "text", tuple(self.text))
        if self.sequence_length is not None:
            validate.integer(at_least=3, sequence_length=self.sequence_length)
        if not isinstance(self.encoder_trained_on, str) or not self.encoder_trained_on.isprintable():
            raise InputError("encoder_trained_on must be one line of text: what the encoder was trained on")
        if not re.fullmatch("([0-9a-f]{64})?", self.encoder_sha256):
            raise InputError("encoder_sha256 must be 64 digits, as sha256sum prints them for model.safetensors")

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings().items() if value != ""}

    def describe(self) -> dict[str, Any]:
        """Describes the model without the encoder's path; its digest identifies it."""
        return {name: value for name, value in super().describe().items() if name != "encoder"}

    def check_files(self, folder: Path) -> None:
        if not self.encoder:
            raise InputError(f"encoder must name a folder; {GET_AN_ENCODER}")
        check_encoder_folder(folder / self.encoder)

    def from_run(self, folder: Path) -> Self:
        return dataclasses.replace(self, encoder=str(folder.absolute()))

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        from coowned.models.text_encoder import TextEncoder

        label = getattr(self, self.label_field) if labels else None
        check_text_columns(schema, self.text)
        check_label_column(schema, label, self.classes)
        self.check_files(folder)
        if is_private:
            bert_files.refuse_private_checkpoint(folder / self.encoder)
        encoder = TextEncoder.read(folder / self.encoder, sequence_length=self.sequence_length)
        if self.encoder_sha256 not in ("", encoder.files.sha256):
            raise InputError(
                f"{folder / self.encoder}: the weights have the SHA-256 {encoder.files.sha256}, declared is "
                f"{self.encoder_sha256}; give the encoder that was meant"
            )
        model: Any = dataclasses.replace(self, num_features=encoder.width, encoder_sha256=encoder.files.sha256)

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            tokens = encoder.tokenize(text_column(examples.payload, self.text))
            table = FeatureTable(
                graph=examples.graph,
                features=encoder.embed_tokens(tokens),
                labels=read_labels(examples.payload, label, self.classes),
            )
            counts = {"truncated_texts": tokens.num_truncated, "empty_texts": tokens.num_empty}
            return model, table, {"unusable_rows": table.num_unusable, **counts}

        return Task(read=read, files=encoder.files.stored())

    def _widened(self, num_features: int) -> Self:
        return dataclasses.replace(self, num_features=num_features)

    def _example_features(self) -> str:
        comment = f"# {joined}\n" if (joined := joined_text(self.text)) else ""
        return (
            "\nfrom coowned.models.text_encoder import TextEncoder\n\n"
            f"{comment}"
            'features = TextEncoder.read(".").embed(["Shall we meet on Thursday?"])\n'
        )
