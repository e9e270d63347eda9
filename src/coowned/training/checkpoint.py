"""The run folder: what a run is, its secret key while it lasts, and the state it can be taken up from.

run.json                what the run is (digests of plan, data, code) and whether it has ended
run-key.json            the secret, readable by its owner alone; destroyed when the run has ended
checkpoint.safetensors  parameters, optimizer state and metrics after some step; removed when the run has ended
model.safetensors       the result
model-N.safetensors     of a sweep: member N, readable by its owner alone, since only one of them is covered
members.parquet         of a sweep: number, configuration and settings of every member
metrics.parquet         training curves: not covered by any guarantee
private-log.json        what reading the content showed: not covered, readable by its owner alone
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import coowned
from coowned.errors import CertificateMismatchError, InputError
from coowned.mechanism.keys import RunKey

FORMAT = "coowned-run-1"
OWN_FILES = (
    "run.json", "run-key.json", "checkpoint.safetensors", "model.safetensors", "metrics.parquet", "config.toml",
    "certificate.json", "guarantee.json", "validation.parquet", "test.parquet", "S.parquet", "audit.json",
    "report.html", "report-release.html", "statistics.json", "config.json", "vocab.txt", "members.parquet",
    "private-log.json",
)  # fmt: skip
# What there is before run.json: where nothing else is, no step was taken with the key.
_BEFORE_THE_RECORD = (
    "run.json", "run-key.json", "S.parquet", "statistics.json", "config.toml", "certificate.json", "guarantee.json",
    "private-log.json",
)  # fmt: skip
_MEMBER = re.compile(r"model-\d+\.safetensors")
# What a run must agree in when it is taken up again, and what to say where it does not.
_BOUND = {
    "plan": "selection, mechanism, noise, clip norm or optimizer",
    "model": "model",
    "data": "data (features, labels or attribution)",
    "configuration": "configuration file",
    "initial": "parameters it starts from",
    "code": "code or versions of coowned, jax, numpy, numba or optax",
    "devices": "number of devices",
    "platform": "kind of device",
    "key": "run key",
}


class Checkpoint(NamedTuple):
    """The state after `step` steps."""

    step: int
    tensors: dict[str, npt.NDArray[Any]]


class RunFolder:
    """A folder that holds one run and nothing else, for one process at a time.

    Noise and coins of a step follow from the run key, so the same step on other data, settings or code would put the
    same noise under two different gradients, which gives both away: `begin` refuses that. The key is needed to take a
    run up again and worth nothing afterwards but to an attacker, so `finish` destroys it.

    Guarantees:
      - The key is readable by its owner alone, and gone when the run has ended.      (test_key_is_secret_then_gone)
      - Every file appears whole or not at all, whenever the process is killed.       (test_killed_run_is_bit_identical)
      - A key serves no step before run.json is on the disk; one without that record is thrown away, or refused where
        something was made with it.   (test_key_that_was_never_used_is_replaced,
        test_used_key_without_record_is_refused)
      - Other data, plan, model, code, devices or key than at first are refused.   (test_changed_run_is_refused)
      - A run that has ended is refused.                                              (test_finished_run_is_refused)
      - Two processes cannot train in one folder.                                     (test_two_processes_are_refused)
    What it is not: proof against whoever can read the disk while the run lasts; overwriting a key before removing it is
    all that can be done from here, and some disks keep old blocks.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._record: dict[str, Any] = {}
        self._key: RunKey | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | os.PathLike[str]) -> Iterator["RunFolder"]:
        """Makes the folder or takes an earlier one, and keeps other processes out until the end."""
        place = Path(path)
        if place.exists() and not place.is_dir():
            raise InputError(f"{place}: not a folder; name another place for the run")
        if not place.parent.is_dir():
            raise InputError(f"{place}: the folder {place.parent} does not exist; make it first")
        place.mkdir(exist_ok=True)
        foreign = sorted(file.name for file in place.iterdir() if not _is_own(file.name))
        if foreign:
            raise InputError(
                f"{place}: a folder that holds other things ({foreign[0]}); name another place for the run"
            )
        handle = os.open(place, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system gives it up when the process ends
            except OSError:
                raise InputError(
                    f"{place}: another process is training there; wait for it or name another place"
                ) from None
            yield cls(place)
        finally:
            os.close(handle)

    @property
    def is_finished(self) -> bool:
        return self._stored().get("state") == "finished"

    @property
    def is_begun(self) -> bool:
        return bool(self._stored())

    def refuse_if_finished(self) -> None:
        """A model that has its epsilon must not be trained on: that is another run, with a guarantee of its own."""
        if self.is_finished:
            self._destroy_secrets()  # where the process was killed just before
            raise InputError(
                f"{self.path}: this run has ended; training on would spend privacy nobody accounted for; name another "
                "place"
            )

    def run_key(self, seed: int | None = None) -> RunKey:
        """The key of the run here, made and stored at the first call: the system's, or a seed's for a test run.

        A key that an earlier process left without beginning was never used: it is replaced, not taken up.
        """
        self.refuse_if_finished()
        if self._key is None:
            self._key = self._stored_key() if self.is_begun else self._new_key(seed)
        if self._key.seed != seed:
            raise CertificateMismatchError(f"{self.path}: the run was begun with another seed; name another place")
        return self._key

    def _stored_key(self) -> RunKey:
        file = self.path / "run-key.json"
        try:
            return RunKey.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CertificateMismatchError(
                f"{self.path}: the run's key is gone, so it cannot be taken up; name another place"
            ) from None
        except ValueError:  # without what was read: it may hold the secret
            raise InputError(
                f"{file}: not the key of a run, so it cannot be taken up; begin in another place"
            ) from None

    def _new_key(self, seed: int | None) -> RunKey:
        made = {name for name in map(_written_as, os.listdir(self.path)) if _is_of_a_run(name)}
        used = sorted(made - set(_BEFORE_THE_RECORD))
        if used:
            raise CertificateMismatchError(
                f"{self.path}: {used[0]} without the record of how it was made (run.json is gone); name another place"
            )
        if "run-key.json" in made:  # else files of these names may be somebody's own
            self._destroy_secrets()
            for name in _BEFORE_THE_RECORD:
                (self.path / name).unlink(missing_ok=True)
        key = RunKey.from_operating_system() if seed is None else RunKey.from_seed(seed)
        self.write("run-key.json", key.to_json().encode())
        return key

    def begin(self, record: Mapping[str, Any]) -> Checkpoint | None:
        """Starts the run that `record` describes, or gives the state an earlier process left; refuses another run."""
        self.refuse_if_finished()
        self._record = {"format": FORMAT, "state": "training", **record}
        stored = self._stored()
        if not stored:
            self.write("run.json", json.dumps(self._record, indent=2).encode())
            return None
        for name, what in _BOUND.items():
            if stored.get(name) != self._record.get(name):
                raise CertificateMismatchError(
                    f"{self.path}: the run was begun with another {what}; going on would use the same noise for two "
                    "different gradients. Restore what it was, or name another place"
                )
        return self._read_checkpoint()

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replaces the checkpoint."""
        metadata = {"step": str(step), "run": self._record_digest()}
        self._write_arrays("checkpoint.safetensors", tensors, metadata)

    def finish(self, model: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], metrics: bytes) -> None:
        """Writes the result, marks the run as ended, and only then destroys what it could be taken up with."""
        self.write("metrics.parquet", metrics)
        self._write_arrays("model.safetensors", model, metadata, mode=0o644)
        self._end()

    def finish_sweep(
        self, models: Sequence[Mapping[str, npt.NDArray[Any]]], metadata: Sequence[Mapping[str, str]], members: bytes
    ) -> None:
        """The same for a sweep: a file for each member, as secret as the data until one of them is chosen."""
        for number, (model, own) in enumerate(zip(models, metadata, strict=True)):
            self._write_arrays(f"model-{number}.safetensors", model, own)
        self.write("members.parquet", members)
        self._end()

    def _end(self) -> None:
        self.write("run.json", json.dumps({**self._record, "state": "finished"}, indent=2).encode())
        self._destroy_secrets()

    def _write_arrays(
        self, name: str, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], *, mode: int = 0o600
    ) -> None:
        from safetensors.numpy import save

        own = {key: np.array(array, order="C") for key, array in arrays.items()}
        self.write(name, save(own, metadata=dict(metadata)), mode=mode)

    def write(self, name: str, content: bytes, *, mode: int = 0o600) -> None:
        """Writes a file of the run, whole or not at all."""
        temporary = self.path / f".{name}.part"  # one name: what a kill leaves behind is overwritten by the next try
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / name)
        self._sync()

    def _read_checkpoint(self) -> Checkpoint | None:
        from safetensors import safe_open

        file = self.path / "checkpoint.safetensors"
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            step = int(metadata["step"])
        except Exception as error:  # safetensors has no one kind of error
            raise InputError(f"{file}: the checkpoint cannot be read ({error}); begin in another place") from error
        if metadata.get("run") != self._record_digest():
            raise CertificateMismatchError(f"{file}: the checkpoint is of another run; begin in another place")
        return Checkpoint(step, tensors)

    def _stored(self) -> dict[str, Any]:
        try:
            stored = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise InputError(f"{self.path / 'run.json'}: not JSON ({error}); begin in another place") from None
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise InputError(f"{self.path / 'run.json'}: not a run of the format {FORMAT!r}; begin in another place")
        return stored

    def _record_digest(self) -> str:
        bound = {name: self._record.get(name) for name in _BOUND}
        return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()

    def _destroy_secrets(self) -> None:
        key = self.path / "run-key.json"
        with contextlib.suppress(FileNotFoundError):
            with key.open("r+b") as file:
                file.write(secrets.token_bytes(key.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            key.unlink()
        for name in ("checkpoint.safetensors", *(f".{name}.part" for name in OWN_FILES)):
            (self.path / name).unlink(missing_ok=True)
        self._sync()

    def _sync(self) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _written_as(name: str) -> str:
    """The file that a half-written one would have been."""
    return name[1:].removesuffix(".part") if name.startswith(".") and name.endswith(".part") else name


def _is_own(name: str) -> bool:
    return name.startswith(".") or _is_of_a_run(name)


def _is_of_a_run(name: str) -> bool:
    return name in OWN_FILES or _MEMBER.fullmatch(name) is not None


def platform() -> str:
    """The kind of device that steps run on: a processor sums large batches in another order than others do.

    >>> platform() in ("cpu", "gpu", "tpu")
    True
    """
    import jax

    return jax.default_backend()


@functools.cache
def code_digest() -> str:
    """Names the code that decides what a step computes: this package's files and the versions it runs on.

    >>> len(code_digest())
    64
    """
    hashed = hashlib.sha256(f"{coowned.__version__} python {sys.version_info[:2]}".encode())
    for name in ("jax", "jaxlib", "numpy", "numba", "optax"):
        hashed.update(f" {name} {importlib.metadata.version(name)}".encode())
    root = Path(coowned.__file__).parent
    parts = ("attribution", "selection", "synthetic", "certificate.py", "mechanism", "accounting", "training")
    files = [file for part in parts for file in [root / part, *sorted((root / part).rglob("*.py"))] if file.is_file()]
    for file in files:
        hashed.update(f" {file.relative_to(root).as_posix()} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()
