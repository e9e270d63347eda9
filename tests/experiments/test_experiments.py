"""Every experiment runs at its smallest scale, resumes, and is drawn and judged from rows alone."""

import statistics

import pytest
from experiments.framework import logistic, pages, runner
from experiments.framework.rows import Points, read_rows
from experiments.framework.runner import load, names, run_grid
from experiments.framework.verdicts import FAILS, HOLDS, IN_PART, OPEN, judge

SLOW = {"private_abstracts", "text_arms", "kills", "fuzzing", "audit_power", "attribution_costs"}
SLOW |= {"dpsgd_against_dpmf", "selection_bias", "accuracy_of_mechanisms", "accuracy_gap", "duplicates_help_or_hurt"}
SLOW |= {"error_frontier"}  # its mechanisms are calibrated by the tests of accounting and planning


def check_verdicts(module, verdicts):
    assert tuple(verdict.claim for verdict in verdicts) == module.CLAIMS
    assert {verdict.verdict for verdict in verdicts} <= {HOLDS, IN_PART, FAILS, OPEN}


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
    drawn = {"verdicts", *(name for name in names() if read_rows(name))}
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
    assert [row["value"] for row in read_rows("size_after_bounding", tmp_path)] == [1, 2, -1, -1]
    assert "about" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["size_after_bounding.parquet"]


def test_points_are_told_by_value():
    points = Points({"small": [{"a": 1, "b": None}, {"a": 2.0, "b": "x"}]})
    assert points.key({"a": 1.0, "b": None, "result": 3}) == points.key({"a": 1})
    assert points.key({"a": 1}) != points.key({"a": 2})


def text_rows(module, loss):
    """A row for every point of the text arms, with losses by `loss(point)`."""
    return [
        {"learning_rate": None} | point | {"validation_loss": loss(point), "test_loss": loss(point)}
        for point in module.GRID["small"]
    ]


def test_text_arms_use_the_pair_that_is_best_on_validation():
    module = load("text_arms")
    rows = text_rows(module, lambda point: 7.0 - point.get("clip_norm", 0.0))
    tuned = [row for row in rows if row["learning_rate"] is not None]
    left = [point for point in module.GRID["small"] if "learning_rate" not in point]
    assert len(tuned) == 2 * (len(module.ARMS) + len(module.ON_ARXIV))
    assert len(left) == len(tuned) + 3 * len(module.SEEDS) * len(module.CLOSE)
    assert all(module._pair(point, rows) == max(module.PAIRS[point["data"]]) for point in left)
    with pytest.raises(RuntimeError, match="first"):
        module._pair(left[0], tuned[1:])
    kept = module.chosen(rows).filter(seed=0)
    assert kept.height == 3 * (len(module.ARMS) + len(module.ON_ARXIV))
    assert set(kept.filter(data="ACL", epsilon=module.TUNED_AT)["clip_norm"]) == {0.5}
    assert set(kept.filter(data="arXiv", epsilon=module.TUNED_AT)["clip_norm"]) == {0.25}


def test_text_arms_are_compared_seed_by_seed():
    """Seeds 1 and 2 move all losses alike, by far more than the arms differ: that counts for nothing."""
    module = load("text_arms")

    def loss(point):
        own = {"greedy, duplicates": 1.01, "random": 1.02, "largest S": 0.999}.get(point["arm"], 1.0)
        seed = point.get("seed", 0)
        return 7.0 * own * (1 + 0.1 * seed) * (1 + 0.001 * seed * (point["arm"] == "random"))

    found = module.ratios(text_rows(module, loss))
    alone, duplicates, random = (found.filter(claim=module.CLAIMS[n], data="ACL") for n in (0, 2, 3))
    assert duplicates["ratio"].to_list() == pytest.approx([1.01] * 3)
    assert random["ratio"].to_list() == pytest.approx([1.02 * (1 + 1.002 + 1.001) / 3] * 3)
    assert alone["ratio"].to_list() == pytest.approx([1.01] * 3)  # the first arm's further seeds are left out
    assert [part["seeds"].to_list() for part in (alone, duplicates, random)] == [[1] * 3, [3] * 3, [3] * 3]
    # Of five claims with three seeds, one has a deviation of 0.00102 over them; the others have none.
    assert alone["error"].to_list() == pytest.approx([0.00102 / 5**0.5] * 3)
    assert duplicates["error"].to_list() == pytest.approx([0.00102 / 15**0.5] * 3)
    verdicts = dict(zip(module.CLAIMS, module.claims(text_rows(module, loss)), strict=True))
    assert verdicts[module.CLAIMS[2]].verdict == FAILS
    assert verdicts[module.CLAIMS[5]].verdict == HOLDS
    assert "ACL +1.00 ± 0.03% at 4" in verdicts[module.CLAIMS[2]].found
    assert "(3 seeds); arXiv +1.00 ± 0.05% at 4" in verdicts[module.CLAIMS[2]].found


def test_seeds_are_averaged_for_the_setting_that_is_best_on_validation():
    tuned = {"epsilon": [1.0, 2.0], "expected": [0.6, 0.7], "validation": [0.9, 0.5]}
    rows = [
        {"kind": "a", "batch_size": 8, **tuned},
        {"kind": "a", "batch_size": 16, **tuned, "validation": [0.8, 0.7], "expected": [0.9, 0.8]},
        *({"kind": "a", "seed": seed, **tuned, "expected": [0.3 * seed, 0.8]} for seed in logistic.SEEDS),
    ]
    filled = [{key: [0.0, 0.0] for key in logistic.LISTS} | row for row in rows]
    best = logistic.best(logistic.by_epsilon(filled), ["kind"])
    assert best["batch_size"].to_list() == [8, 16]
    assert best["expected"].to_list() == pytest.approx([(0.6 + 0.3 + 0.6) / 3, 0.8])
    assert best["seeds"].to_list() == [3, 3]
    assert best["deviation"].to_list() == pytest.approx([statistics.stdev([0.6, 0.3, 0.6]), 0.0])
    assert "3 seeds with a standard error of at most 10.00 points" in logistic.seeds_shown(best)
    assert logistic.seeds_shown(logistic.best(logistic.by_epsilon(filled[:2]), ["kind"])) == ""


def test_repetitions_train_only_what_was_best():
    trained = []

    def tuned_in_world(given, *, epsilons, seed, pairs):
        trained.append((given, epsilons, seed, pairs))
        return {name: [10.0 * e for e in epsilons] for name in logistic.LISTS}

    common = {"num_examples": 5, "num_features": 2, "drawn": 9, "num_epsilons": 2}
    pairs = {"learning_rate": [0.1, 0.2], "clip_norm": [1.0, 2.0]}
    rows = [
        common | {"kind": "a", "batch_size": size, "epsilon": [1.0, 2.0], "validation": validation}
        for size, validation in ((8, [0.9, 0.5]), (16, [0.8, 0.7]))
    ]
    filled = [{key: [0.0, 0.0] for key in logistic.LISTS} | row | pairs for row in rows]
    point = logistic.repetitions(rows, ["kind"])[1]
    assert point == common | {"kind": "a", "seed": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logistic, "tuned_in_world", tuned_in_world)
        row = logistic.repeated(point, logistic.by_epsilon(filled), ["kind"], lambda line, seed: line["batch_size"])
    assert sorted(trained) == [(8, [1.0], 2, [(0.1, 1.0)]), (16, [2.0], 2, [(0.2, 2.0)])]
    assert row["epsilon"] == [1.0, 2.0]
    assert row["test"] == [10.0, 20.0]


def test_judge():
    assert [judge("c", holding, 3, "").verdict for holding in (3, 1, 0)] == [HOLDS, IN_PART, FAILS]
    assert judge("c", 0, 0, "").verdict == OPEN


def test_there_are_experiments():
    assert "greedy_against_optimum" in names()
    assert "framework" not in names()
    assert runner.SCALES == ("ci", "small", "paper")
