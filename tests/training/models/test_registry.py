import pytest

from coowned.errors import InputError
from coowned.training.models.bert_files import BertConfig
from coowned.training.models.bert_model import BertModel
from coowned.training.models.logistic_regression import LogisticRegression
from coowned.training.models.registry import MODELS, model_class, model_from_description
from coowned.training.tasks import Specification


@pytest.mark.parametrize(
    "model",
    [
        LogisticRegression(num_features=7),
        BertModel.masked_lm(config=BertConfig(vocab_size=50, hidden_size=8), sequence_length=16, microbatch=3),
    ],
)
def test_models_are_read_back(model):
    assert model_from_description(model.describe()) == model


def test_unknown_models_are_refused():
    with pytest.raises(InputError, match="Unknown kind of model 'forest'"):
        model_from_description({"kind": "forest"})


@pytest.mark.parametrize("kind", MODELS)
def test_kinds_are_named_once(kind):
    assert model_class(kind).kind == kind
    assert issubclass(model_class(kind), Specification)
