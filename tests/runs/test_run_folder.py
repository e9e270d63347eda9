"""Run folders: resumed after any kill, refused where anything has changed, closed when ended."""

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.folders import names
from tests.small_world import NUM_FEATURES

from coowned.content.data import FeatureTable
from coowned.errors import CertificateMismatchError, InputError
from coowned.models.logistic_regression import LogisticRegression
from coowned.runs import run_folder
from coowned.runs.run_folder import RunFolder
from coowned.training import loop
from coowned.training.loop import train

MODEL = LogisticRegression(num_features=NUM_FEATURES)


class Stopped(Exception):
    pass


def stop_after(steps):
    def progress(done, text):
        if done >= steps:
            raise Stopped

    return progress


def begin_and_stop(place, small, steps, monkeypatch, kind="dp-mf", **changes):
    """A run that is left after `steps` steps."""
    monkeypatch.setattr(loop, "Report", lambda plan, progress: lambda done: progress and progress(done, ""))
    with RunFolder.open(place) as folder:
        plan = small.plan(kind, run_key=folder.run_key(3), **changes)
        with pytest.raises(Stopped):
            train(plan, MODEL, small.data, folder=folder, checkpoint_every=2, progress=stop_after(steps))
    return plan


def resume(place, plan, data, model=MODEL, **options):
    with RunFolder.open(place) as folder:
        return train(plan, model, data, folder=folder, **options)


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf"])
@pytest.mark.parametrize(
    ("steps", "options"), [(1, {}), (5, {}), (7, {"decay": "cosine", "average": "tail", "average_window": 0.75})]
)
def test_resumed_run_is_bit_identical(small, tmp_path, monkeypatch, kind, steps, options):
    plan = begin_and_stop(tmp_path / "run", small, steps, monkeypatch, kind, **options)
    whole = train(plan, MODEL, small.data)
    again = resume(tmp_path / "run", plan, small.data)
    assert np.array_equal(whole.parameters["coefficients"], again.parameters["coefficients"])
    assert whole.metrics.equals(again.metrics)
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert np.array_equal(stored["weights"], whole.arrays["weights"])
    assert np.array_equal(stored["intercept"], whole.arrays["intercept"])


def test_replaying_other_noise_would_be_seen(small, tmp_path, monkeypatch):
    """A checkpoint that is off by one step gives another model: the comparison above can fail."""
    plan = begin_and_stop(tmp_path / "run", small, 5, monkeypatch, "dp-sgd")
    whole = train(plan, MODEL, small.data)
    read = RunFolder._read_checkpoint
    monkeypatch.setattr(RunFolder, "_read_checkpoint", lambda self: read(self)._replace(step=3))
    again = resume(tmp_path / "run", plan, small.data)
    assert not np.array_equal(whole.parameters["coefficients"], again.parameters["coefficients"])


def test_key_is_secret_then_gone(small, tmp_path, monkeypatch):
    place = tmp_path / "run"
    plan = begin_and_stop(place, small, 5, monkeypatch)
    assert stat.S_IMODE((place / "run-key.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((place / "checkpoint.safetensors").stat().st_mode) == 0o600
    resume(place, plan, small.data)
    assert sorted(file.name for file in place.iterdir()) == ["metrics.parquet", "model.safetensors", "run.json"]


def test_secret_is_in_no_file_that_stays(small, tmp_path):
    with RunFolder.open(tmp_path / "run") as folder:
        key, stored = folder.run_key(), tmp_path / "run" / "run-key.json"
        plan, found = small.plan(guarantee=None, run_key=key), []
        train(plan, MODEL, small.data, folder=folder, at_end=lambda trained: found.append(stored.read_text()))
    assert key.secret.hex() in found[0]
    for file in (tmp_path / "run").iterdir():
        assert key.secret.hex().encode() not in file.read_bytes()
        assert key.secret not in file.read_bytes()


def test_finished_run_is_refused(small, tmp_path):
    with RunFolder.open(tmp_path / "run") as folder:
        plan = small.plan(run_key=folder.run_key(3))
        train(plan, MODEL, small.data, folder=folder)
        with pytest.raises(InputError, match="this run is finished"):
            train(plan, MODEL, small.data, folder=folder)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(InputError, match="this run is finished"):
        folder.run_key(3)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_killed_between_end_and_cleaning_up(small, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_destroy_secrets", lambda self: None)
        with RunFolder.open(tmp_path / "run") as folder:
            train(small.plan(run_key=folder.run_key(3)), MODEL, small.data, folder=folder)
    assert (tmp_path / "run" / "run-key.json").exists()
    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(InputError, match="this run is finished"):
        folder.refuse_if_finished()
    assert not (tmp_path / "run" / "run-key.json").exists()


def test_changed_run_is_refused(small, tmp_path, monkeypatch):
    place = tmp_path / "run"
    plan = begin_and_stop(place, small, 5, monkeypatch, "dp-sgd")
    features, labels = small.world.batch(np.arange(300))
    edited = labels.copy()
    edited[7] = 1 - edited[7]
    table = FeatureTable(graph=small.graph, features=features, labels=edited)
    with pytest.raises(CertificateMismatchError, match="different data"):
        resume(place, plan, table)
    for changes in ({"learning_rate": 0.06}, {"clip_norm": 0.2}, {"optimizer": "sgd"}, {"noise_multiplier": 0.8}):
        with pytest.raises(CertificateMismatchError, match="different selection, mechanism, noise"):
            resume(place, small.plan(**changes), small.data)
    with pytest.raises(CertificateMismatchError, match="different selection"):
        resume(place, small.plan(seed=4), small.data)
    with pytest.raises(CertificateMismatchError, match="configuration file"):
        resume(place, plan, small.data, configuration_digest="other")
    with pytest.raises(CertificateMismatchError, match="different set of initial parameters"):
        resume(place, plan, small.data, initial={"coefficients": np.ones(NUM_FEATURES + 1, np.float32)})
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "code_digest", lambda: "other")
        with pytest.raises(CertificateMismatchError, match="version of the code"):
            resume(place, plan, small.data)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "machine", lambda: "cpu of another kind")
        with pytest.raises(CertificateMismatchError, match="different kind of device"):
            resume(place, plan, small.data)
    with RunFolder.open(place) as folder, pytest.raises(CertificateMismatchError, match="different seed"):
        folder.run_key(4)
    resume(place, plan, small.data)  # and what has not changed is still resumed


def test_lost_key_is_refused(small, tmp_path, monkeypatch):
    begin_and_stop(tmp_path / "run", small, 5, monkeypatch)
    (tmp_path / "run" / "run-key.json").unlink()
    with RunFolder.open(tmp_path / "run") as folder, pytest.raises(CertificateMismatchError, match="key is missing"):
        folder.run_key(3)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"{}", b"[1]", b"{", b'{"format": "coowned-run-key-1"}'])
def test_damaged_key_is_named(small, tmp_path, monkeypatch, damage):
    begin_and_stop(tmp_path / "run", small, 5, monkeypatch)
    (tmp_path / "run" / "run-key.json").write_bytes(damage)
    with (
        RunFolder.open(tmp_path / "run") as folder,
        pytest.raises(InputError, match=r"run-key\.json: not the key .* choose another folder"),
    ):
        folder.run_key(3)


def test_nothing_is_written_before_a_run_begins(tmp_path):
    """The key and the plan's files are in memory until then: whatever ends the process leaves nothing."""
    made = []
    for place in (tmp_path / "new", tmp_path):
        with RunFolder.open(place) as folder:
            made.append(folder.run_key())
            assert folder.run_key() is made[-1]
            folder.prepare("guarantee.json", b"{}")
            assert names(place) == []
    assert names(tmp_path) == []
    assert made[0].fingerprint != made[1].fingerprint
    with RunFolder.open(tmp_path) as folder:  # nothing was begun with the other kind of key either
        assert folder.run_key(4).seed == 4
        with pytest.raises(CertificateMismatchError, match="different seed"):
            folder.run_key(5)


def lay_out(place):
    """Begins a run with a key and two files."""
    with RunFolder.open(place) as folder:
        folder.run_key()
        folder.prepare("S.parquet", b"selection")
        folder.prepare("config.toml", b"configuration")
        folder.begin({"key": "some"})


STAGES = ["run.json", "S.parquet", "config.toml", "run-key.json", "run.json again"]


def break_at(stage, monkeypatch, failure):
    """Makes the write of one stage fail, when half of the file is on the disk."""
    fsync, seen = os.fsync, []

    def fail(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if name.endswith(".part"):
            seen.append(name)
            if len(seen) == STAGES.index(stage) + 1:
                os.ftruncate(handle, 3)
                raise failure
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_while_beginning(tmp_path, monkeypatch, stage):
    """The next process clears away what is left, and knows it from what somebody put there since."""
    (tmp_path / ".DS_Store").write_bytes(b"x")
    with monkeypatch.context() as patch:
        # A kill: nobody clears away.
        patch.setattr(RunFolder, "_clear_unbegun", lambda self: None)
        patch.setattr(run_folder.Path, "unlink", lambda self, missing_ok=False: None)
        break_at(stage, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            lay_out(tmp_path)
    left = names(tmp_path)
    assert f".{stage.split()[0]}.part" in left
    assert ("run-key.json" in left) == (stage == "run.json again")
    assert not RunFolder(tmp_path).is_begun
    if stage == STAGES[-1]:
        (tmp_path / "config.toml").write_bytes(b"mine")
        for _ in range(2):
            with pytest.raises(InputError, match=r"config\.toml: exists without the record"):
                lay_out(tmp_path)
        assert names(tmp_path) == [".DS_Store", ".run.json.part", "config.toml"]
        assert (tmp_path / "config.toml").read_bytes() == b"mine"
        (tmp_path / "config.toml").unlink()
    lay_out(tmp_path)
    assert names(tmp_path) == [".DS_Store", "S.parquet", "config.toml", "run-key.json", "run.json"]
    with RunFolder.open(tmp_path) as folder:
        assert folder.is_begun


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_run_that_cannot_begin_leaves_nothing(tmp_path, monkeypatch, stage, failure):
    for place in (tmp_path, tmp_path / "new"):
        with monkeypatch.context() as patch:
            break_at(stage, patch, failure)
            with pytest.raises(type(failure)) as raised:
                lay_out(place)
        if isinstance(failure, OSError):
            assert raised.value.filename == str(place / stage.split()[0])  # type: ignore[attr-defined]
        assert names(tmp_path) == []


def test_full_disk(small, tmp_path, monkeypatch):
    """While a checkpoint is written: the one before stays, and the run is resumed from it."""
    place = tmp_path / "run"
    plan = begin_and_stop(place, small, 5, monkeypatch, "dp-sgd")
    whole, before, there = train(plan, MODEL, small.data), (place / "checkpoint.safetensors").read_bytes(), names(place)
    with monkeypatch.context() as patch:
        break_at(STAGES[0], patch, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left") as raised:
            resume(place, plan, small.data, checkpoint_every=2)
    assert raised.value.filename == str(place / "checkpoint.safetensors")
    assert names(place) == there
    assert (place / "checkpoint.safetensors").read_bytes() == before
    again = resume(place, plan, small.data)
    assert np.array_equal(whole.parameters["coefficients"], again.parameters["coefficients"])


def test_models_have_repeatable_bytes(tmp_path):
    """Wrong with probability (1/24)^4 at most: the library would write four entries in 24 orders."""
    arrays = {"b": np.arange(3.0), "a": np.ones((2, 2), np.float32)}
    metadata = {"statement": 'Sätze, "quoted"', "plan": "1", "step": "2", "run": "3"}
    contents = {run_folder.serialize(arrays, metadata) for _ in range(5)}
    assert len(contents) == 1
    file = tmp_path / "model.safetensors"
    file.write_bytes(contents.pop())
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == metadata
        assert all(np.array_equal(opened.get_tensor(name), array) for name, array in arrays.items())


@pytest.mark.parametrize("name", ["config.toml", "S.parquet", "report.html", "run-key.json", ".test.parquet.part"])
def test_files_of_somebody_else_stay(tmp_path, name):
    """A configuration or a selection that was in the folder before any run, or came there before one began."""
    with RunFolder.open(tmp_path) as folder:
        folder.run_key()
        (tmp_path / name).write_bytes(b"mine")
        with pytest.raises(InputError, match="without the record"):
            folder.begin({})
    for _ in range(2):
        with pytest.raises(InputError, match="without the record"):
            lay_out(tmp_path)
    assert names(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"mine"


def test_used_key_without_record_is_refused(small, tmp_path, monkeypatch):
    place = tmp_path / "run"
    begin_and_stop(place, small, 5, monkeypatch)
    (place / "run.json").unlink()
    before = (place / "run-key.json").read_bytes()
    for name in ("checkpoint.safetensors", "run-key.json"):
        with pytest.raises(InputError, match=rf"{name}: exists without the record"):
            lay_out(place)
        assert (place / "run-key.json").read_bytes() == before
        (place / name).unlink()


def test_record_is_on_the_disk_before_the_first_step(small, tmp_path, monkeypatch):
    """`begin` writes run.json with fsync; the loop calls it before anything is drawn."""
    order, fsync, run = [], os.fsync, loop.Trainer.run

    def noted(handle):
        order.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(loop.Trainer, "run", lambda *a, **k: (order.append("first step"), run(*a, **k))[1])
    with RunFolder.open(tmp_path / "run") as folder:
        train(small.plan(run_key=folder.run_key(3)), MODEL, small.data, folder=folder)
    synced = order[: order.index("first step")]
    assert str(tmp_path / "run" / ".run.json.part") in synced
    assert synced[-1] == str(tmp_path / "run")  # and its name, in the folder


def test_two_processes_are_refused(tmp_path):
    with (
        RunFolder.open(tmp_path / "run"),
        pytest.raises(InputError, match="another process"),
        RunFolder.open(tmp_path / "run"),
    ):
        pass
    with RunFolder.open(tmp_path / "run") as folder:
        assert not folder.is_begun


def test_bad_folders(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("file", "other", "no/such", "link"):
        with pytest.raises(InputError), RunFolder.open(tmp_path / place):
            pass
    plan = begin_and_stop(tmp_path / "run", small, 5, monkeypatch)
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        resume(tmp_path / "run", plan, small.data)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        resume(tmp_path / "run", plan, small.data)


def test_xla_flags_are_part_of_the_machine(monkeypatch):
    before = run_folder.machine()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert run_folder.machine() != before


def test_code_digest_reads_the_files(tmp_path, monkeypatch):
    run_folder.code_digest.cache_clear()
    before = run_folder.code_digest()
    run_folder.code_digest.cache_clear()
    monkeypatch.setattr(run_folder.coowned, "__version__", "0.0.0")
    assert run_folder.code_digest() != before
    run_folder.code_digest.cache_clear()


PROGRAM = """
import sys
import numpy as np
from coowned import AttributionGraph
from coowned.synthetic.logistic_data import LogisticData
from coowned.runs.run_folder import RunFolder
from coowned.synthetic.logistic_data import WorldData
from coowned.training.loop import train
from coowned.models.logistic_regression import LogisticRegression
from tests.small_world import NUM_FEATURES, Small, forged
graph = AttributionGraph.from_users_per_example([[i % 120] for i in range(300)], num_users=120)
world = LogisticData(num_features=NUM_FEATURES).attach(graph, seed=5)
small = Small(graph, world, WorldData.part(world))
with RunFolder.open(sys.argv[1]) as folder:
    plan = small.plan("dp-mf", run_key=folder.run_key(3), iterations=2000, batch_size=4)
    import dataclasses
    plan = dataclasses.replace(plan, guarantee=forged(plan.guarantee, run_id="fixed"))
    print("ready", flush=True)
    train(plan, LogisticRegression(num_features=NUM_FEATURES), small.data, folder=folder, checkpoint_every=7)
"""


# At a checkpoint this late the process waits for its kill, which so comes before the end on any machine.
WAITING = """
import sys
from coowned.runs.run_folder import RunFolder
def save_and_wait(self, step, tensors, save=RunFolder.save):
    save(self, step, tensors)
    if step >= int(sys.argv[2]):
        sys.stdin.read()
RunFolder.save = save_and_wait
"""
KILLS, STEPS_EACH = 5, 350  # of 2000 steps
PATIENCE = 1800  # seconds: for a process that hangs, not for a busy machine


def run_and_kill(program, folder):
    """Runs it once as a whole, and once killed by SIGKILL at random moments, again and again, until it ends by itself.

    The results are in `folder / "whole"` and `folder / "killed"`.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}

    def start(place, wait_at=10**9):
        command = [sys.executable, "-c", WAITING + textwrap.dedent(program), str(place), str(wait_at)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=environment, text=True, **pipes)

    def saved(place):
        try:
            return (place / "checkpoint.safetensors").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    whole = start(folder / "whole")
    _, errors = whole.communicate(timeout=PATIENCE)
    assert whole.returncode == 0, errors
    moments, seen = random.Random(0), [0]
    for number in range(KILLS):
        process = start(folder / "killed", STEPS_EACH * (number + 1))
        assert process.stdout is not None
        process.stdout.readline()
        while number and process.poll() is None and saved(folder / "killed") == seen[-1]:
            time.sleep(0.001)  # the first kill comes at any moment, the others at one after a further checkpoint
        time.sleep(moments.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL, errors
        seen.append(saved(folder / "killed"))
    assert len(set(seen[1:])) == KILLS  # it got further between kills
    last = start(folder / "killed")
    _, errors = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, errors
    assert json.loads((folder / "killed" / "run.json").read_text())["state"] == "finished"
    assert not (folder / "killed" / "run-key.json").exists()


@pytest.mark.full
def test_killed_run_is_bit_identical(tmp_path):
    run_and_kill(PROGRAM, tmp_path)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert np.array_equal(one["weights"], two["weights"])
    assert np.array_equal(one["intercept"], two["intercept"])
    assert (tmp_path / "whole" / "metrics.parquet").read_bytes() == (
        tmp_path / "killed" / "metrics.parquet"
    ).read_bytes()
