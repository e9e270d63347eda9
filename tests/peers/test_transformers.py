"""transformers opens what is written here and gives the same logits, and the other way round."""

import numpy as np
import polars as pl
import pytest
from experiments.private_abstracts import made_up_corpus
from tests.models.test_bert_files import write_bert_folder
from tests.report.readme import run_readme

import coowned as co
from coowned.models.bert_files import BertConfig, read_bert_folder
from coowned.models.bert_model import BertModel
from coowned.models.bert_network import ClassifierHead, MaskedLMHead

CONFIG = BertConfig(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=20,
)
LENGTH, SIZE = 12, 3
HEAD = MaskedLMHead(max_predictions=LENGTH)


def scores_of(config: BertConfig, parameters) -> np.ndarray:
    """(batch, sequence_length, vocabulary) logits of ours at every place."""
    import jax

    from coowned.models import bert_model

    batch = {
        "tokens": tokens(),
        "lengths": lengths(),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (SIZE, 1)),
        "targets": np.zeros((SIZE, LENGTH), np.int32),
        "weights": np.ones((SIZE, LENGTH), np.float32),
    }
    return np.asarray(jax.jit(lambda own: bert_model.scores_of(HEAD, config, own, batch))(parameters))


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60, (SIZE, LENGTH), np.int32)


def lengths() -> np.ndarray:
    return np.int32([LENGTH, 5, 1])


def peer_scores(model) -> np.ndarray:
    import torch

    seen = np.arange(LENGTH) < lengths()[:, None]
    with torch.no_grad():
        given = model.eval()(input_ids=torch.tensor(tokens()).long(), attention_mask=torch.tensor(seen).long())
    return given.logits.numpy()


def assert_same_where_seen(found, expected):
    for row, count in enumerate(lengths()):
        np.testing.assert_allclose(found[row, :count], expected[row, :count], rtol=1e-4, atol=1e-5)
    assert np.abs(found).max() > 1e-2


def random_parameters(config: BertConfig):
    generator = np.random.default_rng(1)
    start = BertModel.masked_lm(config=config, sequence_length=LENGTH).initial()
    return {n: a + np.float32(0.2) * generator.standard_normal(a.shape, np.float32) for n, a in start.items()}


@pytest.mark.peers
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_transformers_opens_what_is_written(tmp_path, activation):
    from transformers import BertForMaskedLM

    settings = {**CONFIG.__dict__, "hidden_act": activation}
    config = BertConfig(**settings)
    (tmp_path / "words.txt").write_text("".join(f"word{number}\n" for number in range(60)))
    parameters = random_parameters(config)
    write_bert_folder(tmp_path / "model", config, parameters, tmp_path / "words.txt")
    model, report = BertForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same_where_seen(peer_scores(model), scores_of(config, parameters))


@pytest.mark.peers
def test_what_transformers_saves_is_opened(tmp_path):
    import torch
    from transformers import BertConfig as PeerConfig
    from transformers import BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(PeerConfig(**CONFIG.__dict__))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("".join(f"word{number}\n" for number in range(60)))
    config, parameters = read_bert_folder(tmp_path / "model", HEAD)
    assert config == CONFIG
    assert_same_where_seen(scores_of(config, parameters), peer_scores(model))


@pytest.mark.peers
def test_the_loss_of_an_example_is_theirs(tmp_path):
    import jax
    import torch
    from transformers import BertForMaskedLM

    (tmp_path / "words.txt").write_text("".join(f"word{number}\n" for number in range(60)))
    parameters = random_parameters(CONFIG)
    write_bert_folder(tmp_path / "model", CONFIG, parameters, tmp_path / "words.txt")
    peer = BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    model = BertModel.masked_lm(config=CONFIG, sequence_length=LENGTH, max_predictions=3)
    places, targets = np.int32([2, 0, 4]), np.int32([7, 8, 9])
    labels = torch.full((1, LENGTH), -100)
    labels[0, places] = torch.tensor(targets).long()
    seen = torch.tensor(np.arange(LENGTH) < 5).long()[None]
    theirs = peer(input_ids=torch.tensor(tokens()[1:2]).long(), attention_mask=seen, labels=labels).loss.item()
    example = {
        "tokens": tokens()[1],
        "lengths": np.int32(5),
        "positions": places,
        "targets": targets,
        "weights": np.float32([1 / 3] * 3),
    }
    ours = jax.jit(model.example_loss)(parameters, example)
    assert float(ours) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.peers
def test_transformers_opens_a_classifier(tmp_path):
    """With the same logits and names of classes; and what transformers writes is read back here."""
    import jax
    import torch
    from transformers import BertForSequenceClassification

    from coowned.models import bert_model

    (tmp_path / "words.txt").write_text("".join(f"word{number}\n" for number in range(60)))
    head = ClassifierHead(classes=("ham", "spam", "eggs"))
    start = BertModel(config=CONFIG, head=head, sequence_length=LENGTH).initial()
    generator = np.random.default_rng(1)
    parameters = {n: a + np.float32(0.2) * generator.standard_normal(a.shape, np.float32) for n, a in start.items()}
    write_bert_folder(tmp_path / "model", CONFIG, parameters, tmp_path / "words.txt", head)
    model, report = BertForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == {0: "ham", 1: "spam", 2: "eggs"}
    seen = torch.tensor(np.arange(LENGTH) < lengths()[:, None]).long()
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor(tokens()).long(), attention_mask=seen).logits.numpy()
    batch = {"tokens": tokens(), "lengths": lengths(), "labels": np.zeros(SIZE), "weights": np.ones(SIZE)}
    found = jax.jit(lambda own: bert_model.scores_of(head, CONFIG, own, batch))(parameters)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected).max() > 1e-2
    model.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "vocab.txt").write_bytes((tmp_path / "words.txt").read_bytes())
    config, back = read_bert_folder(tmp_path / "again", head)
    assert config == CONFIG
    assert all(np.array_equal(back[name], parameters[name]) for name in parameters)


@pytest.mark.peers
@pytest.mark.parametrize("kind", [co.BertMaskedLM, co.BertClassifier])
def test_code_of_an_exported_readme_runs(tmp_path, kind):
    made_up_corpus(tmp_path)
    table = pl.read_parquet(tmp_path / "texts.parquet").with_columns(label=pl.int_range(pl.len()) % 2)
    labelled = {} if kind is co.BertMaskedLM else {"label": "label", "classes": ["even", "odd"]}
    if labelled:
        table = table.with_columns(label=pl.when(pl.col("label") == 0).then(pl.lit("even")).otherwise(pl.lit("odd")))
    model = kind(vocabulary=str(tmp_path / "vocab.txt"), sequence_length=16, **labelled)
    selector = co.Greedy(contribution_bound=2)
    run = co.fit(
        co.from_table(table),
        model,
        privacy=co.PrivacySettings(public=True),
        selector=selector,
        batch_size=8,
        iterations=2,
    )
    printed = run_readme(run.export(tmp_path / "model"))
    assert "torch.Size([1, " in printed if kind is co.BertMaskedLM else printed.strip() in ("['even']", "['odd']")
