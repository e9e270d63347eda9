"""Signs a finished run with a curator's Ed25519 key, so that anyone with the public key can verify who wrote it.

Digests inside a folder show that its files belong together, not who wrote them: whoever can write to the folder can
forge all of it. What is signed is run.json, which holds the digests of all other files.
"""

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from coowned import codec
from coowned.errors import CertificateMismatchError, InputError
from coowned.files import refusing_unwritable, write_file
from coowned.runs.records import read_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FILE = "signature.json"
PUBLIC_SUFFIX = ".pub"
_CONTEXT = b"coowned-signature-2\n"  # a signature of run.json cannot be taken for one of anything else


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The content of signature.json: the Ed25519 signature of run.json, in base64."""

    format: Literal["coowned-signature-2"] = "coowned-signature-2"
    signature: str


def signing_key(file: Path) -> "Ed25519PrivateKey":
    """Reads a private key; creates it if there is none, with the public key beside it in FILE.pub.

    Guarantees:
      - A private key that others can read is refused.   (test_key_files_are_private)
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not file.exists():
        created = Ed25519PrivateKey.generate()
        text = created.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with refusing_unwritable(file):
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(text)
        public = created.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        write_file(file.with_name(file.name + PUBLIC_SUFFIX), public, mode=0o644)
    if file.stat().st_mode & 0o077:
        raise InputError(f"{file}: others can read this key; run chmod 600 {file}, or use a new one")
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{file}: not a private Ed25519 key in PEM; `coowned train --sign-key FILE` creates one")
    return key


def verification_key(file: Path) -> "Ed25519PublicKey":
    """Reads the public key that belongs to a signing key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(file.read_bytes())
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(
            f"{file}: not a public Ed25519 key in PEM; `coowned train --sign-key FILE` writes one to "
            f"FILE{PUBLIC_SUFFIX}"
        )
    return key


def sign_run(folder: Path, key: "Ed25519PrivateKey") -> None:
    """Signs a finished run.

    Guarantees:
      - A signed run is verified with the matching public key, and with no other.   (test_signed_runs_are_verified)
    """
    signature = Signature(signature=base64.b64encode(key.sign(_signed_bytes(folder))).decode())
    write_file(folder / FILE, codec.encode_json(signature, indent=2).encode() + b"\n", mode=0o644)


def verify_run(folder: Path, key: "Ed25519PublicKey") -> None:
    """Raises CertificateMismatchError for a run that the key's owner did not sign, or that was changed since.

    Guarantees:
      - A folder forged as a whole, with every digest made again, is refused.   (test_forged_runs_are_refused)
    """
    from cryptography.exceptions import InvalidSignature

    stored = read_json(Signature, folder / FILE, remedy="restore the original, or sign the run again")
    if stored is None:
        raise CertificateMismatchError(
            f"{folder}: the run is not signed (no {FILE}), so anyone who can write there could have created it"
        )
    try:
        key.verify(base64.b64decode(stored.signature, validate=True), _signed_bytes(folder))
    except (InvalidSignature, ValueError):
        raise CertificateMismatchError(
            f"{folder}: not signed with this key, or changed since; restore the original files"
        ) from None


def _signed_bytes(folder: Path) -> bytes:
    try:
        return _CONTEXT + (folder / "run.json").read_bytes()
    except OSError:
        raise InputError(f"{folder}: no run in this folder; give one written by `coowned train -o`") from None
