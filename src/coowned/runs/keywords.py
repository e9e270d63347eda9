"""Keywords of `fit` outside its groups: short forms of one key of a section, and deprecated ones."""

import dataclasses
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from coowned.errors import InputError
from coowned.progress import Progress, did_you_mean
from coowned.runs.settings import MechanismSettings, Optimizer, PrivacySettings, RunSettings
from coowned.training.progress import OnMetrics


class FitKeywords(TypedDict, total=False):
    """Keywords of `fit` beside its groups: short forms of frequent keys, and callbacks.

    A key that is to be given in short is declared here, and in `_SHORT` with its section.
    """

    batch_size: int | None
    iterations: int | None
    clip_norm: float | None
    learning_rate: float | None
    splits: Sequence[float] | None
    selection_seed: int
    seed: int | None
    processes: int
    progress: Progress | None
    on_metrics: OnMetrics | None


GROUPS: dict[str, Any] = {
    "privacy": PrivacySettings,
    "mechanism": MechanismSettings,
    "optimizer": Optimizer,
    "run": RunSettings,
}
"""The arguments of `fit` that are groups, each with the settings of the section of its name."""
_SHORT = {
    "epsilon": "privacy",
    "delta": "privacy",
    "adjacency": "privacy",
    "batch_size": "mechanism",
    "iterations": "mechanism",
    "clip_norm": "mechanism",
    "learning_rate": "optimizer",
    "splits": "data",
    "seed": "run",
}
_WORDS = {"mechanism": "kind", "optimizer": "name"}  # the key that a plain word in place of a group stands for
_NO_KEYS = ("selection_seed", "processes", "progress", "on_metrics")


def sections_of(groups: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections that groups and keywords of `fit` describe, as plain values; None means not given.

    Guarantees:
      - A key that is given twice, differently, is refused.   (test_what_is_given_twice_is_refused)
      - A keyword that has moved warns of its new place, and means the same.   (test_moved_keywords_warn)
      - An unknown keyword is refused as Python does, with the nearest one.   (test_unknown_keywords)

    Args:
      groups: by section: its settings, or the word that says most of them; None where it was not given.
      keywords: by name, in short for one key.
    """
    sections: dict[str, dict[str, Any]] = {"data": {}}
    for name, kind in GROUPS.items():
        sections[name] = _keys(name, kind, groups.get(name))
    for name, value in keywords.items():
        if name in _NO_KEYS:
            continue
        section = _SHORT.get(name) or _moved_to(name)
        given = sections[section].get(name)
        if value is not None and given is not None and value != given:
            group = GROUPS[section].__name__
            raise InputError(f"{name} is {value!r}, but {section}={group}(...) has {given!r}; omit one of them")
        if value is not None:
            sections[section][name] = value
    return sections


def _keys(name: str, kind: type, group: Any) -> dict[str, Any]:
    """Returns the keys of a group that differ from the default."""
    if group is None:
        return {}
    if isinstance(group, str) and name in _WORDS:
        return {_WORDS[name]: group}
    if not isinstance(group, kind):
        word = " or a word" if name in _WORDS else ""
        raise InputError(f"{name} must be {kind.__name__}(...){word}, not {group!r}")
    fields = ((field.name, field.default) for field in dataclasses.fields(kind))
    return {name: value for name, default in fields if (value := getattr(group, name)) != default}


def _moved_to(name: str) -> str:
    """Returns the group that a keyword of earlier releases has moved to, and warns of it."""
    for section, kind in GROUPS.items():
        if name in {field.name for field in dataclasses.fields(kind)}:
            warnings.warn(
                f"fit({name}=...) is deprecated and will be removed in the next release; write "
                f"{section}=co.{kind.__name__}({name}=...)",
                DeprecationWarning,
                stacklevel=_stack_level(),
            )
            return section
    near = did_you_mean(name, [*FitKeywords.__annotations__, *GROUPS])
    raise TypeError(f"fit() got an unexpected keyword argument {name!r}{near}")


def _stack_level() -> int:
    """Returns the `stacklevel` for `warnings.warn` that points outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "coowned":
        frame, level = frame.f_back, level + 1
    return level
