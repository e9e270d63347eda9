"""BERT on texts: masked language modelling and classification."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pyarrow as pa

from coowned import validate
from coowned.attribution.examples import AttributedExamples
from coowned.content.columns import check_label_column, check_text_columns, declared_classes, joined_text, read_labels
from coowned.content.splits import TEXT_FRACTIONS
from coowned.content.text import Vocabulary
from coowned.content.token_table import LabelledTokenTable, TokenTable, max_predictions
from coowned.errors import ConfigError, InputError
from coowned.models import bert_files
from coowned.models.bert_files import BertConfig
from coowned.models.model import Model, Specification, Table, Task

if TYPE_CHECKING:
    from coowned.models.bert_network import Head


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bert(Specification):
    """Settings and reading that both kinds share.

    Guarantees:
      - A run with a guarantee, or on public data, starts from no weights that a run of this package made from data it
        did not declare public, wherever they were copied.   (test_checkpoint_of_private_data_is_refused,
        test_copied_weights_of_private_data_are_refused)
      - Files that are missing are refused before anything is read, with where to get them.
        (test_missing_files_are_refused_before_anything_is_read)
    """

    text: str | Sequence[str] = "text"
    vocabulary: str | None = None
    checkpoint: str | None = None
    architecture: str | None = None
    lowercase: bool = True
    sequence_length: int = 512
    microbatch: int | None = None
    trainable: Sequence[str] | None = None

    def __post_init__(self) -> None:
        validate.integer(at_least=3, sequence_length=self.sequence_length)
        validate.column_names(text=self.text)
        if self.microbatch is not None:
            validate.positive(microbatch=self.microbatch)
        if self.trainable is not None:
            object.__setattr__(self, "trainable", tuple(self.trainable))
            if not self.trainable:
                raise InputError("trainable is empty; name patterns of parameters, or leave it out to train them all")
        if self.vocabulary is None and self.checkpoint is None:
            raise InputError(f"needs vocabulary or checkpoint; {bert_files.GET_A_VOCABULARY}")
        if self.architecture is not None and self.checkpoint is not None:
            raise InputError("a checkpoint has its own architecture; give only one of the two")

    @abc.abstractmethod
    def head(self) -> "Head":
        """Returns the head of the model."""

    @abc.abstractmethod
    def table(self, examples: AttributedExamples, *, labels: bool, **tokens: Any) -> TokenTable | LabelledTokenTable:
        """Returns the prediction targets of the examples with their tokens, for `TokenizedExamples.from_examples`."""

    def check_files(self, folder: Path) -> None:
        if self.checkpoint is not None:
            bert_files.check_bert_folder(folder / self.checkpoint)
        if self.vocabulary is not None and not (folder / self.vocabulary).is_file():
            raise InputError(f"{folder / self.vocabulary}: no such file; {bert_files.GET_A_VOCABULARY}")
        if self.architecture is not None and not (folder / self.architecture).is_file():
            raise InputError(
                f"{folder / self.architecture}: no such file; give the config.json of a BERT, or omit architecture "
                "for BERT-Tiny"
            )

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        from coowned.models.bert_model import BertModel

        check_text_columns(schema, self.text)
        self.check_files(folder)
        head, arrays = self.head(), None
        vocabulary_file = folder / (self.vocabulary or f"{self.checkpoint}/{bert_files.VOCABULARY_FILE}")
        vocabulary = Vocabulary.read(vocabulary_file)
        if self.checkpoint is not None:
            if is_private:
                bert_files.refuse_private_checkpoint(folder / self.checkpoint)
            architecture, arrays = bert_files.read_bert_folder(folder / self.checkpoint, head)
        elif self.architecture is not None:
            architecture = bert_files.read_config(folder / self.architecture)
        else:
            architecture = BertConfig(vocab_size=vocabulary.size)
        if architecture.vocab_size < vocabulary.size:
            raise ConfigError(
                f"{vocabulary_file}: {vocabulary.size:,} tokens, but the model has room for "
                f"{architecture.vocab_size:,}; use the vocabulary of that model"
            )
        if architecture.max_position_embeddings < self.sequence_length:
            raise ConfigError(
                f"[model] sequence_length is {self.sequence_length}, but the model has "
                f"{architecture.max_position_embeddings} positions; use at most that many"
            )
        model = BertModel(
            config=architecture, head=head, sequence_length=self.sequence_length, microbatch=self.microbatch or 0
        )
        initial = None if arrays is None else model.from_arrays(arrays)
        if self.trainable is not None:
            model, initial = model.training_only(self.trainable, initial or model.initial())

        def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
            table = self.table(
                examples,
                labels=labels,
                text=self.text,
                vocabulary=vocabulary,
                sequence_length=self.sequence_length,
                lowercase=self.lowercase,
            )
            return model, table, table.counts()

        files = {
            bert_files.CONFIG_FILE: bert_files.describe_config(architecture, head).encode(),
            bert_files.VOCABULARY_FILE: vocabulary_file.read_bytes(),
        }
        return Task(read=read, initial=initial, files=files)

    def from_run(self, folder: Path) -> Self:
        names = bert_files.VOCABULARY_FILE, bert_files.CONFIG_FILE
        vocabulary, architecture = (str(folder.absolute() / name) for name in names)
        return dataclasses.replace(
            self, checkpoint=None, vocabulary=vocabulary, architecture=architecture, trainable=None
        )

    def usage(self) -> str:
        head, shown = self.head(), "scores.shape"
        layout = f"The folder has the layout of Hugging Face's transformers. {joined_text(self.text)}"
        if head.classes is not None:
            shown = "[model.config.id2label[number] for number in scores.argmax(-1).tolist()]"
        return (
            f"{layout.rstrip()}\n\n"
            "```python\n"
            f"from transformers import {head.architecture}, BertTokenizerFast\n\n"
            f'tokenizer = BertTokenizerFast(vocab="vocab.txt", do_lower_case={self.lowercase})\n'
            f'model = {head.architecture}.from_pretrained(".").eval()\n'
            'texts = ["Shall we meet on Thursday?"]\n'
            f"tokens = tokenizer(texts, truncation=True, max_length={self.sequence_length}, padding=True, "
            'return_tensors="pt")\n'
            "scores = model(**tokens).logits\n"
            f"print({shown})\n"
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        from coowned.models.bert_model import BertModel

        return BertModel.from_description(cls.kind, **described)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertMaskedLM(_Bert):
    """A BERT trained on masked language modelling.

    Attributes:
      text: the column, or columns that are read one after another.
      vocabulary: a vocab.txt; default: the checkpoint's.
      checkpoint: a folder in Hugging Face's layout, or a finished run on public data, to start from.
      architecture: a config.json of another size than BERT-Tiny's, to start from scratch.
      lowercase: false for a vocabulary with capitals and accents ("cased").
      sequence_length: tokens of a text that are read.
      microbatch: examples that are differentiated at once: memory grows with it, results do not depend on it.
      trainable: patterns of names of parameters, such as "bert.encoder.*" or "*.bias": the others stay as they start,
        without clipping and noise. Default: all are trained.

    Example:
      >>> BertMaskedLM(text="abstract")
      Traceback (most recent call last):
        ...
      coowned.errors.InputError: needs vocabulary or checkpoint; a vocabulary is a vocab.txt that was not made from ...
    """

    kind: ClassVar[str] = "bert-masked-lm"
    splits: ClassVar[tuple[float, float, float]] = TEXT_FRACTIONS

    def head(self) -> "Head":
        from coowned.models.bert_network import MaskedLMHead

        return MaskedLMHead(max_predictions=max_predictions(self.sequence_length))

    def table(self, examples: AttributedExamples, *, labels: bool, **tokens: Any) -> TokenTable:
        return TokenTable.from_examples(examples, **tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertClassifier(_Bert):
    """A BERT text classifier: a pooler and a linear layer on the first token.

    It starts from the same checkpoints as the masked model; a head that the checkpoint does not have starts anew, from
    a public seed.

    Attributes:
      text: the column, or columns that are read one after another.
      label: the column with the class.
      classes: as the data spell them, or how many there are (0, 1, ...). They are declared, never collected from the
        data. An example with another label has no influence.
      vocabulary, checkpoint, architecture, lowercase, sequence_length, microbatch, trainable: as for `BertMaskedLM`.

    Example:
      >>> BertClassifier(text="body", label="folder", classes=["spam", "ham"], checkpoint="bert-tiny").classes
      ('spam', 'ham')
    """

    kind: ClassVar[str] = "bert-classifier"
    label: str = "label"
    classes: Any = 2  # becomes a tuple
    sequence_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        validate.column_names(label=self.label)
        object.__setattr__(self, "classes", declared_classes(self.classes))

    def head(self) -> "Head":
        from coowned.models.bert_network import ClassifierHead

        return ClassifierHead(classes=self.classes)

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        check_label_column(schema, self.label if labels else None, self.classes)
        return super().task(schema, folder=folder, is_private=is_private, labels=labels)

    def table(self, examples: AttributedExamples, *, labels: bool, **tokens: Any) -> LabelledTokenTable:
        found = read_labels(examples.payload, self.label if labels else None, self.classes)
        return LabelledTokenTable.from_examples(examples, **tokens, labels=found)
