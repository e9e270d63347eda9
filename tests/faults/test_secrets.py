"""No user and no byte of a key is in anything that is printed, reported or exported; private files are private."""

import base64
import contextlib
import dataclasses
import io
import os
import secrets
import stat
from pathlib import Path

import pytest
from tests.faults.world import DATA_OPTIONS as OPTIONS
from tests.faults.world import USERS, write_world

from coowned.cli.main import run
from coowned.runs.signature import signing_key

pytestmark = pytest.mark.full

DATA = ["mail.jsonl", *OPTIONS]
STEPS = ["--delta", "1e-5", "--batch-size", "16", "--iterations", "30"]
ROAD = [
    ["inspect", *DATA],
    ["inspect", *DATA, "--json"],
    ["plan", *DATA, "--epsilon", "8", *STEPS, "--contribution-bounds", "1,2", "-o", "plan.json", "--html", "plan.html"],
    ["select", *DATA, "--contribution-bound", "2", "-o", "S.parquet"],
    ["certify", *DATA, "S.parquet"],
    ["calibrate", "--certificate", "S.certificate.json", "--epsilon", "8", *STEPS, "-o", "guarantee.json"],
    ["train", "run.toml", "-o", "RUN", "--sign-key", "curator.key"],
    ["audit", "RUN", "--trials", "1000"],
    ["report", "RUN"],
    ["report", "RUN", "--release"],
    ["report", "RUN", "--release", "--graph-statistics", "-o", "statistics.html"],
    ["export-model", "RUN", "-o", "exported"],
    ["compose", "RUN", "--delta", "1e-5"],
    ["aliases", *DATA, "-o", "aliases.csv"],
]
# Files that nobody but their owner may read; every other one is searched.
PRIVATE = {
    "S.parquet", "RUN/S.parquet", "RUN/run.json", "RUN/metrics.parquet", "RUN/validation.parquet", "RUN/test.parquet",
    "RUN/certificate.json", "RUN/graph.json", "RUN/private-log.json", "RUN/report.html", "curator.key", "aliases.csv",
}  # fmt: skip
GIVEN = {"mail.jsonl", "run.toml"}


@dataclasses.dataclass
class Road:
    """What came of the whole road of a real run, whose key nobody knows beforehand.

    Attributes:
      folder: where it all is.
      printed: what each command printed, stderr too.
      drawn: the secrets that were drawn from the operating system, but for those of the audit's own runs.
      changed: files whose permissions were changed after they had been created.
    """

    folder: Path
    printed: dict[str, str] = dataclasses.field(default_factory=dict)
    drawn: list[bytes] = dataclasses.field(default_factory=list)
    changed: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    road = Road(write_world(tmp_path_factory.mktemp("secrets") / "world", seed=False))
    token_bytes, before = secrets.token_bytes, os.umask(0)  # others may read whatever nobody forbids
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(road.folder)
            patch.setattr(secrets, "token_bytes", lambda count: road.drawn.append(token_bytes(count)) or road.drawn[-1])
            for name in ("chmod", "fchmod"):
                patch.setattr(os, name, lambda file, *mode, **more: road.changed.append(str(file)))
            for arguments in ROAD:
                before_it = len(road.drawn)
                shown = io.StringIO()
                with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                    code = run(arguments)
                assert code == 0, shown.getvalue()
                road.printed[" ".join(arguments)] = shown.getvalue()
                if arguments[0] == "audit":  # thousands of keys of its own, for made-up runs
                    del road.drawn[before_it:]
    finally:
        os.umask(before)
    return road


def files(road: Road) -> dict[str, Path]:
    return {path.relative_to(road.folder).as_posix(): path for path in road.folder.rglob("*") if path.is_file()}


def searched(road: Road) -> dict[str, bytes]:
    """Everything that others may see."""
    shown = {name: file.read_bytes() for name, file in files(road).items() if name not in PRIVATE | GIVEN}
    return shown | {name: text.encode() for name, text in road.printed.items()}


def spellings(secret: bytes) -> list[bytes]:
    """Eight bytes of it at a time, as they are, in hexadecimal, and all of it in base 64."""
    pieces = [secret[at : at + 8] for at in range(0, len(secret) - 7, 8)]
    return [*pieces, *(piece.hex().encode() for piece in pieces), base64.b64encode(secret)[:40]]


def test_keys_are_nowhere(road):
    keys = [secret for secret in road.drawn if len(secret) == 32]
    keys.append(signing_key(road.folder / "curator.key").private_bytes_raw())
    assert len(keys) >= 2  # the run's, and the one to sign with
    everything = searched(road) | {name: files(road)[name].read_bytes() for name in PRIVATE - {"curator.key"}}
    pieces = [piece for secret in keys for piece in spellings(secret)]
    for name, content in everything.items():
        lower = content.lower()
        assert not any(piece in content or piece in lower for piece in pieces), name


def test_users_are_nowhere(road):
    parts = [user.split("@")[0].encode() for user in USERS]
    own = ("RUN/report.html", "RUN/certificate.json")
    everything = searched(road) | {name: (road.folder / name).read_bytes() for name in own}
    for name, content in everything.items():
        found = [part for part in parts if part in content]
        assert not found or name.startswith("aliases "), f"{name}: {found[:3]}"


def test_private_files_are_private_from_their_creation(road):
    """Under a umask that forbids nothing, and without a change of permissions later on."""
    modes = {name: stat.S_IMODE(file.stat().st_mode) for name, file in files(road).items()}
    assert modes.keys() >= PRIVATE
    assert {name: oct(mode) for name, mode in modes.items() if name in PRIVATE and mode & 0o077} == {}
    assert road.changed == []


BAD = [
    ("wide.csv", "id,users\n1,person001@people.example,7\n", ["inspect", "wide.csv", *OPTIONS]),
    ("bad.jsonl", '{"id": 1, "users": ["person001@people.example", }\n', ["inspect", "bad.jsonl", *OPTIONS]),
    ("a.csv", "key,user\nperson001@people.example\n", ["inspect", *DATA, "--aliases", "a.csv"]),
    ("b.csv", "key,user,x\nperson001@people.example,,\n", ["inspect", *DATA, "--aliases", "b.csv"]),
    ("run-key.json", '{"secret": "918273645"}', ["train", "run.toml", "-o", "."]),
]


@pytest.mark.parametrize(("name", "content", "arguments"), BAD, ids=[name for name, *_ in BAD])
def test_errors_name_no_user(tmp_path, monkeypatch, capsys, name, content, arguments):
    monkeypatch.chdir(write_world(tmp_path / "world"))
    Path(name).write_text(content, encoding="utf-8")
    assert run(arguments) == 2
    assert "person001" not in (said := capsys.readouterr().err)
    assert "918273645" not in said
