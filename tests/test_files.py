"""Output files appear whole or not at all."""

import os

import pytest

from coowned import InputError
from coowned.files import whole_files, write_file


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
