"""JSON lines on Spark: looked through once, so that no value is taken for one of another type."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coowned.attribution.identifiers import one_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NOTHING, _LIST, _EMPTY = "nothing", "a list (", "a list (nothing)"
_KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}
_ARROW = {
    "text": pa.string(), "a whole number": pa.int64(), "a number": pa.float64(), "true or false": pa.bool_(),
    "an object": pa.struct([]), "a list": pa.list_(pa.null()), _NOTHING: pa.null(),
}  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class Survey:
    """What some lines of one file hold: its fields, the kinds of value in the named ones, and the first fault."""

    fields: set[str] = dataclasses.field(default_factory=set)
    kinds: dict[str, set[str]]
    problem: str | None = None

    def join(self, other: "Survey") -> None:
        self.fields |= other.fields
        for name, kinds in other.kinds.items():
            self.kinds[name] |= kinds
        self.problem = self.problem or other.problem


def survey(lines: "DataFrame", names: Sequence[str]) -> dict[str, Survey]:
    """What each file holds; lines: text, file, valid (whether the text is UTF-8)."""
    found: dict[str, Survey] = {}
    for file, part in lines.rdd.mapPartitions(functools.partial(_survey_lines, tuple(names))).collect():
        found.setdefault(file, Survey(kinds={name: set() for name in names})).join(part)
    return found


def arrow_type(kinds: set[str]) -> pa.DataType | None:
    """The one type that all these kinds of value are of, or None."""
    told = kinds - {_NOTHING}
    if told - {_EMPTY} and all(kind.startswith(_LIST) for kind in told):
        told -= {_EMPTY}
    kind = next(iter(told), _NOTHING)
    if len(told) > 1 or ", " in kind:
        return None
    if not kind.startswith(_LIST):
        return _ARROW[kind]
    return pa.list_(_ARROW[kind.removeprefix(_LIST).removesuffix(")")])


def _survey_lines(names: tuple[str, ...], rows: Iterable[Any]) -> Iterator[tuple[str, Survey]]:
    """Runs on the executors."""
    found: dict[str, Survey] = {}
    for text, file, valid in rows:
        part = found.setdefault(file, Survey(kinds={name: set() for name in names}))
        if part.problem is not None:
            continue
        if not valid:
            part.problem = "not UTF-8; save the file as UTF-8"
            continue
        if not text.strip():
            continue
        try:
            fields = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unrepeated)
        except (ValueError, RecursionError) as error:
            part.problem = f"not JSON ({one_line(error)}); write one whole object a line"
            continue
        if not isinstance(fields, dict):
            part.problem = f"{_kind(fields).split(' (')[0]} where an object was expected; write one object a line"
            continue
        part.fields.update(fields)
        for name in names:
            value = fields.get(name)
            part.kinds[name].add(_kind(value))
            if "\\" in text and not _is_unicode(value):
                part.problem = f"half a surrogate pair in {name!r}; save the file as UTF-8"
    yield from found.items()


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a field is there twice in one object")
    return fields


def _kind(value: Any) -> str:
    if value is None:
        return _NOTHING
    if isinstance(value, list):
        entries = {_kind(entry).split(" (")[0] for entry in value} - {_NOTHING}
        return f"{_LIST}{', '.join(sorted(entries)) or _NOTHING})"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "a number"
    return _KINDS[type(value)]


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
