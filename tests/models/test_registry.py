import pytest

from coowned import codec
from coowned.errors import InputError
from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel
from coowned.models.linear_regression import LinearRegression
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.model import Specification
from coowned.models.registry import MODELS, model_class, model_from_description
from coowned.models.text_classifier import TextClassifier


@pytest.mark.parametrize(
    "model",
    [
        LogisticRegression(num_features=7),
        BertModel.masked_lm(config=BertConfig(vocab_size=50, hidden_size=8), sequence_length=16, microbatch=3),
        LogisticRegression(features=["a", "b"], label="c", classes=["x", "y", "z"]),
        LinearRegression(num_features=7, target_bound=3.5),
        TextClassifier(text=["a", "b"], num_features=64, classes=5, character_ngrams=()),
    ],
)
def test_models_are_read_back(model):
    assert model_from_description(codec.to_plain(model.describe())) == model


def test_unknown_models_are_refused():
    with pytest.raises(InputError, match="Unknown kind of model 'forest'"):
        model_from_description({"kind": "forest"})


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_are_named_once(kind):
    assert model_class(kind).kind == kind
    assert issubclass(model_class(kind), Specification)
