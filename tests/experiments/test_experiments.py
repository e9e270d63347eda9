"""Every experiment runs at its smallest scale, resumes, and is drawn and judged from rows alone."""

import pytest
from experiments.framework import pages, runner
from experiments.framework.rows import Points, read_rows
from experiments.framework.runner import load, names, run_grid
from experiments.framework.verdicts import FAILS, HOLDS, IN_PART, OPEN, judge

SLOW = {"private_abstracts", "text_arms", "kills", "fuzzing", "audit_power", "attribution_costs"}
SLOW |= {"dpsgd_against_dpmf", "selection_bias", "accuracy_of_mechanisms", "accuracy_gap"}


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


def test_text_arms_use_the_pair_that_is_best_on_validation():
    module = load("text_arms")
    tuned = [
        point | {"validation_loss": 7.0 - point["learning_rate"], "test_loss": 7.0}
        for point in module.GRID["small"]
        if point["epsilon"] == module.TUNED_AT
    ]
    left = [point for point in module.GRID["small"] if point["epsilon"] != module.TUNED_AT]
    assert (len(tuned), len(left)) == (2 * len(module.ARMS), 2 * len(module.ARMS))
    best = max(module.PAIRS)
    assert all(module._pair(point, tuned) == best for point in left)
    with pytest.raises(RuntimeError, match="first"):
        module._pair(left[0], tuned[1:])
    kept = module.chosen(tuned + [point | {"validation_loss": 6.0, "test_loss": 6.0} for point in left])
    assert kept.height == 3 * len(module.ARMS)
    assert set(kept.filter(epsilon=module.TUNED_AT)["learning_rate"]) == {best[0]}


def test_judge():
    assert [judge("c", holding, 3, "").verdict for holding in (3, 1, 0)] == [HOLDS, IN_PART, FAILS]
    assert judge("c", 0, 0, "").verdict == OPEN


def test_there_are_experiments():
    assert "greedy_against_optimum" in names()
    assert "framework" not in names()
    assert runner.SCALES == ("ci", "small", "paper")
