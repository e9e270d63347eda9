import pytest

from coowned.errors import InputError
from coowned.training.models.bert import BertConfig, BertMaskedLM
from coowned.training.models.described import model_from_description
from coowned.training.models.logistic_regression import LogisticRegression


@pytest.mark.parametrize(
    "model",
    [
        LogisticRegression(num_features=7),
        BertMaskedLM(config=BertConfig(vocab_size=50, hidden_size=8), sequence_length=16, microbatch=3),
    ],
)
def test_models_are_read_back(model):
    assert model_from_description(model.describe()) == model


def test_unknown_models_are_refused():
    with pytest.raises(InputError, match="Unknown kind of model 'forest'"):
        model_from_description({"kind": "forest"})
