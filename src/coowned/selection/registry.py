"""The registry of selectors: one file and one line here each.

The line gives it to Python (`coowned.MySelector`), to `coowned select` with an option for each of its fields, to
`[selection]` of a configuration, and to `coowned plan` if `bound_is_enough`.
"""

import dataclasses
import functools
import pkgutil
from typing import TYPE_CHECKING, Any

from coowned.errors import InputError
from coowned.progress import nearest

if TYPE_CHECKING:
    import ast
    from collections.abc import Mapping

    from coowned.attribution.options import Option
    from coowned.selection.selector import Selector

CLASSES = {
    "greedy": "coowned.selection.greedy.Greedy",
    "greedy-with-duplicates": "coowned.selection.greedy_with_duplicates.GreedyWithDuplicates",
    "greedy-min-separation": "coowned.selection.greedy_min_separation.GreedyMinSeparation",
    "bias-mitigating": "coowned.selection.bias_mitigating.BiasMitigating",
    "random-subset": "coowned.selection.random_subset.RandomSubset",
    "integer-program": "coowned.selection.integer_program.IntegerProgram",
    "min-separation-program": "coowned.selection.min_separation_program.MinSeparationProgram",
    "priced": "coowned.selection.priced.Priced",
    "priced-min-separation": "coowned.selection.priced_min_separation.PricedMinSeparation",
    "cyclic-groups": "coowned.selection.cyclic_groups.CyclicGroups",
}
"""Dotted path of every selector's class, by the name that the command line and configurations use."""


def selector_class(word: str) -> "type[Selector]":
    """Imports and returns the selector class of this name; KeyError if there is none.

    Example:
      >>> selector_class("greedy").__name__
      'Greedy'
    """
    return pkgutil.resolve_name(CLASSES[word])


def make_selector(word: str, settings: "Mapping[str, Any]") -> "Selector":
    """Returns the selector of this name with these settings; an unknown or missing one is refused by its option.

    >>> make_selector("greedy", {"contribution_bound": 3}).contribution_bound
    3
    """
    if word not in CLASSES:
        raise InputError(f"Unknown selector {word!r}{nearest(word, CLASSES)}")
    kind = selector_class(word)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in fields:
            raise InputError(f"The selector {word} has no option --{name.replace('_', '-')}; remove it")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in settings:
            raise InputError(f"The selector {word} needs --{name.replace('_', '-')}")
    return kind(**settings)


def needs_bound_alone(word: str | None) -> bool:
    """Returns whether a selector of this name needs nothing but a contribution bound.

    >>> needs_bound_alone("greedy"), needs_bound_alone("cyclic-groups"), needs_bound_alone(None)
    (True, False, False)
    """
    return word in CLASSES and selector_class(word).bound_is_enough


def selectors_by_bound() -> tuple[str, ...]:
    """Returns the names of the selectors that need nothing but a contribution bound: those that a plan can try.

    >>> selectors_by_bound()
    ('greedy', 'greedy-with-duplicates', 'integer-program', 'priced')
    """
    return tuple(filter(needs_bound_alone, CLASSES))


def declared_settings() -> "dict[str, tuple[type, Option]]":
    """Returns type and description of every selector's fields, those that must be given first.

    They are read from the sources: importing all selectors would keep `coowned --help` waiting for numpy and numba.

    Guarantees:
      - They are those of the classes.   (test_declared_settings_are_the_fields)
    """
    declared: dict[str, tuple[type, Option]] = {}
    optional: dict[str, tuple[type, Option]] = {}
    for path in CLASSES.values():
        module, _, name = path.rpartition(".")
        for field, (kind, option, needed) in _fields(module, name).items():
            (declared if needed else optional).setdefault(field, (kind, option))
    return declared | {field: found for field, found in optional.items() if field not in declared}


@functools.cache
def _fields(module: str, name: str) -> "dict[str, tuple[type, Option, bool]]":
    """Returns the annotated fields of a class and its bases: type, description, and whether it has no default."""
    import ast

    tree = _source(module)
    body = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in body:  # imported, perhaps from outside of the package, where nothing is declared
        home = _imported_from(tree, name)
        return _fields(home, name) if home is not None and home.startswith("coowned.") else {}
    found: dict[str, tuple[type, Option, bool]] = {}
    for base in body[name].bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Name):
            found |= _fields(module, named.id)
    for node in body[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            described = _description(node.annotation)
            if described is not None:
                found[node.target.id] = (*described, node.value is None)
    return found


@functools.cache
def _source(module: str) -> "ast.Module":
    import ast
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec(module)
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))  # type: ignore[union-attr, arg-type]


def _imported_from(tree: "ast.Module", name: str) -> str | None:
    import ast

    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module
    return None


def _description(annotation: "ast.expr") -> "tuple[type, Option] | None":
    """Returns type and description of `Annotated[TYPE, Option(...)]`; None for any other annotation."""
    import ast

    from coowned.attribution.options import Option

    match annotation:
        case ast.Subscript(
            value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, ast.Call(func=ast.Name(id="Option")) as call])
        ):
            given: dict[str, Any] = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            word = ast.unparse(kind).removesuffix(" | None")
            return _TYPES[word], Option(*map(ast.literal_eval, call.args), **given)
    return None


_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool, "Bounds": str}  # a file, as text
