import json

import pytest
from tests.runs.run_folders import claim, reseal, write_run

from coowned import CertificateMismatchError, InputError
from coowned.cli import main
from coowned.runs.signature import FILE, sign_run, signing_key, verification_key, verify_run


@pytest.fixture
def signed(tmp_path):
    """(folder, private key file, public key file) of a signed run."""
    (tmp_path / "RUN").mkdir()
    folder, key = write_run(tmp_path / "RUN", claim()), tmp_path / "curator.key"
    sign_run(folder, signing_key(key))
    return folder, key, tmp_path / "curator.key.pub"


def test_signed_runs_are_verified(signed, tmp_path):
    folder, key, public = signed
    before = key.read_bytes()
    verify_run(folder, verification_key(public))
    assert signing_key(key).public_key() == verification_key(public)
    assert key.read_bytes() == before  # not made again
    signing_key(tmp_path / "other.key")
    with pytest.raises(CertificateMismatchError, match="not signed with this key"):
        verify_run(folder, verification_key(tmp_path / "other.key.pub"))


def test_the_public_key_cannot_sign(signed):
    """Whoever verifies cannot forge: neither file is taken for the other."""
    _, key, public = signed
    public.chmod(0o600)
    with pytest.raises(InputError, match="not a private Ed25519 key"):
        signing_key(public)
    with pytest.raises(InputError, match=r"not a public Ed25519 key .* writes one to FILE\.pub"):
        verification_key(key)


def test_other_keys_are_refused(signed, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    other = X25519PrivateKey.generate()
    text = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "x").touch(mode=0o600)
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(InputError, match="not a private Ed25519 key"):
        signing_key(tmp_path / "x")


def test_forged_runs_are_refused(signed):
    """Another run, whole and consistent, is put into the folder: only the signature tells."""
    folder, _, public = signed
    write_run(folder, claim(10.0))
    reseal(folder)
    with pytest.raises(CertificateMismatchError, match="or changed since"):
        verify_run(folder, verification_key(public))
    (folder / FILE).unlink()
    with pytest.raises(CertificateMismatchError, match="the run is not signed"):
        verify_run(folder, verification_key(public))


def test_key_files_are_private(signed):
    _, key, public = signed
    assert public.stat().st_mode & 0o777 == 0o644
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    with pytest.raises(InputError, match="others can read this key; run chmod 600"):
        signing_key(key)
    key.chmod(0o600)
    key.write_text("ab", encoding="ascii")
    with pytest.raises(InputError, match="not a private Ed25519 key"):
        signing_key(key)
    with pytest.raises(InputError, match="not a public Ed25519 key"):
        verification_key(key.parent / "nowhere")


@pytest.mark.parametrize("verb", ["audit", "report"])
def test_verbs_refuse_what_is_not_signed(signed, capsys, verb):
    folder, _, public = signed
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps(record | {"devices": 2}), encoding="utf-8")
    assert main.run([verb, str(folder), "--verify-key", str(public)]) == 1
    assert "not signed with this key" in " ".join(capsys.readouterr().err.split())
