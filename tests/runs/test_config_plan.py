"""Plans for a configuration: what is tried is what `train` would run."""

import pytest

import coowned as co
from coowned.content.splits import split_examples
from coowned.errors import InputError
from coowned.runs.config import TrainConfig
from coowned.runs.config_plan import attempts_for, plan_settings

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
