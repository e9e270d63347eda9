"""Every exception of the package. A message says what was wrong, where, and what to do about it."""


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
