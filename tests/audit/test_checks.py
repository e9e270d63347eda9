import numpy as np
import pytest
from scipy.stats import binom, binomtest

from coowned.audit.checks import any_of, binomial_check, lower_bound, upper_bound


@pytest.mark.parametrize(("count", "trials"), [(0, 10), (1, 10), (7, 10), (10, 10), (123, 4567)])
def test_clopper_pearson_is_scipys(count, trials):
    interval = binomtest(count, trials).proportion_ci(0.99, "exact")
    assert lower_bound(count, trials, 0.005) == pytest.approx(interval.low, abs=1e-12)
    assert upper_bound(count, trials, 0.005) == pytest.approx(interval.high, abs=1e-12)


@pytest.mark.parametrize("probability", [0.003, 0.2, 0.5, 0.98])
def test_clopper_pearson_covers(probability):
    """Summed over all outcomes: no chance is involved."""
    counts = np.arange(51)
    weights = binom.pmf(counts, 50, probability)
    assert weights[lower_bound(counts, 50, 0.01) > probability].sum() <= 0.01
    assert weights[upper_bound(counts, 50, 0.01) < probability].sum() <= 0.01


def test_binomial_check_is_exact():
    assert binomial_check("", 0, 10, 0.5).p_value == pytest.approx(2 / 1024)
    assert binomial_check("", 9, 10, 0.5).p_value == pytest.approx(22 / 1024)
    assert binomial_check("", 5, 10, 0.5).p_value == 1
    assert binomial_check("", 1, 10, 0.5, too_few=True).p_value == pytest.approx(11 / 1024)


def test_any_of_pays_for_every_look():
    checks = [binomial_check("", count, 10, 0.5) for count in (0, 5, 5)]
    assert any_of("all", checks).p_value == pytest.approx(6 / 1024)
