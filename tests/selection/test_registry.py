"""One word, one file, one class."""

import importlib

import pytest

from coowned.selection.registry import CLASSES, selector_class
from coowned.selection.selector import Selector


@pytest.mark.parametrize("word", CLASSES)
def test_word_file_and_class_agree(word):
    found = selector_class(word)
    assert issubclass(found, Selector)
    assert found.name == word
    assert found.__module__ == "coowned.selection." + word.replace("-", "_")
    assert found.__name__ == "".join(piece.capitalize() for piece in word.split("-"))
    assert getattr(importlib.import_module("coowned"), found.__name__) is found


def test_unknown_word():
    with pytest.raises(KeyError):
        selector_class("greediest")
