"""A guarantee of the best of a random number of runs."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from coowned import (
    AttributionGraph,
    CyclicGroups,
    CyclicPoisson,
    Greedy,
    GreedyMinSeparation,
    MinSeparation,
    PoissonSampling,
    Schedule,
    certify,
    codec,
)
from coowned.accounting.calculators import epsilon_curve
from coowned.accounting.composed_guarantee import compose
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.tuned_guarantee import tuned_guarantees
from coowned.accounting.tuning import TuningClaim
from coowned.content.splits import select_held_out
from coowned.errors import CertificateMismatchError, InputError
from coowned.selection.user_bounds import UserBounds

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}
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


def test_tiers_that_differ_between_settings_have_one_epsilon():
    """A bound of 1 for others puts everybody into the tier "bound 1": its name says nothing of a setting with 3."""
    claims = [functools.partial(tiered_claim, others) for others in (1, 3)]
    grid = {"contribution_bound": [1, 3]}
    for run in tuned_guarantees(claims, [1, 1], grid=grid, expected_runs=2, epsilon=4.0):
        assert not run.tuning.individual_bounds
        assert set(run.by_tier()["epsilon"]) == {run.epsilon}


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
