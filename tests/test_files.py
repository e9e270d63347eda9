"""Output files appear whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coowned import InputError
from coowned import files as module
from coowned.files import cache_folder, cached, keep, whole_files, write_file


def everything(folder):
    """Every file below a folder with its content, hidden ones too."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
@pytest.mark.parametrize("old", [True, False])
def test_nothing_half_written(tmp_path, failure, old):
    if old:
        (tmp_path / "a").write_text("old a")
    before = everything(tmp_path)
    with pytest.raises(type(failure)), whole_files(tmp_path / "a", tmp_path / "b") as (a, b):  # noqa: PT012
        a.write_text("half")
        b.write_text("half")
        raise failure
    assert everything(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == set(before)


@pytest.mark.parametrize("old", ["nothing", "file", "folder", "link"])
def test_failure_while_taking_places_is_undone(tmp_path, monkeypatch, old):
    target = tmp_path / "a"
    if old == "file":
        target.write_text("old")
    if old == "folder":
        target.mkdir()
        (target / "part.parquet").write_text("old")
    if old == "link":
        (tmp_path / "real").write_text("old")
        target.symlink_to(tmp_path / "real")
    before = everything(tmp_path)
    # The second file was never written, so the second rename fails after the first was done.
    with pytest.raises(FileNotFoundError), whole_files(target, tmp_path / "b") as (a, _):
        a.write_text("new")
    assert everything(tmp_path) == before
    assert target.is_symlink() == (old == "link")
    assert {path.name for path in tmp_path.iterdir()} == {name.split("/")[0] for name in before}


def test_all_take_their_places(tmp_path):
    (tmp_path / "a").write_text("old")
    with whole_files(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write_text("new a")
        b.write_text("new b")
        assert (tmp_path / "a").read_text() == "old"
    assert everything(tmp_path) == {"a": b"new a", "b": b"new b"}
    assert len(list(tmp_path.iterdir())) == 2


def test_folder_is_replaced(tmp_path):
    target = tmp_path / "S.parquet"
    target.mkdir()
    for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc"):
        (target / name).write_text("old")
    with whole_files(target) as (new,):
        new.write_text("one file")
    assert target.read_text() == "one file"
    assert list(tmp_path.iterdir()) == [target]


def test_folder_with_other_things_is_kept(tmp_path):
    target = tmp_path / "thesis"
    target.mkdir()
    (target / "chapter.tex").write_text("years of work")
    with pytest.raises(
        InputError, match=r"thesis: a folder with other files in it \(chapter.tex\); choose another path"
    ):
        whole_files(target).__enter__()
    assert everything(tmp_path) == {"thesis/chapter.tex": b"years of work"}


def test_folder_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "S").write_text("old")
    with whole_files(tmp_path / "S") as (new,):
        new.mkdir()
        (new / "part.parquet").write_text("new")
    assert everything(tmp_path) == {"S/part.parquet": b"new"}


def test_bad_places_are_refused_at_once(tmp_path):
    with pytest.raises(InputError, match=r"no/a: the folder .*no does not exist; create it first"):
        whole_files(tmp_path / "no" / "a").__enter__()
    with pytest.raises(InputError, match="not a file name"):
        whole_files("/").__enter__()
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        try:
            with pytest.raises(InputError, match="cannot be written to; choose another"):
                whole_files(tmp_path / "a").__enter__()
        finally:
            tmp_path.chmod(0o700)


def test_new_files_are_readable_by_others(tmp_path):
    mask = os.umask(0o022)
    try:
        with whole_files(tmp_path / "a") as (a,):
            a.write_text("x")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_what_is_no_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="neither a file nor a folder"), whole_files(pipe):
        pass
    assert pipe.is_fifo()


@pytest.mark.parametrize("content", [b"new", lambda file: file.write(b"new")])
def test_one_file_is_replaced(tmp_path, content):
    path = tmp_path / "a.txt"
    write_file(path, b"old", mode=0o600)
    write_file(path, content, mode=0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["a.txt"]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_file(path, b"old")

    def interrupted(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, interrupted)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coowned.files.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a.txt'"):
        write_file(path, b"new", temporary=tmp_path / ".a.part")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


QUESTION = {"epsilon": 1.5, "fields": {"iterations": 10}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def ask(question=QUESTION, *, kind="answers", answer=2.5):
    """(the answer, whether it was made anew)."""
    made = []

    def make():
        made.append(answer)
        return answer

    return cached(kind, question, make, encode=json.dumps, decode=json.loads), bool(made)


def only_file(folder):
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    return path


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"COOWNED_CACHE": "/somewhere"}, Path("/somewhere")),
        ({"COOWNED_CACHE": "off"}, None),
        ({"COOWNED_CACHE": None, "XDG_CACHE_HOME": "/kept"}, Path("/kept/coowned")),
        ({"COOWNED_CACHE": None, "XDG_CACHE_HOME": None, "HOME": "/home/ann"}, Path("/home/ann/.cache/coowned")),
    ],
)
def test_folder(monkeypatch, environment, folder):
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cache_folder() == folder


def test_what_was_made_is_read_back(folder):
    assert ask(answer=0.1 + 0.2) == (0.1 + 0.2, True)
    assert ask(answer=0.0) == (0.1 + 0.2, False)
    assert only_file(folder).parent == folder / "answers"


def test_off(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    assert ask() == ask() == (2.5, True)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("folder")
def test_every_input_is_part_of_the_key():
    ask(answer=1.0)
    assert ask({**QUESTION, "epsilon": 1.5000000000000002}) == (2.5, True)
    assert ask({**QUESTION, "fields": {"iterations": 11}}) == (2.5, True)
    assert ask({**QUESTION, "more": None}) == (2.5, True)
    assert ask(kind="other") == (2.5, True)
    assert ask() == (1.0, False)


@pytest.mark.usefixtures("folder")
def test_other_versions_are_other_entries(monkeypatch):
    ask(answer=1.0)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.0.0")
    assert ask() == (2.5, True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"[1, 2]",
        lambda content: b"\x00" * 40,
        lambda content: b"\xff\xfe\x00",
        lambda content: content.replace(b"2.5", b"0.5"),
        lambda content: b"0" + content[1:] if content[:1] != b"0" else b"1" + content[1:],
    ],
)
def test_a_damaged_file_is_made_anew(folder, damage):
    ask()
    path = only_file(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert ask() == (2.5, True)
    assert ask() == (2.5, False)


def test_an_entry_of_another_question_is_not_read(folder):
    ask()
    first = only_file(folder)
    ask({"other": 1}, answer=9.0)
    (second,) = (path for path in folder.rglob("*.txt") if path != first)
    first.write_bytes(second.read_bytes())
    assert ask() == (2.5, True)


def test_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "entry.txt"
    keep(path, b"first")
    assert path.read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coowned.files.os.replace", full)
    keep(path, b"second")
    assert path.read_bytes() == b"first"
    assert [file.name for file in path.parent.iterdir()] == ["entry.txt"]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("COOWNED_CACHE", str(blocked))
    assert ask() == ask() == (2.5, True)
    assert blocked.read_text() == "not a folder"


_COMPILES = """
import jax, sys
jax.jit(lambda x: x + 1)(1.0)  # as a caller's own code may have done
from coowned.files import keep_compiled_programs
keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
found = []
jax.monitoring.register_event_listener(lambda event, **more: found.append(event))
jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((9, 9)))
print(jax.config.jax_compilation_cache_dir, "/jax/compilation_cache/cache_hits" in found)
"""


def _compile(**more: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment = {**kept, "JAX_PLATFORMS": "cpu", **more}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_programs_are_kept(tmp_path):
    place = str(tmp_path / "programs")
    assert _compile(COOWNED_CACHE=str(tmp_path)) == [place, "False"]
    assert _compile(COOWNED_CACHE=str(tmp_path)) == [place, "True"]
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700


def test_another_place_stays(tmp_path):
    other = str(tmp_path / "other")
    assert _compile(COOWNED_CACHE=str(tmp_path), JAX_COMPILATION_CACHE_DIR=other)[0] == other
    assert _compile(COOWNED_CACHE="off")[0] == "None"
