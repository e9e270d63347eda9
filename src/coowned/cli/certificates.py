"""The path of a selection's certificate, and how a verb reads it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from coowned.errors import InputError

if TYPE_CHECKING:
    from coowned.certificate import ContributionCertificate


def certificate_for(selection: str) -> str:
    """The path or URL of the certificate of S."""
    if "://" not in selection:
        return str(certificate_path_of(Path(selection)))
    if not re.fullmatch(r"[^:/]+://[^/]*/.*[^/]/*", selection):
        raise InputError(f"{selection}: not the URL of a selection; give one such as hdfs://head/S.parquet")
    return f"{selection.rstrip('/').removesuffix('.parquet')}.certificate.json"


def certificate_path_of(selection: Path) -> Path:
    """S.parquet has its certificate in S.certificate.json."""
    if not selection.name:
        raise InputError(f"{selection}: a folder, not a selection; give a file such as S.parquet")
    return selection.with_name(f"{selection.stem}.certificate.json")


def read_certificate(path: Path) -> "ContributionCertificate":
    """Reads a certificate file; what cannot be read is bad input."""
    from coowned.certificate import ContributionCertificate

    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the certificate ({error.strerror}); give --certificate FILE") from error
    return ContributionCertificate.from_json(text, name=str(path))
