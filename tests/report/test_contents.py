"""Reading a run folder."""

import json
import shutil

import pytest
from tests.report.conftest import SEEDED

from coowned import CertificateMismatchError, InputError, PrivacyGuarantee, guarantee
from coowned.report.contents import read_run, releasable_config


def test_release_opens_no_private_file(copy):
    folder = copy("seeded")
    for name in ("metrics.parquet", "validation.parquet", "test.parquet"):
        (folder / name).write_bytes(b"no table")
    assert read_run(folder, release=True).private is None
    with pytest.raises(InputError, match="parquet: cannot be read"):
        read_run(folder, release=False)


def test_unfinished_run_is_refused(copy, tmp_path):
    folder = copy("seeded")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "state": "training"}), encoding="utf-8")
    with pytest.raises(InputError, match="has not ended"):
        read_run(folder, release=False)
    with pytest.raises(InputError, match="no folder"):
        read_run(tmp_path / "nowhere", release=False)
    with pytest.raises(InputError, match="no run"):
        read_run(tmp_path, release=False)


def test_foreign_guarantee_is_refused(copy, runs):
    folder = copy("scheduled")
    shutil.copy(runs["simulated"] / "guarantee.json", folder / "guarantee.json")
    with pytest.raises(CertificateMismatchError, match="another certificate"):
        read_run(folder, release=False)


def test_guarantee_of_another_run_is_refused(copy):
    """Same certificate, smaller epsilon: what a mixed-up folder would claim."""
    folder = copy("scheduled")
    own = PrivacyGuarantee.from_json((folder / "guarantee.json").read_text(encoding="utf-8"))
    other = guarantee(own.certificate, own.mechanism, epsilon=own.epsilon / 2, delta=own.delta, adjacency=own.adjacency)
    (folder / "guarantee.json").write_text(other.to_json(), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="not for this one"):
        read_run(folder, release=False)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "run_id": None}), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="not for this one"):
        read_run(folder, release=True)


def test_lost_guarantee_is_refused(copy, runs):
    folder = copy("scheduled")
    shutil.copy(runs["public"] / "guarantee.json", folder / "guarantee.json")
    with pytest.raises(CertificateMismatchError, match="not that of this run"):
        read_run(folder, release=True)


def test_hidden_seed_is_refused(copy):
    folder = copy("scheduled")
    config = folder / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace(*SEEDED), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="gives a seed"):
        read_run(folder, release=True)


def test_claims(runs):
    claims = {name: read_run(runs[name], release=True).claims for name in ("scheduled", "seeded", "none", "public")}
    assert claims == {"scheduled": True, "seeded": False, "none": False, "public": False}
    with pytest.raises(InputError, match="no guarantee"):
        _ = read_run(runs["seeded"], release=True).claim


@pytest.mark.parametrize("key", ["path", "aliases", "unprotected"])
def test_folders_and_comments_are_not_released(key: str):
    text = releasable_config(f'# secret one\n[data]\n{key} = "/home/bob/x.csv" # secret two\n[run]\nseed = 3\n')
    assert text == f'[data]\n{key} = "x.csv"\n\n[run]\nseed = 3'
