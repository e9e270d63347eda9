"""What a configuration trains on what: the model, the content of the examples, and where training starts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.errors import ConfigError, InputError
from coowned.training.config import BertSection, LogisticSection, TrainConfig
from coowned.training.data import FeatureTable, TrainingData
from coowned.training.model import Model
from coowned.training.run import NO_GUARANTEE, PUBLIC, stated_origins


class Divisible(TrainingData, Protocol):
    """Content of which a part can be had."""

    def subset(self, examples: npt.NDArray[np.int64]) -> Self: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model and the content it is trained on.

    Attributes:
      model: what is trained.
      data: content for all examples, those of every split.
      initial: where training starts; None for the model's own start.
      files: name and content of what belongs beside model.safetensors, so that others can open it.
      private_log: counts of what the examples hold, for those who may see the data alone.
    """

    model: Model
    data: Divisible
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    private_log: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def graph(self) -> AttributionGraph:
        return self.data.graph


def make_task(config: TrainConfig, examples: AttributedExamples) -> Task:
    """The task a configuration describes.

    Guarantees:
      - A run with a guarantee, or on public data, starts from no weights that a run of this package made from data it
        did not declare public, wherever they were copied.   (test_checkpoint_of_private_data_is_refused,
        test_copied_weights_of_private_data_are_refused)
    """
    if isinstance(config.model, LogisticSection):
        return _logistic(config.model, examples)
    return _bert(config, config.model, examples)


def _logistic(section: LogisticSection, examples: AttributedExamples) -> Task:
    from coowned.training.models.logistic_regression import LogisticRegression

    table = FeatureTable.from_examples(examples, features=section.features, label=section.label)
    return Task(model=LogisticRegression(num_features=table.features.shape[1]), data=table)


def _bert(config: TrainConfig, section: BertSection, examples: AttributedExamples) -> Task:
    from coowned.training.models.bert import BertConfig, BertMaskedLM
    from coowned.training.models.bert_files import describe_config, read_bert_folder, read_config
    from coowned.training.text import Vocabulary
    from coowned.training.token_table import TokenTable

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
    table = TokenTable.from_examples(
        examples,
        text=section.text,
        vocabulary=vocabulary,
        sequence_length=section.sequence_length,
        lowercase=section.lowercase,
    )
    files = {"config.json": describe_config(architecture).encode(), "vocab.txt": vocabulary_file.read_bytes()}
    initial = None if arrays is None else model.from_arrays(arrays)
    counts = {"truncated_texts": table.texts.num_truncated, "empty_texts": table.texts.num_empty}
    return Task(model=model, data=table, initial=initial, files=files, private_log=counts)


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
