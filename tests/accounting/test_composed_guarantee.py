"""Several runs on the same people, taken together."""

import dataclasses
import json

import pytest

from coowned import PoissonSampling
from coowned.accounting import calculators
from coowned.accounting.composed_guarantee import ComposedGuarantee, compose
from coowned.accounting.guarantee import guarantee
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.errors import CertificateMismatchError, InputError
from coowned.selection.greedy import Greedy

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}


def test_test_runs_are_not_composed(greedy_certificate, mechanism, made):
    seeded = guarantee(greedy_certificate, mechanism, noise_multiplier=2.0, test_run=True, **CLAIM)
    with pytest.raises(InputError, match="given seed"):
        compose([made, seeded], delta=1e-6)


def test_composed_round_trip(made):
    both = compose([made], delta=1e-6)
    again = ComposedGuarantee.from_json(both.to_json())
    assert again.epsilon == both.epsilon
    assert "contribution bounds 3" in again.statement()
    forged = {**json.loads(both.to_json()), "epsilon": 0.1}
    with pytest.raises(CertificateMismatchError, match="is proven; "):
        ComposedGuarantee.from_json(json.dumps(forged))


def test_composition(greedy_certificate, mechanism, made):
    second = guarantee(greedy_certificate, mechanism, noise_multiplier=made.noise_multiplier, run_id="two", **CLAIM)
    both = compose([made, second], delta=1e-6)
    twice = dataclasses.replace(mechanism, iterations=100)
    expected = calculators.epsilon(twice, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert both.epsilon == pytest.approx(expected, rel=2e-3)
    assert "independent" in both.statement()


def test_what_cannot_be_composed(greedy_certificate, mechanism, made):
    with pytest.raises(InputError, match="duplicate run"):
        compose([made, made], delta=1e-6)
    with pytest.raises(InputError, match="nothing"):
        compose([], delta=1e-6)
    replaced = guarantee(greedy_certificate, mechanism, noise_multiplier=2.0, delta=1e-6, adjacency="replace")
    with pytest.raises(InputError, match="adjacencies"):
        compose([made, replaced], delta=1e-6)
    graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
    certificate = certify(graph, Greedy(contribution_bound=1).select(graph))
    other_mechanism = PoissonSampling.from_certificate(certificate, batch_size=10, iterations=5)
    other = guarantee(certificate, other_mechanism, noise_multiplier=2.0, **CLAIM)
    with pytest.raises(CertificateMismatchError, match="compose runs on one graph"):
        compose([made, other], delta=1e-6)


def test_large_delta_of_a_composition(made):
    with pytest.raises(InputError, match="allow-large-delta"):
        compose([made], delta=0.1)
    allowed = compose([made], delta=0.1, allow_large_delta=True)
    assert "Warning: delta 0.1 is above 1 / (users" in allowed.statement()
    assert ComposedGuarantee.from_json(allowed.to_json()) == allowed
    assert "Warning" not in compose([made], delta=1e-6).statement()
