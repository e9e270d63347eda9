"""Signs a finished run with a curator's key: an HMAC of run.json, which holds the digests of all other files.

Digests inside a folder show that its files belong together, not who wrote them: whoever can write to the folder can
forge all of it. A signature can be made only by those who have the key, and checked only by them.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from coowned import codec
from coowned.errors import CertificateMismatchError, InputError
from coowned.files import refusing_unwritable, write_file
from coowned.runs.records import read_json

FILE = "signature.json"
_KEY_BYTES = 32


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The content of signature.json: the HMAC-SHA256 of run.json."""

    format: Literal["coowned-signature-1"] = "coowned-signature-1"
    mac: str


def signing_key(file: Path) -> bytes:
    """The key in a file, which is made, readable by its owner alone, where there is none.

    Guarantees:
      - A key file that others can read is refused.   (test_key_files_are_private)
    """
    if not file.exists():
        with refusing_unwritable(file):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES).hex() + "\n")
    return read_key(file)


def read_key(file: Path) -> bytes:
    """The key in a file that `signing_key` made."""
    try:
        text, mode = file.read_text(encoding="ascii").strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{file}: no key file; `coowned train --sign-key FILE` creates one") from None
    if mode & 0o077:
        raise InputError(f"{file}: others can read this key; run chmod 600 {file}, or use a new one")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise InputError(f"{file}: not a key of {_KEY_BYTES} bytes; `coowned train --sign-key FILE` creates one")
    return key


def sign_run(folder: Path, key: bytes) -> None:
    """Signs a finished run.

    Guarantees:
      - What is signed is found to be signed, with the same key alone.   (test_signed_runs_are_verified)
    """
    signature = Signature(mac=_mac(folder, key))
    write_file(folder / FILE, codec.encode_json(signature, indent=2).encode() + b"\n", mode=0o644)


def verify_run(folder: Path, key: bytes) -> None:
    """Refuses, with CertificateMismatchError, a run that was not signed with this key, or was changed since.

    Guarantees:
      - A folder forged as a whole, with every digest made again, is refused.   (test_forged_runs_are_refused)
    """
    stored = read_json(Signature, folder / FILE, remedy="restore the run's own")
    if stored is None:
        raise CertificateMismatchError(
            f"{folder}: the run is not signed (no {FILE}), so anyone who can write there could have created it"
        )
    if not hmac.compare_digest(stored.mac.encode(), _mac(folder, key).encode()):
        raise CertificateMismatchError(
            f"{folder}: not signed with this key, or changed since; restore the original files"
        )


def _mac(folder: Path, key: bytes) -> str:
    try:
        record = (folder / "run.json").read_bytes()
    except OSError:
        raise InputError(f"{folder}: no run in this folder; give one written by `coowned train -o`") from None
    return hmac.new(key, b"coowned-signature-1\n" + record, hashlib.sha256).hexdigest()
