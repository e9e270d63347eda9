import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.audit import driving
from coowned.audit.driving import World, WorldData, audited, content_for, drive
from coowned.certificate import certify
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.models.logistic_regression import LogisticRegression
from coowned.models.probes import BLANK, IN, INFINITE, LinearContent
from coowned.training.loop import Trainer
from coowned.training.step import Feeder

MODEL = planted_bugs.SMALL


def released(held, *, plan=None, model=MODEL, **more):
    plan = plan or planted_bugs.poisson()
    world = World.like(plan.certificate, plan.mechanism, users=10, strategy=plan.strategy)
    content = content_for(model)
    data = WorldData(world=world, content=content, held=held).in_memory()
    own = audited(plan, world.selected, RunKey.from_seed(3))
    return drive([own], model, data, **more)[content.tensor], own, world


def test_the_trainer_itself_is_driven(monkeypatch):
    seen = set()
    for kind, name in ((Trainer, "run"), (Trainer, "_noise"), (Feeder, "_make")):
        honest = getattr(kind, name)

        def watched(self, *given, honest=honest, name=name, **more):
            seen.add(name)
            return honest(self, *given, **more)

        monkeypatch.setattr(kind, name, watched)
    released(IN, steps=3)
    assert seen == {"run", "_noise", "_make"}


def test_a_copy_adds_one_clip_norm():
    """The difference of two trainings with the same key is how many copies of each user were drawn."""
    full, plan, world = released(IN, steps=12)
    empty, _, _ = released(BLANK, steps=12)
    batches = plan.batches()
    for step in range(12):
        batch = batches.batch(step)
        owner = world.owner[batch.examples[batch.mask]]
        drawn = np.bincount(owner[owner >= 0], minlength=21)
        # What a copy adds is rounded down to the grid: a little less than a clip norm, never more.
        np.testing.assert_allclose(full[step] - empty[step], drawn, rtol=2e-4, atol=1e-5)
        assert (full[step] - empty[step] <= drawn + 1e-5).all()


@pytest.mark.parametrize(
    ("plan", "model"),
    [(planted_bugs.poisson, MODEL), (planted_bugs.schedule, MODEL), (planted_bugs.scaled, planted_bugs.ROWS)],
)
def test_resuming_changes_nothing(plan, model):
    whole, *_ = released(IN, plan=plan(), model=model, steps=10)
    resumed, *_ = released(IN, plan=plan(), model=model, steps=10, resume_at=4)
    assert len(whole) == 10
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, resumed)


def test_scales_are_undone():
    """What is read is the noise itself, as without scales: the key is the same."""
    plain, scaled = (
        released(BLANK, plan=plan(), model=planted_bugs.ROWS, steps=8)[0]
        for plan in (planted_bugs.poisson, planted_bugs.scaled)
    )
    np.testing.assert_allclose(scaled, plain, atol=1e-5)


def test_private_scales_are_seen(monkeypatch):
    planted_bugs.scales_from_gradients_without_noise(monkeypatch)
    assert np.isnan(released(IN, plan=planted_bugs.scaled(), model=planted_bugs.ROWS, steps=3)[0]).all()


def test_time_ends_a_training():
    assert len(released(IN, steps=10, seconds=0.0)[0]) == 2


def test_keys_are_the_audits_own():
    plan = planted_bugs.poisson()
    one, other = (audited(plan, plan.selected, RunKey.from_seed(seed)) for seed in (1, 2))
    assert len({plan.run_key.fingerprint, one.run_key.fingerprint, other.run_key.fingerprint}) == 3
    assert one.run_key.is_test_run


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
    assert driving.content_for(LogisticRegression(num_features=3)) == LinearContent(3)
    with pytest.raises(InputError, match="no worst-case content for object"):
        driving.content_for(object())  # type: ignore[arg-type]
