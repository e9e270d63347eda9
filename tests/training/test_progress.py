"""What is told while a run goes on."""

import dataclasses

from tests.small_world import forged

from coowned import LogisticRegression, train
from coowned.accounting import calculators
from coowned.errors import UncertifiableError
from coowned.exact.keys import RunKey
from coowned.training import progress
from coowned.training.progress import Report, claim, privacy_so_far


def test_no_figure_where_none_can_be_certified(small, monkeypatch):
    """A figure beside the bar must not end the run it stands beside."""
    plan = small.plan()
    claims = forged(plan.guarantee, test_run=False)
    plan = dataclasses.replace(plan, guarantee=claims, run_key=RunKey.from_operating_system())

    def refuse(*given, **named):
        raise UncertifiableError("numerical errors would take more than 1% of delta")

    monkeypatch.setattr(calculators, "epsilon", refuse)
    assert privacy_so_far(plan, 6) == ""
    assert privacy_so_far(plan, 12).startswith("epsilon")  # the claim itself was certified before
    told = []
    report = Report(plan, lambda done, text: told.append(text))
    report(6)
    assert told == [""]


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def real_run(small, **changes):
    plan = small.plan(**changes)
    claims = forged(plan.guarantee, test_run=False)
    return dataclasses.replace(plan, guarantee=claims, run_key=RunKey.from_operating_system())


def test_compiling_is_said_first(small):
    told = []
    train(small.plan(), LogisticRegression(num_features=6), small.data, progress=lambda done, text: told.append(text))
    assert told[0] == "compiling"
    assert all("left" not in text for text in told[:2])


def test_speed_is_that_of_the_last_seconds(small, monkeypatch):
    clock, told = Clock(monkeypatch), []
    report = Report(small.plan(iterations=100_000, guarantee=None), lambda done, text: told.append(text))
    clock.now += 3600  # the compiler
    report(1)
    assert told == [""]
    for second in range(1, 31):
        clock.now += 1.0
        report(1 + 100 * second)
    assert told[1].startswith("100 steps/s, 16 min 39 s left")
    for second in range(1, 21):
        clock.now += 1.0
        report(3001 + 1000 * second)
    assert told[-1].startswith("1,000 steps/s, 1 min 17 s left")
    clock.now += 600.0
    report(23_002)  # slower than the window is long
    clock.now += 600.0
    report(23_003)
    assert told[-1].startswith("0.0017 steps/s")


def test_privacy_is_told_for_tenths_alone(small, monkeypatch):
    """A claim holds only for steps that were fixed before the run."""
    plan, clock, told = real_run(small, iterations=25), Clock(monkeypatch), []
    asked = []
    monkeypatch.setattr(calculators, "epsilon", lambda part, **named: asked.append(part.iterations) or 0.125)
    report = Report(plan, lambda done, text: told.append((round(25 * done), text.split(", ")[-1])))
    for done in range(1, 26):
        clock.now += 1.0
        report(done)
    assert [done for done, _ in told] == list(range(1, 26))
    ends = [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    assert asked == ends[:-1]  # the whole run's is the claim
    for done, text in told:
        passed = [end for end in ends if end <= done]
        assert ("epsilon" in text) == bool(passed)
        assert not passed or text.endswith(f" after {passed[-1]} steps")


def test_the_claim_has_its_terms(small):
    plan = real_run(small)
    assert plan.guarantee.terms() in claim(plan)
    assert "12 steps" in claim(plan)
    assert "epsilon" not in claim(small.plan())  # a test run
    assert "epsilon" not in claim(small.plan(guarantee=None))
