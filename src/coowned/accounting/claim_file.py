"""Writes and reads guarantee.json: what a run claims, or that it claims nothing. No other module does."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from coowned import codec
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_from_dict

NAME = "guarantee.json"
NO_GUARANTEE = "No guarantee: this model was trained without privacy and may reveal its training examples."
PUBLIC = "No guarantee: the data were declared public; nothing about them is protected."
_NoGuaranteeFormat = Literal["coowned-no-guarantee-1"]
(_NO_GUARANTEE_FORMAT,) = get_args(_NoGuaranteeFormat)


class NoGuarantee(msgspec.Struct, frozen=True, kw_only=True):
    """Content of guarantee.json where nothing is claimed."""

    format: _NoGuaranteeFormat = _NO_GUARANTEE_FORMAT
    public: bool
    statement: str
    mechanism: dict[str, Any]


class Claim(NamedTuple):
    """The content of guarantee.json.

    Attributes:
      guarantee: None without privacy.
      public: without a guarantee because the data are public.
    """

    guarantee: PrivacyGuarantee | None
    public: bool
    mechanism: Mechanism


def absent_statement(*, public: bool) -> str:
    """Returns the statement of a run without a guarantee."""
    return PUBLIC if public else NO_GUARANTEE


def write_claim(guarantee: PrivacyGuarantee | None, mechanism: Mechanism, *, public: bool) -> str:
    """Returns the content of guarantee.json."""
    if guarantee is not None:
        return guarantee.to_json(embed_certificate=False) + "\n"
    absent = NoGuarantee(public=public, statement=absent_statement(public=public), mechanism=mechanism.to_dict())
    return codec.encode_json(absent, indent=2) + "\n"


def parse_claim(text: bytes, certificate: ContributionCertificate) -> Claim:
    """Reads the content of guarantee.json; the epsilon of a guarantee is computed anew."""
    stored = codec.decode_json(dict[str, Any], text, name="guarantee", remedy="train again")
    if stored.get("format") != _NO_GUARANTEE_FORMAT:
        guarantee = PrivacyGuarantee.from_json(text, certificate=certificate)
        return Claim(guarantee, False, guarantee.mechanism)
    absent = codec.decode_json(NoGuarantee, text, name="guarantee", remedy="train again")
    return Claim(None, absent.public, mechanism_from_dict(absent.mechanism))


def stated_origins(folder: Path) -> list[str]:
    """Returns the statements that guarantee.json and the weights in a folder make; none for weights from elsewhere.

    The folder need not be a whole run: weights may have been copied.
    """
    stated = []
    file = folder / NAME
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        pass
    else:
        remedy = "the checkpoint is not a run's folder"
        stored = codec.decode_json(dict[str, Any], content, name=str(file), remedy=remedy)
        absent = absent_statement(public=stored.get("public") is True)
        stated.append(absent if stored.get("format") == _NO_GUARANTEE_FORMAT else "a guarantee")
    weights = folder / "model.safetensors"
    if weights.is_file() and "statement" in (metadata := model_metadata(weights)):
        stated.append(metadata["statement"])
    return stated


def model_metadata(weights: Path) -> dict[str, str]:
    """Returns the statement, plan and kind in a model file's metadata."""
    from safetensors import safe_open

    try:
        with safe_open(weights, framework="numpy") as opened:
            return opened.metadata() or {}
    except Exception as error:  # safetensors raises various kinds
        raise InputError(
            f"{weights}: the model cannot be read ({error}); give a folder with a complete model"
        ) from error
