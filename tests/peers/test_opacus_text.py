"""Opacus on transformers' masked-LM BERT: which of its modes run, how the others fail, and that it clips as we do.

Opacus is given every help: positions and types for each example, the head only where something is predicted, and, in
`make_model(one_bias=True)`, a head without the second name of its bias, which stops three of the four modes.
"""

import numpy as np
import pytest

from coowned.models.bert_files import BertConfig
from coowned.models.bert_model import BertModel

CONFIG = BertConfig(vocab_size=60, hidden_size=16, intermediate_size=24, max_position_embeddings=20)
LENGTH, PLACES, SIZE, CLIP_NORM = 12, 3, 6, 0.1


def make_model(*, one_bias: bool):
    """transformers' model, with its head at given places only."""
    import torch
    from transformers import BertConfig as PeerConfig
    from transformers import BertForMaskedLM

    class AtPlaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            settings = {**CONFIG.__dict__, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model = BertForMaskedLM(PeerConfig(**settings))
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
            if one_bias:
                del self.model.cls.predictions.bias  # the decoder has the same

        def forward(self, tokens, orders, places):
            rows = self.model.bert(
                input_ids=tokens,
                position_ids=orders,
                token_type_ids=torch.zeros_like(tokens),
                attention_mask=torch.ones_like(tokens),
            ).last_hidden_state
            return self.model.cls(torch.gather(rows, 1, places[:, :, None].expand(-1, -1, rows.shape[-1])))

    return AtPlaces().train()


def make_loss():
    import torch

    class MeanOverPlaces(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reduction = "mean"

        def forward(self, scores, targets):
            own = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)
            return own if self.reduction == "none" else own.mean()

    return MeanOverPlaces()


def inputs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        # Not id 0: torch leaves its embedding out (padding_idx), Opacus' hooks do not.
        "tokens": generator.integers(1, 60, (SIZE, LENGTH), np.int32),
        "places": np.stack([generator.permutation(LENGTH)[:PLACES] for _ in range(SIZE)]).astype(np.int32),
        "targets": generator.integers(1, 60, (SIZE, PLACES), np.int32),
    }


def one_step(mode: str, *, one_bias: bool):
    """The model after one private backward pass of Opacus without noise; its .grad is the mean of clipped gradients."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    given = {name: torch.tensor(array).long() for name, array in inputs().items()}
    module, loss = make_model(one_bias=one_bias), make_loss()
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, *rest = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(given["tokens"]), batch_size=SIZE),
        criterion=loss,
        noise_multiplier=0.0,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = rest[0] if mode == "ghost" else loss
    orders = torch.arange(LENGTH).repeat(SIZE, 1)
    criterion(private(given["tokens"], orders, given["places"]), given["targets"]).backward()
    optimizer.step()
    return module.model


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_modes_that_fail_on_the_model_as_it_is(mode):
    with pytest.raises(RuntimeError, match="expected device meta"):
        one_step(mode, one_bias=False)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_ghost_clipping_refuses_a_tied_embedding():
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported with Ghost Clipping"):
        one_step("ghost", one_bias=True)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_modes_that_run_clip_as_we_do(mode):

    peer = one_step(mode, one_bias=True)
    theirs = {name: parameter.grad.numpy() * SIZE for name, parameter in peer.named_parameters()}
    theirs["cls.predictions.bias"] = theirs.pop("cls.predictions.decoder.bias")
    stored = {name: parameter.detach().numpy() for name, parameter in peer.named_parameters()}
    model = BertModel.masked_lm(config=CONFIG, sequence_length=LENGTH, max_predictions=PLACES)
    given = inputs()
    batch = {
        "tokens": given["tokens"],
        "lengths": np.full(SIZE, LENGTH, np.int32),
        "positions": given["places"],
        "targets": given["targets"],
        "weights": np.full((SIZE, PLACES), 1 / PLACES, np.float32),
    }
    mask = np.ones(SIZE, bool)
    grid = model.grid(CLIP_NORM)
    own = {name: array[None] for name, array in model.from_arrays(stored).items()}
    sums, clipped = model.clipped_sum(own, batch, mask, [grid])
    ours = {name: total[0] * grid.unit for name, total in sums.items()}
    assert int(clipped) == SIZE
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=1e-5 * SIZE * CLIP_NORM, err_msg=name)
