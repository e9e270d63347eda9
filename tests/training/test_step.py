"""What a step is given."""

import numpy as np
import pytest

from coowned.content.data import with_norms
from coowned.errors import InputError
from coowned.exact.linear_sums import norms_of
from coowned.synthetic.logistic_data import WorldData
from coowned.training.step import Feeder


def inputs(small, plan, *, start=0, release=True, in_place=False):
    feeder = Feeder(
        small.data, plan.batches(), None, run_key=plan.run_key, start=start, stop=plan.iterations, in_place=in_place
    )
    given = []
    for made in feeder:
        given.append((made.step, {name: array.copy() for name, array in made.batch.items()}, made.mask.copy()))
        if release:
            feeder.release(made)
    return given


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("start", [0, 5])
def test_timing_changes_nothing(small, start, in_place):
    plan = small.plan()
    reused = inputs(small, plan, start=start, in_place=in_place)
    fresh = inputs(small, plan, start=start, release=False)
    assert [step for step, _, _ in reused] == list(range(start, 12))
    assert inputs(small, plan, start=12, in_place=in_place) == []
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


def test_features_are_read_where_they_lie(small):
    """The next input is made while the last is looked at, and a failure to make one reaches the caller."""
    plan = small.plan()
    data = with_norms(WorldData.part(small.world.materialize()))
    feeder = Feeder(data, plan.batches(), None, run_key=plan.run_key, start=0, stop=plan.iterations, in_place=True)
    for made, drawn in zip(feeder, plan.batches(), strict=True):
        features, labels = small.world.batch(drawn.examples[drawn.mask])
        assert np.array_equal(made.batch["features"].arrays()["features"][made.mask], features)
        assert len(made.batch["features"].rows) == drawn.physical_size
        assert np.array_equal(made.batch["labels"][made.mask], labels)
        assert np.array_equal(made.batch["norms"][made.mask], norms_of(features))
        feeder.release(made)
    batches = plan.batches()
    broken = Feeder(data, batches, None, run_key=plan.run_key, start=0, stop=plan.iterations + 2, in_place=True)
    with pytest.raises(InputError):
        list(broken)


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
