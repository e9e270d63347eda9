"""Answers kept on disk are the right ones or none."""

import os
import pathlib

import pytest

from coowned.accounting import cache as module
from coowned.accounting.cache import ResultCache

QUESTION = {"kind": "calibrate", "epsilon": 1.5, "fields": {"iterations": 10}}


def only_file(folder):
    (path,) = folder.rglob("*.json")
    return path


def test_what_was_put_is_got(tmp_path):
    cache = ResultCache(directory=tmp_path / "deep" / "folder")
    assert cache.get(QUESTION) is None
    cache.put(QUESTION, 0.1 + 0.2)
    assert cache.get(QUESTION) == 0.1 + 0.2


def test_every_input_is_part_of_the_key(tmp_path, monkeypatch):
    cache = ResultCache(directory=tmp_path)
    cache.put(QUESTION, 1.0)
    assert cache.get({**QUESTION, "epsilon": 1.5000000000000002}) is None
    assert cache.get({**QUESTION, "fields": {"iterations": 11}}) is None
    assert cache.get({**QUESTION, "more": None}) is None
    monkeypatch.setattr(module, "ACCOUNTANT_VERSION", -1)
    assert cache.get(QUESTION) is None


def test_other_versions_are_other_entries(tmp_path, monkeypatch):
    cache = ResultCache(directory=tmp_path)
    cache.put(QUESTION, 1.0)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "0.0.0")
    assert cache.get(QUESTION) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-5],
        lambda text: "[1, 2]",
        lambda text: "\x00" * 40,
        lambda text: text.replace('"value": 2.5', '"value": 0.5'),
        lambda text: text.replace('"value": 2.5', '"value": NaN'),
        lambda text: text.replace('"epsilon": 1.5', '"epsilon": 9.5'),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path, damage):
    cache = ResultCache(directory=tmp_path)
    cache.put(QUESTION, 2.5)
    path = only_file(tmp_path)
    path.write_text(damage(path.read_text()))
    assert cache.get(QUESTION) is None
    cache.put(QUESTION, 2.5)
    assert cache.get(QUESTION) == 2.5


def test_a_file_that_is_not_text_is_ignored(tmp_path):
    cache = ResultCache(directory=tmp_path)
    cache.put(QUESTION, 2.5)
    only_file(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert cache.get(QUESTION) is None


def test_no_partial_file_is_left(tmp_path, monkeypatch):
    cache = ResultCache(directory=tmp_path)

    def fail(temporary, place):
        raise OSError("disk full")

    monkeypatch.setattr("coowned.cache.os.replace", fail)
    cache.put(QUESTION, 2.5)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = ResultCache(directory=blocked)
    cache.put(QUESTION, 1.0)
    assert cache.get(QUESTION) is None


def test_where_the_default_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    assert ResultCache.default().directory == tmp_path
    monkeypatch.setenv("COOWNED_CACHE", "off")
    assert ResultCache.default().directory is None
    monkeypatch.delenv("COOWNED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ResultCache.default().directory == tmp_path / "xdg" / "coowned"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ResultCache.default().directory == pathlib.Path(os.path.expanduser("~")) / ".cache" / "coowned"
    assert not (tmp_path / "home").exists()
