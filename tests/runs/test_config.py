"""The configuration file."""

from pathlib import Path

import pytest

from coowned import ConfigError
from coowned.runs.config import TrainConfig, example

ROOT = Path(__file__).parents[2]


def changed(old, new):
    assert old in example()
    return example().replace(old, new, 1)


def test_example_is_read_and_kept_in_the_examples_folder():
    config = TrainConfig.from_toml(example())
    assert config.selection.settings == {"contribution_bound": 2}
    assert config.data.splits == [0.8, 0.1, 0.1]
    assert (ROOT / "examples" / "logistic.toml").read_text(encoding="utf-8") == example()


@pytest.mark.parametrize(
    ("old", "new", "nearest"),
    [
        ("batch_size = 256", "bach_size = 256", "'batch_size'"),
        ("[optimizer]", "[optimiser]", "'optimizer'"),
        ("learning_rate", "learningrate", "'learning_rate'"),
        ("contribution_bound", "contribution_bond", "'contribution_bound'"),
        ('selector = "greedy"', 'selector = "gredy"', "'greedy'"),
        ("delta =", "detla =", "'delta'"),
        ("# seed = 0  ", "sed = 0  ", "'seed'"),
    ],
)
def test_unknown_keys_name_the_nearest(old, new, nearest):
    with pytest.raises(ConfigError, match=f"did you mean {nearest}"):
        TrainConfig.from_toml(changed(old, new))


def test_only_selectors_that_a_file_can_choose_are_offered():
    with pytest.raises(ConfigError, match=r"'greedy'.*, not 'steam'") as raised:
        TrainConfig.from_toml(changed('selector = "greedy"', 'selector = "steam"'))
    assert "given" not in str(raised.value)


def test_nothing_far_fetched_is_suggested():
    with pytest.raises(ConfigError, match=r"no key 'contribution_bound'; choose selector, seed"):
        TrainConfig.from_toml(changed('selector = "greedy"', 'selector = "greedy-min-separation"'))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch_size = 256", 'batch_size = "many"', "integer"),
        ("batch_size = 256", "batch_size = true", "integer"),
        ("batch_size = 256", "batch_size = 0", "at least 1"),
        ("epsilon = 8.0", "epsilon = -1", r"configuration: \[privacy\] epsilon"),
        ("epsilon = 8.0", "epsilon = inf", r"configuration: \[privacy\] epsilon"),
        ("epsilon = 8.0", "noise_multiplier = 0", r"configuration: \[privacy\] noise_multiplier"),
        ("delta = 1e-6", "delta = 1.0", r"configuration: \[privacy\] delta"),
        ("delta = 1e-6", "delta = 0.1", r"\[privacy\] delta = 0.1 lets the guarantee fail.*allow_large_delta"),
        ("delta = 1e-6", "", r"configuration: \[privacy\] needs delta"),
        ("clip_norm = 1.0", "clip_norm = 0", r"configuration: \[mechanism\] clip_norm"),
        ("clip_norm = 1.0", "clip_norm = 1e30", r"configuration: \[mechanism\] clip_norm"),
        ('name = "adam"', 'name = "adan2000x"', r"configuration: \[optimizer\] optax has no optimizer"),
        (
            'kind = "dp-sgd"',
            'kind = "dp-mf"\nmin_separation = 501',
            r"\[mechanism\] min_separation \(501\) must be at most iterations \(500\)",
        ),
        (
            'kind = "dp-sgd"',
            'kind = "dp-mf"\nmin_separation = 5\nnum_bands = 6',
            r"\[mechanism\] num_bands \(6\) must be at most min_separation \(5\)",
        ),
        ("epsilon = 8.0", 'epsilon = "small"', "a number"),
        ("epsilon = 8.0", "", "exactly one of"),
        ("epsilon = 8.0", "epsilon = 8.0\nnoise_multiplier = 1.0", "exactly one of"),
        ("delta = 1e-6", "", "needs delta"),
        ('"zero-out"', '"remove"', "adjacency"),
        ('kind = "dp-sgd"', 'kind = "sgd"', "kind"),
        ('kind = "dp-sgd"', 'kind = "dp-sdg"', r"\[mechanism\] kind must be one of .*; did you mean 'dp-sgd'\?"),
        ('"zero-out"', '"zeroout"', r"\[privacy\] adjacency must be one of .*; did you mean 'zero-out'\?"),
        ('kind = "logistic-regression"', 'kind = "forest"', "kind"),
        ("clip_norm = 1.0", "clip_norm = 1.0\nnum_bands = 4", "does not apply to dp-sgd"),
        ("learning_rate = 0.05", "learning_rate = -1", "learning_rate"),
        ("# seed = 0  ", "seed = -1  ", "seed"),
        ('kind = "logistic-regression"', 'kind = ["a"]', r"\[model\] kind must be 'bert"),
        ('selector = "greedy"', 'selector = ["greedy"]', r"\[selection\] selector must be 'bias"),
        ('selector = "greedy"', "selector = {a = 1}", r"\[selection\] selector must be 'bias"),
        (
            'selector = "greedy"',
            'selector = "priced"\nallow_duplicates = "yes"',
            "allow_duplicates must be true or false",
        ),
        ('selector = "greedy"', 'selector = "priced"\nallow_duplicates = 1', "allow_duplicates must be true or false"),
        ("learning_rate = 0.05", "learning_rate = 1e40", "learning_rate"),
        ("learning_rate = 0.05", "learning_rate = 1e-50", "learning_rate"),
        ("learning_rate = 0.05", f"learning_rate = 1{'0' * 400}", "learning_rate"),
        ("iterations = 500", "iterations = 1_000_000_000_000", "at most 1000000000"),
        ("# checkpoint_every = 100", "checkpoint_every = 0", "checkpoint_every"),
        ('path = "papers.parquet"', 'path = ""', "path is empty"),
        ('users = "users"', "users = []", "users must be a column name or a list"),
        ('users = "users"', "users = [1]", r"users\[0\] must be a string"),
        ('features = "features"', "features = []", "features must be a column name or a list"),
        ("[data]", "data = 3\n[dada]", "no section|must be a section"),
        ("[data]", "[data", "not TOML"),
    ],
)
def test_wrong_values(old, new, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig.from_toml(changed(old, new))


def test_no_guarantee_is_asked_for_in_words():
    text = changed("epsilon = 8.0", 'epsilon = "none"').replace("delta = 1e-6", "")
    assert not TrainConfig.from_toml(text).privacy.is_private
    text = changed("epsilon = 8.0", "public = true").replace("delta = 1e-6", "").replace("clip_norm = 1.0", "")
    assert not TrainConfig.from_toml(text).privacy.is_private


def test_digest_is_of_the_values():
    one = TrainConfig.from_toml(example())
    commented = TrainConfig.from_toml("# other words\n" + example(), folder="/elsewhere")
    assert one.digest == commented.digest
    assert one.digest == TrainConfig.from_toml(changed('# owner = "mail team"', 'owner = "mail team"')).digest
    assert one.digest != TrainConfig.from_toml(changed("iterations = 500", "iterations = 501")).digest


def test_paths_are_relative_to_the_file(tmp_path):
    (tmp_path / "run.toml").write_text(example(), encoding="utf-8")
    assert TrainConfig.read(tmp_path / "run.toml").source().path == tmp_path / "papers.parquet"
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.read(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        TrainConfig.read(tmp_path / "bytes.toml")
