"""Which selection and mechanism train a text model best? (paper: figure arxiv-main)

BERT-Tiny on ACL abstracts, from a public checkpoint trained on arXiv abstracts (math.AP), and the other way round.
`paper` trains all parameters on 128 tokens, 400 steps of 512, and is what the paper's claims are judged by. `small` is
not a reproduction: 64 tokens, 200 steps of 256, the output bias alone. In both, an arm is trained with each pair of
learning rate and clip norm at epsilon 16; the pair that is best on validation there is used at the other epsilons.
"""

import itertools
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import altair as alt
import numpy as np
import polars as pl

import coowned as co
from coowned.content.splits import split_examples
from coowned.synthetic.regular_graph import RegularGraph
from experiments import private_abstracts
from experiments.framework.graphs import data_file
from experiments.framework.rows import Point, Row
from experiments.framework.verdicts import Effect, Verdict, combine, judge, with_interval

DATA = ("ACL", "math.AP", "vocabulary")
CLAIMS = (
    "Text: DP-SGD is ahead of DP-MF at every epsilon.",
    "Text: DP-SGD is ahead of DP-MF on a random regular graph too.",
    "Text: duplicates are better throughout.",
    "Text: a random subset is better than greedy's at equal noise.",
    "Text: a random subset of abstracts with many authors is at least as good as one of all.",
)
PAGE = "docs/results.md"
PAPER = (
    "BERT-Tiny, all parameters, 1.9 million arXiv papers, batches of 2^11 to 2^16 with 20,480,000 drawn examples, "
    "simulated epsilon; tokens and seeds not stated"
)
TUNED_AT, EPSILONS = 16.0, (4.0, 16.0, 64.0)
FRESH_SEEDS = (1, 2, 3)  # seed 0 tunes
BIAS_SEEDS = (1, 2)  # of the output bias alone, where arms were close
AS_GOOD = 0.001  # relative test loss that does not count as worse
HYPOTHETICAL = 4096  # batch size for which simulated noise is calibrated
TRUE, SIMULATED = "true", "simulated"


class Size(NamedTuple):
    """How a model is trained."""

    sequence_length: int
    batch_size: int
    iterations: int
    separation: int
    trainable: list[str]
    options: str
    microbatch: int


BIAS = Size(64, 256, 200, 16, ["cls.predictions.bias"], 'name = "yogi"\ndecay = "cosine"', 16)
ALL = Size(128, 512, 400, 16, ["*"], 'decay = "cosine"', 64)
SIZES = {None: BIAS, "all": ALL}  # by `trained`


class Arm(NamedTuple):
    selector: str  # lines of [selection]
    bound: int = 3
    is_schedule: bool = False
    attribution: str = "authors"  # or "regular", or a name of `RANDOM`


GREEDY, DUPLICATES = 'selector = "greedy"', 'selector = "greedy-with-duplicates"'
SCHEDULE = 'selector = "greedy-min-separation"'
MITIGATING = 'selector = "bias-mitigating"\nthreshold = 2\nallow_duplicates = true\n'
RANDOM = {"random": "all", "random, few users": "few-users", "random, many users": "many-users"}
ARMS = {
    "greedy, duplicates": Arm(DUPLICATES),
    "greedy": Arm(GREEDY),
    "greedy, k = 1": Arm(GREEDY, 1),
    "greedy, duplicates, k = 10": Arm(DUPLICATES, 10),
    "greedy, k = 10": Arm(GREEDY, 10),
    "DP-MF": Arm(SCHEDULE, 0, is_schedule=True),
    **{name: Arm(GREEDY, attribution=name) for name in RANDOM},
    "greedy, regular graph": Arm(DUPLICATES, attribution="regular"),
    "DP-MF, regular graph": Arm(SCHEDULE, 0, is_schedule=True, attribution="regular"),
}
BIAS_ARMS = {  # further ones that the output bias was trained with
    "largest S": Arm('selector = "priced"'),
    "program, duplicates": Arm('selector = "integer-program"\nallow_duplicates = true'),
    "mitigated, 1 to 1": Arm(f"{MITIGATING}few_user_run = 1\nmany_user_run = 1"),
    "mitigated, 1 to 5": Arm(f"{MITIGATING}few_user_run = 1\nmany_user_run = 5"),
}
COMPARED = {  # two arms whose test losses the page shows, the first over the second
    "DP-SGD, DP-MF": ("greedy, duplicates", "DP-MF"),
    "DP-SGD, DP-MF, regular graph": ("greedy, regular graph", "DP-MF, regular graph"),
    "duplicates, none": ("greedy, duplicates", "greedy"),
    "random, greedy": ("random", "greedy"),
    "mitigated 1 to 1, 1 to 5": ("mitigated, 1 to 1", "mitigated, 1 to 5"),
    "greedy, largest S": ("greedy", "largest S"),
    "greedy, program, both with duplicates": ("greedy, duplicates", "program, duplicates"),
}
JUDGED = (  # of each claim: the pairs of arms, the first claimed to have at most so much more loss
    ((("greedy, duplicates", "DP-MF"),), 0.0),
    ((("greedy, regular graph", "DP-MF, regular graph"),), 0.0),
    ((("greedy, duplicates", "greedy"), ("greedy, duplicates, k = 10", "greedy, k = 10")), 0.0),
    ((("random", "greedy"),), 0.0),
    ((("random, many users", "random"),), AS_GOOD),
)
PAIRS = {  # (learning rate, clip norm) by data and `trained`
    ("ACL", None): ((1.0, 0.5), (1.0, 0.25)),
    ("arXiv", None): ((1.0, 0.25), (1.0, 0.125)),  # chosen after all arms on ACL had preferred 0.25
    ("made up", None): ((1.0, 1.0),),
    ("ACL", "all"): ((1e-3, 0.5), (2e-3, 0.1)),
    ("arXiv", "all"): ((1e-3, 0.5), (2e-3, 0.1)),
}
TEXTS = {"ACL": "ACL", "arXiv": "math.AP"}
PUBLIC = {"ACL": "math.AP", "arXiv": "ACL"}  # what the checkpoint of each was trained on
RUN = ["data", "arm", "trained", "accounting", "epsilon", "seed"]  # what one line of `chosen` stands for


def _bias_points(data: str, arms: list[str], epsilons: tuple[float, ...] = (4.0, 64.0)) -> list[Point]:
    tuning = [
        {"data": data, "arm": arm, "epsilon": TUNED_AT, "learning_rate": rate, "clip_norm": clip_norm}
        for (rate, clip_norm), arm in itertools.product(PAIRS[data, None], arms)
    ]
    return tuning + [
        {"data": data, "arm": arm, "epsilon": epsilon} for arm, epsilon in itertools.product(arms, epsilons)
    ]


def _points() -> list[Point]:
    """Arm by arm: pairs with seed 0, then fresh seeds at every epsilon; true accounting first."""
    points = []
    for data, accounting, arm in itertools.product(TEXTS, (TRUE, SIMULATED), ARMS):
        own = {"data": data, "arm": arm, "trained": "all", "accounting": accounting}
        pairs = [{"learning_rate": rate, "clip_norm": clip_norm} for rate, clip_norm in PAIRS[data, "all"]]
        points += [own | {"epsilon": TUNED_AT, "seed": 0} | pair for pair in pairs]
        points += [
            own | {"epsilon": epsilon, "seed": seed} for seed, epsilon in itertools.product(FRESH_SEEDS, EPSILONS)
        ]
    return points


_CLOSE = list(dict.fromkeys(arm for pair in list(COMPARED.values())[2:] for arm in pair))
_ON_BOTH = list(dict.fromkeys(arm for pair in list(COMPARED.values())[:4] for arm in pair))
_ON_ACL = [*_ON_BOTH, *BIAS_ARMS, "random, many users"]
GRID = {
    "ci": _bias_points("made up", ["greedy, duplicates", "DP-MF", "random"], ()),
    "small": [
        *_bias_points("ACL", _ON_ACL),
        *_bias_points("arXiv", _ON_BOTH),
        *(
            {"data": "ACL", "arm": arm, "epsilon": epsilon, "seed": seed}
            for seed, epsilon, arm in itertools.product(BIAS_SEEDS, (64.0, TUNED_AT, 4.0), _CLOSE)
        ),
    ],
    "paper": _points(),
}


def run(point: Point, rows: list[Row]) -> Row:
    """One training run; random subsets have greedy's noise and claim nothing."""
    rate, clip_norm = _pair(point, rows)
    seed, size = point.get("seed", 0), SIZES[point.get("trained")]
    arm = (ARMS | BIAS_ARMS)[point["arm"]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        delta = 1e-10
        if point["data"] == "made up":
            private_abstracts.made_up_corpus(folder)
            source, delta = folder / "texts.parquet", 1e-5
            size = size._replace(batch_size=8, iterations=3, separation=2)
        else:
            source = data_file(TEXTS[point["data"]])
        bound, privacy = arm.bound, f"epsilon = {point['epsilon']}"
        if arm.attribution == "regular":
            _write_regular(source, folder / "data.parquet")
            source = folder / "data.parquet"
        if arm.attribution in RANDOM or point.get("accounting") == SIMULATED:
            noise = _noise(source, arm, size, point["epsilon"], delta, simulated=point.get("accounting") == SIMULATED)
            privacy = f"noise_multiplier = {noise}"
        if arm.attribution in RANDOM:
            _write_unshared(source, folder / "data.parquet", RANDOM[arm.attribution], seed)
            source, bound = folder / "data.parquet", 1
        settings = {
            "path": source,
            "seed": seed,
            "privacy": f"{privacy}\ndelta = {delta}",
            "bound": bound,
            "learning_rate": rate,
            "clip_norm": clip_norm,
            "selector": arm.selector,
            "mechanism": f'kind = "dp-mf"\nmin_separation = {size.separation}'
            if arm.is_schedule
            else 'kind = "dp-sgd"',
            "options": size.options,
        }
        if point["data"] == "made up":
            text = private_abstracts.made_up(folder, **settings)
        else:
            length = private_abstracts.SEQUENCE_LENGTH if size is BIAS else size.sequence_length
            checkpoint = private_abstracts.public_checkpoint(PUBLIC[point["data"]], length)
            text = private_abstracts.configuration(
                **settings,
                batch_size=size.batch_size,
                iterations=size.iterations,
                sequence_length=size.sequence_length,
                microbatch=size.microbatch,
                model=f'checkpoint = "{checkpoint}"\ntrainable = {json.dumps(size.trainable)}',
            )
        start = private_abstracts.untrained(folder, text)["validation_loss"] if size is ALL else None
        trained = private_abstracts.trained(folder, text, folder / "run")
        if arm.attribution in RANDOM:
            trained["true_epsilon"] = None  # such a run protects no author
        return trained | {"rate": rate, "clip": clip_norm, "start_loss": start}


def _pair(point: Point, rows: list[Row]) -> tuple[float, float]:
    """(learning rate, clip norm) of a point: its own, or the arm's best on validation at the epsilon of tuning."""
    if "learning_rate" in point:
        return point["learning_rate"], point["clip_norm"]
    same = ("data", "arm", "trained", "accounting")
    own = [row for row in rows if all(row.get(name) == point.get(name) for name in same)]
    tuned = [row for row in own if row["learning_rate"] is not None]
    if len(tuned) < len(PAIRS[point["data"], point.get("trained")]):
        raise RuntimeError(f"run {point['arm']!r} at epsilon {TUNED_AT:g} first, with all pairs")
    best = min(tuned, key=lambda row: row["validation_loss"])
    return best["learning_rate"], best["clip_norm"]


def _train_part(source: Path) -> tuple[co.AttributionGraph, np.ndarray]:
    """(graph of the train split, its rows in the file), as `coowned train` splits it."""
    graph = co.read_parquet(source, users="users", example_id="example_id").graph
    rows = np.asarray(split_examples(graph, [0.9, 0.05, 0.05])["train"])
    return graph.subgraph(rows), rows


def _noise(source: Path, arm: Arm, size: Size, epsilon: float, delta: float, *, simulated: bool) -> float:
    """The noise multiplier of an arm; of a random subset, that of greedy.

    Simulated noise is what batches of `HYPOTHETICAL` would need, in units of the mean gradient: epsilon is not true.
    """
    graph, _ = _train_part(source)
    terms = {"epsilon": epsilon, "delta": delta, "adjacency": "zero-out"}
    batch_size = HYPOTHETICAL if simulated else size.batch_size
    steps = {"batch_size": size.batch_size, "iterations": size.iterations}
    if arm.is_schedule:
        schedule = co.GreedyMinSeparation(**steps, min_separation=size.separation).select(graph)
        mechanism = co.MinSeparation.from_certificate(co.certify(graph, schedule))
    else:
        selector = co.GreedyWithDuplicates if arm.selector == DUPLICATES else co.Greedy
        certificate = co.certify(graph, selector(contribution_bound=arm.bound).select(graph))
        mechanism = co.PoissonSampling.from_certificate(certificate, **(steps | {"batch_size": batch_size}))
    return co.calibrate(mechanism, **terms) * size.batch_size / batch_size


def _write_unshared(source: Path, target: Path, among: str, seed: int) -> None:
    """The same data with a user of its own for each example of a random subset, and none for the rest of train."""
    graph, rows = _train_part(source)
    size = co.Greedy(contribution_bound=ARMS["random"].bound).select(graph).size
    taken = rows[co.RandomSubset(size=size, among=among).select(graph, seed=seed).copies > 0]
    table = pl.read_parquet(source)
    own = np.zeros(table.height, bool)
    own[taken] = True
    alone = (
        pl.when(pl.Series(own))
        .then(pl.concat_list(pl.col("example_id").cast(pl.String)))
        .otherwise(pl.lit([], pl.List(pl.String)))
    )
    table.with_columns(alone.alias("users")).write_parquet(target)


def _write_regular(source: Path, target: Path) -> None:
    """The same texts on a random regular graph with as many examples, users and pairs."""
    graph = co.read_parquet(source, users="users", example_id="example_id").graph
    made = RegularGraph(
        num_examples=graph.num_examples,
        mean_users_per_example=graph.num_pairs / graph.num_examples,
        mean_examples_per_user=graph.num_pairs / graph.num_users,
    ).generate(seed=0)
    lists = [made.users[made.indptr[i] : made.indptr[i + 1]].astype(str).tolist() for i in range(made.num_examples)]
    users = pl.Series("users", lists, dtype=pl.List(pl.String))
    pl.read_parquet(source).with_columns(users).write_parquet(target)


def chosen(rows: list[Row]) -> pl.DataFrame:
    """Each arm with its pair, at every epsilon and with every seed that ran; runs that diverged are left out."""
    absent = {"trained": None, "accounting": None, "seed": None, "start_loss": None}
    table = pl.DataFrame([absent | row for row in rows], infer_schema_length=None)
    table = table.with_columns(pl.col("seed").fill_null(0), pl.col("trained", "accounting").cast(pl.String))
    fresh = pl.col("trained").is_null() | (pl.col("seed") > 0)  # seed 0 of the paper's scale tunes only
    sound = (pl.col("validation_loss") <= pl.col("start_loss").cast(pl.Float64)).fill_null(True)
    return table.filter(fresh, sound).sort("validation_loss").unique(RUN, keep="first").sort(RUN)


def relative(table: pl.DataFrame, lower: str, higher: str) -> dict[tuple, list[float]]:
    """The first arm's test loss over the second's, less one, seed by seed; by data, accounting and epsilon."""
    on = ["data", "accounting", "epsilon", "seed"]
    both = table.filter(arm=lower).join(table.filter(arm=higher), on=on, suffix="_higher", nulls_equal=True)
    found: dict[tuple, list[float]] = {}
    for line in both.sort(on).to_dicts():
        case = (line["data"], line["accounting"], line["epsilon"])
        found.setdefault(case, []).append(line["test_loss"] / line["test_loss_higher"] - 1)
    return found


def table(rows: list[Row]) -> str:
    """A Markdown table of the output bias alone: relative losses, with an interval where three seeds ran."""
    own = chosen([row for row in rows if row.get("trained") is None])
    lines = ["| data | arms | epsilon 4 | epsilon 16 | epsilon 64 |", "|---|---|---:|---:|---:|"]
    for name, arms in COMPARED.items():
        found = relative(own, *arms)
        for data in sorted({case[0] for case in found}):
            cells = [_cell(found.get((data, None, epsilon), [])) for epsilon in EPSILONS]
            lines.append(f"| {data} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    return with_interval(combine([(1.0, values)])) + " %" if len(values) > 1 else f"{100 * values[0]:+.2f} %, one seed"


def draw(rows: list[Row]) -> alt.FacetChart:
    """Test loss of all parameters where that ran, else of the output bias; bars: 95% intervals over seeds."""
    found = chosen(rows)
    if not found["trained"].is_null().all():
        found = found.filter(trained="all")
    lines = []
    lines_of = found.group_by("data", "arm", "accounting", "epsilon", maintain_order=True)
    for (data, arm, accounting, epsilon), own in lines_of:
        effect = combine([(1.0, own["test_loss"].to_list())]) if own.height > 1 else None
        low, high = effect.interval() if effect else (None, None)
        panel = (
            f"{data}, output bias alone: not a reproduction" if accounting is None else f"{data}, {accounting} epsilon"
        )
        line = {"panel": panel, "arm": arm, "epsilon": epsilon, "test_loss": own["test_loss"].mean()}
        lines.append(line | {"low": low, "high": high})
    base = alt.Chart(pl.DataFrame(lines, infer_schema_length=None)).encode(
        x=alt.X("epsilon:Q").scale(type="log", base=2),
        color=alt.Color("arm:N", title=None).scale(scheme="tableau20"),
    )
    losses = base.mark_line(point=True).encode(y=alt.Y("test_loss:Q", title="test loss").scale(zero=False))
    return (
        (base.mark_rule().encode(y="low:Q", y2="high:Q") + losses)
        .properties(width=280, height=220)
        .facet(column=alt.Column("panel:N", title=None))
        .resolve_scale(y="independent")
    )


def claims(rows: list[Row]) -> list[Verdict]:
    """By all parameters alone, data set by data set and accounting by accounting; a case needs all fresh seeds."""
    own = (
        chosen([row for row in rows if row.get("trained") == "all"])
        if any(row.get("trained") for row in rows)
        else None
    )
    verdicts = []
    for claim, (pairs, most) in zip(CLAIMS, JUDGED, strict=True):
        effects: dict[tuple, Effect] = {}
        for lower, higher in pairs if own is not None else ():
            found = relative(own, lower, higher)
            effects |= {
                (lower, *case): combine([(1.0, values)])
                for case, values in found.items()
                if len(values) == len(FRESH_SEEDS)
            }
        every = len(pairs) * len(TEXTS) * 2 * len(EPSILONS)
        shown = "; ".join(
            f"{with_interval(effect)} ({arm}, {data}, {accounting} epsilon {epsilon:g})"
            for (arm, data, accounting, epsilon), effect in effects.items()
        )
        found_text = f"test loss over the other arm's, in with_interval, in {len(effects)} of {every} cases: {shown}"
        verdicts.append(
            judge(
                claim,
                list(effects.values()),
                found_text if effects else "",
                below=most,
                cases=every,
                seeds=f"{FRESH_SEEDS[0]} to {FRESH_SEEDS[-1]}",
            )
        )
    return verdicts
