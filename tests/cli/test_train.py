"""`coowned train`."""

import errno
import html
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from polars.testing import assert_frame_equal
from safetensors.numpy import load_file
from tests.runs.run_folders import reseal
from tests.terminal import Terminal

from coowned import AttributionGraph, interrupts, progress_display
from coowned.cli import main
from coowned.content.splits import split_examples
from coowned.errors import CertificateMismatchError
from coowned.runs.config import TrainConfig, example
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun
from coowned.synthetic.logistic_data import LogisticData
from coowned.training import loop
from coowned.training.evaluate import evaluate

run = main.run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data file of 400 examples and a configuration of 20 steps."""
    graph = AttributionGraph.from_users_per_example(
        [[i % 150] if i % 2 else [i % 150, (i * 7) % 150] for i in range(400)]
    )
    table = LogisticData(num_features=5).attach(graph, seed=1).to_table().drop_columns(["split"])
    pq.write_table(table, tmp_path / "papers.parquet")
    write(tmp_path)
    return tmp_path


def write(folder: Path, *changes: tuple[str, str]) -> None:
    text = example().replace("batch_size = 256", "batch_size = 32").replace("iterations = 500", "iterations = 20")
    text = text.replace("# checkpoint_every = 100", "checkpoint_every = 4")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "run.toml").write_text(text, encoding="utf-8")


BASELINE = ("# baseline = true", "baseline = true")


SEEDED = ("# seed = 0  ", "seed = 0  ")


def go(folder: Path, *more: str, name: str = "RUN") -> int:
    return run(["train", str(folder / "run.toml"), "-o", str(folder / name), *more])


def test_the_whole_road(folder: Path, capsys):
    assert go(folder) == 0
    printed = capsys.readouterr().out
    place = folder / "RUN"
    made = StoredRun.open(place).guarantee
    assert 7.9 < made.epsilon <= 8.0
    assert made.statement() in printed
    assert "not covered by the guarantee" in printed
    names = {file.name for file in place.iterdir()}
    needed = {"config.toml", "certificate.json", "guarantee.json", "metrics.parquet", "model.safetensors"}
    assert needed <= names
    assert not names & {"run-key.json", "checkpoint.safetensors"}
    assert load_file(place / "model.safetensors")["weights"].shape == (5,)
    metrics = pl.read_parquet(place / "metrics.parquet")
    assert metrics["step"].to_list() == [0, 10, 19]
    assert not metrics["covered_by_guarantee"].any()
    assert b"Not covered" in pq.read_schema(place / "metrics.parquet").metadata[b"coowned"]
    for name in ("validation", "test"):
        assert pl.read_parquet(place / f"{name}.parquet")["split"].unique().to_list() == [name]


def test_s_of_a_run_is_recounted_on_its_train_split(folder: Path, capsys):
    write(folder, ("splits = [0.8, 0.1, 0.1] ", "splits = [0.7, 0.2, 0.1] "))
    assert go(folder) == 0
    place = folder / "RUN"
    check = ["certify", str(folder / "papers.parquet"), str(place / "S.parquet")]
    check += ["--users", "users", "--example-id", "example_id"]
    capsys.readouterr()
    for more in ([], ["--certificate", str(place / "certificate.json")]):
        assert run([*check, *more]) == 0
        output = capsys.readouterr()
        assert output.out.startswith("holds: ")
        assert StoredRun.open(place).certificate.graph_digest in output.out
    assert run([*check, "--engine", "spark"]) == 2
    assert "recount it without --engine spark" in capsys.readouterr().err
    chosen = (place / "S.parquet").read_bytes()
    pl.read_parquet(place / "S.parquet")[1:].write_parquet(place / "S.parquet")
    assert run(check) == 1
    assert "S.parquet: changed since this run wrote it" in capsys.readouterr().err
    (place / "S.parquet").write_bytes(chosen)
    config = (place / "config.toml").read_text(encoding="utf-8")
    (place / "config.toml").write_text(config.replace("[0.7, 0.2, 0.1]", "[0.8, 0.1, 0.1]"), encoding="utf-8")
    assert run(check) == 1
    reseal(place)
    assert run(check) == 1
    assert "another graph" in capsys.readouterr().err


def test_cyclic_groups_of_users(folder: Path, capsys):
    cyclic = ('kind = "dp-sgd"', 'kind = "cyclic-dp-mf"')
    write(folder, cyclic)
    assert go(folder) == 2
    assert "'greedy' does not work with [mechanism] kind 'cyclic-dp-mf'; use 'cyclic-groups'" in capsys.readouterr().err
    write(folder, cyclic, ('selector = "greedy" ', 'selector = "cyclic-groups"\nnum_groups = 4  '))
    assert go(folder) == 0
    made = StoredRun.open(folder / "RUN").guarantee
    assert (made.mechanism.num_groups, made.mechanism.num_bands, len(made.certificate.groups.sizes)) == (4, 4, 4)
    assert sum(made.certificate.groups.sizes) == made.certificate.size
    assert run(["report", str(folder / "RUN")]) == 0


@pytest.mark.full
def test_every_verb_knows_random_allocation(folder: Path, capsys):
    """The audit accuses an honest run with probability at most 1e-6; seed and trials are fixed."""
    kind = ('kind = "dp-sgd"', 'kind = "random-allocation"')
    write(folder, kind)
    assert go(folder) == 2
    assert "select with contribution_bound = 1" in capsys.readouterr().err
    one = ("contribution_bound = 2", "contribution_bound = 1")
    small = ("batch_size = 32", "batch_size = 10")
    write(folder, kind, one, small, ('selector = "greedy" ', 'selector = "cyclic-groups"\nnum_groups = 2  '))
    assert go(folder) == 0
    mechanism = StoredRun.open(folder / "RUN").guarantee.mechanism
    assert (mechanism.kind, mechanism.num_groups, mechanism.num_bands) == ("random-allocation", 2, 2)
    capsys.readouterr()
    assert run(["plan", "--config", str(folder / "run.toml"), "--mechanism", "random-allocation", "--json"]) == 0
    assert {row["mechanism"] for row in json.loads(capsys.readouterr().out)} == {"random-allocation"}
    assert run(["audit", str(folder / "RUN"), "--trials", "1000", "--seed", "3", "--alpha", "1e-6"]) == 0
    assert run(["report", str(folder / "RUN")]) == 0
    page = html.unescape((folder / "RUN" / "report.html").read_text(encoding="utf-8"))
    assert "random allocation over 2 groups" in page


@pytest.mark.full
def test_every_verb_knows_groups(folder: Path, capsys):
    """The audit accuses an honest run with probability at most 1e-6; seed and trials are fixed."""
    kind = ('kind = "dp-sgd"', 'kind = "cyclic-dp-mf"')
    write(folder, kind, ('selector = "greedy" ', 'selector = "cyclic-groups"\nnum_groups = 4\nwithin = "priced"  '))
    data, chosen = str(folder / "papers.parquet"), str(folder / "S.parquet")
    groups = ["--selector", "cyclic-groups", "--num-groups", "4", "--contribution-bound", "2", "--within", "priced"]
    assert run(["select", data, "--users", "users", "--example-id", "example_id", *groups, "-o", chosen]) == 0
    assert run(["certify", data, chosen, "--users", "users", "--example-id", "example_id"]) == 0
    certificate = str(folder / "S.certificate.json")
    asked = ["--epsilon", "8", "--delta", "1e-6", "--batch-size", "32", "--iterations", "20"]
    assert run(["calibrate", "--certificate", certificate, *asked, "--mechanism", "cyclic"]) == 0
    assert "cyclic Poisson sampling over 4 groups" in capsys.readouterr().out
    assert run(["plan", "--config", str(folder / "run.toml"), "--mechanism", "cyclic", "--json"]) == 0
    assert {row["mechanism"] for row in json.loads(capsys.readouterr().out)} == {"cyclic"}
    assert go(folder) == 0
    assert run(["audit", str(folder / "RUN"), "--trials", "1000", "--seed", "3", "--alpha", "1e-6"]) == 0
    assert run(["report", str(folder / "RUN")]) == 0
    page = html.unescape((folder / "RUN" / "report.html").read_text(encoding="utf-8"))
    assert "cyclic Poisson sampling over 4 groups" in page


def test_each_split_is_evaluated_on_its_own_examples(folder: Path):
    assert go(folder) == 0
    config = TrainConfig.read(folder / "run.toml")
    examples = config.source().read()
    content = config.task(examples.payload.schema).load(examples, split_examples(examples.graph, config.splits))
    parameters = content.model.from_arrays(load_file(folder / "RUN" / "model.safetensors"))
    found = {name: pl.read_parquet(folder / "RUN" / f"{name}.parquet") for name in ("validation", "test")}
    for name, data in content.parts.items():
        if name != "train":
            expected = evaluate(content.model, parameters, data, split=name)
            assert_frame_equal(found[name], expected)
    assert found["validation"]["loss"][0] != found["test"]["loss"][0]


def test_selection_sees_the_train_split_alone(folder: Path):
    assert go(folder) == 0
    config = TrainConfig.read(folder / "run.toml")
    graph = config.source().read().graph
    parts = {name: set(graph.ids_of(rows).to_pylist()) for name, rows in split_examples(graph).items()}
    selected = set(pl.read_parquet(folder / "RUN" / "S.parquet")["example_id"].to_list())
    assert selected <= parts["train"]
    certificate = json.loads((folder / "RUN" / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["num_examples"] == len(parts["train"])


def test_finished_run_is_not_trained_on(folder: Path, capsys):
    write(folder, SEEDED)
    assert go(folder) == 0
    model = (folder / "RUN" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert go(folder) == 2
    assert "this run is finished" in capsys.readouterr().err
    assert (folder / "RUN" / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize("kind", ["dp-sgd", "dp-mf"])
def test_interrupted_and_resumed(folder: Path, monkeypatch, capsys, kind: str):
    changes = [SEEDED]
    if kind == "dp-mf":
        changes += [
            ('kind = "dp-sgd"', 'kind = "dp-mf"'),
            ('selector = "greedy"', 'selector = "greedy-min-separation"'),
            ("contribution_bound = 2", "#"),
            ("batch_size = 32", "batch_size = 8"),
            ("# min_separation = 8", "min_separation = 3"),
        ]
    write(folder, *changes)
    assert go(folder, name="WHOLE") == 0
    save = RunFolder.save

    def save_then_leave(self, step, tensors):
        save(self, step, tensors)
        if step == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save_then_leave)
        assert go(folder) == 130
    assert "resume from the last checkpoint" in capsys.readouterr().err
    assert (folder / "RUN" / "run-key.json").exists()
    assert go(folder) == 0
    whole, again = (load_file(folder / name / "model.safetensors") for name in ("WHOLE", "RUN"))
    assert np.array_equal(whole["weights"], again["weights"])
    assert pl.read_parquet(folder / "WHOLE/test.parquet").equals(pl.read_parquet(folder / "RUN/test.parquet"))


@pytest.mark.parametrize("is_new", [True, False])
def test_ended_before_the_record(folder: Path, monkeypatch, capsys, is_new: bool):
    """Between the plan and run.json nothing is on the disk: neither a key that was never used nor a file of ours."""
    place, made = folder / "RUN", []
    if not is_new:
        place.mkdir()

    def leave(self, record):
        made.append(record["key"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", leave)
        assert go(folder) == 130
    said = capsys.readouterr().err
    assert said.endswith("\ncoowned: interrupted; no partial files were left behind\n")
    assert "resume" not in said
    assert place.exists() != is_new
    assert is_new or not list(place.iterdir())
    assert go(folder) == 0
    assert json.loads((place / "run.json").read_text(encoding="utf-8"))["key"] != made[0]


def test_corrected_configuration_in_a_folder_that_was_there(folder: Path, capsys):
    (folder / "RUN").mkdir()
    for change, says in [
        (("# devices = 1", "devices = 300"), "use fewer"),
        (("clip_norm = 1.0", "clip_norm = 1e30"), "clip"),
        (("epsilon = 8.0", "epsilon = 0"), "epsilon"),
        (("papers.parquet", "none.parquet"), "none.parquet"),
    ]:
        write(folder, change)
        assert go(folder) == 2
        assert says in capsys.readouterr().err
        assert not list((folder / "RUN").iterdir())
    write(folder)
    assert go(folder) == 0


def test_own_files_in_the_folder_stay(folder: Path, capsys):
    """However often it is tried, and where the folder holds the configuration itself."""
    place = folder / "MY"
    place.mkdir()
    write(folder, ("papers.parquet", "../papers.parquet"))
    (folder / "run.toml").rename(place / "config.toml")
    (folder / "papers.parquet").rename(folder / "kept.parquet")
    (place / "S.parquet").write_bytes((folder / "kept.parquet").read_bytes())
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    for _ in range(2):
        assert run(["train", str(place / "config.toml"), "-o", str(place)]) == 2
        said = capsys.readouterr().err
        assert f"{place / 'S.parquet'}: exists without the record of the run" in said
        assert len(said.splitlines()) == 1
        assert {file.name: file.read_bytes() for file in place.iterdir()} == before


@pytest.mark.full
def test_unwritable_places(folder: Path, monkeypatch, capsys):
    """Of every verb that writes: the folder of a result, a folder to be made, and one that is there."""
    assert go(folder) == 0
    data, config, made = str(folder / "papers.parquet"), str(folder / "run.toml"), folder / "RUN"
    locked = folder / "LOCKED"
    locked.mkdir()
    access = os.access

    def denied(path, mode):  # as to anybody but root, who may be running this
        return access(path, mode) and not (mode & os.W_OK and Path(path) in (locked, made))

    monkeypatch.setattr(os, "access", denied)
    verbs = [
        ["train", config],
        ["select", data, "--users", "users", "--example-id", "example_id", "--contribution-bound", "2"],
        ["report", str(made)],
        ["export-model", str(made)],
        ["predict", str(made), data],
    ]
    # Of /proc only the attempt tells, whoever is asking.
    cases = [[*verb, "-o", f"{place}/xx"] for verb in verbs for place in (locked, "/proc")]
    cases += [["demo", "-o", "/proc/xx"], ["demo", "-o", str(locked)], ["train", config, "-o", str(locked)]]
    cases += [["audit", str(made)]]
    before = sorted(file.name for file in made.iterdir())
    for case in cases:
        capsys.readouterr()
        assert run(case) == 2, case
        said = capsys.readouterr().err
        assert re.search("cannot be written to; choose another|cannot create the folder", said), case
        assert len(said.splitlines()) == 1
    assert not list(locked.iterdir())
    assert sorted(file.name for file in made.iterdir()) == before


def test_verdict_is_the_same_before_and_after(folder: Path, capsys):
    """Screen, JSON and page use the same sentences; the baseline is evaluated and leaves no other trace."""
    write(folder, BASELINE)
    assert go(folder) == 0
    captured = capsys.readouterr()
    made, before = StoredRun.open(folder / "RUN"), captured.err.splitlines()
    noise = made.signal_to_noise.verdict()
    assert "batch size 32 over noise multiplier" in noise
    assert "times the root of 6 parameters" in noise
    shown = captured.out.split("\n\nWhat to try next:")[0].splitlines()
    said = [line for line in shown if not line.startswith("wrote ")][-3:]
    # What is to be expected is said before training; after it, what came of it.
    assert before[-1] == f"{noise} {made.signal_to_noise.outlook(made.certificate.num_distinct).sentence}"
    assert said[-1] == noise
    test = made.evaluations()["test"].row(0, named=True)
    assert said[0].startswith(
        f"Test accuracy {test['accuracy']:.1%} (95% interval {test['accuracy_low']:.1%} to "
        f"{test['accuracy_high']:.1%}); the most frequent class: {test['trivial_accuracy']:.1%}; "
        f"the same model without privacy: {test['baseline_accuracy']:.1%}."
    )
    assert re.search("of the copies (was|were) clipped", said[1])
    page = folder / "page.html"
    assert run(["report", str(folder / "RUN"), "-o", str(page)]) == 0
    shown = html.unescape(page.read_text(encoding="utf-8"))
    assert all(sentence in shown for sentence in said)
    assert run(["report", str(folder / "RUN"), "-o", str(page), "--release"]) == 0
    released = html.unescape(page.read_text(encoding="utf-8"))
    assert noise in released
    for word in ("Test accuracy", "most frequent class", "without privacy:", "of the copies were clipped"):
        assert word not in released
    for name in ("validation.parquet", "test.parquet", "metrics.parquet"):
        assert (folder / "RUN" / name).stat().st_mode & 0o077 == 0
    assert run(["export-model", str(folder / "RUN"), "-o", str(folder / "exported")]) == 0
    assert not [file for file in (folder / "exported").iterdir() if b"baseline" in file.read_bytes()]


def test_baseline_is_the_run_without_privacy(folder: Path):
    """With the same seed, so that batches are the same; no clip norm, since the baseline does not clip."""
    write(folder, SEEDED, BASELINE)
    assert go(folder) == 0
    write(folder, SEEDED, ("epsilon = 8.0", 'epsilon = "none"'), ("clip_norm = 1.0", "#"))
    assert go(folder, name="PLAIN") == 0
    for split, found in StoredRun.open(folder / "RUN").evaluations().items():
        plain = StoredRun.open(folder / "PLAIN").evaluations()[split]
        for name in ("loss", "accuracy", "accuracy_low"):
            assert found[f"baseline_{name}"].equals(plain[name])


def test_baseline_needs_a_guarantee(folder: Path, capsys):
    write(folder, BASELINE, ("epsilon = 8.0", 'epsilon = "none"'))
    assert go(folder) == 2
    assert "a run without privacy is its own baseline" in capsys.readouterr().err


def test_full_disk_is_one_sentence(folder: Path, monkeypatch, capsys):
    save, whole = RunFolder.save, os.fsync

    def full(handle):
        if "checkpoint" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(handle)

    def save_twice(self, step, tensors):
        save(self, step, tensors)
        monkeypatch.setattr(os, "fsync", full)

    monkeypatch.setattr(RunFolder, "save", save_twice)
    assert go(folder) == 3
    *progress, last = capsys.readouterr().err.splitlines()
    assert last == (
        f"coowned: {folder}/RUN/checkpoint.safetensors: No space left on device; make room there, or write to "
        "another disk; then run the same command again to resume from the last checkpoint"
    )
    assert [line.split(":")[0].split(" is ")[0] for line in progress] == ["training", "A step's signal-to-noise ratio"]
    assert not [file for file in (folder / "RUN").iterdir() if file.name.startswith(".")]
    monkeypatch.setattr(os, "fsync", whole)
    monkeypatch.setattr(RunFolder, "save", save)
    assert go(folder) == 0


def test_swallowed_interrupt_ends_at_the_next_step(folder: Path, monkeypatch, capsys):
    """As when JAX loses it in a callback of the garbage collector."""
    begin = RunFolder.begin

    def interrupted(self, record):
        interrupts.received.append(signal.SIGINT)
        return begin(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "begin", interrupted)
        patch.setattr(RunFolder, "save", lambda *a: pytest.fail("it went on"))
        assert go(folder) == 130
    assert capsys.readouterr().err.endswith(
        "\nrun the same command again to resume from the last checkpoint\n"
        "coowned: interrupted; no partial files were left behind\n"
    )
    assert go(folder) == 0


@pytest.mark.parametrize("private", [True, False])
def test_damaged_files_are_named_when_resumed(folder: Path, monkeypatch, capsys, private: bool):
    changes = [] if private else [("epsilon = 8.0", 'epsilon = "none"'), ("delta = 1e-6", "")]
    write(folder, SEEDED, *changes)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        assert go(folder) == 130
    for name in ("guarantee.json", "certificate.json", "S.parquet"):
        file = folder / "RUN" / name
        whole = file.read_bytes()
        lowered = whole.replace(b'"contribution_bound": 2', b'"contribution_bound": 1')
        for damage in (None, b"", b"\xff\xfe", b"{}", whole[: len(whole) // 2], lowered):
            if damage == whole:
                continue
            if damage is None:
                file.unlink()
            else:
                file.write_bytes(damage)
            capsys.readouterr()
            assert go(folder) in (1, 2), (name, damage)
            said = capsys.readouterr().err
            assert name in said
            assert len(said.splitlines()) == 1
            assert "restore it, or train again elsewhere" in said
        file.write_bytes(whole)
    assert go(folder) == 0


def test_changes_are_refused_when_resumed(folder: Path, monkeypatch, capsys):
    write(folder, SEEDED)

    def leave(self, step, tensors):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", leave)
        assert go(folder) == 130
    write(folder, SEEDED, ("learning_rate = 0.05", "learning_rate = 0.06"))
    assert go(folder) == 1
    assert "was started with a different" in capsys.readouterr().err
    write(folder, SEEDED, ("epsilon = 8.0", "epsilon = 7.0"))  # which the stored guarantee does not show
    assert go(folder) == 1
    assert "was started with a different configuration" in capsys.readouterr().err
    write(folder, SEEDED)
    table = pl.read_parquet(folder / "papers.parquet")
    table.with_columns(label=1 - pl.col("label")).write_parquet(folder / "papers.parquet")
    assert go(folder) == 1
    assert "different data" in capsys.readouterr().err
    table.write_parquet(folder / "papers.parquet")
    assert go(folder) == 0


def test_a_seed_is_a_test_run(folder: Path, capsys):
    write(folder, SEEDED)
    assert go(folder, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["guarantee"] is False
    assert printed["statement"].startswith("1. No guarantee")
    assert 0 <= printed["test"]["accuracy"] <= 1


@pytest.mark.parametrize("how", ['epsilon = "none"', "public = true"])
def test_without_guarantee(folder: Path, capsys, how: str):
    write(folder, ("epsilon = 8.0", how), ("delta = 1e-6", ""), ("clip_norm = 1.0", ""))
    assert go(folder) == 0
    assert "No guarantee" in capsys.readouterr().out
    stored = json.loads((folder / "RUN" / "guarantee.json").read_text(encoding="utf-8"))
    assert stored["format"] == "coowned-no-guarantee-1"
    assert stored["public"] is (how == "public = true")
    assert "epsilon" not in stored


def test_classes_that_match_nothing(folder: Path, capsys):
    """The run is finished and shown; the command fails, with one sentence."""
    write(folder, ('label = "label"', 'label = "label"\nclasses = [7, 9]'))
    assert go(folder) == 2
    printed = capsys.readouterr()
    assert "their labels are not among the classes '7' or '9'" in printed.out
    assert "has a label among the classes '7', '9': this run is finished" in printed.err
    assert StoredRun.open(folder / "RUN").claims


def test_progress_in_a_log(folder: Path, capsys, monkeypatch):
    """Elsewhere than on a terminal: the claim, then a line now and then, none with an epsilon without its terms."""
    monkeypatch.setattr(progress_display, "LOG_EVERY", 0.0)
    assert go(folder) == 0
    made = StoredRun.open(folder / "RUN").guarantee
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("training: epsilon")]
    assert all(made.terms() in line for line in lines if "epsilon" in line)
    assert lines[-1].startswith("training: 100%, ")
    assert f"epsilon {made.shown_epsilon} after 20 steps" in lines[-1]


def test_a_line_every_30_seconds(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now[0])
    with progress_display.training() as (progress, announce):
        announce("reading")
        announce("training: the claim")
        for done in range(1, 1001):
            now[0] += 0.125
            progress(done / 1000, f"text {done}")
    assert capsys.readouterr().err.splitlines() == [
        "training: the claim",
        *(f"training: {done / 1000:.0%}, text {done}; the claim" for done in (240, 480, 720, 960)),
    ]


def test_progress_on_a_narrow_terminal(monkeypatch):
    """Nothing is cut at 80 columns, and there is a bar; the claim is written above it once."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    text = "1,234 steps/s, 1:02:05 left, epsilon 3.21 after 900,000 steps"
    with progress_display.training() as (progress, announce):
        announce("the claim")
        for done in (1e-6, 0.905, 0.906):
            progress(done, text)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert f"90%: {text} ━" in shown
    assert "…" not in shown
    assert len(re.findall(r"^the claim$", shown.replace("\r", "\n"), re.MULTILINE)) == 1


def test_example_is_a_configuration(capsys):
    assert run(["train", "--example"]) == 0
    assert TrainConfig.from_toml(capsys.readouterr().out).digest == TrainConfig.from_toml(example()).digest


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch_size = 32", "batch_sise = 32", "did you mean 'batch_size'"),
        ('features = "features"', 'features = "feature"', "no column 'feature'"),
        ('label = "label"', 'label = "users"', "and classes are [0, 1]; declare them as the data spell them"),
        ('users = "users"', 'users = "people"', "people"),
        ("batch_size = 32", "batch_size = 100000", "the train split, 80% of the data"),
        ("papers.parquet", "none.parquet", "none.parquet"),
        ('kind = "dp-sgd"', 'kind = "dp-mf"', "greedy-min-separation"),
        ('name = "adam"', 'name = "adan2000x"', "optax has no optimizer"),
        ("contribution_bound = 2", "contribution_bound = 0", "contribution_bound"),
    ],
)
def test_bad_input(folder: Path, capsys, old: str, new: str, says: str):
    write(folder, (old, new))
    assert go(folder) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_large_delta_only_where_allowed(folder: Path, capsys):
    write(folder, ("delta = 1e-6", "delta = 0.1"), ("iterations = 20", "iterations = 2"))
    assert go(folder) == 2
    assert "--allow-large-delta" in capsys.readouterr().err
    assert go(folder, "--allow-large-delta") == 0
    assert "Warning: delta 0.1 is above" in capsys.readouterr().out
    stored = TrainConfig.read(folder / "RUN" / "config.toml")  # every later verb reads this file
    assert stored.privacy.allow_large_delta
    again = TrainConfig.read(folder / "RUN" / "config.toml", allow_large_delta=True)
    assert again.privacy == stored.privacy


def test_missing_arguments(capsys):
    assert run(["train"]) == 2
    assert "--example" in capsys.readouterr().err


def test_changed_selection_is_refused(folder: Path, monkeypatch, capsys):
    """S.parquet edited between two processes: the recount sees it."""
    write(folder, SEEDED)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        assert go(folder) == 130
    file = folder / "RUN" / "S.parquet"
    pl.read_parquet(file).head(50).write_parquet(file)
    assert go(folder) == 1
    assert "S.parquet: changed since this run wrote" in capsys.readouterr().err
    reseal(folder / "RUN")
    assert go(folder) == 1
    assert "recount" in capsys.readouterr().err
    assert issubclass(CertificateMismatchError, Exception)
