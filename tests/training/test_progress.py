"""What is told while a run goes on."""

import dataclasses

from tests.training.conftest import forged

from coowned.accounting import calculators
from coowned.errors import UncertifiableError
from coowned.mechanism.keys import RunKey
from coowned.training.progress import Report, privacy_so_far


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
    report = Report(plan, lambda done, text: told.append(text), 0)
    report._last = 0.0
    report(6)
    assert told[0].endswith("left")
