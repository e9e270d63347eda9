"""The strategy: columns no longer than 1, the optimum of jax_privacy, a user's true sensitivity."""

import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_privacy.matrix_factorization import toeplitz

from coowned import certify, files
from coowned.attribution.graph import AttributionGraph
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.mechanism import banded_strategy
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.min_separation import MinSeparation
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.selector import Schedule
from coowned.synthetic.regular_graph import RegularGraph


def squared(coefficients) -> Fraction:
    return sum((Fraction(float(c)) ** 2 for c in coefficients), Fraction(0))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_no_column_is_longer_than_one(rest, first):
    strategy = BandedStrategy(len(rest) + 1, 30, [first, *rest])
    assert squared(strategy.coefficients) <= 1
    norms = strategy.column_norms()
    assert norms.shape == (30,)
    assert norms.max() <= 1
    exact = [squared(column) for column in strategy.matrix().T]
    assert all(square <= Fraction(norm) ** 2 or norm == 1 for square, norm in zip(exact, norms.tolist(), strict=True))
    np.testing.assert_allclose(norms, np.linalg.norm(strategy.matrix(), axis=0), rtol=1e-13)


@pytest.mark.parametrize(("num_bands", "iterations"), [(2, 2), (3, 7), (8, 100), (32, 500), (64, 10_000)])
def test_optimized_columns(num_bands, iterations):
    strategy = BandedStrategy(num_bands, iterations)
    assert 1 - 1e-12 < squared(strategy.coefficients) <= 1
    assert strategy.column_norms().max() == 1
    assert (strategy.coefficients > 0).all()


def test_as_good_as_jax_privacy():
    num_bands, iterations = 8, 100
    ours = BandedStrategy(num_bands, iterations).coefficients
    theirs = np.asarray(toeplitz.optimize_banded_toeplitz(iterations, num_bands), np.float64)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
    errors = [banded_strategy.mean_squared_error(c, iterations) * float(c @ c) for c in (ours, theirs)]
    assert errors[0] <= errors[1] * (1 + 1e-9)


@pytest.mark.parametrize("num_bands", [1, 2, 5, 12])
def test_bands(num_bands):
    matrix = BandedStrategy(num_bands, 12).matrix()
    gap = np.arange(12)[:, None] - np.arange(12)
    assert (matrix[(gap < 0) | (gap >= num_bands)] == 0).all()
    assert (matrix[(gap >= 0) & (gap < num_bands)] > 0).all()


def test_one_band_is_the_identity():
    strategy = BandedStrategy(num_bands=1, iterations=9)
    assert np.array_equal(strategy.matrix(), np.eye(9))
    assert strategy.error_factor() == 1
    assert strategy.column_norms().tolist() == [1.0] * 9


def test_error_factor_is_that_of_the_matrix():
    strategy = BandedStrategy(4, 25)
    prefix = np.tril(np.ones((25, 25)))
    ours = np.square(prefix @ np.linalg.inv(strategy.matrix())).sum()
    assert strategy.error_factor() == pytest.approx(math.sqrt(ours / np.square(prefix).sum()), rel=1e-12)


def test_more_bands_are_better():
    factors = [BandedStrategy(num_bands, 200).error_factor() for num_bands in (1, 2, 4, 16, 64)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 0.4


def scheduled(num_bands=4):
    graph = RegularGraph(num_examples=400, mean_examples_per_user=4.0).generate(seed=1)
    schedule = GreedyMinSeparation(batch_size=8, iterations=20, min_separation=4).select(graph, seed=0)
    return graph, schedule, BandedStrategy(num_bands, 20)


@pytest.mark.parametrize("num_bands", [1, 3, 4])
def test_sensitivity_is_that_of_the_matrix(num_bands):
    graph, schedule, strategy = scheduled(num_bands)
    matrix, worst = strategy.matrix(), 0.0
    for user in range(graph.num_users):
        takes_part = np.zeros(20)
        for step, batch in enumerate(schedule.batches):
            takes_part[step] = sum(user in graph.users[graph.indptr[e] : graph.indptr[e + 1]] for e in batch)
        # C is not negative, so the worst case is that all her gradients point the same way.
        worst = max(worst, float(np.linalg.norm(matrix @ takes_part)))
    found = strategy.sensitivity_of(schedule, graph)
    assert worst <= found <= worst * (1 + 1e-12)


@pytest.mark.parametrize("participations", [4_092, 4_093, 5_000, 100_000])
@pytest.mark.parametrize("coefficients", [None, (0.8, 0.6), (0.7, 0.1)])
def test_sensitivity_of_many_participations(participations, coefficients):
    steps = 2 * participations
    graph = AttributionGraph.from_users_per_example([[0], [1]])
    schedule = Schedule.from_batches(graph, np.arange(steps)[:, None] % 2)
    strategy = BandedStrategy(2, steps, coefficients or np.sqrt([0.75, 0.25]))
    exact = participations * squared(strategy.coefficients)  # of the first user, who is never at the last step
    found = strategy.sensitivity_of(schedule, graph)
    assert exact <= Fraction(found) ** 2 <= exact * (1 + Fraction(1, 2**45))
    norm = None if coefficients is None else float(strategy.column_norms().max())
    certificate = certify(graph, schedule)
    mechanism = MinSeparation.from_certificate(certificate, batch_size=1)
    mechanism.check_sensitivity(schedule, graph, strategy)
    dataclasses.replace(mechanism, max_column_norm=norm).check_sensitivity(schedule, graph, strategy)
    too_small = dataclasses.replace(mechanism, sensitivity=found * (1 - 1e-9))
    with pytest.raises(CertificateMismatchError, match="one user can change"):
        too_small.check_sensitivity(schedule, graph, strategy)


def test_truncated_columns_count_less():
    graph = AttributionGraph.from_users_per_example([[0], [1], [2]])
    strategy = BandedStrategy(2, 3, (0.8, 0.6))
    schedule = Schedule.from_batches(graph, [[0], [1], [0]])
    assert strategy.sensitivity_of(schedule, graph) == pytest.approx(math.sqrt(1 + 0.64), rel=1e-14)


@pytest.mark.parametrize("batches", [[[0, 1], [2, 2], [3, 3]], [[0, 2], [1, 2], [3, 3]], [[3, 3], [0, 2], [1, 2]]])
def test_overlapping_columns_are_refused(batches):
    """Examples 0 and 1 are both user 0's: in one batch, or in neighbouring ones."""
    graph = AttributionGraph.from_users_per_example([[0], [0, 1], [], []], num_users=2)
    with pytest.raises(UncertifiableError, match="overlap"):
        BandedStrategy(2, 3).sensitivity_of(Schedule.from_batches(graph, batches), graph)


def test_overlap_would_raise_the_sensitivity():
    """What is refused is wrong indeed: with a gap of 3 under 4 bands the matrix moves by more than sqrt(k)."""
    strategy = BandedStrategy(4, 20)
    takes_part = np.zeros(20)
    takes_part[[0, 3]] = 1
    assert np.linalg.norm(strategy.matrix() @ takes_part) > math.sqrt(2) + 0.1


def test_another_schedule_is_refused():
    graph, schedule, _ = scheduled()
    with pytest.raises(InputError, match="20 batches"):
        BandedStrategy(2, 21).sensitivity_of(schedule, graph)
    other = RegularGraph(num_examples=400, mean_examples_per_user=4.0).generate(seed=2)
    with pytest.raises(CertificateMismatchError):
        BandedStrategy(2, 20).sensitivity_of(schedule, other)


def test_nobody():
    graph = AttributionGraph.from_users_per_example([[], []], num_users=0)
    assert BandedStrategy(1, 2).sensitivity_of(Schedule.from_batches(graph, [[0], [1]]), graph) == 0


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(6, 9))
def test_json_round_trip(num_bands, iterations):
    strategy = BandedStrategy(num_bands, iterations)
    again = BandedStrategy.from_json(strategy.to_json())
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.coefficients.tobytes() == strategy.coefficients.tobytes()


@pytest.mark.parametrize("stored", ["[]", "nonsense", json.dumps({"format": BandedStrategy.FORMAT, "num_bands": 1})])
def test_other_texts_are_refused(stored):
    with pytest.raises(InputError):
        BandedStrategy.from_json(stored)


@pytest.mark.parametrize("given_", [(0.0, 1.0), (1.0,), (np.nan, 1.0), (-1.0, 0.0), (np.inf, 0.0)])
def test_other_coefficients_are_refused(given_):
    with pytest.raises(InputError):
        BandedStrategy(2, 5, given_)


def test_more_bands_than_iterations_are_refused():
    with pytest.raises(InputError, match="num_bands"):
        BandedStrategy(6, 5)


def test_coefficients_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        BandedStrategy(2, 5).coefficients[0] = 2.0


def forge(folder, text):
    """Puts another text into the one entry of a cache, with its check."""
    (entry,) = (folder / "strategies").iterdir()
    entry.write_text(f"{files.checksum_of(entry.stem, text)}\n{text}")


def test_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "new"))
    strategy = BandedStrategy(3, 11)
    assert len(list((tmp_path / "new" / "strategies").iterdir())) == 1
    monkeypatch.setattr(banded_strategy, "optimize", lambda *_: pytest.fail("the cache was not read"))
    assert BandedStrategy(3, 11) == strategy


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[0, 1, 1]", '"x"', "[NaN, 1, 1]"])
def test_a_bad_cache_is_not_used(tmp_path, monkeypatch, content):
    expected = BandedStrategy(3, 11)
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    BandedStrategy(3, 11)
    forge(tmp_path, content)
    assert BandedStrategy(3, 11) == expected


def test_a_forged_cache_keeps_the_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    BandedStrategy(3, 11)
    forge(tmp_path, "[5.0, 4.0, 3.0]")
    found = BandedStrategy(3, 11).coefficients
    assert squared(found) <= 1
    assert found.tolist() == pytest.approx([5 / 50**0.5, 4 / 50**0.5, 3 / 50**0.5])  # it was read


def test_the_cache_can_be_off(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    assert BandedStrategy(3, 11).num_bands == 3
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("COOWNED_CACHE", str(blocked))
    assert BandedStrategy(3, 11).num_bands == 3
