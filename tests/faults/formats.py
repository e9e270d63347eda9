"""Makes the files of tests/fixtures/formats anew: one of each format that this release writes.

`python -m tests.faults.formats` after a format has got another version; what older releases wrote stays in git.
"""

import contextlib
import io
import shutil
from pathlib import Path

from tests.faults.world import DATA_OPTIONS, ROOT, write_world

from coowned.cli.main import run

FIXTURES = ROOT / "tests" / "fixtures" / "formats"
DATA = ["mail.jsonl", *DATA_OPTIONS]
COMMANDS = [
    ["select", *DATA, "--contribution-bound", "2", "-o", "S.parquet"],
    ["select", *DATA, "--selector", "greedy-min-separation", "--batch-size", "8", "--iterations", "6",
     "--min-separation", "3", "-o", "schedule.parquet"],
    ["calibrate", "--certificate", "S.certificate.json", "--epsilon", "8", "--delta", "1e-5", "--batch-size", "16",
     "--iterations", "30", "-o", "guarantee.json"],
    ["train", "run.toml", "-o", "RUN", "--sign-key", "curator.key"],
    ["audit", "RUN", "--trials", "1000", "--seed", "3"],
]  # fmt: skip


def make() -> None:
    """Replaces all fixtures."""
    shutil.rmtree(FIXTURES, ignore_errors=True)
    FIXTURES.parent.mkdir(exist_ok=True)
    write_world(FIXTURES)
    with contextlib.chdir(FIXTURES):
        for command in COMMANDS:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                code = run(command)
            if code:
                raise SystemExit(shown.getvalue())
    Path(FIXTURES / "curator.key").unlink()  # the public key is enough to verify


if __name__ == "__main__":
    make()
