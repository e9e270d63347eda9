"""Runs that version 0.1.0 wrote: later versions open them and predict the same bits."""

from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import coowned

FOLDER = Path(__file__).parents[1] / "fixtures" / "runs-0.1"


@pytest.mark.parametrize(("name", "example_id"), [("text", "message_id"), ("table", "id")])
def test_runs_of_an_earlier_version_predict_the_same(name: str, example_id: str):
    run = coowned.open_run(FOLDER / name)
    assert run.guarantee.version == "0.1.0"
    predicted = run.predict(pl.read_parquet(FOLDER / f"{name}-new.parquet"), example_id=example_id)
    assert_frame_equal(predicted, pl.read_parquet(FOLDER / f"{name}-predictions.parquet"), check_exact=True)
