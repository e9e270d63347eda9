"""`coowned audit` in a copy of the package whose source has one thing wrong: nothing is patched at run time.

Each audit is repeatable (fixed seed); an honest one may alarm falsely with probability 1e-3 at most.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.audit import planted_bugs
from tests.runs.run_folders import write_run

import coowned
from coowned.accounting.guarantee import guarantee

pytestmark = pytest.mark.full


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change of the source, the run it is tried on, and a test of the audit that must see it."""

    name: str
    file: str
    old: str
    new: str
    seen_by: str
    plan: str = "poisson"
    model: dict | None = None


NOISE = "grid.noise_deviation(p.noise_multiplier)"
EDITS = [
    Edit("1% of the noise", "training/loop.py", NOISE, f"0.01 * {NOISE}", "noise"),
    Edit("half the noise on the host", "training/loop.py", NOISE, f"0.5 * {NOISE}", "noise"),
    Edit(
        "no noise on one coordinate",
        "exact/noise.py",
        "if noisy else sums[i, j]",
        "if noisy and j != 3 else sums[i, j]",
        "noise",
    ),
    Edit(
        "probability over distinct examples",
        "mechanism/poisson_sampling.py",
        "**drawing, sampling_probability=self.sampling_probability)",
        "**drawing, sampling_probability=self.batch_size / selected.num_distinct)",
        "participation",
        plan="duplicates",
    ),
    Edit(
        "noise over the root of the participations",
        "training/loop.py",
        NOISE,
        f"{NOISE} / (p.mechanism.contribution_bound**0.5 if p.mechanism.needs_schedule else 1)",
        "noise",
        plan="schedule",
    ),
    Edit("noise repeated on resumption", "training/loop.py", "self._noise(start),", "self._noise(0),", "noise"),
    Edit(
        "coins repeated on resumption",
        "training/step.py",
        "drawn = self.batches.batch(step)",
        "drawn = self.batches.batch(step - self.start)",
        "contributions",
    ),
    Edit(
        "the same noise for two tensors",
        "exact/noise.py",
        "step=step, tensor=name)",
        'step=step, tensor="any")',
        "noise",
        model=planted_bugs.SMALL_BERT.describe(),
    ),
    Edit(
        "the largest clip norm for all of a sweep",
        "training/step.py",
        "        sums, clipped = self.model.clipped_sum(state[0], batch, mask, self.grids, self.devices, *given)\n",
        """
        largest = max(self.grids, key=lambda grid: grid.clip_norm)
        sums, clipped = self.model.clipped_sum(state[0], batch, mask, (largest,) * len(self.grids), self.devices)
        units = np.array([largest.unit / grid.unit for grid in self.grids])
        sums = {name: (total.T * units).T.astype(np.int64) for name, total in sums.items()}
""",
        "sweep",
    ),
    Edit(
        "noise scaled like the gradients",
        "training/step.py",
        "        units = np.array([grid.unit for grid in self.grids])\n",
        """        units = np.array([grid.unit for grid in self.grids])
        if scales is not None:
            noise = {name: (row * np.asarray(scales[name])).astype(np.int64) for name, row in noise.items()}
""",
        "contributions",
        plan="scaled",
        model=planted_bugs.ROWS.describe(),
    ),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """The package without any change; compiled kernels come with it, since times of files are kept."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(Path(coowned.__file__).parent, folder / "coowned")
    return folder


def audit(tree: Path, run: Path) -> tuple[int, dict]:
    """Exit code and audit.json of `coowned audit` by the package in a tree."""
    command = "import coowned, sys; assert coowned.__file__.startswith(sys.argv.pop(1)); "
    command += "from coowned.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command, str(tree), "audit", str(run), "--trials", "2000", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (run / "audit.json").exists(), ended.stderr
    return ended.returncode, json.loads((run / "audit.json").read_text(encoding="utf-8"))


def run_folder(folder: Path, plan: str, model: dict | None) -> Path:
    folder.mkdir()
    own = getattr(planted_bugs, plan)()
    terms = {name: getattr(own.guarantee, name) for name in ("noise_multiplier", "delta", "adjacency")}
    claim = guarantee(own.certificate, own.mechanism, **terms)
    return write_run(folder, claim, model=model, options=own.options())


@pytest.mark.parametrize("edit", EDITS, ids=[edit.name for edit in EDITS])
def test_a_changed_source_is_caught(edit, copied, tmp_path):
    run = run_folder(tmp_path / "run", edit.plan, edit.model)
    file = copied / "coowned" / edit.file
    honest, times = file.read_text(encoding="utf-8"), file.stat()
    assert honest.count(edit.old) == 1  # else the edit is out of date
    try:
        file.write_text(honest.replace(edit.old, edit.new), encoding="utf-8")
        code, found = audit(copied, run)
    finally:
        file.write_text(honest, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert code == 1
    assert found["holds"] is False
    assert edit.seen_by in found["verdict"]


CASES = [
    ("poisson", None),
    ("poisson", planted_bugs.FROZEN_BERT.describe()),
    ("scaled", planted_bugs.ROWS.describe()),
]


@pytest.mark.parametrize(("plan", "model"), CASES, ids=["linear", "BERT", "scaled"])
def test_an_unchanged_copy_passes(plan, model, copied, tmp_path):
    code, found = audit(copied, run_folder(tmp_path / "run", plan, model))
    assert (code, found["holds"]) == (0, True)
