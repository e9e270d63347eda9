"""An epsilon for each tier: against an independent accountant, from targets by name, and in the statement."""

import numpy as np
import polars as pl
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom

from coowned import CyclicGroups, CyclicPoisson, PoissonSampling
from coowned.accounting import calculators
from coowned.accounting.guarantee import compose, guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.content.splits import select_held_out
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.selection.greedy import Greedy
from coowned.selection.user_bounds import UserBounds

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}
TIERS = [{"user": user, "bound": 1, "tier": "customers"} for user in range(40)]
TIERS += [{"user": user, "bound": 3, "tier": "staff"} for user in range(40, 80)]
TIERS += [{"user": 80, "bound": 0, "tier": "out"}, {"user": 81, "bound": 0, "tier": "out"}]


@pytest.fixture(scope="module")
def graph():
    rng = np.random.default_rng(1)
    rows = [rng.choice(90, size=1 + rng.integers(0, 3), replace=False).tolist() for _ in range(600)]
    return AttributionGraph.from_users_per_example(rows, num_users=90)


@pytest.fixture(scope="module")
def certificate(graph):
    return certify(graph, Greedy(contribution_bound=2, contribution_bounds=TIERS).select(graph))


@pytest.fixture(scope="module")
def mechanism(certificate):
    return PoissonSampling.from_certificate(certificate, batch_size=16, iterations=60)


@pytest.fixture(scope="module")
def made(certificate, mechanism):
    targets = {"staff": 8.0, "customers": 2.0, "bound 2": 5.0}
    return guarantee(certificate, mechanism, epsilon=targets, run_id="one", **CLAIM)


def loss_of_training(mechanism, copies, noise):
    weights = binom.pmf(range(copies + 1), copies, mechanism.probability_of(0)).tolist()
    loss = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise, list(range(copies + 1)), weights, value_discretization_interval=2e-3
    )
    return loss.self_compose(mechanism.iterations)


def theirs(mechanism, copies, noise):
    return loss_of_training(mechanism, copies, noise).get_epsilon_for_delta(CLAIM["delta"])


def test_epsilons_of_tiers(made, mechanism):
    found = {row["tier"]: row for row in made.by_tier().to_dicts()}
    assert {name: row["contribution_bound"] for name, row in found.items()} == {
        "staff": 3, "bound 2": 2, "customers": 1, "out": 0
    }  # fmt: skip
    assert {name: row["users"] for name, row in found.items()} == {"staff": 40, "bound 2": 8, "customers": 40, "out": 2}
    for name, copies in (("staff", 3), ("bound 2", 2), ("customers", 1)):
        independent = theirs(mechanism, copies, made.noise_multiplier)
        assert independent * (1 - 5e-3) <= found[name]["epsilon"] <= independent * (1 + 2e-4)
        assert found[name]["other_epsilon"] > found[name]["epsilon"]
    assert found["out"]["epsilon"] is None
    assert found["staff"]["epsilon"] == made.epsilon
    assert made.contribution_bound == 3


def test_one_noise_multiplier_meets_every_target(made, certificate, mechanism):
    found = dict(made.by_tier().select("tier", "epsilon").iter_rows())
    targets = {"staff": 8.0, "customers": 2.0, "bound 2": 5.0}
    assert all(found[name] <= target for name, target in targets.items())
    closest = max(found[name] / target for name, target in targets.items())
    assert closest > 0.999  # and no more noise than that takes
    each = [
        calculators.calibrate(mechanism.for_copies(copies), epsilon=target, **CLAIM)
        for copies, target in ((3, 8.0), (1, 2.0), (2, 5.0))
    ]
    assert made.noise_multiplier == max(each)
    lower = guarantee(certificate, mechanism, epsilon=targets | {"customers": 0.5}, **CLAIM)
    assert lower.noise_multiplier > made.noise_multiplier


def test_levels_of_tiers(made, certificate):
    levels = made.by_copies()
    assert levels.columns == ["tier", "copies", "epsilon", "users"]
    assert levels["users"].sum() == certificate.num_users
    customers = levels.filter(tier="customers")
    assert customers["copies"].to_list() == [0, 1]
    assert customers["epsilon"][1] == dict(made.by_tier().select("tier", "epsilon").iter_rows())["customers"]
    assert "Graph statistic" in made.statement(graph_statistics=True)


def test_statement_of_tiers(made):
    text = made.statement()
    for row in made.by_tier().filter(tier="customers").to_dicts():
        own, other = rounded_up(row["epsilon"]), rounded_up(row["other_epsilon"])
        assert f"'customers' (bound 1): epsilon {own}, {other} under" in text
    assert "2 users opted out (bound 0): no example that they are part of is in the training set." in text
    examples = f"opted out are part of {made.certificate.tiers.num_examples_opted_out} examples"
    assert examples in made.statement(graph_statistics=True)
    assert examples not in text
    assert "without looking at content; a bound that a person is told tells of the policy" in text
    assert "40 users" not in text  # how many there are is a statistic of the graph
    test_run = guarantee(made.certificate, made.mechanism, epsilon=8.0, test_run=True, **CLAIM).statement()
    assert "By tier" not in test_run
    assert "opted out" in test_run


def test_stored_guarantee_has_the_tiers(made):
    again = PrivacyGuarantee.from_json(made.to_json())
    assert again.by_tier().equals(made.by_tier())
    apart = PrivacyGuarantee.from_json(made.to_json(embed_certificate=False), certificate=made.certificate)
    assert apart.certificate.tiers == made.certificate.tiers


def test_groups_and_tiers(graph):
    selection = CyclicGroups(num_groups=2, contribution_bound=2, contribution_bounds=TIERS).select(graph)
    certificate = certify(graph, selection)
    mechanism = CyclicPoisson.from_certificate(certificate, batch_size=16, iterations=60)
    made = guarantee(certificate, mechanism, noise_multiplier=2.0, **CLAIM)
    assert "group" in made.by_copies().columns
    found = dict(made.by_tier().select("tier", "epsilon").iter_rows())
    assert found["customers"] < found["bound 2"] <= found["staff"] == made.epsilon


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ({"staff": 8.0, "customers": 2.0}, "8 users are of tier 'bound 2', which has no target"),
        ({"staff": 8.0, "customer": 2.0, "bound 2": 5.0}, "tier 'customer' is unknown"),
        ({"staff": 8.0, "customers": 2.0, "bound 2": 5.0, "out": 1.0}, "tier 'out' has bound 0"),
        ({"staff": 8.0, "customers": -2.0, "bound 2": 5.0}, "epsilon must be"),
    ],
)
def test_wrong_targets_are_refused(certificate, mechanism, targets, says):
    with pytest.raises(InputError, match=says):
        guarantee(certificate, mechanism, epsilon=targets, **CLAIM)


def test_targets_need_tiers(graph):
    certificate = certify(graph, Greedy(contribution_bound=2).select(graph))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=16, iterations=60)
    with pytest.raises(InputError, match="select with contribution_bounds"):
        guarantee(certificate, mechanism, epsilon={"staff": 8.0}, **CLAIM)
    assert guarantee(certificate, mechanism, epsilon=8.0, **CLAIM).by_tier().is_empty()


def test_noise_from_another_version_is_refused(certificate, mechanism, monkeypatch):
    monkeypatch.setattr(calculators, "calibrate", lambda *_, **__: 0.5)
    with pytest.raises(UncertifiableError, match="that was found gives tier 'staff'"):
        guarantee(certificate, mechanism, epsilon={"staff": 8.0, "customers": 2.0, "bound 2": 5.0}, **CLAIM)


HELD_OUT = AttributionGraph.from_users_per_example([[user % 90] for user in range(400)])


def test_tiers_with_a_covered_evaluation_without_them(certificate, mechanism):
    """Every tier, also of those who opted out of training, may be in as many held-out copies as there are."""
    held_out = certify(HELD_OUT, Greedy(contribution_bound=4).select(HELD_OUT))
    made = guarantee(certificate, mechanism, epsilon=4.0, held_out=held_out, epsilon_share=0.2, **CLAIM)
    counts = privacy_loss_distribution.from_gaussian_mechanism(
        made.evaluation.noise_multiplier / 4, value_discretization_interval=1e-4
    )
    found = dict(made.by_tier().select("tier", "epsilon").iter_rows())
    assert found["out"] == pytest.approx(counts.get_epsilon_for_delta(CLAIM["delta"]), rel=1e-3)
    assert found["out"] < found["customers"] < found["bound 2"] < found["staff"] == made.epsilon
    text = made.statement()
    assert f"'out' (bound 0): epsilon {rounded_up(found['out'])}, " in text
    assert "the counts of the covered evaluation, may be theirs" in text


@pytest.fixture(scope="module")
def held_out():
    bounds = UserBounds.of(pl.DataFrame(TIERS), others=2)
    return certify(HELD_OUT, select_held_out(HELD_OUT, contribution_bound=3, user_bounds=bounds))


@pytest.mark.parametrize("targets", [4.0, {"staff": 8.0, "customers": 1.5, "bound 2": 5.0}], ids=["one", "by tier"])
def test_tiers_with_a_covered_evaluation(certificate, mechanism, held_out, targets):
    """Every tier is held to its own bound in both parts; an independent accountant composes them."""
    made = guarantee(certificate, mechanism, epsilon=targets, held_out=held_out, epsilon_share=0.2, **CLAIM)
    assert made.evaluation.individual_bounds
    assert made.evaluation.contribution_bound == held_out.contribution_bound == 3
    rows = {row["tier"]: row for row in made.by_tier().to_dicts()}
    for name, copies in (("staff", 3), ("bound 2", 2), ("customers", 1)):
        counts = privacy_loss_distribution.from_gaussian_mechanism(
            made.evaluation.noise_multiplier, sensitivity=copies, value_discretization_interval=2e-3
        )
        trained = loss_of_training(mechanism, copies, made.noise_multiplier)
        independent = trained.compose(counts).get_epsilon_for_delta(CLAIM["delta"])
        assert independent * (1 - 1e-2) <= rows[name]["epsilon"] <= independent * (1 + 2e-4)
    assert rows["out"]["epsilon"] is rows["out"]["other_epsilon"] is None
    assert made.by_copies().filter(tier="out")["epsilon"].to_list() == [None]
    if isinstance(targets, dict):
        closest = max(rows[name]["epsilon"] / target for name, target in targets.items())
        assert 0.999 < closest <= 1
        alone = calculators.epsilon_of_copies(mechanism, copies=1, noise_multiplier=made.noise_multiplier, **CLAIM)
        assert alone <= 0.8 * 1.5  # the share of training, of the tier that decides
        assert PrivacyGuarantee.from_json(made.to_json()).by_tier().equals(made.by_tier())
    assert "is in the training set or counted in the covered evaluation. Validation" in made.statement()


def test_a_held_out_part_with_other_bounds_is_refused(graph, certificate, mechanism, held_out):
    """The planted mistake: other people are careful in the held-out part, whose tiers have the same names."""
    swapped = [{**row, "user": 89 - row["user"]} for row in TIERS]
    bounds = UserBounds.of(pl.DataFrame(swapped), others=2)
    other = certify(HELD_OUT, select_held_out(HELD_OUT, contribution_bound=3, user_bounds=bounds))
    assert (other.tiers.names, other.tiers.bounds) == (held_out.tiers.names, held_out.tiers.bounds)
    plain = certify(graph, Greedy(contribution_bound=2).select(graph))
    for training, part in ((certificate, other), (plain, held_out)):
        with pytest.raises(CertificateMismatchError, match="other individual bounds"):
            guarantee(training, mechanism, epsilon=4.0, held_out=part, epsilon_share=0.2, **CLAIM)


def test_composition_counts_the_larger_tier_of_each_run(made, graph):
    """Somebody may be of a small tier in one run and of a large one in the other."""
    bounds = [{**row, "bound": {1: 3, 3: 1}.get(row["bound"], 0)} for row in TIERS]
    other = certify(graph, Greedy(contribution_bound=2, contribution_bounds=bounds).select(graph))
    sampling = PoissonSampling.from_certificate(other, batch_size=16, iterations=60)
    second = guarantee(other, sampling, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert second.by_tier()["tier"].to_list() != made.by_tier()["tier"].to_list()
    losses = []
    for run in (made, second):
        weights = binom.pmf(range(4), 3, run.mechanism.probability_of(0)).tolist()
        step = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            run.noise_multiplier, list(range(4)), weights, value_discretization_interval=2e-3
        )
        losses.append(step.self_compose(60))
    independent = losses[0].compose(losses[1]).get_epsilon_for_delta(CLAIM["delta"])
    assert independent * (1 - 5e-3) <= compose([made, second], delta=CLAIM["delta"]).epsilon
    assert compose([made, second], delta=CLAIM["delta"]).epsilon <= independent * (1 + 2e-4)
