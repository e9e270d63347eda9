"""What a configuration trains: the model, its content once S is chosen, and where training starts."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.errors import ConfigError, InputError
from coowned.training.config import BertSection, LogisticSection, TrainConfig
from coowned.training.data import FeatureTable, TrainingData, check_columns
from coowned.training.model import Model
from coowned.training.run import NO_GUARANTEE, PUBLIC, stated_origins
from coowned.training.token_table import TokenTable, check_text_columns

Table = FeatureTable | TokenTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """A model and what it is trained and evaluated on.

    Attributes:
      model: what is trained.
      parts: the data of each split.
      private_log: counts of what the examples hold, for those who may see the data alone.
    """

    model: Model
    parts: Mapping[str, TrainingData]
    private_log: Mapping[str, int] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a configuration trains, before any content is read.

    Attributes:
      read: makes a table of some examples, the model for it, and counts of what they hold.
      initial: where training starts; None for the model's own start.
      files: name and content of what belongs beside model.safetensors, so that others can open it.
    """

    read: Callable[[AttributedExamples], tuple[Model, Table, dict[str, int]]]
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def load(
        self,
        examples: AttributedExamples,
        splits: Mapping[str, npt.NDArray[np.int64]],
        copies: npt.NDArray[Any] | None = None,
    ) -> Content:
        """Reads the content of what was selected and of what is held out; no other row is looked at.

        Guarantees:
          - Content of examples of the train split that were not selected is not read.
            (test_content_is_read_after_selection, test_unselected_rows_are_not_read)
          - Held-out examples have the same rows whatever was selected, so that all models are compared on the same
            masks.   (test_held_out_rows_do_not_depend_on_the_selection)

        Args:
          examples: with the payload.
          splits: examples of "train" and of the held-out splits.
          copies: (examples of the train split,) how often each was selected; None reads them all.
        """
        train = splits["train"]
        used = train if copies is None else train[np.asarray(copies) > 0]
        wanted = np.concatenate([*(part for name, part in splits.items() if name != "train"), used])
        rows = np.full(examples.graph.num_examples, -1, np.int64)
        rows[wanted] = np.arange(wanted.size)
        payload = examples.payload.take(pa.array(wanted))
        few = dataclasses.replace(examples, graph=examples.graph.subgraph(wanted), payload=payload)
        model, table, counts = self.read(few)
        parts = {
            name: dataclasses.replace(table, graph=examples.graph.subgraph(part), rows=rows[part])
            for name, part in splits.items()
        }
        return Content(model=model, parts=parts, private_log=counts)


def make_task(config: TrainConfig, schema: pa.Schema) -> Task:
    """The task a configuration describes, for data of this schema; nothing but the schema can refuse it later.

    Guarantees:
      - A run with a guarantee, or on public data, starts from no weights that a run of this package made from data it
        did not declare public, wherever they were copied.   (test_checkpoint_of_private_data_is_refused,
        test_copied_weights_of_private_data_are_refused)
    """
    if isinstance(config.model, LogisticSection):
        return _logistic(config.model, schema)
    return _bert(config, config.model, schema)


def _logistic(section: LogisticSection, schema: pa.Schema) -> Task:
    from coowned.training.models.logistic_regression import LogisticRegression

    check_columns(schema, features=section.features, label=section.label)

    def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
        table = FeatureTable.from_examples(examples, features=section.features, label=section.label)
        model = LogisticRegression(num_features=table.features.shape[1])
        return model, table, {"unusable_rows": table.num_unusable}

    return Task(read=read)


def _bert(config: TrainConfig, section: BertSection, schema: pa.Schema) -> Task:
    from coowned.training.models.bert import BertConfig, BertMaskedLM
    from coowned.training.models.bert_files import describe_config, read_bert_folder, read_config
    from coowned.training.text import Vocabulary

    check_text_columns(schema, section.text)
    arrays = None
    checkpoint = None if section.checkpoint is None else config.path_of(section.checkpoint)
    vocabulary_file = checkpoint / "vocab.txt" if checkpoint is not None else None
    if section.vocabulary is not None:
        vocabulary_file = config.path_of(section.vocabulary)
    assert vocabulary_file is not None
    vocabulary = Vocabulary.read(vocabulary_file)
    if checkpoint is not None:
        if config.privacy.is_private or config.privacy.public:  # else the next run would take it for public
            refuse_private_checkpoint(checkpoint)
        architecture, arrays = read_bert_folder(checkpoint)
    elif section.architecture is not None:
        architecture = read_config(config.path_of(section.architecture))
    else:
        architecture = BertConfig(vocab_size=vocabulary.size)
    if architecture.vocab_size < vocabulary.size:
        raise ConfigError(
            f"{vocabulary_file}: {vocabulary.size:,} tokens, but the model has room for {architecture.vocab_size:,}; "
            "use the vocabulary the model was made with"
        )
    if architecture.max_position_embeddings < section.sequence_length:
        raise ConfigError(
            f"[model] sequence_length is {section.sequence_length}, but the model has "
            f"{architecture.max_position_embeddings} positions; use at most that many"
        )
    settings: dict[str, Any] = {} if section.microbatch is None else {"microbatch": section.microbatch}
    model = BertMaskedLM(config=architecture, sequence_length=section.sequence_length, **settings)

    def read(examples: AttributedExamples) -> tuple[Model, Table, dict[str, int]]:
        table = TokenTable.from_examples(
            examples,
            text=section.text,
            vocabulary=vocabulary,
            sequence_length=section.sequence_length,
            lowercase=section.lowercase,
        )
        return model, table, {"truncated_texts": table.texts.num_truncated, "empty_texts": table.texts.num_empty}

    files = {"config.json": describe_config(architecture).encode(), "vocab.txt": vocabulary_file.read_bytes()}
    return Task(read=read, initial=None if arrays is None else model.from_arrays(arrays), files=files)


def refuse_private_checkpoint(checkpoint: Path) -> None:
    """Refuses, with InputError, weights that a run of this package made from data not declared public.

    The run's guarantee.json and the statement inside its weights are read: either is enough to refuse. Where weights
    come from elsewhere nothing can be told: that they were made without these people's data is then the caller's word.
    """
    for statement in stated_origins(checkpoint):
        if statement == NO_GUARANTEE:
            raise InputError(
                f"{checkpoint}: trained without privacy on data not declared public: a model that starts there has no "
                "guarantee; start from a run with [privacy] public = true"
            )
        if statement != PUBLIC:
            raise InputError(
                f"{checkpoint}: has a guarantee of its own, which this run's would have to be composed with; train in "
                "Python with train(initial=...) and say what compose([...]) gives"
            )
