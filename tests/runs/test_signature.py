import json

import pytest
from tests.runs.run_folders import reseal, write_run
from tests.runs.test_stored_run import claim

from coowned import CertificateMismatchError, InputError
from coowned.cli import main
from coowned.runs.signature import FILE, read_key, sign_run, signing_key, verify_run


@pytest.fixture
def signed(tmp_path):
    """(folder, key file) of a signed run."""
    (tmp_path / "RUN").mkdir()
    folder, key = write_run(tmp_path / "RUN", claim()), tmp_path / "curator.key"
    sign_run(folder, signing_key(key))
    return folder, key


def test_signed_runs_are_verified(signed, tmp_path):
    folder, key = signed
    verify_run(folder, read_key(key))
    assert signing_key(key) == read_key(key)  # not made again
    with pytest.raises(CertificateMismatchError, match="not signed with this key"):
        verify_run(folder, signing_key(tmp_path / "other.key"))


def test_forged_runs_are_refused(signed):
    """Another run, whole and consistent, is put into the folder: only the signature tells."""
    folder, key = signed
    write_run(folder, claim(10.0))
    reseal(folder)
    with pytest.raises(CertificateMismatchError, match="or changed since"):
        verify_run(folder, read_key(key))
    (folder / FILE).unlink()
    with pytest.raises(CertificateMismatchError, match="the run is not signed"):
        verify_run(folder, read_key(key))


def test_key_files_are_private(signed):
    _, key = signed
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    with pytest.raises(InputError, match="others can read this key; run chmod 600"):
        read_key(key)
    key.chmod(0o600)
    key.write_text("ab", encoding="ascii")
    with pytest.raises(InputError, match="not a key of 32 bytes"):
        read_key(key)
    with pytest.raises(InputError, match="no key file"):
        read_key(key.parent / "nowhere")


@pytest.mark.parametrize("verb", ["audit", "report"])
def test_verbs_refuse_what_is_not_signed(signed, capsys, verb):
    folder, key = signed
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(record | {"devices": 2}), encoding="utf-8")
    assert main.run([verb, str(folder), "--verify-key", str(key)]) == 1
    assert "not signed with this key" in " ".join(capsys.readouterr().err.split())
