"""How fast an epsilon and a noise multiplier are found, against dp-accounting in the same run.

python -m benchmarks accounting
"""

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.stats import binom

from benchmarks.timing import Figure, timed
from coowned import PoissonSampling
from coowned.accounting.calculators import epsilon
from coowned.accounting.calibrate import calibrate

COPIES, PROBABILITY, ITERATIONS, DELTA, NOISE = 3, 0.002, 10_000, 1e-10, 1.0
GRID_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
GRID_BATCH_SIZES = (256, 512, 1024, 2048, 4096, 8192)
GRID_SIZE, GRID_ITERATIONS = 250_000, 1000  # selected copies and steps of the grid


def run() -> list[Figure]:
    mechanism = PoissonSampling(contribution_bound=COPIES, sampling_probability=PROBABILITY, iterations=ITERATIONS)
    question = {"delta": DELTA, "adjacency": "zero-out"}
    epsilon(mechanism, noise_multiplier=2.0, **question)  # loads what is loaded once
    own_seconds, own = timed(lambda: epsilon(mechanism, noise_multiplier=NOISE, **question), runs=5)
    noise_seconds, noise = timed(lambda: calibrate(mechanism, epsilon=6.0, cache=False, **question), runs=3)
    their_seconds, theirs = timed(their_epsilon, runs=1)
    difference = abs(own - theirs) / theirs
    rows = [
        Figure("dp-accounting 0.6, one epsilon", their_seconds, "s"),
        Figure("coowned, one epsilon", own_seconds, "s"),
        Figure("one epsilon: times faster", their_seconds / own_seconds, "x", ">= 20"),
        Figure("one epsilon: relative difference", difference, "", "<= 0.001"),
        Figure(f"coowned, one calibration at epsilon 6 (noise multiplier {noise:.4f})", noise_seconds, "s"),
        Figure(
            "one calibration over one dp-accounting epsilon",
            noise_seconds / their_seconds,
            "",
            "<= 0.25",
        ),
    ]
    seconds, points = timed(calibrate_grid)
    return [
        *rows,
        Figure(f"a grid of the paper's size, {points} calibrations", seconds / 60, "min", "<= 10"),
    ]


def calibrate_grid() -> int:
    points = 0
    for copies in range(1, 9):
        for batch_size in GRID_BATCH_SIZES:
            mechanism = PoissonSampling(
                contribution_bound=copies, sampling_probability=batch_size / GRID_SIZE, iterations=GRID_ITERATIONS
            )
            for target in GRID_EPSILONS:
                calibrate(mechanism, epsilon=target, delta=DELTA, adjacency="zero-out", cache=False)
                points += 1
        print(f"  grid: copies {copies} of 8 done", flush=True)
    return points


def their_epsilon() -> float:
    weights = [float(weight) for weight in binom.pmf(range(COPIES + 1), COPIES, PROBABILITY)]
    event = dp_event.SelfComposedDpEvent(
        dp_event.MixtureOfGaussiansDpEvent(NOISE, list(range(COPIES + 1)), weights), ITERATIONS
    )
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4)
    return accountant.compose(event).get_epsilon(DELTA)
