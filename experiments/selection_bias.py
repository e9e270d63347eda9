"""What does the bias of S cost, and does mitigating it pay? (paper: figures lr-bias and pareto)

On the skewed graph with 8 examples per user and bound 3: there bounding leaves few enough examples that as many can be
drawn at random among those with more users than the median.
"""

import dataclasses
import itertools

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.synthetic.logistic_data import LogisticWorld
from experiments.framework import logistic
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import LEVEL, Effect, Verdict, combine, judge, unrun, with_interval

CLAIMS = (
    "Greedy's S trains a worse model than a random subset of the same size at equal noise.",
    "A random subset of the examples with many users is at least as good as one of all examples.",
    "A sweet spot between size and users per example beats greedy.",
    "Mitigating bias has diminishing returns: each tenfold bias calls for fewer additional users per example.",
)
PAPER = (
    "bound 3, all non-dominated settings of the 80, bias strengths 0.1, 1 and 10, six batch sizes with 10,240,000 "
    "drawn examples, epsilon 1/2 to 64; graph, number of examples and seeds not stated"
)
AS_GOOD = -0.002  # accuracy: a loss of less than 0.2 points is "as good"
SWEET = 0.001  # accuracy: a gain of 0.1 points is not negligible
FEWEST_SETTINGS = 10  # through which a parabola is fitted
DRAWS = 2_000  # of the interval of the best number of users per example
BOUND, KIND, EXAMPLES_PER_USER = 3, "skewed", 8
DESIGN = logistic.Design(arm=["num_examples", "steps", "selector", "bias_strength"], candidate=["batch_size", "step"])
RANDOM = {"random": "all", "random, few users": "few-users", "random, many users": "many-users"}
STRENGTHS = (1.0, 10.0, 0.1)
_EPSILONS = {len(epsilons): epsilons for epsilons in logistic.EPSILONS_OF_MANY.values()}


def _points(scale: str, num_examples: int, batch_sizes: tuple[int, ...], steps: int, drawn: int) -> list[Point]:
    """`step` k of n is a setting on the frontier between size and users per example, from most size to most users."""
    common = {
        "num_examples": num_examples,
        "num_features": logistic.FEATURES[scale],
        "drawn": drawn,
        "num_epsilons": len(logistic.EPSILONS_OF_MANY[scale]),
        "steps": steps,
    }
    plain = [{"selector": name, "bias_strength": 1.0} for name in ("greedy", *RANDOM, "greedy with duplicates")]
    parts = [plain] + [
        [{"selector": "bias-mitigating", "bias_strength": strength, "step": step} for step in range(steps)]
        for strength in STRENGTHS
    ]
    points = []
    for arms in parts:  # claim by claim
        first = [common | arm | {"batch_size": size} for size, arm in itertools.product(batch_sizes, arms)]
        points += first + DESIGN.later_points(first)
    return points


# 37 settings are not dominated at 250,000 examples. With a million and the paper's draws they would take days here.
GRID = {
    "ci": _points("ci", 2_000, (64,), 2, logistic.DRAWN["ci"]),
    "small": _points("small", 125_000, (2**10, 2**12), 5, logistic.DRAWN_BY_MANY["small"]),
    "paper": _points("paper", 250_000, (2**10, 2**12), 37, 2_560_000),
}


def cost(point: Point) -> float:
    return 2.0 if "batch_size" in point else 1.0


def run(point: Point, rows: list[Row]) -> Row:
    """One sweep of the first pass, or a later stage; random subsets have greedy's noise, and claim nothing."""
    if "batch_size" not in point:
        return DESIGN.run_again(point, DESIGN.lines(rows), _setting)
    setting = _setting(point, 0)
    graph = logistic.train_part(_world(point)).graph
    copies = setting.selected.copies
    return {
        "mean_users_per_example": float(np.dot(copies, graph.users_per_example)) / setting.selected.size,
        **(_bias_mitigating(point, graph) or dict.fromkeys(("threshold", "few_user_run", "many_user_run"))),
        **logistic.first_pass(setting),
    }


def _world(point: Point) -> LogisticWorld:
    return logistic.make_world(
        KIND, point["num_examples"], EXAMPLES_PER_USER, point["num_features"], point["bias_strength"]
    )


def _bias_mitigating(point: Point, graph: co.AttributionGraph) -> dict[str, int]:
    """The setting of this step, for the arm that has steps."""
    if point["selector"] != "bias-mitigating":
        return {}
    return (
        frontier(graph, point["steps"])
        .select("threshold", "few_user_run", "many_user_run")
        .row(int(point["step"]), named=True)
    )


def _setting(point: Point, seed: int) -> logistic.Setting:
    world, epsilons, noise = _world(point), _EPSILONS[point["num_epsilons"]], None
    data = logistic.train_part(world)
    graph = data.graph
    if bias_mitigating := _bias_mitigating(point, graph):
        selector = co.BiasMitigating(contribution_bound=BOUND, allow_duplicates=True, **bias_mitigating)
    elif point["selector"] == "greedy with duplicates":
        selector = co.GreedyWithDuplicates(contribution_bound=BOUND)
    else:
        selector = co.Greedy(contribution_bound=BOUND)
    selection = selector.select(graph, seed=seed)
    if point["selector"] in RANDOM:
        greedy = _mechanism(graph, selection, point)
        terms = {"delta": logistic.DELTA, "adjacency": logistic.ADJACENCY}
        noise = tuple(co.calibrate(greedy, epsilon=epsilon, **terms) for epsilon in epsilons)
        subset = co.RandomSubset(size=selection.size, among=RANDOM[point["selector"]]).select(graph, seed=seed)
        data = dataclasses.replace(data, graph=_unshared(graph))
        selection = co.Selection.from_copies(data.graph, subset.copies)
    splits = (logistic.Split(world, name) for name in ("validation", "test"))
    return logistic.Setting(data, selection, _mechanism(data.graph, selection, point), epsilons, *splits, noise)


def _unshared(graph: co.AttributionGraph) -> co.AttributionGraph:
    """Every example with a user of its own: a random subset holds no bound for the real users."""
    number = graph.num_examples
    return co.AttributionGraph.from_csr(np.arange(number + 1), np.arange(number), num_users=number)


def _mechanism(graph: co.AttributionGraph, selection: co.Selection, point: Point) -> co.PoissonSampling:
    batch_size = int(point["batch_size"])
    return co.PoissonSampling.from_certificate(
        co.certify(graph, selection), batch_size=batch_size, iterations=point["drawn"] // batch_size
    )


def frontier(graph: co.AttributionGraph, steps: int) -> pl.DataFrame:
    """So many of the paper's 80 settings that no other dominates, evenly from the largest S to the most users."""
    table = co.pareto(graph, contribution_bound=BOUND).filter(~pl.col("dominated"))
    table = table.unique("size", keep="first", maintain_order=True).sort("size", descending=True)
    return table[np.linspace(0, table.height - 1, steps).round().astype(int)]


def _largest(rows: list[Row]) -> pl.DataFrame:
    """The lines of the largest graph of which a later stage was run."""
    lines = DESIGN.lines(rows)
    sizes = lines.filter(pl.col("seed") > 0)["num_examples"]
    return lines.filter(pl.col("num_examples") == (sizes.max() if sizes.len() else 0))


def winners(rows: list[Row]) -> pl.DataFrame:
    """The best setting for each bias and epsilon."""
    return DESIGN.winners(_largest(rows).filter(selector="bias-mitigating"))


def draw(rows: list[Row]) -> alt.HConcatChart:
    """Arms of equal size and noise; mitigation against greedy with duplicates; users per example of the best."""
    shown = DESIGN.reported(_largest(rows)).filter(bias_strength=1.0)
    mitigated = pl.col("selector").is_in(["bias-mitigating", "greedy with duplicates"])
    panel = pl.when(mitigated).then(pl.lit("with duplicates")).otherwise(pl.lit("equal size and noise"))
    users = alt.Chart(winners(rows), title="users per example of the best", width=180, height=170)
    users = users.mark_line(point=True).encode(
        x=alt.X("epsilon:Q").scale(type="log", base=2),
        y=alt.Y("mean_users_per_example:Q", title="users per example").scale(zero=False),
        color=alt.Color("bias_strength:N", title="bias"),
    )
    charts = [logistic.draw(shown.with_columns(panel.alias("panel")), "selector", "panel", 180), users]
    return alt.hconcat(*charts).resolve_scale(color="independent")


def claims(rows: list[Row]) -> list[Verdict]:
    lines = _largest(rows)
    table = DESIGN.reported(lines).filter(bias_strength=1.0)
    about = {"why": logistic.divergence(table), "seeds": logistic.SEEDS_SHOWN, "smaller": _smaller(lines)}
    compared = (
        (CLAIMS[0], "random", "greedy", 0.0),
        (CLAIMS[1], "random, many users", "random", AS_GOOD),
    )
    verdicts = []
    for claim, higher, lower, threshold in compared:
        gains = logistic.differences(table, "selector", higher, lower)
        if not gains:
            verdicts += unrun([claim])
            continue
        effect = combine(logistic.mean(gains.values()))
        found = f"accuracy of '{higher}' less that of '{lower}', mean over epsilons, in points: {with_interval(effect)}"
        verdicts.append(judge(claim, [effect], f"{found}. {_by_epsilon(gains, LEVEL)}", above=threshold, **about))
    return [*verdicts, _sweet_spot(table, about), _diminishing(lines)]


def _smaller(lines: pl.DataFrame) -> str:
    """The paper draws 10,240,000 examples, of a number that it does not state."""
    if lines.is_empty():
        return ""
    return f"{lines['num_examples'][0]:,} examples and {lines['drawn'][0] / logistic.DRAWN['paper']:.0%} of the draws"


def _by_epsilon(gains: dict[tuple, logistic.Contrast], level: float) -> str:
    shown = ", ".join(f"{with_interval(combine(gain), level)} at {case[-1]:g}" for case, gain in gains.items())
    return f"By epsilon: {shown}"


def _sweet_spot(table: pl.DataFrame, about: dict[str, str]) -> Verdict:
    """At some epsilon, with intervals for all of them together."""
    gains = logistic.differences(table, "selector", "bias-mitigating", "greedy with duplicates")
    if not gains:
        return unrun(CLAIMS[2:3])[0]
    found = "accuracy of the best setting less that of greedy with duplicates, in points, intervals for all together. "
    effects = [combine(gain) for gain in gains.values()]
    found += _by_epsilon(gains, LEVEL / len(gains))
    return judge(CLAIMS[2], effects, found, above=SWEET, in_some=True, **about)


def _diminishing(lines: pl.DataFrame) -> Verdict:
    """The rise of the best users per example from bias 1 to 10, less that from 0.1 to 1; claimed to be below 0.

    The best is the top of a parabola through the settings' accuracies on validation, mean over epsilons; the interval
    is that of parabolas through redrawn residuals.
    """
    own = lines.filter(pl.col("selector") == "bias-mitigating", pl.col("seed") == 0)
    tops = {strength: _tops(own.filter(bias_strength=strength)) for strength in STRENGTHS}
    if any(top is None for top in tops.values()):
        return unrun(CLAIMS[3:])[0]
    change = tops[10.0] - 2 * tops[1.0] + tops[0.1]
    low, high = (float(end) for end in np.quantile(change[1:], [LEVEL / 2, 1 - LEVEL / 2]))
    shown = ", ".join(f"{top[0]:.3f} at bias {strength:g}" for strength, top in sorted(tops.items()))
    found = f"best users per example: {shown}; second rise less the first {change[0]:+.3f} [{low:+.3f}, {high:+.3f}]"
    return judge(
        CLAIMS[3], [Effect(float(change[0]), bounds=(low, high))], found, below=0.0, seeds="0", smaller=_smaller(lines)
    )


def _tops(lines: pl.DataFrame) -> np.ndarray | None:
    """Where accuracy is best, mean over epsilons: the estimate, then `DRAWS` more; None unless every setting ran."""
    best = lines.group_by("epsilon", "step", "mean_users_per_example").agg(pl.col("validation").max())
    if best.is_empty() or best["step"].n_unique() < max(FEWEST_SETTINGS, lines["steps"][0]):
        return None
    generator, tops = np.random.default_rng(0), []
    for part in best.sort("epsilon", "step").partition_by("epsilon", maintain_order=True):
        users, accuracy = part["mean_users_per_example"].to_numpy(), part["validation"].to_numpy()
        powers = np.polynomial.polynomial.polyvander((users - users.mean()) / np.ptp(users), 2)
        fitted = powers @ np.linalg.lstsq(powers, accuracy)[0]
        residuals = (accuracy - fitted) * np.sqrt(len(users) / (len(users) - 3))
        redrawn = fitted[:, None] + generator.choice(residuals, (len(users), DRAWS))
        parabolas = powers @ np.linalg.lstsq(powers, np.column_stack([accuracy, redrawn]))[0]
        tops.append(users[parabolas.argmax(axis=0)])
    return np.mean(tops, axis=0)
