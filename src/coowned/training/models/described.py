"""A model from what its `describe` gave."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from coowned.errors import InputError
from coowned.training.model import Model
from coowned.training.models.logistic_regression import LogisticRegression


def model_from_description(described: Mapping[str, Any]) -> Model:
    """The model that run.json names.

    Guarantees:
      - `model_from_description(model.describe())` is the model.   (test_models_are_read_back)

    >>> model_from_description({"kind": "logistic-regression", "num_features": 3})
    LogisticRegression(num_features=3)
    """
    settings = {name: value for name, value in described.items() if name != "kind"}
    if described.get("kind") == "logistic-regression":
        return LogisticRegression(**settings)
    if described.get("kind") == "bert-masked-lm":
        from coowned.training.models.bert import BertConfig, BertMaskedLM

        sizes = {field.name for field in dataclasses.fields(BertConfig)}
        config = BertConfig(**{name: value for name, value in settings.items() if name in sizes})
        return BertMaskedLM(config=config, **{name: value for name, value in settings.items() if name not in sizes})
    raise InputError(f"Unknown kind of model {described.get('kind')!r}; was it trained by another version?")
