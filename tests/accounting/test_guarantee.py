"""The only way to a claim, and what it says."""

import dataclasses
import json

import numpy as np
import pytest

from coowned import CyclicPoisson, MinSeparation, PoissonSampling, codec
from coowned.accounting import calculators
from coowned.accounting import privacy_guarantee as module
from coowned.accounting.composed_guarantee import compose
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.errors import CertificateMismatchError, CoownedError, InputError, UncertifiableError
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Schedule, Selection

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}


def test_target_is_met_from_the_private_side(made, mechanism):
    assert 3.99 < made.epsilon <= 4.0
    assert made.epsilon == calculators.epsilon(mechanism, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert made.other_epsilon > made.epsilon > made.example_epsilon


def test_only_guarantee_makes_one(made):
    fields = {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.name != "maker"}
    with pytest.raises(UncertifiableError, match="comes from guarantee"):
        PrivacyGuarantee(**{**fields, "epsilon": 0.1})


def test_no_way_around_the_maker(made):
    for changes in ({"epsilon": 0.1}, {"noise_multiplier": 99.0}):
        with pytest.raises(UncertifiableError, match="comes from guarantee"):
            dataclasses.replace(made, **changes)
    both = compose([made], delta=1e-6)
    with pytest.raises(UncertifiableError, match="comes from compose"):
        dataclasses.replace(both, epsilon=0.1)


def test_a_forged_epsilon_is_recomputed(made):
    stored = json.loads(made.to_json())
    for name in ("epsilon", "other_epsilon", "example_epsilon"):
        fields = {**{key: value for key, value in stored.items() if key not in ("format", "checksum")}, name: 0.01}
        sealed = {"format": stored["format"], **fields, "checksum": codec.checksum(fields)}
        with pytest.raises(CertificateMismatchError, match="is proven; "):
            PrivacyGuarantee.from_json(json.dumps(sealed))


def test_an_unchecked_sensitivity_is_refused(schedule_certificate):
    mechanism = MinSeparation.from_certificate(schedule_certificate, sensitivity=1e-3)
    with pytest.raises(UncertifiableError, match="cannot prove a sensitivity"):
        guarantee(schedule_certificate, mechanism, noise_multiplier=1.0, **CLAIM)


def test_example_level_covers_examples_without_users():
    graph = AttributionGraph.from_users_per_example([[user] for user in range(100)] + [[]])
    selection = Selection.from_copies(graph, [1] * 101, groups=[0] * 100 + [1])
    certificate = certify(graph, selection)
    mechanism = CyclicPoisson.from_certificate(certificate, batch_size=1, iterations=20)
    made = guarantee(certificate, mechanism, noise_multiplier=1.0, **CLAIM)
    alone = PoissonSampling(contribution_bound=1, sampling_probability=1.0, iterations=10)  # group 1: always drawn
    assert made.example_epsilon == pytest.approx(calculators.epsilon(alone, noise_multiplier=1.0, **CLAIM))


def test_example_level_of_a_schedule_with_repeats():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2], []])
    certificate = certify(graph, Schedule.from_batches(graph, [[0, 3], [1, 3], [2, 3]]))
    made = guarantee(certificate, MinSeparation.from_certificate(certificate), noise_multiplier=2.0, **CLAIM)
    # Three copies without a user may overlap: their sensitivities add up.
    single = MinSeparation(contribution_bound=1, min_separation=1, num_bands=1, iterations=1)
    assert made.example_epsilon == pytest.approx(calculators.epsilon(single, noise_multiplier=2.0 / 3, **CLAIM))


def test_numbers_of_numpy_are_stored(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=np.int64(64), iterations=np.int32(5))
    made = guarantee(greedy_certificate, mechanism, noise_multiplier=np.float32(2), delta=1e-6, adjacency="zero-out")
    assert PrivacyGuarantee.from_json(made.to_json()) == made
    assert PoissonSampling.from_json(mechanism.to_json()) == mechanism


def test_exactly_one_of_target_and_noise(greedy_certificate, mechanism):
    for given in ({}, {"epsilon": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(InputError, match="exactly one"):
            guarantee(greedy_certificate, mechanism, **given, **CLAIM)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0, "delta": 1e-6, "adjacency": "zero-out"},
        {"epsilon": -1.0, "delta": 1e-6, "adjacency": "zero-out"},
        {"epsilon": 1.0, "delta": 0.0, "adjacency": "zero-out"},
        {"epsilon": 1.0, "delta": 1.0, "adjacency": "zero-out"},
        {"epsilon": 1.0, "delta": 1e-6, "adjacency": "add-remove"},
        {"noise_multiplier": 0.0, "delta": 1e-6, "adjacency": "zero-out"},
    ],
)
def test_bad_targets(greedy_certificate, mechanism, wrong):
    with pytest.raises(InputError):
        guarantee(greedy_certificate, mechanism, **wrong)


def test_a_certificate_of_something_else_is_refused(schedule_certificate, mechanism):
    with pytest.raises(UncertifiableError):
        guarantee(schedule_certificate, mechanism, epsilon=1.0, **CLAIM)
    with pytest.raises(InputError, match="certify"):
        guarantee(3, mechanism, epsilon=1.0, **CLAIM)  # type: ignore[arg-type]


def test_json_round_trip(made):
    assert PrivacyGuarantee.from_json(made.to_json()) == made


def test_tampered_guarantee_is_refused(made):
    stored = json.loads(made.to_json())
    changes = [
        ("epsilon", 0.1),
        ("delta", 1e-12),
        ("noise_multiplier", 99.0),
        ("adjacency", "replace"),
        ("unit", "example"),
        ("test_run", True),
    ]
    for name, value in changes:
        with pytest.raises(CertificateMismatchError):
            PrivacyGuarantee.from_json(json.dumps({**stored, name: value}))
    for part, name, value in (("mechanism", "contribution_bound", 1), ("certificate", "contribution_bound", 1)):
        with pytest.raises(CoownedError):
            PrivacyGuarantee.from_json(json.dumps({**stored, part: {**stored[part], name: value}}))
    for text in ("", "[]", '{"format": "other"}'):
        with pytest.raises(InputError):
            PrivacyGuarantee.from_json(text)


def test_read_epsilon_is_never_below_proven(made):
    fields = {**made._fields(), "epsilon": made.epsilon * (1 - 5e-4)}  # as an older accountant might have found it
    text = json.dumps({"format": module.FORMAT, **fields, "checksum": codec.checksum(fields)})
    read = PrivacyGuarantee.from_json(text)
    assert read.epsilon == made.epsilon
    assert f"({rounded_up(made.epsilon)}, " in read.statement()
    larger = {**made._fields(), "epsilon": made.epsilon * 1.01}
    text = json.dumps({"format": module.FORMAT, **larger, "checksum": codec.checksum(larger)})
    assert PrivacyGuarantee.from_json(text).epsilon == larger["epsilon"]


def test_guarantee_without_its_certificate(made):
    text = made.to_json(embed_certificate=False)
    assert "graph_digest" not in text
    assert PrivacyGuarantee.from_json(text, certificate=made.certificate) == made
    with pytest.raises(InputError, match="without its certificate"):
        PrivacyGuarantee.from_json(text)
    other = dataclasses.replace(made.certificate, origin=dataclasses.replace(made.certificate.origin, seed=99))
    for stored in (text, made.to_json()):
        with pytest.raises(CertificateMismatchError, match="another certificate"):
            PrivacyGuarantee.from_json(stored, certificate=other)


def test_by_copies_ends_at_the_bound(made):
    levels = made.by_copies()
    assert levels["copies"].to_list() == [0, 1, 2, 3]
    assert levels["users"].to_list() == list(made.certificate.copies_per_user)
    epsilons = levels["epsilon"].to_list()
    assert epsilons[0] is None
    assert epsilons[1] < epsilons[2] < epsilons[3] == made.epsilon
    fresh = calculators.epsilon_of_copies(made.mechanism, copies=3, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert fresh == made.epsilon


def test_by_copies_of_a_schedule(schedule_certificate):
    made = guarantee(
        schedule_certificate, MinSeparation.from_certificate(schedule_certificate), noise_multiplier=2.0, **CLAIM
    )
    levels = made.by_copies()
    assert levels["users"].to_list() == [1, 10, 1]
    assert levels["epsilon"][2] == made.epsilon > levels["epsilon"][1]


def test_by_copies_of_groups(group_certificate):
    mechanism = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    made = guarantee(group_certificate, mechanism, noise_multiplier=3.0, **CLAIM)
    rows = [row for row in made.by_copies().iter_rows(named=True) if row["users"] and row["copies"]]
    assert {(row["group"], row["copies"], row["users"]) for row in rows} == {(0, 1, 1), (0, 2, 1), (1, 1, 1)}
    assert max(row["epsilon"] for row in rows) == pytest.approx(made.epsilon, rel=1e-12)


def test_simulated_epsilon_carries_the_true_one(greedy_certificate, mechanism):
    made = guarantee(greedy_certificate, mechanism, epsilon=4.0, simulated_batch_size=256, **CLAIM)
    imagined = dataclasses.replace(mechanism, sampling_probability=256 / greedy_certificate.size)
    assert made.simulated_epsilon == calculators.epsilon(imagined, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert made.epsilon == calculators.epsilon(mechanism, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert made.statement().startswith("1. Simulated epsilon")
    with pytest.raises(InputError, match="at most the size of S"):
        guarantee(greedy_certificate, mechanism, epsilon=4.0, simulated_batch_size=10**6, **CLAIM)


def test_terms_of_an_epsilon(made):
    assert made.terms() == (
        f"unit: user, fixed graph; contribution bound {made.contribution_bound}; delta {made.delta:.12g}; "
        f"adjacency: {made.adjacency}"
    )


def test_delta_above_the_chance_of_being_drawn():
    graph = AttributionGraph.from_users_per_example([[user] for user in range(1000)])
    certificate = certify(graph, Greedy(contribution_bound=1).select(graph))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=1, iterations=5)  # drawn with about 0.005
    for asked in ({"epsilon": 1.0}, {"noise_multiplier": 0.1}):
        with pytest.raises(InputError, match=r"not below the probability 0\.00499"):
            guarantee(certificate, mechanism, delta=0.01, adjacency="zero-out", **asked)
        guarantee(certificate, mechanism, delta=1e-6, adjacency="zero-out", **asked)


def test_very_large_delta_is_refused(greedy_certificate, mechanism):
    claim = {"epsilon": 4.0, "delta": 0.1, "adjacency": "zero-out"}
    with pytest.raises(InputError, match="allow-large-delta"):
        guarantee(greedy_certificate, mechanism, **claim)
    made = guarantee(greedy_certificate, mechanism, allow_large_delta=True, **claim)
    assert PrivacyGuarantee.from_json(made.to_json()) == made
