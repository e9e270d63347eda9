"""The plan binds what runs to what is claimed."""

import dataclasses
import json

import pytest
from tests.small_world import forged

from coowned import InputError
from coowned.errors import CertificateMismatchError
from coowned.exact.keys import RunKey
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.training.plan import RunPlan


def test_parts_must_agree(small):
    plan, other = small.plan(), small.plan("dp-mf")
    with pytest.raises(CertificateMismatchError, match="another certificate"):
        dataclasses.replace(plan, certificate=other.certificate)
    longer = dataclasses.replace(plan.mechanism, iterations=13)
    with pytest.raises(CertificateMismatchError, match="another mechanism"):
        dataclasses.replace(plan, mechanism=longer)
    claims = forged(plan.guarantee, test_run=False)
    with pytest.raises(InputError, match="given seed"):
        dataclasses.replace(plan, guarantee=claims)
    assert dataclasses.replace(plan, guarantee=claims, run_key=RunKey.from_operating_system()).guarantee is claims


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": None}, "clip_norm"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 1e40}, "learning_rate"),
        ({"learning_rate": 1e-50}, "learning_rate"),
        ({"optimizer": "adem"}, "did you mean 'adam'"),
        ({"optimizer": "lbfgs2"}, "optax has no optimizer"),
        ({"run_key": b"secret"}, "RunKey"),
        ({"guarantee": 8.0}, "must come from guarantee"),
        ({"public": True}, "public"),
        ({"strategy": BandedStrategy(2, 12, (0.8, 0.6))}, "independent noise"),
    ],
)
def test_bad_plans(small, changes, says):
    with pytest.raises(InputError, match=says):
        small.plan(**changes)


def test_strategy_must_fit(small):
    with pytest.raises(InputError, match="must have 3 bands and 12 iterations"):
        small.plan("dp-mf", strategy=BandedStrategy(2, 12, (0.8, 0.6)))
    nameless = dataclasses.replace(small.plan().mechanism, batch_size=None)
    with pytest.raises(InputError, match="batch_size"):
        dataclasses.replace(small.plan(), guarantee=None, mechanism=nameless)


def test_digest_names_every_choice(small):
    run_id = small.plan().guarantee
    base = small.plan(guarantee=run_id)
    changes = [{}, {"learning_rate": 0.1}, {"clip_norm": 0.4}, {"optimizer": "sgd"}, {"configuration": "x"}]
    plans = [dataclasses.replace(base, **change) for change in changes]
    assert len({plan.digest for plan in plans}) == len(changes)
    assert (
        base.digest == dataclasses.replace(base, run_key=RunKey.from_seed(9)).digest
    )  # the key is compared on its own


def test_secret_is_not_shown(small):
    assert "RunKey" not in repr(small.plan())


def test_whole_numbers_are_numbers(small):
    """An int among floats made the table of a sweep's members fail after the last step."""
    whole = small.plan(clip_norm=1, learning_rate=1)
    assert (type(whole.clip_norm), type(whole.learning_rate)) == (float, float)
    assert whole.describe() == {
        **small.plan(clip_norm=1.0, learning_rate=1.0).describe(),
        "claim": whole.describe()["claim"],
    }


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf", "cyclic"])
def test_plans_are_read_back(small, kind):
    plan = small.plan(kind, weight_decay=0.1)
    described = json.loads(json.dumps(plan.describe()))
    read = RunPlan.from_description(described, plan.certificate, plan.mechanism, plan.guarantee)
    assert json.loads(json.dumps(read.describe())) == described
    assert (read.noise_multiplier, read.clip_norm, read.options()) == (0.7, 0.3, {"weight_decay": 0.1})
