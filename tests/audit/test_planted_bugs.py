"""The audit's power: every planted bug is caught, and the honest mechanism is left alone.

A fixed part of what `make audit-power` runs: one seed a bug, and twenty seeds of the honest mechanisms with fewer
trials. An honest audit may alarm falsely with probability 1e-3 at most; seeds are fixed.
"""

import pytest
from tests.audit.planted_bugs import HONEST, PLANTED

NAMES = [
    "10% too little noise",
    "bound off by one",
    "copies sampled jointly",
    "noise correlated otherwise",
    "divided by the drawn size",
    "clip lets 5% through",
    "noise reused between steps",
    "truncated batches",
    "float32 noise tail",
    "shuffling",
    "one user in two groups",
    "one example changes what others add",
]


def test_all_bugs_are_planted():
    assert [planted.name for planted in PLANTED] == NAMES


@pytest.mark.full
@pytest.mark.parametrize("planted", PLANTED, ids=NAMES)
def test_planted_bugs_are_caught(planted):
    assert not planted.run(1000).holds


@pytest.mark.full
@pytest.mark.parametrize("honest", HONEST, ids=[case.name for case in HONEST])
def test_honest_mechanisms_pass_twenty_seeds(honest):
    fewer = 2_000 if honest.name == "Poisson in a crowd" else min(honest.trials, 20_000)
    for seed in range(20):
        assert honest.run(seed, trials=fewer).holds
