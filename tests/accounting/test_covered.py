"""Training and its covered evaluation are one claim, at the epsilon that was asked for."""

import dataclasses
import json
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom, norm

from coowned import CyclicPoisson, MinSeparation, PoissonSampling, codec
from coowned.accounting.calculators import calibrate, epsilon, epsilon_curve, release_epsilon
from coowned.accounting.calibrate import calibrate_release
from coowned.accounting.covered import CoveredEvaluation
from coowned.accounting.gaussian import gaussian_epsilon
from coowned.accounting.guarantee import compose, guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_down
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.errors import CertificateMismatchError, CoownedError, InputError, UncertifiableError
from coowned.mechanism.mechanism import Steps
from coowned.mechanism.random_allocation import RandomAllocation
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Schedule, Selection

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}
MECHANISMS = [
    PoissonSampling(contribution_bound=3, sampling_probability=0.02, iterations=200),
    MinSeparation(contribution_bound=4, min_separation=8, num_bands=8, iterations=100),
    CyclicPoisson(contribution_bound=2, sampling_probability=0.1, iterations=80, num_groups=4, num_bands=2),
    RandomAllocation(contribution_bound=1, rounds_per_epoch=4, iterations=40, num_groups=2, num_bands=2),
]


def release(copies: int, noise: float) -> Steps:
    return Steps(copies=copies, probability=1.0, noise_multiplier=noise, repetitions=1)


@pytest.fixture(scope="module")
def held_out():
    graph = AttributionGraph.from_users_per_example([[user % 25] for user in range(60)])
    return certify(graph, Greedy(contribution_bound=2).select(graph))


@pytest.fixture(scope="module")
def made(greedy_certificate, mechanism, held_out) -> PrivacyGuarantee:
    return guarantee(greedy_certificate, mechanism, epsilon=4.0, held_out=held_out, epsilon_share=0.1, **CLAIM)


# -- the accountant ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "probability", "noise", "iterations", "held_out_copies", "release_noise"),
    [
        (2, 0.05, 1.5, 20, 1, 4.0),
        pytest.param(1, 0.01, 0.8, 300, 3, 20.0, marks=pytest.mark.full),
        pytest.param(3, 0.02, 2.0, 1000, 2, 12.0, marks=pytest.mark.full),
    ],
)
def test_joint_claim_is_that_of_dp_accounting(copies, probability, noise, iterations, held_out_copies, release_noise):
    def theirs(pessimistic: bool) -> float:
        grid = {"value_discretization_interval": 2e-3, "pessimistic_estimate": pessimistic}
        weights = [float(w) for w in binom.pmf(range(copies + 1), copies, probability)]
        step = privacy_loss_distribution.from_mixture_gaussian_mechanism(noise, range(copies + 1), weights, **grid)
        other = privacy_loss_distribution.from_gaussian_mechanism(release_noise, sensitivity=held_out_copies, **grid)
        return step.self_compose(iterations).compose(other).get_epsilon_for_delta(1e-6)

    m = PoissonSampling(contribution_bound=copies, sampling_probability=probability, iterations=iterations)
    also = [release(held_out_copies, release_noise)]
    ours = epsilon(m, noise_multiplier=noise, also=also, **CLAIM)
    assert theirs(pessimistic=False) <= ours <= theirs(pessimistic=True) * (1 + 2e-4)
    assert ours == pytest.approx(theirs(pessimistic=True), rel=0.01)
    assert ours > epsilon(m, noise_multiplier=noise, **CLAIM)  # or nothing was composed


def binned(copies, probability, noise, adjacency, pessimistic):
    """Losses in both directions of the number of copies drawn plus noise, in bins: binning only makes them smaller."""
    weights = binom.pmf(range(copies + 1), copies, probability)
    edges = np.arange(-copies - 10 * noise, copies + 10 * noise, 0.04 * noise)

    def masses(sign):
        ends = (edges[:, None] - sign * np.arange(copies + 1)) / noise
        tails = np.where(ends < 0, norm.cdf(ends), -norm.sf(ends))  # small numbers, not differences of large ones
        found = np.diff(tails, axis=0) + ((ends[:-1] < 0) & (ends[1:] >= 0))
        return dict(enumerate(np.log(np.maximum(found @ weights, 1e-300))))

    pair = masses(1), masses(-1 if adjacency == "replace" else 0)
    grid = {"value_discretization_interval": 1e-3, "pessimistic_estimate": pessimistic, "symmetric": False}
    make = privacy_loss_distribution.from_two_probability_mass_functions
    return make(*pair, **grid), make(*reversed(pair), **grid)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("kind", ["poisson", "cyclic"])
def test_joint_claim_is_that_of_binned_noise(kind, adjacency):
    """Also under replace, and where the worst group is neither the largest nor the one that is drawn most often."""
    noise, release_noise, iterations = 1.2, 8.0, 16
    groups = [(2, 0.25)] if kind == "poisson" else [(1, 0.5), (2, 0.4), (3, 0.1)]
    if kind == "poisson":
        m = PoissonSampling(contribution_bound=2, sampling_probability=0.25, iterations=iterations)
    else:
        bounds, probabilities = zip(*groups, strict=True)
        m = CyclicPoisson(
            contribution_bound=3, group_probabilities=probabilities, group_bounds=bounds, iterations=iterations,
            num_groups=3, num_bands=3,
        )  # fmt: skip

    def theirs(pessimistic):
        found = []
        for group, (copies, probability) in enumerate(groups):
            rounds = len(range(group, iterations, len(groups)))
            trained = binned(copies, probability, noise, adjacency, pessimistic)
            released = binned(2, 1.0, release_noise, adjacency, pessimistic)
            for one, other in zip(trained, released, strict=True):
                found.append(one.self_compose(rounds).compose(other).get_epsilon_for_delta(1e-6))
        return max(found)

    ours = epsilon(m, noise_multiplier=noise, delta=1e-6, adjacency=adjacency, also=[release(2, release_noise)])
    assert theirs(pessimistic=False) <= ours <= theirs(pessimistic=True) * (1 + 1e-3)
    assert ours == pytest.approx(theirs(pessimistic=True), rel=0.01)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_two_gaussians_are_one(adjacency):
    mu = math.sqrt(4 / 3.0**2 + (2 / 7.0) ** 2) * (2 if adjacency == "replace" else 1)
    found = epsilon(MECHANISMS[1], noise_multiplier=3.0, delta=1e-6, adjacency=adjacency, also=[release(2, 7.0)])
    assert found == pytest.approx(gaussian_epsilon(mu, 1e-6), rel=1e-12)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.kind)
def test_joint_claim_of_every_mechanism(mechanism, adjacency):
    claim = {"delta": 1e-6, "adjacency": adjacency}
    noise = calibrate(mechanism, epsilon=1.9, **claim)
    found = calibrate_release(mechanism, noise_multiplier=noise, contribution_bound=2, epsilon=2.0, **claim)
    together = epsilon(mechanism, noise_multiplier=noise, also=[release(2, found)], **claim)
    alone = [epsilon(mechanism, noise_multiplier=noise, **claim), release_epsilon(release(2, found), **claim)]
    assert max(alone) < 0.9995 * 2.0 < together <= 2.0 < sum(alone)  # never a sum
    assert epsilon_curve(
        mechanism, noise_multiplier=noise, adjacency=adjacency, epsilons=[2.0], also=[release(2, found)]
    )[0] == pytest.approx(1e-6, rel=0.02)


def test_release_is_private_and_tight():
    for share in (0.02, 0.3):
        m = MECHANISMS[0]
        noise = calibrate(m, epsilon=4.0 * (1 - share), **CLAIM)
        found = calibrate_release(m, noise_multiplier=noise, contribution_bound=3, epsilon=4.0, **CLAIM)
        assert epsilon(m, noise_multiplier=noise, also=[release(3, found)], **CLAIM) <= 4.0
        assert epsilon(m, noise_multiplier=noise, also=[release(3, 0.99 * found)], **CLAIM) > 4.0
    with pytest.raises(UncertifiableError, match="no noise makes an evaluation free"):
        calibrate_release(m, noise_multiplier=0.9 * noise, contribution_bound=3, epsilon=2.8, **CLAIM)


# -- the claim -----------------------------------------------------------------------------------------------------


def test_the_claim_is_for_both(made, mechanism, held_out):
    assert made.evaluation is not None
    assert 3.99 < made.epsilon <= 4.0 < made.other_epsilon
    alone = epsilon(mechanism, noise_multiplier=made.noise_multiplier, **CLAIM)
    assert 3.59 < alone <= 3.6
    assert made.evaluation.unshared_noise_multiplier == calibrate(mechanism, epsilon=4.0, **CLAIM)
    assert made.evaluation.unshared_noise_multiplier < made.noise_multiplier
    made.evaluation.check_certificate(held_out)
    assert PrivacyGuarantee.from_json(made.to_json()) == made
    twice = guarantee(made.certificate, mechanism, noise_multiplier=3.0, **CLAIM)
    assert compose([made, twice], delta=1e-6).epsilon > made.epsilon


def test_given_noise_has_its_share(greedy_certificate, mechanism, held_out):
    alone = epsilon(mechanism, noise_multiplier=2.0, **CLAIM)
    claim = guarantee(
        greedy_certificate, mechanism, noise_multiplier=2.0, held_out=held_out, epsilon_share=0.1, **CLAIM
    )
    assert claim.noise_multiplier == 2.0
    assert claim.epsilon == pytest.approx(alone / 0.9, rel=1e-3)


def test_levels_with_an_evaluation(made):
    levels = made.by_copies()
    found = levels["epsilon"].to_list()
    assert levels["copies"].to_list() == list(range(len(found)))
    assert found[0] == release_epsilon(made.evaluation.steps, **CLAIM)
    assert found == sorted(found)
    assert found[-1] == made.epsilon


def test_a_forged_evaluation_is_recomputed(made):
    stored = json.loads(made.to_json())
    fields = {key: entry for key, entry in stored.items() if key not in ("format", "checksum")}
    for name, value in (("noise_multiplier", 0.5 * made.evaluation.noise_multiplier), ("contribution_bound", 9)):
        forged = fields | {"evaluation": {**fields["evaluation"], name: value}}
        sealed = {"format": stored["format"], **forged, "checksum": codec.checksum(forged)}
        with pytest.raises(CertificateMismatchError, match="is proven; "):
            PrivacyGuarantee.from_json(json.dumps(sealed))


def test_a_held_out_part_that_cannot_be_covered_is_refused(greedy_certificate, mechanism, held_out):
    def claim(held_out, **changes):
        return guarantee(greedy_certificate, mechanism, epsilon=4.0, held_out=held_out, **CLAIM, **changes)

    graph = AttributionGraph.from_users_per_example([[0], [1]])
    empty = certify(graph, Selection.from_copies(graph, [0, 0]))
    schedule = certify(graph, Schedule.from_batches(graph, [[0], [1]]))
    for part, words in ((empty, "has no example"), (schedule, "is a schedule")):
        with pytest.raises(CoownedError, match=words):
            claim(part, epsilon_share=0.1)
    for share in (0.0, 1.0):
        with pytest.raises(InputError, match="epsilon_share"):
            claim(held_out, epsilon_share=share)
    with pytest.raises(InputError, match="simulated"):
        claim(held_out, epsilon_share=0.1, simulated_batch_size=32)
    for settings in ({"epsilon_share": 0.0}, {"contribution_bound": 0}, {"loss_bound": 0.0}):
        with pytest.raises(InputError):
            CoveredEvaluation(**settings)
    other = dataclasses.replace(held_out, selection_digest="0" * 64)
    with pytest.raises(CertificateMismatchError, match="selection_digest"):
        claim(held_out, epsilon_share=0.1).evaluation.check_certificate(other)


def test_covered_evaluation_is_stated(made, greedy_certificate, mechanism):
    text, plain = made.statement(), guarantee(greedy_certificate, mechanism, epsilon=4.0, **CLAIM).statement()
    assert "Training with its covered evaluation is (4, 1e-06)" in text
    assert f"training would have had noise multiplier {rounded_down(made.evaluation.unshared_noise_multiplier)}" in text
    assert f"of noise multiplier {rounded_down(made.evaluation.noise_multiplier)}" in text
    for words in (
        f"{made.evaluation.size:,} held-out copies",
        made.evaluation.selection_digest,
        "accuracies not marked",
        "normal (score) intervals at 95%",
    ):
        assert words in text
        assert words not in plain
    assert "reported accuracies" in plain


def test_a_held_out_part_of_the_training_graph_is_refused(greedy_certificate, mechanism):
    """An example could then be trained on and held out, which the epsilon of one example does not count."""
    with pytest.raises(InputError, match="of one graph, so that an example could be in both"):
        guarantee(greedy_certificate, mechanism, epsilon=4.0, held_out=greedy_certificate, epsilon_share=0.1, **CLAIM)
