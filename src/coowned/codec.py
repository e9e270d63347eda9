"""JSON and TOML to typed values and back; errors name the file, the key, what was expected and the nearest word.

>>> import msgspec
>>> class Coin(msgspec.Struct, frozen=True):
...     sides: int
>>> decode_json(Coin, '{"sides": 2}', name="coin.json")
Coin(sides=2)
>>> decode_json(Coin, '{"sids": 2}', name="coin.json")
Traceback (most recent call last):
  ...
coowned.errors.InputError: coin.json: has no key 'sids'; did you mean 'sides'?
"""

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from coowned.errors import CoownedError, InputError
from coowned.progress import did_you_mean, nearest, one_of

Kind = TypeVar("Kind")
Path = tuple[str | int, ...]

_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "bytes": "a string",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_RECORDS = (inspect.StructType, inspect.DataclassType)
_OBJECTS = (*_RECORDS, inspect.DictType)
_LISTS = (inspect.ListType, inspect.VarTupleType)
_ANY = inspect.AnyType()
# tomllib needs quadratic time for the parts of a key. Possessive, from the start of a part: linear time here.
_LONG_KEY = re.compile(r"(?<![^\s=.\[\]])(?:[^\s=.\[\]]++\s*+\.\s*+){100}")
_SHOWN = 60  # characters of a wrong value that an error shows


def decode_json(
    kind: type[Kind],
    text: str | bytes,
    *,
    name: str,
    format: str | None = None,
    remedy: str = "",
    secret: bool = False,
) -> Kind:
    """Reads one JSON text as a `kind`.

    Guarantees:
      - Not UTF-8, not JSON, trailing data, duplicate keys, NaN and infinity are refused, each with one sentence.
        (test_bad_json)
      - Another format is refused before anything else is looked at.   (test_another_format)
      - An unknown key is refused with the nearest known one, in dataclasses too.   (test_unknown_keys)
      - Wrong types, missing keys and unknown words are refused with the path to them.   (test_wrong_values)
      - With `secret` no error shows a value.   (test_secrets_are_not_shown)

    Args:
      kind: a frozen `msgspec.Struct` or dataclass, or any type msgspec knows. A field `format: Literal["..."]` is
        checked first.
      name: what errors call the file.
      format: the value of an entry "format" that `kind` has no field for.
      remedy: what to do, appended to errors without a remedy of their own.
      secret: leave values out of errors.
    """
    reader = _Reader(name=name, remedy=remedy, secret=secret)
    return reader.convert(kind, reader.parse(text), format)


def decode_versions(kinds: Mapping[str, type], text: str | bytes, *, name: str, remedy: str = "") -> Any:
    """Reads one JSON text as the kind that its entry "format" names, with the promises of `decode_json`.

    Guarantees:
      - A format that is not among them is refused before anything else is looked at.   (test_several_versions)
    """
    reader = _Reader(name=name, remedy=remedy)
    value = reader.parse(text)
    found: Any = value.get("format") if isinstance(value, dict) else next(iter(kinds))
    reader.check_format(tuple(kinds), found)
    return reader.convert(kinds[found], value, found)


def decode_toml(
    kind: type[Kind], text: str | bytes, *, name: str, error: type[CoownedError] = InputError, remedy: str = ""
) -> Kind:
    """Reads one TOML text as a `kind`; the same promises, with keys named as `[section] key`.

    Guarantees:
      - An error names the section and the key.   (test_toml_errors)
    """
    reader = _Reader(name=name, error=error, remedy=remedy, toml=True)
    return reader.convert(kind, reader.parse(text), None)


def decode_sections(
    kind: type[Kind],
    sections: Mapping[str, Mapping[str, Any]],
    *,
    name: str,
    error: type[CoownedError] = InputError,
    remedy: str = "",
) -> Kind:
    """Reads sections of plain values, as TOML has them, as a `kind`; errors are those of `decode_toml`."""
    return _Reader(name=name, error=error, remedy=remedy, toml=True).convert(kind, sections, None)


def encode_json(value: Any, *, indent: int | None = None, format: str | None = None) -> str:
    """Writes structs, dataclasses, numpy arrays and plain values as JSON; NaN and infinity are refused.

    Guarantees:
      - `decode_json(type(value), encode_json(value), ...)` is equal to value.   (test_round_trip)
      - Values that JSON cannot represent are refused with InputError.   (test_encoding_refuses_nan)

    Args:
      indent: spaces per level; None for one line.
      format: an entry "format" put before the others.
    """
    plain = to_plain(value)
    if format is not None:
        plain = {"format": format, **plain}
    try:
        return json.dumps(plain, indent=indent, allow_nan=False)
    except ValueError as found:
        raise InputError(f"{type(value).__name__} cannot be written as JSON ({found})") from None


def encode_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes sections of plain values and lists of them as TOML; None leaves a key out.

    Guarantees:
      - `tomllib.loads` gives the sections back.   (test_toml_round_trip)

    >>> print(encode_toml({"data": {"users": ["from", "to"], "format": None}, "privacy": {"delta": 1e-8}}))
    [data]
    users = ["from", "to"]
    <BLANKLINE>
    [privacy]
    delta = 1e-08
    <BLANKLINE>
    """
    blocks = []
    for name, section in to_plain(sections).items():
        lines = [f"{key} = {_toml_value(value)}\n" for key, value in section.items() if value is not None]
        blocks.append(f"[{name}]\n" + "".join(lines))
    return "\n".join(blocks)


def to_plain(value: Any) -> Any:
    """Converts structs and dataclasses to dicts, arrays and tuples to lists, for writing JSON."""
    return msgspec.to_builtins(value, enc_hook=_plain_array, str_keys=True)


def checksum(value: Any) -> str:
    """Computes SHA-256 of the value's JSON with sorted keys: the same whatever the order of keys and the spaces."""
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object without duplicate keys, as an `object_pairs_hook`; raises ValueError otherwise.

    >>> unique_keys([("a", 1), ("a", 2)])
    Traceback (most recent call last):
      ...
    ValueError: duplicate key 'a'
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def shortened(value: Any) -> str:
    """Returns a value's text, shortened for an error."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reader:
    """A reader of one text, with the wording of its errors."""

    name: str
    remedy: str
    error: type[CoownedError] = InputError
    secret: bool = False
    toml: bool = False

    def parse(self, text: str | bytes) -> Any:
        """Parses to plain Python values; numbers may still be infinite."""
        language = "TOML" if self.toml else "JSON"
        try:
            if isinstance(text, bytes):
                text = text.decode("utf-8")
            if self.toml and _LONG_KEY.search(text):
                raise ValueError("a key of more than 100 parts")
            return tomllib.loads(text) if self.toml else json.loads(text, object_pairs_hook=unique_keys)
        except UnicodeDecodeError as found:
            self.refuse((), f"is not UTF-8 text (byte {found.start})")
        except RecursionError:
            self.refuse((), f"is not {language} (too deeply nested)")
        except ValueError as found:
            self.refuse((), f"is not {language}" + ("" if self.secret else f" ({found})"))

    def convert(self, kind: type[Kind], value: Any, format: str | None) -> Kind:
        info = inspect.type_info(kind)
        fields = info.fields if isinstance(info, _RECORDS) else ()
        if isinstance(info, _RECORDS) and not isinstance(value, dict):
            self._refuse_type((), "object", value)
        if format is not None:
            self.check_format((format,), value.get("format"))
            value = {key: entry for key, entry in value.items() if key != "format"}
        for field in fields:
            if field.name == "format" and isinstance(field.type, inspect.LiteralType):
                self.check_format(field.type.values, value.get("format"))
        self._check(info, value, ())
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as found:
            self._refuse_invalid(str(found), value)
        except UnicodeEncodeError:
            self.refuse((), "contains half of a surrogate pair, which is not text")

    def refuse(self, path: Path, problem: str, *, ends: bool = False) -> NoReturn:
        """Raises the error; `ends` if the problem already says what to do."""
        remedy = "" if ends or not self.remedy else f"; {self.remedy}"
        where = self._where(path)
        raise self.error(f"{self.name}: {where + ' ' if where else ''}{problem}{remedy}") from None

    def _check(self, info: inspect.Type, value: Any, path: Path) -> None:
        """Raises an error for unknown or missing keys, unknown words and infinite numbers; msgspec checks the types."""
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(path, f"must be a finite number, not {value}")
        choices = info.types if isinstance(info, inspect.UnionType) else (info,)
        if isinstance(info, inspect.LiteralType):
            self._check_word(info.values, value, path)
        elif isinstance(value, dict):
            self._check_object(next((choice for choice in choices if isinstance(choice, _OBJECTS)), _ANY), value, path)
        elif isinstance(value, list):
            item = next((choice.item_type for choice in choices if isinstance(choice, _LISTS)), _ANY)
            # There may be millions of integers, and nothing to find in them.
            for index, entry in enumerate(() if isinstance(item, inspect.IntType) else value):
                self._check(item, entry, (*path, index))

    def _check_object(self, info: inspect.Type, value: dict[str, Any], path: Path) -> None:
        if not isinstance(info, _RECORDS):
            for key, entry in value.items():
                self._check(getattr(info, "value_type", _ANY), entry, (*path, key))
            return
        fields = {field.encode_name: field for field in info.fields}
        for key in value:
            if key not in fields:
                close = nearest(key, fields)
                is_section = self.toml and not path
                problem = f"there is no section [{key}]" if is_section else f"has no key {key!r}"
                self.refuse(path, problem + close, ends=bool(close))
        for key, field in fields.items():
            if key in value:
                self._check(field.type, value[key], (*path, key))
            elif field.required:
                needed = f"the section [{key}]" if self.toml and not path else f"the key {key!r}"
                self.refuse(path, f"needs {needed}")

    def _check_word(self, known: tuple[Any, ...], value: Any, path: Path) -> None:
        if value in known:
            return
        close = did_you_mean(value, map(str, known)) if isinstance(value, str) and len(known) > 1 else ""
        shown = "another word" if self.secret else repr(value)
        self.refuse(path, f"must be {one_of(map(repr, known))}, not {shown}{close}", ends=bool(close))

    def check_format(self, known: tuple[Any, ...], value: Any) -> None:
        if value not in known:
            shown = "another" if self.secret else repr(value)
            self.refuse((), f"expected the format {one_of(map(repr, known))}, not {shown}")

    def _refuse_type(self, path: Path, expected: str, value: Any) -> NoReturn:
        words = [_WORDS.get(word, word) for word in expected.split(" | ")]
        if self.toml:
            words = [word for word in words if word != "null"]
            if words == ["an object"] and len(path) == 1:
                self.refuse((), f"{path[0]} must be a section [{path[0]}] with keys, not one value")
        self.refuse(path, f"must be {one_of(words)}{self._not(value)}")

    def _refuse_invalid(self, message: str, value: Any) -> NoReturn:
        """Rewords an error of msgspec: "Expected `int`, got `str` - at `$.a[2]`"."""
        problem, _, written = message.partition(" - at `$")
        path, found = _resolve(written.rstrip("`"), value)
        expected = re.fullmatch(r"Expected `([^`]+)`(?:, got `[^`]+`|(.*))", problem)
        if expected is None:  # from a __post_init__, which may say what to do
            self.refuse(path, problem, ends=True)
        kinds, limit = expected.groups()
        if not limit:
            self._refuse_type(path, kinds, found)
        self.refuse(path, f"must be {_WORDS.get(kinds, kinds)}{limit}{self._not(found)}")

    def _not(self, value: Any) -> str:
        return "" if self.secret else f", not {shortened(value)}"

    def _where(self, path: Path) -> str:
        """Formats a path: [section] key of TOML, key.key[index] of JSON."""
        section = self.toml and bool(path)
        rest = path[1:] if section else path
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest).removeprefix(".")
        return f"[{path[0]}] {text}".rstrip() if section else text


def _resolve(written: str, value: Any) -> tuple[Path, Any]:
    """Resolves a path that msgspec writes as `.a[2].b` to the path and its value; keys of dicts are written [...]."""
    path: list[str | int] = []
    for key, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", written):
        step: str | int = key or (int(index) if index.isdigit() else "…")
        path.append(step)
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = "…"
    return tuple(path), value


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml_value(key)} = {_toml_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _plain_array(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return value.tolist()
    raise InputError(f"{type(value).__name__} cannot be written as JSON")
