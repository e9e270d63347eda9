"""A model's parameters in any tree, split into trained and frozen leaves."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.errors import InputError
from coowned.models.model import digest_arrays

Trainable = Callable[[str], bool] | Sequence[str] | Any
"""A predicate over names of leaves, patterns of names (`matching_names`), or a tree of booleans of the parameters'
structure (or its beginning)."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterTree:
    """Parameters split into floating-point arrays that are trained, other arrays, and leaves that are not arrays.

    A leaf is called by its path in the tree: {"layers": [{"w": ...}]} has "layers/0/w". Functions, numbers and texts
    among the leaves (as in Equinox's modules) stay as they are, and so do arrays of integers.

    Guarantees:
      - `whole` of what was taken apart is what was given.   (test_trees_are_put_together_again)
      - Frozen leaves and what is no array are not trained.   (test_frozen_leaves_stay)

    Example:
      >>> tree = ParameterTree.of({"w": np.ones(2), "b": np.zeros(1), "act": abs}, lambda path: path != "b")
      >>> tree.trained, sorted(tree.frozen)
      ({'w': array([1., 1.], dtype=float32)}, ['b'])
    """

    trained: dict[str, npt.NDArray[np.float32]]
    frozen: dict[str, npt.NDArray[Any]]
    _names: tuple[str, ...]
    _static: Mapping[str, Any]
    _structure: Any

    @classmethod
    def of(cls, parameters: Any, trainable: Trainable = None) -> "ParameterTree":
        """Splits parameters; `trainable` None trains every floating-point array."""
        import jax
        import jax.numpy as jnp

        found, structure = jax.tree_util.tree_flatten_with_path(parameters)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") or "parameters" for path, _ in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two parameters have the path {twice!r}; rename one of them")
        leaves = dict(zip(names, (leaf for _, leaf in found), strict=True))
        wanted = _wanted(parameters, names, trainable)
        trained, frozen, static = {}, {}, {}
        for name, leaf in leaves.items():
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                static[name] = leaf
            elif jnp.issubdtype(leaf.dtype, jnp.floating) and wanted[name]:
                trained[name] = _trained(name, np.asarray(leaf))
            else:
                frozen[name] = np.asarray(leaf)
        if not trained:
            raise InputError("no parameter is trained: parameters must contain arrays of float32 that are not frozen")
        return cls(trained, frozen, tuple(names), static, structure)

    def whole(self, trained: Mapping[str, Any], frozen: Mapping[str, Any]) -> Any:
        """Returns the tree with these leaves."""
        import jax

        leaves = {**self._static, **frozen, **trained}
        return jax.tree.unflatten(self._structure, [leaves[name] for name in self._names])

    def read(self, arrays: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[np.float32]]:
        """Reads the trained leaves from a model file; raises InputError for those of another model."""
        found = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
        if {name: array.shape for name, array in found.items()} != {name: a.shape for name, a in self.trained.items()}:
            raise InputError(f"these are not the arrays of this model, which are {', '.join(self.trained)}")
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenParameters:
    """Parameters that training does not change: public constants, equal if their names and bits are."""

    arrays: Mapping[str, npt.NDArray[np.float32]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> str:
        return digest_arrays(self.arrays)

    @functools.cached_property
    def placed(self) -> dict[str, Any]:
        """The arrays on the device, each with a leading axis of one model."""
        import jax

        return jax.device_put({name: array[None] for name, array in self.arrays.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrozenParameters) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def matching_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that match any of the patterns (`fnmatch`); raises InputError for a pattern without a match.

    >>> matching_names(["encoder.0.weight", "encoder.0.bias", "head.bias"], ["encoder.*", "*.bias"])
    ['encoder.0.weight', 'encoder.0.bias', 'head.bias']
    >>> matching_names(["head.bias"], ["heads.*"])
    Traceback (most recent call last):
      ...
    coowned.errors.InputError: trainable: no parameter matches 'heads.*'; the parameters are head.bias
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"trainable: no parameter matches {pattern!r}; the parameters are {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _wanted(parameters: Any, names: list[str], trainable: Trainable) -> dict[str, bool]:
    import jax

    if trainable is None:
        return dict.fromkeys(names, True)
    if callable(trainable):
        return {name: bool(trainable(name)) for name in names}
    if isinstance(trainable, Sequence) and all(isinstance(pattern, str) for pattern in trainable):
        return dict.fromkeys(names, False) | dict.fromkeys(matching_names(names, trainable), True)
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(trainable, parameters))
    except ValueError as error:
        raise InputError(
            f"trainable must have the structure of parameters, or be a function of a path: {error}"
        ) from None
    return {name: bool(flag) for name, flag in zip(names, flags, strict=True)}


def _trained(name: str, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if array.dtype not in (np.float32, np.float64):
        raise InputError(f"parameter {name!r} is {array.dtype}; what is trained must be float32: cast or freeze it")
    return np.array(array, np.float32)
