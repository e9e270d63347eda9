from coowned.audit.bob import Measured
from coowned.audit.retraining import MeasuredLeak
from coowned.report.story import bob_section


def measured(attribution: str, found: float) -> Measured:
    leak = MeasuredLeak(
        epsilon_lower_bound=found, true_positive_rate=0.9, false_positive_rate=0.1, trials=8, alpha=1e-3, delta=1e-5
    )
    return Measured(
        attribution=attribution,
        epsilon=1.0,
        delta=1e-5,
        contribution_bound=1,
        size=100,
        copies_with_bob=20 if attribution == "sender" else 1,
        leak=leak,
        scores_with=(0.1, 0.2, 0.3, 0.4),
        scores_without=(1.1, 1.2, 1.3, 1.4),
    )


def test_one_mark_a_model():
    section = bob_section([measured("sender", 2.1), measured("everyone", 0.0)])
    for figure in section.figures:
        assert len(figure.rows) == 8
        assert len(figure.chart["data"]["values"]) == 8
        assert figure.chart["name"] == "rows"


def test_both_claims_stand_beside_what_was_measured():
    body = bob_section([measured("sender", 2.1), measured("everyone", 0.0)]).body
    assert ">2.1<" in body
    assert "not true for Bob" in body
    assert "1 (unit: user, fixed graph; contribution bound 1; delta 1e-05; adjacency: zero-out)" in body


def test_a_failed_attack_proves_nothing():
    """Few models refute nothing, whatever is true."""
    section = bob_section([measured("sender", 0.0), measured("everyone", 0.0)])
    assert section.body.count("not refuted by 8 models") == 2
    assert "holds" not in section.body
    assert all("not refuted" in figure.title for figure in section.figures)
