"""What a step is given."""

import numpy as np
import pytest

from coowned.training.feed import Feeder


def inputs(small, plan, *, start=0, release=True):
    feeder = Feeder(small.data, plan.batches(), None, run_key=plan.run_key, start=start, stop=plan.iterations)
    given = []
    for made in feeder:
        given.append((made.step, {name: array.copy() for name, array in made.batch.items()}, made.mask.copy()))
        if release:
            feeder.release(made)
    return given


@pytest.mark.parametrize("start", [0, 5])
def test_timing_changes_nothing(small, start):
    plan = small.plan()
    reused, fresh = (inputs(small, plan, start=start, release=release) for release in (True, False))
    assert [step for step, _, _ in reused] == list(range(start, 12))
    for one, two in zip(reused, fresh, strict=True):
        for name in ("features", "labels"):
            assert np.array_equal(one[1][name], two[1][name])
        assert np.array_equal(one[2], two[2])


def test_content_and_padding(small):
    plan = small.plan()
    for (_, batch, mask), drawn in zip(inputs(small, plan), plan.batches(), strict=True):
        features, labels = small.world.batch(drawn.examples[drawn.mask])
        assert np.array_equal(batch["features"][mask], features)
        assert np.array_equal(batch["labels"][mask], labels)
        assert not batch["features"][~mask].any()
        assert not batch["labels"][~mask].any()


def test_arrays_are_not_reused_early(small):
    """What was not released keeps its content; what was is written to again. Aligned, so that devices need no copy."""
    plan = small.plan("dp-mf")  # one physical size
    feeder = Feeder(small.data, plan.batches(), None, run_key=plan.run_key, start=0, stop=plan.iterations)
    steps = iter(feeder)
    first, second = next(steps), next(steps)
    kept = second.batch["features"].copy()
    feeder.release(first)
    third = next(steps)
    assert third.batch["features"] is first.batch["features"]
    next(steps)
    assert np.array_equal(second.batch["features"], kept)
    assert third.batch["features"].ctypes.data % 64 == 0
