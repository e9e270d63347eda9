"""The optional parts of the package: what an extra installs, and the error if it is missing."""

import importlib.util

from coowned.errors import MissingExtraError

_PACKAGES = {  # what is imported, not what is installed: two names may differ
    "train": ("jax", "optax", "tokenizers", "jinja2", "altair", "vl_convert"),
    "torch": ("torch",),
}


def require(extra: str, purpose: str) -> None:
    """Raises `MissingExtraError` unless every package of an extra can be imported.

    Guarantees:
      - The error names what is missing and the command that installs it.   (test_missing_extra_is_named)

    Args:
      extra: "train" or "torch".
      purpose: what needs it, as the subject of a sentence: "training".
    """
    missing = [name for name in _PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; "
            f"run: pip install 'coowned[{extra}]'"
        )
