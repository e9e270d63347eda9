"""The run folder during a run: its record, its secret key and its checkpoints."""

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

import coowned
from coowned.accounting import privacy_guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.certificate import ContributionCertificate
from coowned.errors import CertificateMismatchError, InputError
from coowned.exact.keys import RunKey
from coowned.files import check_parent, check_writable, refusing_unwritable, sync_folder, write_file
from coowned.mechanism.mechanism import Mechanism
from coowned.runs.ledger import NAME as LEDGER
from coowned.runs.ledger import enter
from coowned.runs.records import FILES, RunRecord, is_run_file
from coowned.training.plan import Checkpoint
from coowned.training.workers import ALONE, Workers, send

_PASSING = ("run.json", "run-key.json", "checkpoint.safetensors")  # replaced or removed while the run lasts
_NOT_TRAINING = ("audit/", "cli/", "report/", "spark/", "testing/")  # folders that decide nothing of a step
# What a resumed run must agree in, and what an error calls it.
_BOUND = {
    "plan": "selection, mechanism, noise, clip norm or optimizer",
    "model": "model",
    "data": "data set (features, labels or attribution)",
    "configuration": "configuration file or held-out part",
    "initial": "set of initial parameters",
    "code": "version of the code or of coowned, jax, numpy, numba or optax",
    "devices": "number of devices",
    "platform": "kind of device or processor, or different XLA_FLAGS",
    "key": "run key",
}


class RunFolder:
    """A folder that holds one run and nothing else, for one process at a time.

    Noise and coins of a step follow from the run key, so the same step on other data, settings or code would put the
    same noise under two different gradients, which gives both away: `begin` refuses that. The key is needed to resume a
    run and worth nothing afterwards but to an attacker, so `finish` destroys it.

    Nothing is on the disk before `begin`: until then the key and the files that the run begins with are in memory
    alone. `begin` first writes down, in run.json, which files it is going to write and their digests, and last that
    they are all there; what a process leaves in between is known by these digests, and cleared away.

    Guarantees:
      - The key is readable by its owner alone, and gone when the run has ended.      (test_key_is_secret_then_gone)
      - Every file appears whole or not at all, whenever the process is killed.       (test_killed_run_is_bit_identical)
      - A key serves no step before run.json is on the disk; one that has served none does not outlive its process, or
        is destroyed by the next.   (test_nothing_is_written_before_a_run_begins, test_killed_while_beginning)
      - No file that a run did not write is removed or replaced: a folder with one of these names in it, and without
        run.json, is refused.   (test_files_of_somebody_else_stay, test_used_key_without_record_is_refused)
      - A file that cannot be written whole leaves nothing behind, and the error names it.   (test_full_disk)
      - The same arrays and metadata are the same bytes.   (test_models_have_repeatable_bytes)
      - Other data, plan, model, code, devices or key than at first are refused.   (test_changed_run_is_refused)
      - A run that has ended is refused.                                              (test_finished_run_is_refused)
      - Two processes cannot train in one folder.                                     (test_two_processes_are_refused)
      - A run is in the ledger before its first step, but for the runs of a tuning, which is there as a whole.
        (test_a_run_is_in_the_ledger_before_it_trains, test_a_tuning_is_in_the_ledger_once)
    What it is not: proof against whoever can read the disk while the run lasts; overwriting a key before removing it is
    all that can be done from here, and some disks keep old blocks.
    """

    def __init__(self, path: str | os.PathLike[str], *, workers: Workers = ALONE, ledger: str | None = LEDGER):
        self.path, self.workers = Path(path), workers
        self._ledger = ledger
        self._claim: PrivacyGuarantee | None = None
        self._data_digest: str | None = None
        self._record = RunRecord(state="preparing")
        self._key: RunKey | None = None
        self._prepared: dict[str, tuple[bytes, int]] = {}
        self._files: dict[str, str] = {}  # SHA-256 of the files that were written and stay

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: str | os.PathLike[str], *, workers: Workers = ALONE, ledger: str | None = LEDGER
    ) -> Iterator["RunFolder"]:
        """Creates or opens the folder, and locks it against other processes until the end.

        A folder that it made, and in which no run has begun, is removed again. Of several workers only worker 0 has the
        folder; what others get writes nothing. The run is entered into `ledger`, a file that is relative to the folder
        next to it; None for no ledger.
        """
        if workers.rank:
            yield AbsentFolder(path, workers=workers)
            return
        folder = Path(path)
        is_new = not os.path.lexists(folder)
        if is_new:
            check_parent(folder)
            with refusing_unwritable(folder):
                folder.mkdir()
        elif folder.is_dir():
            check_writable(folder)
        else:
            raise InputError(f"{folder}: not a folder; choose another folder for the run")
        try:
            with cls._locked(folder, workers, ledger) as opened:
                yield opened
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # something is in it
                    folder.rmdir()

    @classmethod
    @contextlib.contextmanager
    def _locked(cls, path: Path, workers: Workers, ledger: str | None) -> Iterator["RunFolder"]:
        foreign = sorted(name for name in os.listdir(path) if not name.startswith(".") and not is_run_file(name))
        if foreign:
            raise InputError(f"{path}: a folder with other files in it ({foreign[0]}); choose another one for the run")
        handle = os.open(path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
            except OSError:
                raise InputError(f"{path}: another process is training there; wait, or choose another folder") from None
            folder = cls(path, workers=workers, ledger=ledger)
            folder._clear_unbegun()
            folder._refuse_files_of_others()
            yield folder
        finally:
            os.close(handle)

    @property
    def is_finished(self) -> bool:
        stored = RunRecord.read(self.path)
        return stored is not None and stored.state == "finished"

    @property
    def is_begun(self) -> bool:
        stored = RunRecord.read(self.path)
        return stored is not None and stored.state != "preparing"

    def refuse_if_finished(self) -> None:
        """Raises an error for a finished run: further training would be another run, with a guarantee of its own."""
        if self.is_finished:
            self._destroy_secrets()  # where the process was killed just before
            raise InputError(
                f"{self.path}: this run is finished; training on would spend privacy that is not accounted for; "
                "choose another folder"
            )

    def run_key(self, seed: int | None = None) -> RunKey:
        """Returns the run's key, made at the first call and stored by `begin`: random, or from a test run's seed."""
        self.refuse_if_finished()
        first_call = self._key is None
        if self._key is None:
            if self.is_begun:
                self._key = self._stored_key()
            else:
                self._key = RunKey.from_operating_system() if seed is None else RunKey.from_seed(seed)
        if self._key.seed != seed:
            raise CertificateMismatchError(
                f"{self.path}: the run was started with a different seed; choose another folder"
            )
        if first_call:
            send(self.workers, self._key.to_json().encode())
        return self._key

    def give_key(self, key: RunKey) -> None:
        """Sets the run's key to one derived by a tuning; a run that has begun must have the same."""
        self.refuse_if_finished()
        if self.is_begun and self._stored_key() != key:
            raise CertificateMismatchError(f"{self.path}: the run was started with a different key")
        self._key = key

    def _stored_key(self) -> RunKey:
        file = self.path / "run-key.json"
        try:
            return RunKey.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CertificateMismatchError(
                f"{self.path}: the run's key is missing, so it cannot be resumed; choose another folder"
            ) from None
        except ValueError:  # without what was read: it may hold the secret
            raise InputError(f"{file}: not the key of a run, so it cannot be resumed; choose another folder") from None

    def begin(self, run: Mapping[str, Any]) -> Checkpoint | None:
        """Starts the run, or returns the state of an earlier process; raises an error for a different run.

        Args:
          run: what a resumed run must agree in, as fields of `RunRecord`; code and platform are added here.
        """
        self.refuse_if_finished()
        record = RunRecord(state="training", code=code_digest(), platform=machine(), **run).as_stored()
        self._record = record
        stored = RunRecord.read(self.path)
        if stored is None or stored.state == "preparing":
            self._lay_out()
            return None
        for name, words in _BOUND.items():
            if getattr(stored, name) != getattr(record, name):
                raise CertificateMismatchError(
                    f"{self.path}: the run was started with a different {words}; resuming would use the same noise for "
                    "two different gradients. Restore the original, or choose another folder"
                )
        self._files = dict(stored.files)
        return self._read_checkpoint()

    def prepare(self, name: str, content: bytes, *, mode: int = 0o600) -> None:
        """Holds a file of the run in memory until `begin` writes it."""
        self._prepared[name] = (content, mode)

    def prepare_claim(
        self,
        certificate: ContributionCertificate,
        guarantee: PrivacyGuarantee | None,
        mechanism: Mechanism,
        *,
        public: bool = False,
        data_digest: str | None = None,
    ) -> None:
        """Prepares guarantee.json, which is public, and certificate.json, which holds statistics of the graph.

        Args:
          data_digest: of the graph of all splits, for the ledger.
        """
        self._claim, self._data_digest = guarantee, data_digest
        self.prepare("certificate.json", (certificate.to_json() + "\n").encode())
        self.prepare(
            privacy_guarantee.GUARANTEE_FILE,
            privacy_guarantee.write_claim(guarantee, mechanism, public=public).encode(),
            mode=0o644,
        )

    def _lay_out(self) -> None:
        self._refuse_files_of_others()  # choosing S may have taken long
        files = dict(self._prepared)
        if self._key is not None:
            files["run-key.json"] = (self._key.to_json().encode(), 0o600)
        digests = {name: hashlib.sha256(content).hexdigest() for name, (content, _) in files.items()}
        try:
            self._write_record("preparing", digests)
            for name, (content, mode) in files.items():
                self.write(name, content, mode=mode)
            # A process that ends in between leaves an entry too many, never one too few.
            if self._ledger is not None and self._claim is not None and self._claim.tuning is None:
                enter(self._ledger, self.path, self._claim, self._data_digest)
            self._write_record("training", self._files)
        except BaseException:
            self._clear_unbegun()
            raise
        self._prepared.clear()

    def _clear_unbegun(self) -> None:
        """Removes the files of a process that ended while starting a run, unless they were changed since."""
        stored = RunRecord.read(self.path)
        if stored is None or stored.state != "preparing":
            return
        for name, digest in stored.files.items():
            file, half = self.path / name, self._half(name)
            if file.is_file() and not file.is_symlink() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
                os.replace(file, half)  # so that a kill in between leaves no file that could be another's
            overwrite_and_remove(half)
        (self.path / "run.json").unlink()
        sync_folder(self.path)

    def _refuse_files_of_others(self) -> None:
        """Raises an error if a file with the name of a run's file exists before the run begins."""
        if self.is_begun:
            return
        first = self._half("run.json").name  # what a kill leaves of the first file: no work is lost
        found = sorted(name for name in os.listdir(self.path) if is_run_file(_written_as(name)) and name != first)
        if found:
            raise InputError(
                f"{self.path / found[0]}: exists without the record of the run that wrote it (run.json); move it, or "
                "choose another folder for the run"
            )

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replaces the checkpoint."""
        metadata = {"step": str(step), "run": self._record_digest()}
        self.write("checkpoint.safetensors", serialize(tensors, metadata))

    def finish(
        self, models: Mapping[str, tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, str]]], files: Mapping[str, bytes]
    ) -> None:
        """Writes the result, marks the run as ended, and only then destroys what it could be resumed from.

        Args:
          models: arrays and metadata by the name of their file. Members of a sweep are as secret as the data until one
            of them is chosen.
          files: other files by name.
        """
        for name, content in files.items():
            self.write(name, content)
        for name, (arrays, metadata) in models.items():
            self.write(name, serialize(arrays, metadata), mode=0o644 if name == "model.safetensors" else 0o600)
        self._write_record("finished", self._files)
        self._destroy_secrets()

    def _write_record(self, state: Literal["preparing", "training", "finished"], files: Mapping[str, str]) -> None:
        record = msgspec.structs.replace(self._record, state=state, files=dict(files))
        self.write("run.json", record.to_json())

    def write(self, name: str, content: bytes, *, mode: int = 0o600) -> None:
        """Writes a file of the run atomically."""
        write_file(self.path / name, content, mode=mode, temporary=self._half(name))
        if name not in _PASSING:
            self._files[name] = hashlib.sha256(content).hexdigest()

    def _half(self, name: str) -> Path:
        """Returns the temporary name of a file: a fixed one, so that a leftover of a kill is overwritten next time."""
        return self.path / f".{name}.part"

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
        except Exception as error:  # safetensors raises various kinds
            raise InputError(f"{file}: the checkpoint cannot be read ({error}); choose another folder") from error
        if metadata.get("run") != self._record_digest():
            raise CertificateMismatchError(f"{file}: the checkpoint belongs to another run; choose another folder")
        return Checkpoint(step, tensors)

    def _record_digest(self) -> str:
        bound = {name: getattr(self._record, name) for name in _BOUND}
        return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()

    def _destroy_secrets(self) -> None:
        overwrite_and_remove(self.path / "run-key.json")
        for name in ("checkpoint.safetensors", *(f".{name}.part" for name in FILES)):
            (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)


class AbsentFolder(RunFolder):
    """The run folder of a worker other than worker 0: nothing is written, least of all the key.

    Guarantees:
      - Nothing is on the disk that this worker wrote.   (test_other_workers_write_nothing)
    """

    @property
    def is_finished(self) -> bool:
        return False

    @property
    def is_begun(self) -> bool:
        return False

    def run_key(self, seed: int | None = None) -> RunKey:
        """Returns the key that worker 0 made or read."""
        if self._key is None:
            self._key = RunKey.from_json(send(self.workers, None).decode())
        return self._key

    def begin(self, run: Mapping[str, Any]) -> Checkpoint | None:
        return None

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        pass

    def finish(
        self, models: Mapping[str, tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, str]]], files: Mapping[str, bytes]
    ) -> None:
        pass

    def write(self, name: str, content: bytes, *, mode: int = 0o600) -> None:
        pass


def serialize(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Serializes arrays as safetensors with sorted metadata, whose order the library varies between calls."""
    from safetensors.numpy import save

    content = save({key: np.array(array, order="C") for key, array in arrays.items()}, metadata=dict(metadata))
    begin = 8 + int.from_bytes(content[:8], "little")  # of the arrays; the header is JSON before it
    header = json.dumps(json.loads(content[8:begin]) | {"__metadata__": dict(sorted(metadata.items()))}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[begin:]


def overwrite_and_remove(file: Path) -> None:
    """Overwrites a key file before removing it, so that its bytes do not remain on the disk."""
    with contextlib.suppress(FileNotFoundError):
        with file.open("r+b") as opened:
            opened.write(secrets.token_bytes(file.stat().st_size))
            opened.flush()
            os.fsync(opened.fileno())
        file.unlink()


def _written_as(name: str) -> str:
    """Returns the final name of a temporary file."""
    return name[1:].removesuffix(".part") if name.startswith(".") and name.endswith(".part") else name


def machine() -> str:
    """Returns the kind of device, with the processor's name and a digest of its instructions and of XLA_FLAGS.

    Compilers choose by them, and another order of operations is another last digit.

    >>> machine().split()[0] in ("cpu", "gpu", "tpu")
    True
    """
    import jax
    from llvmlite import binding

    features = json.dumps(sorted(name for name, enabled in binding.get_host_cpu_features().items() if enabled))
    features += os.environ.get("XLA_FLAGS", "")
    digest = hashlib.sha256(features.encode()).hexdigest()[:16]
    return f"{jax.default_backend()} {binding.get_host_cpu_name()} {digest}"


@functools.cache
def code_digest() -> str:
    """Returns a digest of the code that decides what a step computes: this package and its dependencies' versions.

    >>> len(code_digest())
    64
    """
    hashed = hashlib.sha256(f"{coowned.__version__} python {sys.version_info[:2]}".encode())
    for name in ("jax", "jaxlib", "numpy", "numba", "optax"):
        hashed.update(f" {name} {importlib.metadata.version(name)}".encode())
    root = Path(coowned.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if not name.startswith(_NOT_TRAINING):
            hashed.update(f" {name} ".encode() + hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()
