import jax.numpy as jnp
import numpy as np

from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel

MODEL = BertModel.masked_lm(
    config=BertConfig(
        vocab_size=20, hidden_size=4, num_hidden_layers=1, intermediate_size=4, max_position_embeddings=8
    ),
    sequence_length=8,
)


def test_a_text_without_words_has_no_loss():
    rows = 2
    batch = {
        "tokens": np.full((rows, 8), 5, np.int32),
        "lengths": np.array([8, 0], np.int32),
        "positions": np.ones((rows, MODEL.head.max_predictions), np.int32),
        "targets": np.full((rows, MODEL.head.max_predictions), 6, np.int32),
        "weights": np.zeros((rows, MODEL.head.max_predictions), np.float32),
    }
    batch["weights"][0] = 1 / MODEL.head.max_predictions
    parameters = {name: jnp.asarray(array) for name, array in MODEL.initial().items()}
    losses, right = MODEL.losses(parameters, batch)
    assert np.isfinite(losses[0])
    assert np.isnan(losses[1])  # left out of every mean
    assert not right[1]
