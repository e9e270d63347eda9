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


def _points(
    scale: str, num_examples: int, batch_sizes: tuple[int, ...], steps: int, drawn: int, strengths: tuple[float, ...]
) -> list[Point]:
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
        for strength in strengths
    ]
    points = []
    for arms in parts:  # claim by claim
        first = [common | arm | {"batch_size": size} for size, arm in itertools.product(batch_sizes, arms)]
        points += first + DESIGN.later_points(first)
    return points


# 37 settings are not dominated at 250,000 examples; a quarter of a million, and of the paper's draws, because of them.
GRID = {
    "ci": _points("ci", 2_000, (64,), 2, logistic.DRAWN["ci"], STRENGTHS),
    "small": _points("small", 125_000, (2**10, 2**12), 5, logistic.DRAWN_BY_MANY["small"], (1.0,)),
    "paper": _points("paper", 250_000, (2**10, 2**12), 37, 2_560_000, STRENGTHS),
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


def draw(rows: list[Row]) -> alt.HConcatChart:
    """Arms of equal size and noise and mitigation against greedy, with the most examples; best users per example."""
    lines = DESIGN.lines(rows)
    shown = DESIGN.reported(lines).filter(bias_strength=1.0)
    shown = shown.filter(pl.col("num_examples") == pl.col("num_examples").max())
    mitigated = pl.col("selector").is_in(["bias-mitigating", "greedy with duplicates"])
    panel = pl.when(mitigated).then(pl.lit("with duplicates")).otherwise(pl.lit("equal size and noise"))
    charts = [logistic.draw(shown.with_columns(panel.alias("panel")), "selector", "panel", 180)]
    tops = [
        {"epsilon": epsilon, "bias": strength, "users": own[0]}
        | dict(zip(("low", "high"), np.quantile(own[1:], [LEVEL / 2, 1 - LEVEL / 2]).tolist(), strict=True))
        for strength, found in _tops(lines).items()
        for epsilon, own in found.items()
    ]
    if tops:
        base = alt.Chart(pl.DataFrame(tops), title="best users per example", width=180, height=170).encode(
            x=alt.X("epsilon:Q").scale(type="log", base=2), color=alt.Color("bias:N")
        )
        points = base.mark_line(point=True).encode(y=alt.Y("users:Q", title="users per example").scale(zero=False))
        charts.append(base.mark_rule().encode(y="low:Q", y2="high:Q") + points)
    return alt.hconcat(*charts).resolve_scale(color="independent")


def claims(rows: list[Row]) -> list[Verdict]:
    """Each at the most examples of which both arms are reported."""
    lines = DESIGN.lines(rows)
    table = DESIGN.reported(lines).filter(bias_strength=1.0)
    return [
        _ahead(CLAIMS[0], lines, table, "random", "greedy", 0.0),
        _ahead(CLAIMS[1], lines, table, "random, many users", "random", AS_GOOD),
        _ahead(CLAIMS[2], lines, table, "bias-mitigating", "greedy with duplicates", SWEET, in_some=True),
        _diminishing(lines),
    ]


def _ahead(
    claim: str,
    lines: pl.DataFrame,
    table: pl.DataFrame,
    higher: str,
    lower: str,
    threshold: float,
    *,
    in_some: bool = False,
) -> Verdict:
    """By the accuracy of one arm less that of another: the mean over epsilons, or some epsilon."""
    gains = logistic.differences(table, "selector", higher, lower)  # by examples, settings, bias, epsilon
    if not gains:
        return unrun([claim])[0]
    size = max(case[0] for case in gains)
    own = {case[-1]: gain for case, gain in gains.items() if case[0] == size}
    level = LEVEL / len(own) if in_some else LEVEL
    effects = [combine(gain) for gain in own.values()] if in_some else [combine(logistic.mean(own.values()))]
    shown = ", ".join(f"{with_interval(combine(gain), level)} at {epsilon:g}" for epsilon, gain in own.items())
    overall = ", with intervals for all epsilons together" if in_some else f": mean {with_interval(effects[0])}"
    return judge(
        claim,
        effects,
        f"accuracy of '{higher}' less that of '{lower}', in points{overall}; by epsilon: {shown}",
        above=threshold,
        in_some=in_some,
        why=logistic.divergence(table.filter(num_examples=size)),
        seeds=logistic.SEEDS_SHOWN,
        num_examples=size,
        smaller=_smaller(lines, size),
    )


def _smaller(lines: pl.DataFrame, size: int) -> str:
    """The paper draws 10,240,000 examples, of a number that it does not state."""
    drawn = lines.filter(num_examples=size)["drawn"][0] / logistic.DRAWN["paper"]
    return f"{size:,} examples and {drawn:.0%} of the paper's draws"


def _diminishing(lines: pl.DataFrame) -> Verdict:
    """The rise of the best users per example from bias 1 to 10, less that from 0.1 to 1; claimed to be below 0."""
    tops = {strength: np.mean(list(found.values()), axis=0) for strength, found in _tops(lines).items()}
    if set(tops) < set(STRENGTHS):
        return unrun(CLAIMS[3:])[0]
    change = tops[10.0] - 2 * tops[1.0] + tops[0.1]
    low, high = (float(end) for end in np.quantile(change[1:], [LEVEL / 2, 1 - LEVEL / 2]))
    shown = ", ".join(f"{top[0]:.3f} at bias {strength:g}" for strength, top in sorted(tops.items()))
    found = f"best users per example: {shown}; second rise less the first {change[0]:+.3f} [{low:+.3f}, {high:+.3f}]"
    size = int(lines.filter(pl.col("steps") >= FEWEST_SETTINGS)["num_examples"].max())  # type: ignore[arg-type]
    effect = Effect(float(change[0]), bounds=(low, high))
    about = {"seeds": "0", "num_examples": size, "smaller": _smaller(lines, size)}
    return judge(CLAIMS[3], [effect], found, below=0.0, **about)


def _tops(lines: pl.DataFrame) -> dict[float, dict[float, np.ndarray]]:
    """Where accuracy is best, by bias and epsilon: the estimate, then `DRAWS` more; for biases whose settings all ran.

    It is the top of a parabola through the settings' best accuracies on validation, the first pass; the draws are of
    parabolas through redrawn residuals.
    """
    own = lines.filter(pl.col("selector") == "bias-mitigating", pl.col("seed") == 0, pl.col("steps") >= FEWEST_SETTINGS)
    generator, tops = np.random.default_rng(0), {}
    for (strength,), part in own.group_by("bias_strength", maintain_order=True):
        if part.select("step", "batch_size").n_unique() < part["steps"][0] * part["batch_size"].n_unique():
            continue
        best = part.group_by("epsilon", "step", "mean_users_per_example").agg(pl.col("validation").max())
        for (epsilon,), settings in best.sort("epsilon", "step").group_by("epsilon", maintain_order=True):
            users, accuracy = settings["mean_users_per_example"].to_numpy(), settings["validation"].to_numpy()
            powers = np.polynomial.polynomial.polyvander((users - users.mean()) / np.ptp(users), 2)
            fitted = powers @ np.linalg.lstsq(powers, accuracy)[0]
            residuals = (accuracy - fitted) * np.sqrt(len(users) / (len(users) - 3))
            redrawn = fitted[:, None] + generator.choice(residuals, (len(users), DRAWS))
            parabolas = powers @ np.linalg.lstsq(powers, np.column_stack([accuracy, redrawn]))[0]
            tops.setdefault(strength, {})[epsilon] = users[parabolas.argmax(axis=0)]
    return tops
