"""Where the certificate of a selection lies, and how a verb reads it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from coowned.errors import CertificateMismatchError, InputError

if TYPE_CHECKING:
    from coowned.certificate import ContributionCertificate


def certificate_beside(selection: str) -> str:
    """Where the certificate of S goes, which may be an address."""
    if "://" not in selection:
        return str(certificate_path_of(Path(selection)))
    if not re.fullmatch(r"[^:/]+://[^/]*/.*[^/]/*", selection):
        raise InputError(f"{selection}: not the address of a selection; name one such as hdfs://head/S.parquet")
    return f"{selection.rstrip('/').removesuffix('.parquet')}.certificate.json"


def certificate_path_of(selection: Path) -> Path:
    """S.parquet has its certificate in S.certificate.json."""
    if not selection.name:
        raise InputError(f"{selection}: a folder, not a selection; name a file such as S.parquet")
    return selection.with_name(f"{selection.stem}.certificate.json")


def read_certificate(path: Path) -> "ContributionCertificate":
    """Reads a certificate file; what cannot be read is bad input."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: no certificate can be read there ({error.strerror}); say --certificate FILE"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not a certificate (not UTF-8 at byte {error.start}); say --certificate FILE"
        ) from error
    return certificate_in(text, str(path))


def certificate_in(text: str, place: str) -> "ContributionCertificate":
    """The certificate that a text is; `place` is where it comes from."""
    from coowned.certificate import ContributionCertificate

    try:
        return ContributionCertificate.from_json(text)
    except (InputError, CertificateMismatchError) as error:
        raise type(error)(f"{place}: {error}") from error
