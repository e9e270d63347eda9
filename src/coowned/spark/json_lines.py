"""JSON lines on Spark: looked through once, so that ids and users have the types they have on one machine."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from coowned.attribution.identifiers import one_line
from coowned.attribution.table_files import json_kind
from coowned.codec import unique_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NULL = json_kind(None)
_ARROW = {"text": pa.string(), "an integer": pa.int64(), "a number": pa.float64(), "true or false": pa.bool_()}

Kind = tuple[bool, str]  # whether it is inside a list, and what it is


@dataclasses.dataclass(kw_only=True)
class Survey:
    """A summary of some lines of one file: its fields, the kinds of value in the named ones, and the first problem."""

    fields: set[str] = dataclasses.field(default_factory=set)
    kinds: dict[str, set[Kind]]
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


def arrow_type(kinds: set[Kind]) -> pa.DataType | None:
    """The type of a column with these kinds of value, text where they differ; None if lists and other values occur."""
    known = {kind for kind in kinds if kind != (False, _NULL)}
    if len({in_list for in_list, _ in known}) > 1:
        return None
    words = {word for _, word in known} - {_NULL}
    words = {"a number"} if words == {"an integer", "a number"} else words
    if len(words) == 1:
        entry = _ARROW.get(next(iter(words)), pa.struct([]))
    else:
        entry = pa.string() if words else pa.null()
    return pa.list_(entry) if any(in_list for in_list, _ in known) else entry


def _survey_lines(names: tuple[str, ...], rows: Iterable[Any]) -> Iterator[tuple[str, Survey]]:
    """Runs on the executors."""
    found: dict[str, Survey] = {}
    for text, file, valid in rows:
        part = found.setdefault(file, Survey(kinds={name: set() for name in names}))
        if part.problem is not None or not text.strip():
            continue
        try:
            fields = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            part.problem = f"not JSON ({one_line(error)}); write one complete object per line"
            continue
        if not isinstance(fields, dict):
            part.problem = f"{json_kind(fields)} where an object was expected; write one object per line"
            continue
        part.fields.update(fields)
        for name in names:
            value = fields.get(name)
            part.kinds[name].update(_kinds(value))
            if not valid and "\ufffd" in str(value):  # what Spark makes of bytes that are not UTF-8
                part.problem = f"column {name!r} is not UTF-8; save the file as UTF-8"
    yield from found.items()


def _kinds(value: Any) -> Iterator[Kind]:
    if isinstance(value, list):
        yield True, _NULL
        yield from ((True, _kind(entry)) for entry in value)
    else:
        yield False, _kind(value)


def _kind(value: Any) -> str:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "a number"
    return json_kind(value)
