"""The code of docs/spark.md runs, with a folder in place of the cluster's file system."""

import re
from pathlib import Path

import polars as pl
import pytest
from tests.spark.test_cluster import page_commands

import coowned as co
from coowned.cli.main import run
from coowned.selection.shards import read_shards

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_page_runs(spark, tmp_path, monkeypatch):
    mail = {
        "message_id": [f"<{number}@x.org>" for number in range(40)],
        "sender": [f"user{number % 7}@x.org" for number in range(40)],
        "to": [f"user{number % 5}@x.org;user{number % 11}@x.org" for number in range(40)],
    }
    pl.DataFrame(mail).write_parquet(tmp_path / "mail")
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {"spark": spark}
    exec(block.replace("hdfs://head", str(tmp_path)), names)
    certificate = names["certificate"]
    assert isinstance(certificate, co.ContributionCertificate)
    assert certificate.contribution_bound <= 3
    assert pl.read_parquet(tmp_path / "S.parquet" / "*.parquet")["copies"].sum() == certificate.size > 0
    assert (tmp_path / "S.certificate.json").exists()
    assert read_shards(tmp_path / "shards").manifest.splits == (0.8, 0.1, 0.1)
    # Groups and schedules: on one machine, from the rows that were selected on Spark.
    assert len(pl.read_parquet(tmp_path / "chosen.parquet" / "*.parquet")) == certificate.num_distinct
    monkeypatch.chdir(tmp_path)
    for words in page_commands("Groups and schedules"):
        assert run(words) == 0
    assert pl.read_parquet("groups.parquet")["group"].n_unique() == 2
    assert len(pl.read_parquet("schedule.parquet")) == 8
