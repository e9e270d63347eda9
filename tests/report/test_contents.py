"""Reading a run folder."""

import pytest

from coowned import CertificateMismatchError, InputError
from coowned.report.contents import read_run, releasable_config


def test_release_opens_no_private_file(copy):
    folder = copy("seeded")
    for name in ("metrics.parquet", "validation.parquet", "test.parquet"):
        (folder / name).write_bytes(b"no table")
    assert read_run(folder, release=True).private is None
    with pytest.raises(CertificateMismatchError, match="parquet: not what this run wrote"):
        read_run(folder, release=False)


def test_claims(runs):
    claims = {name: read_run(runs[name], release=True).claims for name in ("scheduled", "seeded", "none", "public")}
    assert claims == {"scheduled": True, "seeded": False, "none": False, "public": False}
    with pytest.raises(InputError, match="no guarantee"):
        _ = read_run(runs["seeded"], release=True).claim


@pytest.mark.parametrize("key", ["path", "aliases", "unprotected"])
def test_folders_and_comments_are_not_released(key: str):
    text = releasable_config(f'# secret one\n[data]\n{key} = "/home/bob/x.csv" # secret two\n[run]\nseed = 3\n')
    assert text == f'[data]\n{key} = "x.csv"\n\n[run]\nseed = 3'
