import numpy as np
import pytest
from tests.audit import planted_bugs

from coowned.audit.driving import audited, drive
from coowned.audit.worlds import World, WorldData, content_for
from coowned.exact.keys import RunKey
from coowned.models.probes import BLANK, IN
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
