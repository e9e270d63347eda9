"""A covered evaluation: what is counted, the noise on it, and the intervals."""

import dataclasses
import json

import numpy as np
import pytest
from scipy.stats import binom, chi2

from coowned import AttributionGraph, CoveredEvaluation, LogisticRegression, codec
from coowned.accounting.covered import CoveredRelease
from coowned.certificate import certify
from coowned.content.data import FeatureTable
from coowned.content.splits import select_held_out
from coowned.errors import CertificateMismatchError, InputError
from coowned.exact.keys import Purpose, RunKey
from coowned.exact.noise import NoiseStream
from coowned.selection.selector import Selection
from coowned.training.covered import (
    SCALE,
    CoveredFigures,
    check_covered,
    covered_counts,
    evaluate_covered,
    evaluation_noise,
    score_interval,
)
from coowned.training.evaluate import example_losses, wilson_interval

ACCURACY = 0.8  # of the model below, by construction
MODEL = LogisticRegression(num_features=1)
GRAPH = AttributionGraph.from_users_per_example([[i % 60] for i in range(150)])
HELD_OUT = select_held_out(GRAPH, contribution_bound=2)
ALL = CoveredEvaluation(loss_bound=0.5, confusion=True)


def parameters():
    return {"coefficients": np.array([2.0, 0.0], np.float32)}  # the weight and the intercept


def world(seed: int) -> FeatureTable:
    """Independent examples, of which the model predicts a share of ACCURACY rightly on average."""
    random = np.random.default_rng(seed)
    features = random.choice([-1.0, 1.0], size=(GRAPH.num_examples, 1)).astype(np.float32)
    right = random.random(GRAPH.num_examples) < ACCURACY
    labels = np.where(right, features[:, 0] > 0, features[:, 0] < 0).astype(np.float32)
    return FeatureTable(graph=GRAPH, features=features, labels=labels)


def release(noise_multiplier: float = 2.0, held_out: Selection = HELD_OUT) -> CoveredRelease:
    certificate = certify(GRAPH, held_out)
    counted = ("contribution_bound", "size", "most_copies_of_one_example", "graph_digest", "selection_digest")
    return CoveredRelease(
        noise_multiplier=noise_multiplier,
        epsilon_share=0.1,
        unshared_noise_multiplier=1.0,
        **{name: getattr(certificate, name) for name in counted},
    )


def figures(seed: int, *, settings: CoveredEvaluation = ALL, **changes) -> CoveredFigures:
    given = {"settings": settings, "release": release(), "run_key": RunKey.from_seed(seed), "run_id": "one"} | changes
    return evaluate_covered(MODEL, parameters(), world(seed), HELD_OUT, **given)


def test_counts_are_those_of_a_plain_loop():
    data = world(0)
    losses, right = example_losses(MODEL, parameters(), data)
    expected = np.zeros(2 + 4, np.int64)
    for i in np.flatnonzero(HELD_OUT.copies):
        predicted = int(data.features[i, 0] > 0)
        expected[0] += SCALE * int(right[i])
        expected[1] += round(SCALE * min(losses[i] / 0.5, 1.0))
        expected[2 + 2 * int(data.labels[i]) + predicted] += SCALE
    found = covered_counts(MODEL, parameters(), data, HELD_OUT, settings=ALL)
    np.testing.assert_array_equal(found, expected)
    assert found[0] == found[2] + found[5] == SCALE * int(right[HELD_OUT.copies > 0].sum())


def test_one_user_moves_the_counts_by_their_copies_alone():
    """However their examples change: k copies, each of at most three parts."""
    data, users = world(1), GRAPH.users
    before = covered_counts(MODEL, parameters(), data, HELD_OUT, settings=ALL)
    for user in range(10):
        for value, label in ((50.0, 0.0), (-50.0, 0.0), (np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan)):
            features, labels = data.features.copy(), data.labels.copy()
            features[users == user], labels[users == user] = value, label
            changed = dataclasses.replace(data, features=features, labels=labels)
            moved = covered_counts(MODEL, parameters(), changed, HELD_OUT, settings=ALL) - before
            assert float(moved @ moved) <= 3 * (2 * 2 * SCALE) ** 2 / 2  # entries are at least 0
    blank = dataclasses.replace(data, labels=np.full_like(data.labels, np.nan))
    assert not covered_counts(MODEL, parameters(), blank, HELD_OUT, settings=ALL).any()


def test_the_noise_is_of_its_own():
    key = RunKey.from_seed(3)
    noise = evaluation_noise(key, deviation=1000.0, length=400)
    np.testing.assert_array_equal(noise, evaluation_noise(key, deviation=1000.0, length=400))
    for purpose in (Purpose.NOISE, Purpose.EVALUATION):
        stream = NoiseStream(
            key, deviations=[1000.0], coefficients=[1.0], shapes={"counts": (400,)}, iterations=1, purpose=purpose
        )
        same = bool((stream.next()["counts"][0] == noise).all())
        assert same == (purpose is Purpose.EVALUATION)
    assert (noise != evaluation_noise(RunKey.from_seed(4), deviation=1000.0, length=400)).any()
    # False alarms: 2e-6.
    assert chi2.ppf(1e-6, 400) < float((noise / 1000.0) @ (noise / 1000.0)) < chi2.isf(1e-6, 400)


def test_the_released_counts_are_sums_with_that_noise():
    found = figures(5)
    counts = covered_counts(MODEL, parameters(), world(5), HELD_OUT, settings=ALL)
    deviation = found.deviation * SCALE
    assert deviation == pytest.approx(2.0 * SCALE * 3**0.5, rel=1e-12)
    assert deviation >= 2.0 * SCALE * 3**0.5
    noise = evaluation_noise(RunKey.from_seed(5), deviation=deviation, length=6)
    assert found.counts == tuple((counts + noise).tolist())
    assert noise.any()


def test_covered_intervals_hold_the_truth():
    """False alarms: 1e-6. Were the noise left out of the intervals, they would hold it in about 150 of 200 worlds."""
    settings, noisy = CoveredEvaluation(), release(5.0)
    found = [figures(seed, settings=settings, release=noisy) for seed in range(200)]
    held = sum(one.accuracy_low <= ACCURACY <= one.accuracy_high for one in found)
    assert held >= binom.ppf(1e-6, 200, 0.95)
    without = [score_interval(one.accuracy, one.size, 0.0) for one in found]
    assert sum(low <= ACCURACY <= high for _, low, high in without) < binom.ppf(1e-6, 200, 0.95)
    assert all(0 <= one.accuracy_low <= one.accuracy <= one.accuracy_high <= 1 for one in found)


def test_without_noise_it_is_wilsons():
    for right, size in ((0, 7), (3, 7), (7, 7), (812, 1000)):
        low, high = wilson_interval(right, size)
        assert score_interval(right / size, size, 0.0) == pytest.approx((right / size, low, high), abs=1e-12)


def test_another_held_out_part_is_refused():
    more = Selection.from_copies(GRAPH, np.ones(GRAPH.num_examples, np.int32))
    with pytest.raises(CertificateMismatchError, match="contribution_bound"):
        evaluate_covered(
            MODEL,
            parameters(),
            world(0),
            more,
            settings=ALL,
            release=release(),
            run_key=RunKey.from_seed(0),
            run_id="one",
        )


def test_changed_figures_are_refused():
    made = figures(7)
    assert CoveredFigures.from_json(made.to_json(), release=release(), run_id="one") == made
    stored = json.loads(made.to_json())
    for name, value in (("accuracy", 0.99), ("accuracy_low", 0.0), ("deviation", 0.1), ("counts", [1]), ("size", 3)):
        fields = {key: entry for key, entry in stored.items() if key not in ("format", "checksum")} | {name: value}
        text = json.dumps({"format": stored["format"], **fields, "checksum": codec.checksum(fields)})
        with pytest.raises(CertificateMismatchError, match="do not follow"):
            CoveredFigures.from_json(text, release=release(), run_id="one")
    for other in ({"release": release(3.0), "run_id": "one"}, {"release": release(), "run_id": "two"}):
        with pytest.raises(CertificateMismatchError, match="do not follow"):
            CoveredFigures.from_json(made.to_json(), **other)


def test_a_model_without_classes_has_no_accuracy():
    numbers = type("Numbers", (), {"classes": None})()
    for settings in (CoveredEvaluation(), CoveredEvaluation(confusion=True, loss_bound=1.0)):
        with pytest.raises(InputError, match="predicts no class"):
            check_covered(settings, numbers)
    check_covered(CoveredEvaluation(loss_bound=1.0), numbers)
