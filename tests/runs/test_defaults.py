"""What is chosen where a configuration says nothing: from the graph and public numbers alone."""

import dataclasses
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import coowned as co
from coowned.content.splits import split_examples
from coowned.errors import InputError
from coowned.runs.config import TrainConfig, reasons_in
from coowned.runs.defaults import attempts_for, completed_for, plan_settings
from coowned.runs.inputs import choose
from coowned.runs.run_folder import RunFolder

MODEL = co.LogisticRegression(features=["x1", "x2"], label="y")
ASKED = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out"}
SHORT = """
[data]
path = "data.parquet"
[privacy]
epsilon = 8.0
delta = 1e-6
[model]
kind = "logistic-regression"
features = ["x1", "x2"]
label = "y"
"""


def examples(seed=0, count=600):
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, 2))
    users = [[f"u{i % 150}"] if i % 2 else [f"u{i % 150}", f"u{i * 7 % 150}"] for i in range(count)]
    labels = (features @ [2.0, -1.0] > 0).astype(int)
    return co.from_table(pl.DataFrame({"users": users, "x1": features[:, 0], "x2": features[:, 1], "y": labels}))


def complete(text, data=None):
    data = examples() if data is None else data
    config = TrainConfig.from_toml(text)
    return completed_for(config, data, data.graph.subgraph(split_examples(data.graph, config.splits)["train"]))


def test_a_configuration_of_data_privacy_and_model_is_enough():
    config = complete(SHORT)
    assert config.left_out == {}
    assert config.mechanism.sizes[0] == "dp-sgd"
    assert TrainConfig.from_toml(config.text).digest == config.digest
    assert [reason.split("]")[0] for reason in reasons_in(config.text)] == [
        "[mechanism", "[selection", "[mechanism", "[mechanism", "[optimizer"
    ]  # fmt: skip


@pytest.mark.parametrize(("epsilon", "hopeless"), [("8.0", False), ("0.01", True)])
def test_what_noise_will_swamp_is_said_where_s_is_chosen(epsilon, hopeless):
    """Before any training, also in the file that `plan -o` writes."""
    (_, chosen, *_) = reasons_in(complete(SHORT.replace("8.0", epsilon)).text)
    assert chosen.endswith("is hopeless: more data or a larger epsilon is needed.") == hopeless


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("selection", {"selector": "greedy", "contribution_bound": 3}),
        ("selection", {"contribution_bound": 3}),
        ("selection", {"selector": "priced"}),
        ("mechanism", {"batch_size": 17}),
        ("mechanism", {"iterations": 33, "clip_norm": 2.0}),
        ("optimizer", {"learning_rate": 0.25}),
        ("optimizer", {"decay": "linear", "name": "sgd"}),
    ],
)
def test_given_values_stay(section, given):
    text = f"{SHORT}[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    config = complete(text)
    assert config.left_out == {}
    found = getattr(config, section)
    held = {"selector": found.selector, **found.settings} if section == "selection" else vars(found)
    assert {key: held[key] for key in given} == given
    assert complete(config.text).text == config.text  # nothing is left out any more
    if "learning_rate" in given:  # who names a rate has the plain schedule around it
        assert (config.optimizer.decay, config.optimizer.average) == ("constant", "none")


def test_defaults_follow_from_the_graph_alone():
    """Other content, the same graph: the same configuration. Another graph: another one."""
    one, other = (complete(SHORT, examples(seed=seed)) for seed in (0, 1))
    assert one.text == other.text
    assert one.text != complete(SHORT, examples(count=900)).text


def test_defaults_keep_bounds_of_single_users(tmp_path):
    """What is chosen, and why, is of the S that these bounds leave."""
    (tmp_path / "tiers.csv").write_text("user,bound\n" + "".join(f"u{user},{user % 2}\n" for user in range(100)))
    text = f"{SHORT}[selection]\ncontribution_bounds = {json.dumps(str(tmp_path / 'tiers.csv'))}\n"
    config, data = complete(text), examples()
    train = data.graph.subgraph(split_examples(data.graph, config.splits)["train"])
    size = choose(config, train).size
    assert f"with {size} copies" in " ".join(reasons_in(config.text))
    assert size < choose(complete(SHORT), train).size
    assert 2 * config.mechanism.sizes[1] <= size + 1  # half of it


def test_no_content_is_read_for_defaults():
    """Labels that belong to no class change nothing: only the schema is looked at."""
    data = examples()
    labels = pa.array([99] * data.graph.num_examples)  # no class
    table = data.payload.set_column(data.payload.schema.get_field_index("y"), "y", labels)
    assert complete(SHORT, dataclasses.replace(data, payload=table)).text == complete(SHORT).text


def test_without_epsilon_s_is_not_chosen():
    with pytest.raises(co.ConfigError, match=r"\[selection\] needs a selector"):
        complete(SHORT.replace("epsilon = 8.0\ndelta = 1e-6", 'epsilon = "none"'))


def test_defaults_are_explained(tmp_path):
    """`run.plan` and the run say what was chosen and why; a run that was killed keeps what it began with."""
    run = co.fit(examples(), MODEL, **ASKED, seed=3, folder=tmp_path / "whole")
    assert len(run.reasons) == 5
    assert all(reason in str(run.plan) for reason in run.reasons)
    assert all(reason in " ".join(str(run).split()) for reason in run.reasons)
    assert f"learning rate {run.plan.learning_rate:g}" in str(run.plan)
    save = RunFolder.save

    def killed(self, step, tensors):
        save(self, step, tensors)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunFolder, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            co.fit(examples(), MODEL, **ASKED, seed=3, folder=tmp_path / "killed")
    with pytest.raises(co.CertificateMismatchError):
        co.fit(examples(), MODEL, **ASKED, seed=3, folder=tmp_path / "killed", learning_rate=0.2)
    resumed = co.fit(examples(), MODEL, **ASKED, seed=3, folder=tmp_path / "killed")
    assert resumed.reasons == run.reasons
    assert resumed.arrays()["weights"].tobytes() == run.arrays()["weights"].tobytes()


SECTIONS = {
    "data": {"path": "data.csv", "splits": [0.8, 0.1, 0.1]},
    "selection": {"selector": "greedy", "contribution_bound": 4, "seed": 3},
    "privacy": {"epsilon": 4.0, "delta": 1e-6},
    "mechanism": {"kind": "dp-sgd", "batch_size": 10, "iterations": 20},
    "model": {"kind": "logistic-regression", "features": ["x"], "label": "y"},
}
EXAMPLES = co.from_table([{"users": [f"u{i % 40}"], "x": float(i), "y": i % 2} for i in range(200)])


def config_of(**changes) -> TrainConfig:
    sections = {name: {**keys, **changes.get(name, {})} for name, keys in SECTIONS.items()}
    return TrainConfig.from_sections(sections, name="the options")


def test_settings_are_those_of_the_configuration():
    settings = plan_settings(config_of())
    assert (settings["epsilon"], settings["batch_size"], settings["selectors"]) == (4.0, 10, ["greedy"])
    assert "epsilon" not in plan_settings(config_of(privacy={"epsilon": "none", "delta": None}))
    with pytest.raises(InputError, match="at one epsilon, not at one for each tier"):
        plan_settings(config_of(privacy={"epsilon": {"a": 1.0}}))


def test_what_is_given_replaces_the_configuration():
    attempted = attempts_for(config_of(), EXAMPLES, {"epsilon": 2.0, "num_parameters": 7}, complete=False)
    assert (attempted.settings["epsilon"], attempted.settings["num_parameters"]) == (2.0, 7)
    assert 4 in attempted.settings["contribution_bounds"]
    assert attempted.graph.num_examples == len(split_examples(EXAMPLES.graph, (0.8, 0.1, 0.1))["train"])
    assert attempts_for(config_of(), EXAMPLES, {}, complete=False).settings["num_parameters"] == 2


def test_a_completed_configuration_is_all_that_is_tried():
    config = config_of(mechanism={"kind": None, "clip_norm": None})
    attempted = attempts_for(config, EXAMPLES, {}, complete=True)
    assert attempted.settings["contribution_bounds"] == [4]
    assert attempted.settings["mechanism"] == "poisson"
    assert attempted.config.mechanism.clip_norm is not None
    (row,) = attempted.plan().choices
    assert (row.selector, row.contribution_bound) == ("greedy", 4)
