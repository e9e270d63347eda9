"""A second copy of a function as it is now, to find out later whether it remembered what it was called with."""

import contextlib
import copy
import types
from typing import Any

import numpy as np


def fresh_copy(function: Any) -> Any:
    """A copy with its own copies of what it refers to: globals, variables around it, defaults, objects it belongs to.

    Functions that it calls by name are copied in the same way. Modules, classes, arrays, networks and what cannot be
    copied are shared.
    """
    return _copied(function, {})


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """made: copies by the identity of the original, as `copy.deepcopy` has them."""
    import torch

    if id(value) in made:
        return made[id(value)]
    if isinstance(value, types.FunctionType):
        return _copied_function(value, made)
    if isinstance(value, (types.ModuleType, type, np.ndarray, torch.Tensor, torch.nn.Module)):
        return value
    try:
        return copy.deepcopy(value, made)
    except Exception:  # an open file, a lock
        return value


def _copied_function(function: types.FunctionType, made: dict[int, Any]) -> types.FunctionType:
    around = function.__closure__ or ()
    names = made.setdefault(id(function.__globals__), dict(function.__globals__))
    cells = tuple(types.CellType() for _ in around)
    copied = types.FunctionType(function.__code__, names, function.__name__, None, cells)
    made[id(function)] = copied
    copied.__defaults__ = _copied(function.__defaults__, made)
    copied.__kwdefaults__ = _copied(function.__kwdefaults__, made)
    copied.__dict__.update(_copied(function.__dict__, made))
    for name in _names_in(function.__code__) & names.keys():
        names[name] = _copied(function.__globals__[name], made)
    for cell, original in zip(cells, around, strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            cell.cell_contents = _copied(original.cell_contents, made)
    return copied


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
