"""What the page of a run is made of."""

import tomllib

import pytest

from coowned import CertificateMismatchError, InputError
from coowned.report.page import write_report
from coowned.report.run_page import releasable_config
from coowned.runs.stored_run import StoredRun


def test_release_opens_no_private_file(copy):
    folder = copy("seeded")
    for name in ("metrics.parquet", "validation.parquet", "test.parquet"):
        (folder / name).write_bytes(b"no table")
    write_report(folder, release=True)
    with pytest.raises(CertificateMismatchError, match="parquet: changed since this run wrote"):
        write_report(folder)


def test_claims(runs):
    claims = {name: StoredRun.open(runs[name]).claims for name in ("scheduled", "seeded", "none", "public")}
    assert claims == {"scheduled": True, "seeded": False, "none": False, "public": False}
    with pytest.raises(InputError, match="no guarantee"):
        _ = StoredRun.open(runs["seeded"]).claim


@pytest.mark.parametrize("key", ["path", "aliases", "unprotected"])
def test_folders_and_comments_are_not_released(key: str):
    text = releasable_config(f'# secret one\n[data]\n{key} = "/home/bob/x.csv" # secret two\n[run]\nseed = 3\n')
    assert text == f'[data]\n{key} = "x.csv"\n\n[run]\nseed = 3'


def test_folders_are_not_released_from_lists_and_tables():
    text = releasable_config(
        '[model]\nfiles = ["/home/bob/a.txt", "b"]\narguments = { inner = { file = "../c/d.txt" } }'
    )
    stored = {"files": ["a.txt", "b"], "arguments": {"inner": {"file": "d.txt"}}}
    assert tomllib.loads(text) == {"model": stored}


def test_released_configurations_are_toml():
    text = '[model]\nkind = "python"\narguments = { width = 3, names = ["a"] }\n'
    assert tomllib.loads(releasable_config(text)) == tomllib.loads(text)
