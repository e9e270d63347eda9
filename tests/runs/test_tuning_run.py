"""Tuning in a folder: which runs there are, that a killed one is resumed, and that only the best is left."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import coowned as co
from coowned.accounting import guarantee
from coowned.exact.keys import Purpose, RunKey
from coowned.report.page import write_report
from coowned.runs import tuning_run
from coowned.runs.ledger import NAME as LEDGER
from coowned.runs.records import is_run_file
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun
from coowned.runs.tuning_config import TuningConfig
from coowned.runs.tuning_run import draw_settings, run_tuning

SECTIONS = {
    "data": {"path": "data.parquet", "example_id": "id"},
    "selection": {"selector": "greedy-min-separation", "seed": 0},
    "privacy": {"epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out"},
    "mechanism": {"kind": "dp-mf", "batch_size": 8, "iterations": 8, "min_separation": 2, "clip_norm": 1.0},
    "model": {"kind": "logistic-regression", "features": ["x1"], "label": "y"},
    "optimizer": {"name": "sgd"},
    "run": {"seed": 3},
}
GRID = {"learning_rate": [0.01, 0.1, 1.0], "batch_size": [4, 8]}


@pytest.fixture(scope="module")
def examples():
    random = np.random.default_rng(0)
    rows = []
    for number in range(240):
        x = float(random.standard_normal())
        rows.append({"id": f"e{number}", "users": [f"u{number % 80}"], "x1": x, "y": int(x > 0)})
    return co.from_table(rows, example_id="id")


def tuning(seed=3, grid=GRID, expected_runs=2.0, **sections):
    return TuningConfig(sections=SECTIONS | {"run": {"seed": seed}} | sections, grid=grid, expected_runs=expected_runs)


def seed_with(count, asked=tuning):
    """The first seed whose tuning has so many runs."""
    return next(seed for seed in range(1000) if len(draw_settings(RunKey.from_seed(seed), asked(seed=seed))) == count)


@pytest.fixture(scope="module")
def whole(examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "RUN"
    seed = seed_with(3)
    scores = []

    def watched(run):
        scores.append((run.covered.counts[0], run.plan.learning_rate, load_file(run.path / "model.safetensors")))
        return run.covered.counts[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning_run, "score_of", watched)
        run_tuning(tuning(seed=seed), folder, examples=examples)
    return folder, seed, scores


def test_only_the_best_is_left(whole):
    folder, _, scores = whole
    assert len(scores) == 3
    names = [file.name for file in folder.iterdir()]
    assert all(is_run_file(name) for name in names)
    assert "run-key.json" not in names
    run = StoredRun.open(folder)
    best = max(scores, key=lambda score: score[0])
    assert run.covered.counts[0] == best[0]
    assert run.plan.learning_rate == best[1]
    for name, array in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(array, best[2][name])
    stored = json.loads((folder / "guarantee.json").read_text())
    assert stored["tuning"]["grid"] == GRID
    assert "runs" not in json.dumps(sorted(stored["tuning"]))


def test_settings_of_one_tuning_have_one_guarantee(whole):
    claim = StoredRun.open(whole[0]).guarantee
    assert claim.test_run
    assert 8.0 * 0.997 <= claim.epsilon <= 8.0
    assert claim.tuning.grid_size == 6
    assert sum(setting.count for setting in claim.tuning.settings) == 6
    assert claim.evaluation is not None
    assert claim.noise_multiplier > claim.evaluation.unshared_noise_multiplier


@pytest.mark.parametrize("stage", ["training", "choosing", "removing", "moving", "ending"])
def test_killed_tuning_is_resumed(whole, examples, tmp_path, monkeypatch, stage):
    folder, seed, _ = whole
    killed = tmp_path / "RUN"

    def stop(*_, **__):
        raise KeyboardInterrupt

    class Stopping:
        """A module of which one function is interrupted at its second call."""

        def __init__(self, module, name):
            self.module, self.name, self.whole, self.calls = module, name, getattr(module, name), 0

        def __getattr__(self, name):
            return self.call if name == self.name else getattr(self.module, name)

        def call(self, *given, **named):
            self.calls += 1
            if self.calls > 1:
                raise KeyboardInterrupt
            return self.whole(*given, **named)

    with monkeypatch.context() as patched:
        if stage == "training":
            save = RunFolder.save

            def save_and_stop(self, step, tensors):
                save(self, step, tensors)
                if self.path.name == "1" and step > 3:
                    raise KeyboardInterrupt

            patched.setattr(RunFolder, "save", save_and_stop)
        elif stage == "choosing":
            patched.setattr(tuning_run, "leave_the_best", stop)
        elif stage == "removing":
            patched.setattr(tuning_run, "shutil", Stopping(shutil, "rmtree"))
        elif stage == "moving":
            patched.setattr(tuning_run, "os", Stopping(tuning_run.os, "replace"))
        else:
            destroyed = Stopping(tuning_run, "overwrite_and_remove")  # the first call is for a key of before
            patched.setattr(tuning_run, "overwrite_and_remove", destroyed.call)
        with pytest.raises(KeyboardInterrupt):
            run_tuning(tuning(seed=seed), killed, examples=examples)
    assert (killed / "tuning.json").exists()
    run_tuning(tuning(seed=seed), killed, examples=examples)
    assert sorted(file.name for file in killed.iterdir()) == sorted(file.name for file in folder.iterdir())
    for name, array in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(killed / "model.safetensors")[name])
    assert StoredRun.open(killed).covered.counts == StoredRun.open(folder).covered.counts


def outcome(parent, examples, drawn, monkeypatch, caplog):
    """All that a tuning leaves whose runs have the settings `drawn`, the first being the best."""
    caplog.clear()
    (parent / "tuning").mkdir(parents=True)
    monkeypatch.chdir(parent / "tuning")
    with monkeypatch.context() as patched:
        patched.setattr(tuning_run, "draw_settings", lambda key, asked: drawn)
        patched.setattr(tuning_run, "score_of", lambda run: -int(run.path.name))
        patched.setattr(guarantee.secrets, "token_hex", lambda size: "0" * 2 * size)
        patched.setattr(RunKey, "from_operating_system", classmethod(lambda cls: cls(secret=bytes(32), seed=None)))
        asked = {"learning_rate": [0.01, 0.1, 1.0]}
        run_tuning(tuning(seed=None, grid=asked), "RUN", examples=examples)
    run = co.open_run("RUN")
    write_report(run.folder, "release.html", release=True)
    run.export("exported")
    files = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    return files, run.statement(), [record.getMessage() for record in caplog.records]


def test_nothing_tells_how_many_runs_there_were(examples, tmp_path, monkeypatch, caplog):
    """Tunings of one and of three runs with the same best leave the same files, page, export, ledger and log."""
    caplog.set_level("DEBUG", logger="coowned")
    one = outcome(tmp_path / "one", examples, [1], monkeypatch, caplog)
    three = outcome(tmp_path / "three", examples, [1, 2, 0], monkeypatch, caplog)
    assert {Path("RUN/model.safetensors"), Path("release.html"), Path(LEDGER)} <= set(one[0])
    assert any(text.startswith("tuning: noise multiplier") for text in one[2])
    assert list(one[0]) == list(three[0])
    for path, content in one[0].items():
        own, others = (text.replace(b"/one/", b"/N/").replace(b"/three/", b"/N/") for text in (content, three[0][path]))
        assert own == others, path
    assert one[1:] == three[1:]


def test_no_record_of_keys_tells_how_many_runs_there_were(examples, tmp_path, monkeypatch):
    """With keys of the operating system, which the machine remembers while they are used."""
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning_run, "draw_settings", lambda key, tuning: [0, 1])
    served = []
    score_of = tuning_run.score_of

    def scored(run):
        served.append(len(list((tmp_path / "cache" / "keys").iterdir())))
        return score_of(run)

    monkeypatch.setattr(tuning_run, "score_of", scored)
    run_tuning(tuning(seed=None), tmp_path / "RUN", examples=examples)
    assert served == [2, 2]
    assert not list((tmp_path / "cache" / "keys").iterdir())


def test_another_tuning_is_refused(whole, examples, tmp_path, monkeypatch):
    with pytest.raises(co.InputError, match="this run is finished"):
        run_tuning(tuning(seed=whole[1]), whole[0], examples=examples)
    started = tmp_path / "RUN"

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tuning_run, "run_configuration", stop)
        with pytest.raises(KeyboardInterrupt):
            run_tuning(tuning(), started, examples=examples)
    with pytest.raises(co.CertificateMismatchError, match="another configuration, grid or attribution"):
        run_tuning(tuning(grid={"learning_rate": [0.1]}), started, examples=examples)
    with pytest.raises(co.CertificateMismatchError, match="another"):
        run_tuning(tuning(seed=4), started, examples=examples)
    (started / "tuning-key.json").unlink()
    with pytest.raises(co.CertificateMismatchError, match="key is missing"):
        run_tuning(tuning(), started, examples=examples)


def test_files_of_others_stay(examples, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(co.InputError, match="with other files in it"):
        run_tuning(tuning(), tmp_path, examples=examples)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_keys_of_runs_differ():
    key = RunKey.from_operating_system()
    children = [key.child(number) for number in range(20)]
    assert len({child.secret for child in [key, *children]}) == 21
    words = [tuple(each.derive(Purpose.COINS, step=0)) for each in [key, *children]]
    assert len(set(words)) == 21


def test_numbers_of_runs_and_settings_follow_their_law():
    """4,000 tunings; an honest law fails a bound of 4.5 deviations with probability 7e-6 at each of 7 comparisons."""
    asked = tuning()
    drawn = [draw_settings(RunKey.from_seed(seed), asked) for seed in range(4000)]
    assert drawn[:50] == [draw_settings(RunKey.from_seed(seed), asked) for seed in range(50)]
    counts = np.array([len(settings) for settings in drawn])
    assert 1 <= counts.min() <= counts.max() <= 8
    assert abs(counts.mean() - 2.0) < 4.5 * counts.std() / np.sqrt(len(counts))
    settings = np.concatenate(drawn)
    for setting in range(6):
        assert abs((settings == setting).mean() - 1 / 6) < 4.5 * np.sqrt(5 / 36 / len(settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {}}, "at least one key"),
        ({"grid": {"learning_rate": 0.1}}, "list of values"),
        ({"grid": {"learning_rate": [0.1, 0.1]}}, "twice"),
        ({"grid": {"learning_rat": [0.1]}}, "cannot be tuned; did you mean 'learning_rate'"),
        ({"grid": {"kind": ["dp-sgd"]}}, "cannot be tuned"),
        ({"grid": {"learning_rate": list(range(1, 20_000))}}, "at most 10,000"),
        ({"expected_runs": 0.5}, "expected_runs must be a number"),
        ({"privacy": {"noise_multiplier": 1.0, "delta": 1e-6}}, "needs .privacy. epsilon"),
        ({"privacy": {"public": True}}, "covers nothing"),
    ],
)
def test_bad_tunings_are_refused(change, message):
    with pytest.raises(co.InputError, match=message):
        tuning(**change)


def test_every_setting_is_checked():
    with pytest.raises(co.InputError, match="batch_size"):
        tuning(grid={"learning_rate": [0.1], "batch_size": [8, 0]})


def test_unknown_grid_keys():
    with pytest.raises(co.InputError, match="did you mean 'batch_size'"):
        tuning(grid={"batchsize": [8]})
