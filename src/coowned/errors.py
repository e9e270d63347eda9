"""Every exception of the package, and its extras. A message says what was wrong, where, and what to do about it.

Every module of the package can be imported without any extra; what needs one raises `MissingExtraError` when it is used
(tests/test_errors.py imports all of them without each).
"""

import importlib
import importlib.util
from typing import Any


class CoownedError(Exception):
    """Base class of every error raised on purpose by this package."""


class InputError(CoownedError, ValueError):
    """A file, table, array or argument is invalid."""


class ConfigError(InputError):
    """A configuration file has an unknown, missing or contradictory key."""


class BatchCoupledLossError(InputError):
    """A loss of one example that depends on other examples of the batch, so clipping cannot bound contributions."""


class MissingExtraError(CoownedError, ImportError):
    """A part of the package whose extra packages are not installed."""


class WorkerLostError(CoownedError):
    """Another process of the run has ended or does not answer; the run can be resumed from its last checkpoint."""


class MemoryLimitError(InputError):
    """Not even one example at a time fits the memory limit that was given."""


class InfeasibleScheduleError(CoownedError):
    """No schedule of the requested size was found.

    Args:
      message: what was requested, how far it got, and what to change.
      filled: slots that were filled before the search ended.
      needed: slots that were requested.
    """

    def __init__(self, message: str, *, filled: int, needed: int):
        super().__init__(message)
        self.filled = filled
        self.needed = needed


class CertificateMismatchError(CoownedError):
    """A certificate, a graph and a selection do not belong together."""


class UncertifiableError(CoownedError):
    """A certificate that does not prove what the mechanism needs."""


PACKAGES = {  # what is imported, not what is installed: two names may differ
    "train": ("jax", "optax", "tokenizers", "jinja2", "altair", "vl_convert"),
    "torch": ("torch",),
    "spark": ("pyspark",),
}


def require(extra: str, purpose: str) -> None:
    """Raises `MissingExtraError` unless every package of an extra can be imported.

    Guarantees:
      - The error names what is missing and the command that installs it.   (test_missing_extra_is_named)

    Args:
      extra: "train", "torch" or "spark".
      purpose: what needs it, as the subject of a sentence: "training".
    """
    missing = [name for name in PACKAGES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; "
            f"run: pip install 'coowned[{extra}]'"
        )


class LazyModule:
    """A module of an extra, imported when one of its names is first used.

    Guarantees:
      - It can be made and looked at where the extra is missing; using it then says what to install.
        (test_a_lazy_module_is_imported_when_used)
    """

    def __init__(self, name: str, *, extra: str, purpose: str) -> None:
        self._name, self._extra, self._purpose = name, extra, purpose

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # someone looks at what this is: doctest, inspect, copy
            raise AttributeError(name)
        require(self._extra, self._purpose)
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


jax = LazyModule("jax", extra="train", purpose="training")
jnp = LazyModule("jax.numpy", extra="train", purpose="training")
