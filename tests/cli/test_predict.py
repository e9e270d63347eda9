"""`coowned predict`."""

import contextlib
import json
import sqlite3

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.test_fitting import fit, rows

from coowned.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("runs") / "RUN")


@pytest.fixture
def new(tmp_path):
    rows(30, seed=1).drop("users", "y").write_parquet(tmp_path / "new.parquet")
    return tmp_path / "new.parquet"


def test_predictions_of_a_file(trained, new, tmp_path, capsys):
    for name in ("new.parquet", "new.csv", "new.jsonl"):
        table = pl.read_parquet(new)
        {"csv": table.write_csv, "jsonl": table.write_ndjson}.get(name[4:], table.write_parquet)(tmp_path / name)
        output = tmp_path / f"{name}.P.parquet"
        call = ["predict", str(trained.folder), str(tmp_path / name), "--example-id", "id", "-o", str(output)]
        assert main.run(call) == 0
        assert_frame_equal(pl.read_parquet(output), trained.predict(table, example_id="id"))
    assert "rows have no prediction" not in capsys.readouterr().out


def test_probabilities_of_all_classes(trained, new, tmp_path):
    call = ["predict", str(trained.folder), str(new), "--probabilities", "-o", str(tmp_path / "P.parquet")]
    assert main.run(call) == 0
    found = pl.read_parquet(tmp_path / "P.parquet")
    assert found.columns == ["id", "prediction", "probability", "probability_0", "probability_1"]
    assert_frame_equal(found, trained.predict(pl.read_parquet(new), probabilities=True))


def test_rows_without_a_prediction_are_counted(trained, tmp_path, capsys):
    spoiled = rows(5).select("x1", x2=pl.Series([None, 1.0, 2.0, None, 3.0]))
    spoiled.write_parquet(tmp_path / "new.parquet")
    call = ["predict", str(trained.folder), str(tmp_path / "new.parquet"), "-o", str(tmp_path / "P.parquet")]
    assert main.run(call) == 0
    assert "2 of 5 rows have no prediction" in capsys.readouterr().out
    assert pl.read_parquet(tmp_path / "P.parquet")["id"].to_list() == [0, 1, 2, 3, 4]
    assert main.run([*call, "--overwrite", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"predictions": str(tmp_path / "P.parquet"), "rows": 5, "without_prediction": 2}


def test_users_may_be_named(trained, tmp_path):
    """Then several rows are one example, as on every other verb."""
    table = rows(10).explode("users")
    table.write_parquet(tmp_path / "pairs.parquet")
    output = tmp_path / "P.parquet"
    given = ["--user", "users", "--example-id", "id", "-o", str(output)]
    assert main.run(["predict", str(trained.folder), str(tmp_path / "pairs.parquet"), *given]) == 0
    assert pl.read_parquet(output)["id"].to_list() == table["id"].unique(maintain_order=True).to_list()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"run": "none"}, "not a folder"),
        ({"data": "none.parquet"}, "no such file"),
        ({"output": "new.parquet"}, "would overwrite its own input"),
        ({"output": "there.parquet"}, "already exists"),
        ({"output": "RUN/P.parquet"}, "is inside"),
        ({"more": ["--example-id", "nothing"]}, "nothing"),
        ({"data": "other.parquet"}, "no column 'x1', which the model reads; they have z"),
    ],
)
def test_bad_input_is_one_sentence(trained, new, tmp_path, capsys, changed, says):
    (tmp_path / "there.parquet").write_bytes(b"mine")
    pl.DataFrame({"z": [1.0]}).write_parquet(tmp_path / "other.parquet")
    folder = tmp_path / changed["run"] if "run" in changed else trained.folder
    output = changed.get("output", "P.parquet")
    written = folder / "P.parquet" if output.startswith("RUN/") else tmp_path / output
    call = ["predict", str(folder), str(tmp_path / changed.get("data", new.name)), "-o", str(written)]
    assert main.run([*call, *changed.get("more", [])]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert (tmp_path / "there.parquet").read_bytes() == b"mine"
    assert not (tmp_path / "P.parquet").exists()


def test_rows_of_a_query(trained, tmp_path):
    table, file = rows(5, seed=1), tmp_path / "new.db"
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE new (id TEXT, x1 REAL, x2 REAL)")
        connection.executemany("INSERT INTO new VALUES (?, ?, ?)", table.select("id", "x1", "x2").rows())
    given = ["--query", "SELECT * FROM new", "--example-id", "id", "-o", str(tmp_path / "P.parquet")]
    assert main.run(["predict", str(trained.folder), f"sqlite:///{file}", *given]) == 0
    assert_frame_equal(pl.read_parquet(tmp_path / "P.parquet"), trained.predict(table, example_id="id"))
