"""What a configuration trains on what: the model, the content of the examples, and where training starts."""

import dataclasses
import json
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

NO_GUARANTEE_FORMAT = "coowned-no-guarantee-1"


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
    """

    model: Model
    data: Divisible
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def graph(self) -> AttributionGraph:
        return self.data.graph


def make_task(config: TrainConfig, examples: AttributedExamples) -> Task:
    """The task a configuration describes.

    Guarantees:
      - A private run starts from no weights that a run of this package made from data it did not declare public.
        (test_checkpoint_of_private_data_is_refused)
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
        if config.privacy.is_private:
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
    return Task(model=model, data=table, initial=initial, files=files)


def refuse_private_checkpoint(checkpoint: Path) -> None:
    """Refuses, with InputError, weights that a run of this package made from data not declared public.

    Where weights come from elsewhere nothing can be told: that they were made without these people's data is then the
    caller's word.
    """
    try:
        stored = json.loads((checkpoint / "guarantee.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except ValueError:
        raise InputError(f"{checkpoint / 'guarantee.json'}: not JSON; the checkpoint is not a run's folder") from None
    if isinstance(stored, dict) and stored.get("format") == NO_GUARANTEE_FORMAT:
        if stored.get("public") is True:
            return
        raise InputError(
            f"{checkpoint}: trained without privacy on data not declared public: a model that starts there has no "
            "guarantee; start from a run with [privacy] public = true"
        )
    raise InputError(
        f"{checkpoint}: has a guarantee of its own, which this run's would have to be composed with; train in Python "
        "with train(initial=...) and say what compose([...]) gives"
    )
