"""The code of docs/spark.md runs, with a folder in place of the cluster's file system."""

import re
from pathlib import Path

import polars as pl
import pytest

import coowned as co

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_the_page_runs(spark, tmp_path):
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
