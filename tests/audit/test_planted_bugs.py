"""The audit's power: every planted bug is caught, and the honest trainer is left alone.

A fixed part of what `make audit-power` runs. An honest audit may alarm falsely with probability 1e-3 at most; seeds are
fixed.
"""

import pytest
from tests.audit.planted_bugs import HONEST, PLANTED

QUICK = ("no noise on one coordinate", "coins repeated on resumption")
NAMES = [planted.name for planted in PLANTED]


@pytest.mark.parametrize(
    "planted",
    [p if p.name in QUICK else pytest.param(p, marks=pytest.mark.full) for p in PLANTED],
    ids=NAMES,
)
def test_planted_bugs_are_caught(planted):
    assert set(planted.seen_by) <= set(planted.run(1000).alarms)


@pytest.mark.full
@pytest.mark.parametrize("honest", HONEST, ids=[case.name for case in HONEST])
def test_honest_plans_pass_twenty_seeds(honest):
    for seed in range(20):
        assert honest.run(seed, trials=1000).holds
