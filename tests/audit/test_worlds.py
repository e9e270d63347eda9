import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.audit import worlds
from coowned.audit.worlds import World, WorldData
from coowned.certificate import certify
from coowned.errors import InputError
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import BLANK, IN, INFINITE, LinearContent

PLANS = {
    "poisson": planted_bugs.poisson,
    "duplicates": planted_bugs.duplicates,
    "schedule": planted_bugs.schedule,
    "cyclic": planted_bugs.cyclic,
}


def world(name, users=30):
    plan = PLANS[name]()
    return plan, World.like(plan.certificate, plan.mechanism, users=users, strategy=plan.strategy)


@pytest.mark.parametrize("name", PLANS)
def test_worst_case_users_are_at_the_bound(name):
    plan, found = world(name)
    copies = np.bincount(found.owner[found.owner >= 0], weights=found.selected.copies[found.owner >= 0])
    assert copies.tolist() == [plan.mechanism.contribution_bound] * 30
    recounted = certify(found.graph, found.selected)
    assert recounted.contribution_bound == plan.mechanism.contribution_bound
    plan.mechanism.check_certificate(recounted)


@pytest.mark.parametrize("name", PLANS)
def test_world_has_the_shape_of_the_run(name):
    plan, found = world(name)
    own, recounted = plan.certificate, certify(found.graph, found.selected)
    assert recounted.size == own.size
    assert (recounted.groups is None) == (own.groups is None)
    assert own.groups is None or recounted.groups.sizes == own.groups.sizes
    assert own.schedule is None or recounted.schedule.iterations == own.schedule.iterations
    if name != "schedule":
        assert recounted.num_distinct == own.num_distinct


def test_no_more_users_than_there_is_room_for():
    plan, found = world("poisson", users=10**6)
    assert found.users == plan.certificate.size // 3
    assert certify(found.graph, found.selected).size == plan.certificate.size


def test_tables_in_memory_are_what_is_filled():
    _, found = world("duplicates")
    data = WorldData(world=found, content=LinearContent(5), held=IN)
    table = data.in_memory()
    examples = np.array([0, 7, found.graph.num_examples - 1, 3])
    for given in (data, table):
        out = {"features": np.ones((4, 5), np.float32), "labels": np.ones(4, np.float32)}
        given.fill(examples, out)
        assert (out["features"] != 0).sum(axis=1).tolist() == [1, 1, 0, 1]  # the crowd is quiet
        assert out["features"].argmax(axis=1).tolist() == [0, 3, 0, 3]
        assert out["labels"].tolist() == [0, 0, 0.5, 0]


@pytest.mark.parametrize("held", [BLANK, INFINITE])
def test_blank_content_is_not_finite(held):
    out = {"features": np.ones((1, 5), np.float32), "labels": np.ones(1, np.float32)}
    LinearContent(5).fill(out, np.array([2]), np.array([held]))
    assert not np.isfinite(out["features"][0, 2])


def test_unknown_models_are_refused():
    assert worlds.content_for(LogisticRegression(num_features=3)) == LinearContent(3)
    with pytest.raises(InputError, match="no worst-case content for object"):
        worlds.content_for(object())  # type: ignore[arg-type]
