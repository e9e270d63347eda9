"""The statement says what the guarantee says, and nothing it does not."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned import CyclicPoisson, MinSeparation, PoissonSampling
from coowned.accounting import calculators
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.selection.greedy import Greedy

CLAIM = {"delta": 1e-6, "adjacency": "zero-out"}


@pytest.fixture(scope="module")
def made(greedy_certificate) -> PrivacyGuarantee:
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    return guarantee(greedy_certificate, mechanism, noise_multiplier=2.5, **CLAIM)


def test_numbers_are_the_guarantees(made):
    text = made.statement()
    for number in (made.epsilon, made.other_epsilon, made.example_epsilon):
        assert rounded_up(number) in text
    assert f"noise multiplier {rounded_down(made.noise_multiplier)}" in text
    for count in (
        made.certificate.size,
        made.certificate.num_distinct,
        made.certificate.contribution_bound,
        made.mechanism.iterations,
    ):
        assert f"{count:,}" in text
    for word in ("1e-06", "zero-out", made.certificate.graph_digest, made.certificate.selection_digest, made.version):
        assert word in text


def test_sentences_are_numbered(made):
    numbers = [int(re.match(r"(\d+)\. ", line)[1]) for line in made.statement().splitlines()]  # type: ignore[index]
    assert numbers == list(range(1, len(numbers) + 1))


def test_not_promised_is_data(made):
    parts = made.statement_parts()
    assert str(parts) == made.statement()
    assert parts.headline == parts.sentences[0]
    text = " ".join(parts.sentences)
    assert [said.split(" ", 2)[:2] for said in parts.not_promised] == [
        ["Not", "released:"],
        ["Not", "covered"],
        ["Not", "promised:"],
    ]
    assert all(said in text for said in parts.not_promised)


def test_what_must_be_reported(made):
    text = made.statement()
    wanted = ["unit", "central model", "same in both worlds", "Released", "edge-data", "coin", "Accountant"]
    for part in [*wanted, "tuning runs", "validation and test", "Keys", "node privacy"]:
        assert part in text


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_sentence_matches_adjacency(greedy_certificate, adjacency):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    made = guarantee(greedy_certificate, mechanism, noise_multiplier=2.5, delta=1e-6, adjacency=adjacency)
    by_name = {"zero-out": made.epsilon, "replace": made.other_epsilon}
    if adjacency == "replace":
        by_name = {"zero-out": made.other_epsilon, "replace": made.epsilon}
    lines = made.statement().splitlines()
    different = [line for line in lines if "completely different text" in line]
    blank = [line for line in lines if "had been blank" in line]
    assert len(different) == len(blank) == 1
    assert f"epsilon {rounded_up(by_name['replace'])}" in different[0]
    assert f"epsilon {rounded_up(by_name['zero-out'])}" in blank[0]


def test_test_run_has_no_epsilon(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    made = guarantee(greedy_certificate, mechanism, noise_multiplier=2.5, test_run=True, **CLAIM)
    text = made.statement(graph_statistics=True)
    assert text.startswith("1. No guarantee")
    assert "epsilon" not in text
    assert rounded_up(made.epsilon) not in text


def test_graph_statistics_are_marked(made):
    assert "% of users" not in made.statement()
    line = next(line for line in made.statement(graph_statistics=True).splitlines() if "% of users" in line)
    assert "Graph statistic" in line
    assert "not in training" in line
    assert "epsilon 0" not in line
    assert "half of all users" in line


def test_unprotected_users_are_counted():
    graph = AttributionGraph.from_users_per_example([[0, user] for user in range(1, 60)] + [[0]]).without_users([0])
    certificate = certify(graph, Greedy(contribution_bound=1, unattributed="keep").select(graph))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=10, iterations=5)
    made = guarantee(certificate, mechanism, noise_multiplier=2.0, **CLAIM)
    text = made.statement()
    assert "1 user was excluded from the attribution: this guarantee does not cover them" in text
    assert "1 copy in the training set has no protected user" in text
    assert "Nothing is promised to 1 user excluded from protection." in made.statement_parts().headline
    assert text.count("about any protected person") == 2


@pytest.mark.parametrize(
    ("noise", "protection", "word"),
    [
        (6.0, "strong", "learns nearly the same about any person as"),
        (1.5, "moderate", "learns a limited amount more about any person than"),
        (0.3, "little", "hides little"),
    ],
)
def test_plain_sentence_follows_epsilon(greedy_certificate, noise, protection, word):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    parts = guarantee(greedy_certificate, mechanism, noise_multiplier=noise, **CLAIM).statement_parts()
    assert parts.protection["replace"] == protection
    assert word in parts.plain["replace"]
    for name, sentence in parts.plain.items():
        assert any(said.endswith(f": {sentence}") and name in said for said in parts.sentences)
        stated = float(re.search(r"at most ([\d.]+)% of cases", sentence)[1])  # type: ignore[index]
        exact = calculators.true_positive_rate_bound(
            mechanism, noise_multiplier=noise, adjacency=name, false_positive_rate=0.01
        )
        assert 100 * exact <= stated <= 100 * exact + 0.1
    assert parts.attack_bounds["zero-out"] < parts.attack_bounds["replace"]


def test_attack_bound_is_never_above_the_claims(greedy_certificate):
    """Where the curve is loose, the claim's own epsilon bounds attacks as well."""
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=1, iterations=1)
    made = guarantee(greedy_certificate, mechanism, noise_multiplier=50.0, **CLAIM)
    for name, epsilon in (("zero-out", made.epsilon), ("replace", made.other_epsilon)):
        assert 0.01 <= made.attack_bound(name) <= 0.01 * math.exp(epsilon) + 1e-6


def test_large_delta_is_warned_of(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    found = {}
    for delta in (1e-6, 2e-5, 1e-2):
        parts = guarantee(
            greedy_certificate, mechanism, noise_multiplier=2.5, delta=delta, adjacency="zero-out"
        ).statement_parts()
        assert all(warning in parts.sentences for warning in parts.warnings)
        found[delta] = " ".join(parts.warnings)
    assert found[1e-6] == ""
    assert "above 1e-05" in found[2e-5]
    assert "above 1 / (users in the training set)" in found[1e-2]


def test_target_is_shown_as_asked(greedy_certificate):
    mechanism = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)
    asked = guarantee(greedy_certificate, mechanism, epsilon=8.0, **CLAIM)
    assert asked.shown_epsilon == "8"
    assert asked.statement().startswith("1. Training is (8, 1e-06)-differentially private")
    assert f"Requested: epsilon 8; proven: {rounded_up(asked.epsilon)}." in asked.statement()
    assert "Under zero-out adjacency, epsilon 8:" in asked.statement()
    given = guarantee(greedy_certificate, mechanism, noise_multiplier=2.34567, **CLAIM)
    assert "noise multiplier 2.34567 in units" in given.statement()
    assert "Requested" not in given.statement()
    other = f"({rounded_up(asked.other_epsilon)}, 1e-06)-differentially private under replace adjacency"
    assert other in asked.statement_parts().headline


def test_statement_of_a_schedule(schedule_certificate):
    made = guarantee(
        schedule_certificate, MinSeparation.from_certificate(schedule_certificate), noise_multiplier=2.0, **CLAIM
    )
    text = made.statement()
    assert "any 3 consecutive batches" in text
    assert "closed form" in text


@given(st.floats(1e-6, 1e6))
def test_rounding_is_on_the_private_side(value):
    assert float(rounded_up(value)) >= value >= float(rounded_down(value))
    assert float(rounded_up(value)) == pytest.approx(value, rel=1.1e-3)


def test_statement_of_groups(group_certificate):
    mechanism = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    made = guarantee(group_certificate, mechanism, noise_multiplier=3.0, delta=1e-6, adjacency="zero-out")
    text = made.statement(graph_statistics=True)
    assert "in its group's rounds, of probability 0.5 to 1 by group" in text
    assert "the 2 groups of users have 1 to 2 copies" in text
    by_group = {
        group: max(row["epsilon"] for row in made.by_copies().iter_rows(named=True) if row["group"] == group)
        for group in (0, 1)
    }
    low, high = sorted(by_group, key=by_group.__getitem__)
    spread = f"epsilon {rounded_up(by_group[low])} to {rounded_up(by_group[high])}, the largest in group {high}"
    assert spread in text
    assert "the 2 groups" not in made.statement()


def test_how_a_given_s_was_chosen_is_assumed(made):
    """A certificate proves the bound alone: no statement says of every S that nobody looked at content."""
    assert "assumed to be chosen without looking at content" in made.statement()
    assert made.statement().count("chosen without looking at content") == 1


def test_the_origin_of_the_shape_is_stated(made):
    (sentence,) = [
        sentence for sentence in made.statement_parts().sentences if "The shape of the model is public" in sentence
    ]
    for origin in ("configuration", "features", "classes", "sequence length", "declared types", "vocabulary", "code"):
        assert origin in sentence
    assert "never from the content of examples" in sentence
