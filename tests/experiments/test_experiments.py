"""Every experiment runs at its smallest scale, resumes, and is drawn and judged from rows alone."""

import inspect

import numpy as np
import polars as pl
import pytest
from experiments.__main__ import main
from experiments.framework import logistic, pages, runner
from experiments.framework.graphs import FILES, MissingDataError
from experiments.framework.rows import Points, read_rows
from experiments.framework.runner import load, names, run_grid
from experiments.framework.verdicts import FAILS, HOLDS, OPEN, UNRESOLVED, Effect, combine, judge, judge_cases
from scipy import stats

SLOW = {"private_abstracts", "text_arms", "kills", "fuzzing", "audit_power", "attribution_costs"}
SLOW |= {"dpsgd_against_dpmf", "selection_bias", "accuracy_of_mechanisms", "accuracy_gap", "duplicates_help_or_hurt"}
SLOW |= {"text_models"}
SLOW |= {"covered_evaluation", "defaults", "tuning_worth"}
SLOW |= {"error_frontier"}  # its mechanisms are calibrated by the tests of accounting and planning
SLOW |= {"canary_power", "cost_of_groups", "feasible_separation", "fewer_participations", "node_privacy", "tiers"}


def check_verdicts(module, verdicts):
    assert tuple(verdict.claim for verdict in verdicts) == module.CLAIMS
    assert {verdict.verdict for verdict in verdicts} <= {HOLDS, FAILS, UNRESOLVED, OPEN}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in names()]
)
def test_ci_scale(name, tmp_path):
    module = load(name)
    run_grid(name, "ci", tmp_path)
    rows = read_rows(name, tmp_path)
    assert Points(module.GRID).rows_of(module.GRID["ci"], rows) == rows
    assert len(rows) == len(module.GRID["ci"])
    module.draw(rows).to_dict()
    check_verdicts(module, module.claims(rows))
    if hasattr(module, "table") and "graph" not in rows[0]:  # a table of real graphs knows those alone
        assert module.table(rows).startswith("| ")


@pytest.mark.parametrize("name", names())
def test_stored_rows(name):
    module, rows = load(name), read_rows(name)
    points = Points(module.GRID)
    known = {points.key(point) for scale in ("small", "paper") for point in module.GRID[scale]}
    assert {points.key(row) for row in rows} <= known
    assert len({points.key(row) for row in rows}) == len(rows)
    check_verdicts(module, pages.claims_of(name))
    if rows:
        module.draw(rows).to_dict()


def test_selectors_are_compared_on_the_same_graph():
    """Key rules change over time, and with them the graph of a file: rows of two versions must not share a table."""
    rows = read_rows("greedy_against_optimum")
    assert len({(row["graph"], row["graph_digest"]) for row in rows}) == len({row["graph"] for row in rows})
    bounds = {(row["graph"], row["contribution_bound"]): row for row in rows if row["selector"] == "integer-program"}
    for row in rows:
        program = bounds.get((row["graph"], row["contribution_bound"]))
        if program is not None and "duplicates" not in row["selector"]:
            assert row["size"] <= program["upper_bound"]


@pytest.mark.parametrize("name", names())
def test_first_line_names_the_question_and_the_paper(name):
    assert "? (" in pages.first_line(load(name))
    assert "paper" in pages.first_line(load(name))


def test_pages_say_what_the_rows_say():
    for page, name, text in pages.sections():
        written = (pages.ROOT / page).read_text(encoding="utf-8")
        assert pages.replace_section(written, name, text) == written, f"{page}: run `make tables`"


def test_verdicts_have_pictures():
    figure = pages.draw_verdicts(pages.all_verdicts()).to_dict()
    assert len(next(iter(figure.values() if "data" not in figure else [figure["data"]]))["values"]) == sum(
        len(load(name).CLAIMS) for name in names()
    )
    stored = {file.stem for file in (pages.ROOT / pages.PICTURES).glob("*.svg")}
    drawn = {"verdicts", *(picture for name in names() for picture in pages.figures(name))}
    assert drawn <= stored
    pages_of_docs = "".join(page.read_text(encoding="utf-8") for page in (pages.ROOT / "docs").rglob("*.md"))
    assert all(f"pictures/{name}.svg" in pages_of_docs for name in stored - drawn)  # no picture is left behind


class Interrupted(Exception):
    pass


def test_a_stopped_grid_resumes(monkeypatch, tmp_path, capsys):
    module = load("size_after_bounding")
    points, ran = module.GRID["ci"], []

    def run(point):
        if len(ran) == 2:
            raise Interrupted
        ran.append(point)
        return {"value": len(ran)}

    monkeypatch.setattr(module, "run", run)
    with pytest.raises(Interrupted):
        run_grid("size_after_bounding", "ci", tmp_path)
    assert ran == points[:2]
    assert [row["value"] for row in read_rows("size_after_bounding", tmp_path)] == [1, 2]
    monkeypatch.setattr(module, "run", lambda point: {"value": -1})
    run_grid("size_after_bounding", "ci", tmp_path)
    assert [row["value"] for row in read_rows("size_after_bounding", tmp_path)] == [1, 2] + [-1] * (len(points) - 2)
    assert "about" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["size_after_bounding.parquet"]


def test_points_are_told_by_value():
    points = Points({"small": [{"a": 1, "b": None}, {"a": 2.0, "b": "x"}]})
    assert points.key({"a": 1.0, "b": None, "result": 3}) == points.key({"a": 1})
    assert points.key({"a": 1}) != points.key({"a": 2})


def text_rows(module, scale, loss):
    """A row for every point of the text arms, with losses by `loss(point)`."""
    return [
        {"learning_rate": None} | point | {"validation_loss": loss(point), "test_loss": loss(point)}
        for point in module.GRID[scale]
    ]


def test_text_arms_use_the_pair_that_is_best_on_validation():
    module = load("text_arms")
    for scale, trained in (("small", None), ("paper", "all")):
        rows = text_rows(module, scale, lambda point: 7.0 - point.get("clip_norm", 0.0))
        tuned = [row for row in rows if row["learning_rate"] is not None]
        left = [point for point in module.GRID[scale] if "learning_rate" not in point]
        for point in left:
            pairs = module.PAIRS[point["data"], trained]
            assert module._pair(point, rows)[1] == max(clip_norm for _, clip_norm in pairs)
        with pytest.raises(RuntimeError, match="first"):
            module._pair(left[0], tuned[1:])


def test_text_arms_are_compared_seed_by_seed():
    """Later seeds move all losses alike, by far more than the arms differ: that counts for nothing."""
    module = load("text_arms")

    def loss(point):
        own = {"greedy, duplicates": 1.01, "random": 0.98}.get(point["arm"], 1.0)
        seed = point.get("seed", 0)
        if point["arm"] == "greedy, regular graph":
            own += {2: 0.001, 3: -0.001}.get(seed, 0.0)  # ahead once, behind once
        return 7.0 * own * (1 + 0.1 * seed) * (1 + 0.0001 * seed * (point["arm"] in ("random", "greedy, duplicates")))

    rows = text_rows(module, "paper", loss)
    found = module.relative(module.chosen(rows), "random", "greedy")
    assert len(found) == 2 * 2 * 3
    assert all(
        values == pytest.approx([0.98 * (1 + 0.0001 * seed) - 1 for seed in (1, 2, 3)]) for values in found.values()
    )
    verdicts = [verdict.verdict for verdict in module.claims(rows)]
    assert verdicts == [FAILS, UNRESOLVED, FAILS, HOLDS, FAILS]  # the second claim's arms are level


def test_the_output_bias_alone_judges_nothing():
    module = load("text_arms")
    rows = text_rows(module, "small", lambda point: 7.0)
    assert {verdict.verdict for verdict in module.claims(rows)} == {OPEN}
    assert module.table(rows).count("one seed") > 3


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_one_effect_is_judged_by_its_interval():
    def word(estimate, **threshold):
        return judge("c", [Effect(estimate, 0.5, 4)], "", **threshold).verdict

    half = 0.5 * 2.776  # Student's, of 4 degrees of freedom
    assert Effect(1.0, 0.5, 4).interval() == pytest.approx((1 - half, 1 + half), abs=1e-3)
    assert [word(value, above=0.0) for value in (1.4, 1.38, 0.0, -1.38, -1.4)] == [
        HOLDS,
        UNRESOLVED,
        UNRESOLVED,
        UNRESOLVED,
        FAILS,
    ]
    assert [word(value, below=0.0) for value in (1.4, 0.0, -1.4)] == [FAILS, UNRESOLVED, HOLDS]
    assert [word(value, above=-2.0) for value in (0.0, -4.0)] == [HOLDS, FAILS]
    assert judge("c", [], "", above=0.0).verdict == OPEN


def test_exact_effects_hold_at_the_threshold():
    assert judge("c", [Effect(1.0)], "", above=1.0).verdict == HOLDS
    assert judge("c", [Effect(1.0)], "", below=1.0).verdict == HOLDS
    assert judge("c", [Effect(0.99)], "", above=1.0).verdict == FAILS


def test_claims_on_all_and_on_some_cases():
    ahead, level, behind = Effect(5.0, 1.0, 20), Effect(0.1, 1.0, 20), Effect(-5.0, 1.0, 20)

    def words(*effects, cases=None):
        return tuple(judge("c", effects, "", above=0.0, in_some=some, cases=cases).verdict for some in (0, 1))

    assert words(ahead, ahead) == (HOLDS, HOLDS)
    assert words(ahead, level) == (UNRESOLVED, HOLDS)
    assert words(ahead, behind) == (FAILS, HOLDS)
    assert words(behind, behind) == (FAILS, FAILS)
    assert words(level, behind) == (FAILS, UNRESOLVED)
    assert words(ahead, ahead, cases=3) == (UNRESOLVED, HOLDS)
    assert words(behind, behind, cases=3) == (FAILS, UNRESOLVED)
    almost = Effect(2.2, 1.0, 20)  # beyond the interval of one case, not of ten
    assert words(almost) == (HOLDS, HOLDS)
    assert words(*[almost] + [level] * 9) == (UNRESOLVED, UNRESOLVED)
    assert words(almost, cases=10) == (UNRESOLVED, UNRESOLVED)  # nine were not run yet


def test_a_contrast_has_the_error_of_welch():
    one, other = [1.0, 2.0, 4.0], [3.0, 3.5, 5.0, 9.0]
    effect = combine([(1.0, one), (-1.0, other)])
    expected = stats.ttest_ind(one, other, equal_var=False)
    assert (effect.estimate / effect.error, effect.freedom) == pytest.approx((expected.statistic, expected.df))
    assert effect.interval() == pytest.approx(tuple(expected.confidence_interval()))


def test_cases_without_chance_hold_together_or_not():
    assert [judge_cases("c", holding, 3, "").verdict for holding in (3, 2, 0)] == [HOLDS, FAILS, FAILS]
    assert judge_cases("c", 0, 0, "").verdict == OPEN


def planted(module, accuracy, diverged=lambda point: False):
    """Rows of a whole grid of DP-SGD against DP-MF: `accuracy(point, epsilon)` and which points diverged."""
    generator = np.random.default_rng(0)
    rows = []
    for point in module.GRID["small"]:
        epsilons = list(logistic.EPSILONS_OF_MANY["small"])
        values = [accuracy(point, epsilon) + generator.normal(0, 0.002) for epsilon in epsilons]
        lists = {"epsilon": epsilons, "validation": values, "expected": values, "test": values}
        lists |= {"learning_rate": [0.1] * 3, "clip_norm": [1.0] * 3, "noise_multiplier": [1.0] * 3}
        lists["loss"] = [0.8 if diverged(point) else 0.6] * 3
        if "batch_size" not in point:
            first = next(p for p in module.GRID["small"] if p["mechanism"] == point["mechanism"])
            lists["candidate"] = [module.DESIGN.name(first)] * 3
        elif (
            point["batch_size"] != 2**10
            or point.get("contribution_bound", 3) != 3
            or point.get("separation_share", 1) < 1
        ):
            lists["validation"] = [0.5] * 3  # one candidate is the best
        rows.append(point | lists)
    return rows


def test_planted_rows_without_an_effect_are_not_resolved():
    module = load("dpsgd_against_dpmf")
    assert {v.verdict for v in module.claims(planted(module, lambda point, epsilon: 0.7))} == {UNRESOLVED}


def test_planted_effects_are_found_in_both_directions():
    module = load("dpsgd_against_dpmf")

    def accuracy(sign):
        def of(point, epsilon):
            ahead = (
                0.01 * (np.log2(epsilon) - 3)
                + 0.02 * (point["kind"] == "skewed")
                + 0.01 * (point["examples_per_user"] == 8)
            )
            return 0.7 + sign * ahead * (point["mechanism"] == "DP-MF")

        return of

    up, down = (module.claims(planted(module, accuracy(sign))) for sign in (1, -1))
    assert [verdict.verdict for verdict in up] == [HOLDS] * 4
    assert [verdict.verdict for verdict in down] == [FAILS] * 3 + [HOLDS]  # at epsilon 2 on some graph DP-MF is ahead
    assert "examples: +1.0" in up[0].found  # a slope of one point by doubling
    behind = module.claims(planted(module, lambda point, _: 0.7 - 0.05 * (point["mechanism"] == "DP-MF")))
    assert behind[3].verdict == UNRESOLVED  # 8 million examples were not run
    assert all(verdict.smaller and verdict.seeds == "3 to 7" for verdict in up)


def test_a_diverged_seed_is_named_and_left_out():
    module = load("dpsgd_against_dpmf")

    def is_bad(point):
        return (point.get("seed"), point["mechanism"], point["kind"], point["examples_per_user"]) == (
            5,
            "DP-MF",
            "skewed",
            8,
        )

    def accuracy(point, epsilon):
        return 0.1 if is_bad(point) else 0.7

    rows = planted(module, accuracy, is_bad)
    own = module.reported(rows).filter(kind="skewed", examples_per_user=8, mechanism="DP-MF")
    assert own["diverged"].to_list() == [1] * 3
    assert all(abs(value - 0.7) < 0.01 for value in own["expected"])
    verdicts = module.claims(rows)
    assert {verdict.verdict for verdict in verdicts} == {UNRESOLVED}
    assert all("1 of 5 (125000, 8, skewed, DP-MF" in verdict.why for verdict in verdicts)
    kept = module.claims(planted(module, accuracy))  # the same accuracy without divergence counts
    assert all("Diverged" not in verdict.why for verdict in kept)
    assert module.reported(planted(module, accuracy))["expected"].min() < 0.6


def test_too_few_seeds_are_not_judged():
    module = load("dpsgd_against_dpmf")
    rows = planted(module, lambda point, _: 0.7, lambda point: point.get("seed") in (3, 4, 5))
    assert {verdict.verdict for verdict in module.claims(rows)} == {OPEN}
    early = [row for row in planted(module, lambda point, _: 0.7) if row.get("seed") != 7]
    assert {verdict.verdict for verdict in module.claims(early)} == {OPEN}


DESIGN = logistic.Design(arm=["kind"], candidate=["batch_size"])
COMMON = {"num_examples": 5, "num_features": 2, "drawn": 9, "num_epsilons": 1, "kind": "a"}


def trained_row(validation, *, pairs, **columns):
    number = len(validation)
    lists = {"epsilon": [1.0] * number, "validation": validation, "loss": [0.6] * number}
    lists |= {"learning_rate": [pair[0] for pair in pairs], "clip_norm": [pair[1] for pair in pairs]}
    lists |= dict.fromkeys(("noise_multiplier", "test", "expected"), [0.5] * number)
    return COMMON | lists | columns


def test_the_winner_has_the_best_mean_over_the_seeds_of_tuning():
    pairs = [(rate, 1.0) for rate in (0.1, 0.2, 0.3)]
    first = [
        trained_row([0.90, 0.80, 0.70], pairs=pairs, batch_size=8),
        trained_row([0.85, 0.75, 0.65], pairs=pairs, batch_size=16),
    ]
    finalists = DESIGN.finalists(DESIGN.lines(first))
    assert sorted(finalists["validation"], reverse=True) == [0.90, 0.85, 0.80, 0.75, 0.70]  # the sixth is left out
    names = ["batch_size 8", "batch_size 16", "batch_size 8", "batch_size 16", "batch_size 8"]
    chosen = [(0.1, 1.0), (0.1, 1.0), (0.2, 1.0), (0.2, 1.0), (0.3, 1.0)]
    tuned = [
        trained_row([0.5, 0.84, 0.8, 0.7, 0.7], pairs=chosen, candidate=names, seed=seed)
        for seed in logistic.TUNING_SEEDS
    ]
    assert DESIGN.winners(DESIGN.lines([*first, tuned[0]])).is_empty()  # tuning has not ended
    winner = DESIGN.winners(DESIGN.lines([*first, *tuned])).row(0, named=True)
    assert (winner["candidate"], winner["learning_rate"]) == ("batch_size 16", 0.1)  # lucky once: batch size 8
    assert winner["validation"] == pytest.approx((0.85 + 2 * 0.84) / 3)
    tuned[1]["loss"] = [0.6, 0.7, 0.6, 0.6, 0.6]  # ln 2 is 0.693
    winner = DESIGN.winners(DESIGN.lines([*first, *tuned])).row(0, named=True)
    assert (winner["candidate"], winner["learning_rate"]) == ("batch_size 8", 0.2)


def test_fresh_seeds_train_the_winner_alone(monkeypatch):
    trained = []

    def sweep(given, *, seed, wanted):
        trained.append((given, seed, wanted))
        table = pl.DataFrame(wanted, schema=["epsilon", "learning_rate", "clip_norm"], orient="row")
        rest = [pl.lit(0.5).alias(name) for name in logistic.LISTS if name not in table.columns]
        return table.with_columns(rest).select(logistic.LISTS)

    monkeypatch.setattr(logistic, "sweep", sweep)
    first = [
        trained_row([0.9], pairs=[(0.1, 1.0)], batch_size=8),
        trained_row([0.8], pairs=[(0.2, 1.0)], batch_size=16),
    ]
    later = DESIGN.later_points(first)
    assert [point["seed"] for point in later] == [1, 2, 3, 4, 5, 6, 7]
    rows = list(first)
    for point in later:
        rows.append(point | DESIGN.run_again(point, DESIGN.lines(rows), lambda line, seed: (line["batch_size"], seed)))
    assert trained[:2] == [((8, 1), 1, [(1.0, 0.1, 1.0)]), ((16, 1), 1, [(1.0, 0.2, 1.0)])]
    assert len(trained) == 2 * 2 + 5
    assert DESIGN.reported(DESIGN.lines(rows))["values"].to_list() == [[0.5] * 5]


def test_where_the_gain_crosses_zero():
    crossing = load("duplicates_help_or_hurt").crossing
    gains = np.array([[1.0, 1.0, -1.0, -1.0], [1.0, -3.0, -1.0, -1.0], [-1.0] * 4, [1.0] * 4, [1.0, -1.0, 1.0, -1.0]])
    assert crossing(np.array([1.0, 2.0, 4.0, 8.0]), gains) == pytest.approx([1.5, 0.25, 0.0, 3.0, 0.5])


def test_noise_ratios_describe_the_stored_selections():
    sizes = {
        (row["graph"], row["contribution_bound"], row["selector"]): row["size"]
        for row in read_rows("greedy_against_optimum")
    }
    for row in read_rows("noise_ratio"):
        for selector in ("greedy", "priced"):
            assert row[f"size_{selector}"] == sizes[row["graph"], row["contribution_bound"], selector]


MADE_AGAIN = (  # an experiment, one of its stored points, a column and how far the value may be off
    ("size_after_bounding", {"num_examples": 125_000, "examples_per_user": 8, "kind": "skewed", "seed": 3}, "sizes", 0),
    ("size_against_users", {"num_examples": 125_000, "examples_per_user": 2, "kind": "skewed"}, "size", 0),
    ("noise_ratio", {"graph": "ACL", "contribution_bound": 2}, "noise_greedy", 1e-6),
    (
        "dpsgd_against_dpmf",
        {"kind": "skewed", "examples_per_user": 8, "mechanism": "DP-SGD", "seed": 3},
        "expected",
        0.005,
    ),
    (
        "dpsgd_against_dpmf",
        {"kind": "skewed", "examples_per_user": 8, "mechanism": "DP-MF", "seed": 4},
        "expected",
        0.02,
    ),
)


@pytest.mark.full
@pytest.mark.parametrize(("name", "named", "column", "within"), MADE_AGAIN)
def test_stored_rows_can_be_made_again(name, named, column, within):
    """Selections are the same everywhere; sums in another order move a model, by less than seeds do."""
    module, rows = load(name), read_rows(name)
    point = next(p for p in module.GRID["small"] if named.items() <= p.items() and "batch_size" not in p)
    (stored,) = Points(module.GRID).rows_of([point], rows)
    made = module.run(point, rows) if "rows" in inspect.signature(module.run).parameters else module.run(point)
    assert made[column] == pytest.approx(stored[column], abs=within)


def test_missing_data_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COOWNED_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"arxiv_hypergraph.parquet is not in .*COOWNED_DATA"):
        run_grid("fewer_participations", "small", tmp_path)
    monkeypatch.setattr("sys.argv", ["experiments", "fewer_participations", "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", names())
def test_experiments_name_the_data_that_they_need(name):
    module = load(name)
    text = inspect.getsource(module)
    calls = ("data_file(", "real_graph(", "corpus(")
    uses = any(call in text for call in calls) and name != "noise_ratio"  # made up alone
    assert bool(getattr(module, "DATA", ())) == uses
    assert set(getattr(module, "DATA", ())) <= set(FILES)


def test_there_are_experiments():
    assert "greedy_against_optimum" in names()
    assert "framework" not in names()
    assert runner.SCALES == ("ci", "small", "paper")


def planted_bias(module, best):
    """Rows of the first pass of bias: accuracy falls with the distance from `best[strength]` users per example."""
    generator, rows = np.random.default_rng(0), []
    for point in module.GRID["paper"]:
        if point.get("batch_size") and point["selector"] == "bias-mitigating":
            users = 1.5 + 0.3 * point["step"] / point["steps"]
            value = 0.7 - (users - best[point["bias_strength"]]) ** 2 + generator.normal(0, 0.0005)
            lists = {"epsilon": [2.0, 8.0], "validation": [value] * 2, "loss": [0.6] * 2}
            lists |= dict.fromkeys(("noise_multiplier", "learning_rate", "clip_norm", "test", "expected"), [0.5] * 2)
            rows.append(point | lists | {"mean_users_per_example": users})
    return rows


@pytest.mark.parametrize(
    ("best", "word"),
    [
        ({0.1: 1.55, 1.0: 1.7, 10.0: 1.72}, HOLDS),
        ({0.1: 1.55, 1.0: 1.57, 10.0: 1.72}, FAILS),
        ({0.1: 1.6, 1.0: 1.65, 10.0: 1.7}, UNRESOLVED),
    ],
)
def test_diminishing_returns_are_a_second_difference(best, word):
    module = load("selection_bias")
    rows = planted_bias(module, best)
    assert module.claims(rows)[3].verdict == word
    assert module.claims([row for row in rows if row["bias_strength"] > 1])[3].verdict == OPEN
