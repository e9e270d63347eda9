"""The plan of a configuration, without a run; whole runs are in tests/cli/test_train.py and test_tasks.py."""

import pytest

from coowned import AttributionGraph
from coowned.errors import InputError
from coowned.mechanism.keys import RunKey
from coowned.training.config import TrainConfig
from coowned.training.configured_run import make_plan

SCHEDULED = """
[data]
path = "data.parquet"
users = "users"
[selection]
selector = "greedy-min-separation"
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-mf"
batch_size = 8
iterations = 60
clip_norm = 1.0
[optimizer]
learning_rate = 0.1
"""


def test_schedule_without_a_given_separation():
    """The last columns of a strategy are shorter than 1; a claim counts them as 1, since a certificate cannot tell."""
    graph = AttributionGraph.from_users_per_example([[user % 100, (3 * user + 1) % 100] for user in range(1000)])
    plan = make_plan(TrainConfig.from_toml(SCHEDULED), graph, RunKey.from_operating_system())
    assert plan.guarantee is not None
    assert plan.guarantee.epsilon <= 8
    assert plan.mechanism.num_bands == plan.certificate.min_separation
    plan.check(graph)


def test_no_bands_are_refused():
    graph = AttributionGraph.from_users_per_example([[user % 100] for user in range(1000)])
    text = SCHEDULED.replace("clip_norm = 1.0", "clip_norm = 1.0\nnum_bands = 0\nmin_separation = 4")
    with pytest.raises(InputError, match=r"num_bands must be .* at least 1"):
        make_plan(TrainConfig.from_toml(text), graph, RunKey.from_operating_system())


@pytest.mark.parametrize("how", ["public = true", 'epsilon = "none"'])
@pytest.mark.parametrize("kind", ["dp-mf", "dp-mf of 4", "dp-sgd"])
def test_without_a_claim_there_need_be_no_users(kind, how):
    graph = AttributionGraph.from_users_per_example([[] for _ in range(1000)])
    text = SCHEDULED.replace("epsilon = 8\ndelta = 1e-6", how)
    text = text.replace('"greedy-min-separation"', '"greedy-min-separation"\nunattributed = "keep"')
    if kind == "dp-sgd":
        text = text.replace("greedy-min-separation", "greedy").replace("dp-mf", kind)
        text = text.replace("[privacy]", "contribution_bound = 1\n[privacy]")
    elif kind == "dp-mf of 4":
        text = text.replace("iterations = 60", "iterations = 60\nmin_separation = 4")
    plan = make_plan(TrainConfig.from_toml(text), graph, RunKey.from_operating_system())
    plan.check(graph)
    assert plan.guarantee is None
