"""The registry of models: one kind, one file, one class, one line here."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError

if TYPE_CHECKING:  # the package takes public names from here, and is imported in no time
    from coowned.models.model import Model, Specification

MODELS = {
    "logistic-regression": "coowned.models.logistic_regression.LogisticRegression",
    "linear-regression": "coowned.models.linear_regression.LinearRegression",
    "text-classifier": "coowned.models.text_classifier.TextClassifier",
    "embedding-classifier": "coowned.models.embedding_classifier.EmbeddingClassifier",
    "embedding-regression": "coowned.models.embedding_regression.EmbeddingRegression",
    "bert-masked-lm": "coowned.models.bert.BertMaskedLM",
    "bert-classifier": "coowned.models.bert.BertClassifier",
    "python": "coowned.models.python_model.PythonModel",
    "torch": "coowned.torch.model.TorchFactory",
}
"""The dotted path of every specification's class by its kind; importing none of them."""
IN_FILES = ("python", "torch")
"""The kinds that name a file of Python in a configuration; their classes are no public names."""
USUAL_MODEL = "logistic-regression"


def model_class(kind: str) -> "type[Specification]":
    """Imports and returns the specification of a kind; raises KeyError if there is none.

    >>> model_class("logistic-regression").__name__
    'LogisticRegression'
    """
    module, _, name = MODELS[kind].rpartition(".")
    return getattr(importlib.import_module(module), name)


def model_from_description(described: Mapping[str, Any]) -> "Model":
    """Rebuilds the model described in run.json.

    Guarantees:
      - `model_from_description(model.describe())` is the model.   (test_models_are_read_back)

    >>> model_from_description({"kind": "logistic-regression", "num_features": 3})
    LogisticRegression(num_features=3, features='features', label='label', classes=(0, 1))
    """
    kind = described.get("kind")
    if kind not in MODELS:
        raise InputError(f"Unknown kind of model {kind!r}; was it trained by another version?")
    return model_class(kind).from_description(**{name: value for name, value in described.items() if name != "kind"})
