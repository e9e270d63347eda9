"""The only way to a claim, and what it says."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from coowned import CyclicGroups, CyclicPoisson, GreedyMinSeparation, MinSeparation, PoissonSampling, codec
from coowned.accounting import calculators
from coowned.accounting import privacy_guarantee as module
from coowned.accounting.calculators import epsilon_curve, true_positive_rate_bound
from coowned.accounting.guarantee import ComposedGuarantee, compose, guarantee, tuned_guarantees
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.accounting.tuning import TuningClaim
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.content.splits import select_held_out
from coowned.errors import CertificateMismatchError, CoownedError, InputError, UncertifiableError
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Schedule, Selection
from coowned.selection.user_bounds import UserBounds

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


GRID = {"learning_rate": [0.1, 0.2, 0.3], "batch_size": [2, 4]}


@pytest.fixture(scope="module")
def claims():
    """Of two schedules, whose curves are closed forms."""
    graph = AttributionGraph.from_users_per_example([[user % 25] for user in range(100)])
    made = []
    for size in GRID["batch_size"]:
        chosen = GreedyMinSeparation(batch_size=size, iterations=20, min_separation=6).select(graph)
        certificate = certify(graph, chosen)
        mechanism = MinSeparation.from_certificate(certificate, num_bands=6)
        made.append(functools.partial(_claim, certificate, mechanism))
    return made


def _claim(certificate, mechanism, epsilon):
    return guarantee(certificate, mechanism, epsilon=epsilon, **CLAIM)


@pytest.fixture(scope="module")
def tuned(claims):
    return tuned_guarantees(claims, [3, 3], grid=GRID, expected_runs=4, epsilon=4.0)


def claim_of(run, *, weights, count=1):
    setting = run.setting(count)
    return TuningClaim(
        weights=weights, settings=(setting,), grid={"learning_rate": [0.1] * count}, untuned_noise_multiplier=1.0
    )


def test_noise_of_a_tuning(claims, tuned):
    alone = [claim(4.0).noise_multiplier for claim in claims]
    for run, untuned in zip(tuned, alone, strict=True):
        assert 4.0 * 0.997 <= run.epsilon <= 4.0
        assert run.noise_multiplier > 1.1 * untuned
        assert run.tuning.untuned_noise_multiplier == alone[0]
    assert tuned[0].epsilon == tuned[1].epsilon
    assert tuned[0].run_id == tuned[1].run_id
    less = tuned_guarantees(claims[:1], [1], grid={"learning_rate": [0.1]}, expected_runs=2, epsilon=4.0)
    assert alone[0] < less[0].noise_multiplier < tuned[0].noise_multiplier


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_a_tuning_of_one_run(claims, adjacency):
    run = claims[0](4.0)
    alone = run.epsilon if adjacency == "zero-out" else run.other_epsilon
    assert alone <= claim_of(run, weights=(1,)).epsilon(1e-6, adjacency) <= alone * 1.005


def test_the_curve_is_the_mean_over_settings(claims):
    """Half of the settings reveal nothing to speak of: the other half's delta counts half."""
    run, quiet = claims[0](4.0), claims[0](1e-3)
    both = dataclasses.replace(
        claim_of(run, weights=(1,), count=2),
        settings=(*claim_of(run, weights=(1,)).settings, *claim_of(quiet, weights=(1,)).settings),
    )
    curve = epsilon_curve(run.mechanism, noise_multiplier=run.noise_multiplier, adjacency="zero-out", epsilons=[3.0])
    assert both.epsilon(curve[0] / 2, "zero-out") == pytest.approx(3.0, rel=0.01)


def test_a_run_outside_of_the_grid_is_refused(claims, tuned):
    with pytest.raises(CertificateMismatchError, match="not one of the tuning's grid"):
        claims[0](4.0).of_tuning(tuned[0].tuning, target_epsilon=4.0, run_id="x")
    stored = json.loads(tuned[0].to_json())
    del stored["checksum"], stored["format"]
    stored["noise_multiplier"] *= 2
    text = codec.encode_json({**stored, "checksum": codec.checksum(stored)}, format="coowned-guarantee-2")
    with pytest.raises(CertificateMismatchError, match="not one of the tuning's grid"):
        PrivacyGuarantee.from_json(text)


def test_stored_and_read_back(tuned):
    for run in tuned:
        assert PrivacyGuarantee.from_json(run.to_json()) == run


def test_a_claim_with_fewer_runs_is_refused(claims):
    run = claims[0](4.0)
    tuned = run.of_tuning(claim_of(run, weights=(1,) * 8), target_epsilon=9.0, run_id="x")
    assert tuned.epsilon > 4.2
    stored = json.loads(tuned.to_json())
    del stored["checksum"], stored["format"]
    stored["epsilon"] = 4.0
    text = codec.encode_json({**stored, "checksum": codec.checksum(stored)}, format="coowned-guarantee-2")
    with pytest.raises(CertificateMismatchError, match="is proven; compute the guarantee again"):
        PrivacyGuarantee.from_json(text)


def test_tuning_is_stated(tuned):
    parts = tuned[1].statement_parts()
    assert parts.headline.startswith("The whole tuning, of which this is the best run, is (4, 1e-06)-differentially")
    text = " ".join(parts.sentences)
    assert "4 expected, at most 16" in text
    assert "one of 6 settings of learning_rate, batch_size" in text
    assert "too high on average" in text
    assert any("how many runs there were" in sentence for sentence in parts.not_promised)
    assert all(0 < bound <= 1 for bound in parts.attack_bounds.values())


def test_levels_of_a_tuning_are_those_of_the_worst_off(tuned):
    assert set(tuned[0].by_copies()["epsilon"]) == {tuned[0].epsilon}


def tiered_claim(others, epsilon):
    """Poisson sampling of people of whom the first ten are careful and the next has opted out, in both parts."""
    bounds = UserBounds.of({str(user): int(user < 10) for user in range(11)}, others=others)
    parts = [AttributionGraph.from_users_per_example([[user % 25] for user in range(size)]) for size in (100, 75)]
    selected = Greedy(contribution_bound=others, contribution_bounds=bounds).select(parts[0])
    certificate = certify(parts[0], selected)
    held_out = certify(parts[1], select_held_out(parts[1], contribution_bound=2, user_bounds=bounds))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=8, iterations=4)
    return guarantee(certificate, mechanism, epsilon=epsilon, held_out=held_out, epsilon_share=0.1, **CLAIM)


@pytest.mark.full
def test_tiers_of_a_tuning():
    """Of the same people, whatever else differs: the tuning of a run in which everybody is as careful as they are."""
    claims = [functools.partial(tiered_claim, 3)]
    (run,) = tuned_guarantees(claims, [1], grid={"learning_rate": [0.1]}, expected_runs=2, epsilon=4.0)
    (setting,) = run.tuning.settings
    careful = dataclasses.replace(
        run.tuning,
        settings=(
            dataclasses.replace(
                setting,
                mechanism=run.mechanism.for_copies(1).to_dict(),
                evaluation=dataclasses.replace(run.evaluation, contribution_bound=1),
            ),
        ),
    )
    rows = {row["tier"]: row for row in run.by_tier().to_dicts()}
    assert rows["bound 1"]["epsilon"] == careful.epsilon(1e-6, "zero-out") < 0.6 * run.epsilon
    assert rows["bound 1"]["other_epsilon"] == careful.epsilon(1e-6, "replace")
    assert rows["bound 3"]["epsilon"] == run.epsilon
    assert rows["bound 0"]["epsilon"] is None
    again = PrivacyGuarantee.from_json(run.to_json())
    assert again.by_tier().equals(run.by_tier())
    assert run.by_copies().filter(tier="bound 1")["epsilon"].to_list() == [rows["bound 1"]["epsilon"]] * 2


@pytest.mark.full
def test_tiers_that_differ_between_settings_have_one_epsilon():
    """A bound of 1 for others puts everybody into the tier "bound 1": its name says nothing of a setting with 3."""
    claims = [functools.partial(tiered_claim, others) for others in (1, 3)]
    grid = {"contribution_bound": [1, 3]}
    for run in tuned_guarantees(claims, [1, 1], grid=grid, expected_runs=2, epsilon=4.0):
        assert not run.tuning.individual_bounds
        assert set(run.by_tier()["epsilon"]) == {run.epsilon}


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_curve_of_a_tuning(tuned, adjacency):
    """The tuning's claim lies on it, and that of one run alone is far below it."""
    epsilons = [0.0, 1.0, 2.0, tuned[0].epsilon if adjacency == "zero-out" else tuned[0].other_epsilon]
    found = tuned[0].deltas(adjacency, epsilons)
    assert found[-1] == pytest.approx(1e-6, rel=0.02)
    noise = {"noise_multiplier": tuned[0].noise_multiplier, "adjacency": adjacency}
    assert (found > 1.5 * epsilon_curve(tuned[0].mechanism, epsilons=epsilons, **noise)).all()
    for rate in (0.001, 0.01, 0.1):
        alone = true_positive_rate_bound(tuned[0].mechanism, false_positive_rate=rate, **noise)
        everything = min(np.exp(epsilons) * rate + found)
        assert alone < tuned[0].attack_bound(adjacency, rate) <= everything * (1 + 1e-6)


def test_composition_with_a_tuning_adds_epsilons(claims, tuned):
    run = claims[0](2.0)
    both = compose([tuned[0], run], delta=2e-6)
    assert both.epsilon == pytest.approx(tuned[0].epsilon + run.epsilon, rel=1e-3)
    assert compose([tuned[0]], delta=1e-6).epsilon == pytest.approx(tuned[0].epsilon)


def test_a_grid_that_is_not_covered_is_refused(claims):
    with pytest.raises(InputError, match="every setting of its grid"):
        tuned_guarantees(claims, [3, 2], grid=GRID, expected_runs=4, epsilon=4.0)


@pytest.mark.full
def test_noise_of_a_tuning_of_sampled_runs(greedy_certificate):
    mechanisms = [
        PoissonSampling.from_certificate(greedy_certificate, batch_size=size, iterations=50) for size in (32, 64)
    ]
    claims = [functools.partial(_claim, greedy_certificate, mechanism) for mechanism in mechanisms]
    for run in tuned_guarantees(claims, [1, 1], grid={"batch_size": [32, 64]}, expected_runs=4, epsilon=4.0):
        assert 4.0 * 0.997 <= run.epsilon <= 4.0


def test_one_example_may_be_worse_off_than_any_user():
    """An example that nobody is part of is in as many copies as the schedule says, however few a user is in."""
    graph = AttributionGraph.from_users_per_example([*([user % 25] for user in range(100)), []])
    batches = np.arange(80).reshape(20, 4) % 100
    batches[:, 3] = 100
    certificate = certify(graph, Schedule.from_batches(graph, batches))
    claim = functools.partial(_claim, certificate, MinSeparation.from_certificate(certificate))
    run = claim(2.0)
    assert run.example_epsilon > 10 * run.epsilon
    tuned = run.of_tuning(claim_of(run, weights=(1, 1)), target_epsilon=4.0, run_id="x")
    assert tuned.example_epsilon >= run.example_epsilon
    assert tuned.epsilon < run.example_epsilon


def test_one_example_of_a_tuning_is_safer_than_a_user(claims):
    """Every setting's example has one or two copies here, where a user has several."""
    run = claims[0](4.0)
    tuned = run.of_tuning(claim_of(run, weights=(1, 1)), target_epsilon=8.0, run_id="x")
    assert run.example_epsilon <= tuned.example_epsilon < tuned.epsilon


def test_groups_of_a_tuning_are_read_back():
    """A mechanism with bounds and probabilities by group, which are lists in JSON."""
    graph = AttributionGraph.from_users_per_example([[user % 25] for user in range(100)])
    certificate = certify(graph, CyclicGroups(num_groups=2, contribution_bound=2).select(graph))
    run = _claim(certificate, CyclicPoisson.from_certificate(certificate, batch_size=5, iterations=6), 4.0)
    tuned = run.of_tuning(claim_of(run, weights=(1, 1)), target_epsilon=8.0, run_id="x")
    again = PrivacyGuarantee.from_json(tuned.to_json())
    assert (again.epsilon, again.example_epsilon) == (tuned.epsilon, tuned.example_epsilon)
