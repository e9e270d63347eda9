"""Typed JSON and TOML: what is read back, and what every error says."""

import dataclasses
import json
import math
import tomllib
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.codec import checksum, decode_json, decode_toml, decode_versions, encode_json, encode_toml
from coowned.errors import ConfigError, InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    name: str | None = None
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InputError("count must not be negative; count again")


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["outer-1"] = "outer-1"
    inner: Inner
    colour: Literal["green", "yellow"] = "green"
    second: Inner | None = None
    levels: dict[str, Inner] = {}
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    copies: list[int] = []
    flag: bool = False


def outer(**entries: object) -> str:
    return json.dumps({"format": "outer-1", "inner": {"count": 1}} | entries)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"format": "\xff"}', r"x.json: is not UTF-8 text \(byte 12\); write it again"),
        ("{", r"x.json: is not JSON \(.*line 1 column 2.*\); write it again"),
        ("", r"x.json: is not JSON"),
        ("[" * 100_000, "x.json: is not JSON"),
        (outer() + " x", r"x.json: is not JSON \(Extra data.*"),
        (outer() + outer(), r"x.json: is not JSON \(Extra data.*"),
        (
            '{"format": "outer-1", "inner": {"count": 1, "count": 2}}',
            r"is not JSON \(duplicate key 'count'\); write it",
        ),
        ("[1]", r"x.json: must be an object, not \[1\]"),
        (outer(inner={"count": 1, "weights": [1.0, math.nan]}), r"x.json: inner.weights\[1\] must be a finite number"),
        (outer(inner={"count": 1, "weights": [math.inf]}), r"inner.weights\[0\] must be a finite number, not inf"),
        (outer(inner={"count": 1, "weights": [1]}).replace("[1]", "[1e999]"), r"weights\[0\] must be a finite number"),
        (outer(copies=[1, math.nan]), r"copies\[1\] must be an integer, not nan"),
        (outer(**{"\ud800": 1}), "x.json: "),
        (outer(size="\ud800"), "x.json: contains half of a surrogate pair, which is not text; write it"),
    ],
)
def test_bad_json(text, sentence):
    with pytest.raises(InputError, match=sentence):
        decode_json(Outer, text, name="x.json", remedy="write it again")


def test_another_format():
    text = json.dumps({"format": "outer-0", "unknown": 1})
    with pytest.raises(InputError, match=r"^x: expected the format 'outer-1', not 'outer-0'; write it again$"):
        decode_json(Outer, text, name="x", remedy="write it again")
    with pytest.raises(InputError, match="expected the format 'inner-1', not None"):
        decode_json(Inner, '{"count": 3}', name="x", format="inner-1")
    assert decode_json(Inner, encode_json(Inner(count=3), format="inner-1"), name="x", format="inner-1").count == 3
    with pytest.raises(InputError, match="must be an object, not 3"):
        decode_json(Inner, "3", name="x", format="inner-1")


def test_several_versions():
    kinds = {"inner-2": Inner, "inner-1": dict[str, int]}
    assert decode_versions(kinds, '{"format": "inner-2", "count": 3}', name="x") == Inner(count=3)
    assert decode_versions(kinds, '{"format": "inner-1", "number": 3}', name="x") == {"number": 3}
    with pytest.raises(InputError, match=r"^x: expected the format 'inner-2' or 'inner-1', not 'inner-3'; again$"):
        decode_versions(kinds, '{"format": "inner-3", "unknown": 1}', name="x", remedy="again")
    with pytest.raises(InputError, match="must be an object, not 3"):
        decode_versions(kinds, "3", name="x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (outer(colours=1), "^x: has no key 'colours'; did you mean 'colour'\\?$"),
        (outer(inner={"count": 1, "nam": "a"}), "^x: inner has no key 'nam'; did you mean 'name'\\?$"),
        (outer(levels={"top": {"count": 1, "q": 2}}), "levels.top has no key 'q'; choose count, name or weights$"),
        (outer(second={"count": 1, "q": 2}), "second has no key 'q'; choose count, name or weights$"),
    ],
)
def test_unknown_keys(text, sentence):
    with pytest.raises(InputError, match=sentence):
        decode_json(Outer, text, name="x", remedy="write it again")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (outer(inner={"count": 1.0}), "^x: inner.count must be an integer, not 1.0; write it again$"),
        (outer(inner={"count": True}), "^x: inner.count must be an integer, not True"),
        (outer(inner={"count": 1, "name": 5}), "^x: inner.name must be a string or null, not 5"),
        (outer(inner={"count": 1, "weights": [1, "2"]}), r"^x: inner.weights\[1\] must be a number, not '2'"),
        (
            outer(inner={"count": 1, "name": ["long"] * 50}),
            r"not .{57}\.\.\.; write it again$",
        ),
        (outer(inner={"name": "a"}), "^x: inner needs the key 'count'; write it again$"),
        (outer(inner={"count": -1}), "^x: inner count must not be negative; count again$"),
        (outer(colour="greem"), "^x: colour must be 'green' or 'yellow', not 'greem'; did you mean 'green'\\?$"),
        (outer(colour=3), "^x: colour must be 'green' or 'yellow', not 3; write it again$"),
        (outer(colour=["green"]), "^x: colour must be 'green' or 'yellow', not \\['green'\\]; write it again$"),
        (outer(second=7), "^x: second must be an object or null, not 7"),
        (outer(second={}), "^x: second needs the key 'count'"),
        (outer(second={"count": "a"}), "^x: second.count must be an integer, not 'a'"),
        (outer(size=0), "^x: size must be an integer >= 1, not 0; write it again$"),
        (outer(flag=1), "^x: flag must be true or false, not 1"),
        (outer(copies={}), "^x: copies must be a list, not {}"),
        (outer(levels={"top": {"count": "a"}}), "^x: levels.….count must be an integer"),
    ],
)
def test_wrong_values(text, sentence):
    with pytest.raises(InputError, match=sentence):
        decode_json(Outer, text, name="x", remedy="write it again")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[inner]\ncount = 1\n[inner]\n", r"^c.toml: is not TOML \(.*line 3.*\); see the example$"),
        ("[inner]\ncount = 1\ncount = 2\n", r"^c.toml: is not TOML \(.*line 3"),
        ("[inner]\ncount = 1\nweights = [nan]\n", r"^c.toml: \[inner\] weights\[0\] must be a finite number, not nan"),
        ("[inner]\ncont = 1\n", r"^c.toml: \[inner\] has no key 'cont'; did you mean 'count'\?$"),
        ("[iner]\ncount = 1\n", r"^c.toml: there is no section \[iner\]; did you mean 'inner'\?$"),
        ("inner = 3\n", r"^c.toml: inner must be a section \[inner\] with keys, not one value"),
        ("[inner]\n", r"^c.toml: \[inner\] needs the key 'count'; see the example$"),
        ("", r"^c.toml: needs the section \[inner\]; see the example$"),
        ("[inner]\ncount = 1\nname = 3\n", r"^c.toml: \[inner\] name must be a string, not 3"),
        ("[inner]\ncount = -1\n", r"^c.toml: \[inner\] count must not be negative; count again$"),
        ("x" * 2_000_000, r"^c.toml: is not TOML \("),  # never ends where the search for long keys is quadratic
        ("a." * 100_000 + "b = 1", r"^c.toml: is not TOML \(a key of more than 100 parts\); see the example$"),
    ],
)
def test_toml_errors(text, sentence):
    class Config(msgspec.Struct, frozen=True):
        inner: Inner

    with pytest.raises(ConfigError, match=sentence):
        decode_toml(Config, text, name="c.toml", error=ConfigError, remedy="see the example")
    assert decode_toml(Config, "[inner]\ncount = 2\nweights = [1]", name="c").inner.weights == (1.0,)


@pytest.mark.parametrize(
    "text",
    [
        '{"count": 1, "name": "hunter2',
        '{"count": "hunter2"}',
        '{"count": 1, "name": ["hunter2"]}',
        '{"format": "hunter2"}',
        '{"count": 1, "name": "hunter2", "name": "hunter2"}',
    ],
)
def test_secrets_are_not_shown(text):
    with pytest.raises(InputError) as raised:
        decode_json(Inner, text, name="the key", secret=True, format="a" if "format" in text else None)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@given(
    st.builds(
        Outer,
        inner=st.builds(
            Inner,
            count=st.integers(0, 2**70),
            name=st.none() | st.text(),
            weights=st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
        ),
        colour=st.sampled_from(["green", "yellow"]),
        second=st.none() | st.builds(Inner, count=st.integers(0, 10)),
        copies=st.lists(st.integers(-(2**63), 2**63)),
    ),
    st.sampled_from([None, 2]),
)
def test_round_trip(value, indent):
    assert decode_json(Outer, encode_json(value, indent=indent), name="x") == value


def test_encoding_refuses_nan():
    for value in (math.nan, -math.inf, np.array([math.inf]), {"a": [np.float64("nan")]}):
        with pytest.raises(InputError, match="cannot be written as JSON"):
            encode_json(value)
    with pytest.raises(InputError, match="object cannot be written as JSON"):
        encode_json(object())
    assert encode_json({"a": np.arange(3), "b": np.int32(4)}) == '{"a": [0, 1, 2], "b": 4}'


def test_checksum_does_not_depend_on_order():
    assert checksum({"a": 1, "b": (2, 3)}) == checksum({"b": [2, 3], "a": 1}) != checksum({"a": 1, "b": [3, 2]})


def test_toml_round_trip():
    sections = {
        "data": {"users": ["from", "to"], "splits": [0.8, 0.1, 0.1], "nothing": []},
        "privacy": {"epsilon": 8.0, "delta": 1e-8, "public": False, "seed": 2**60},
        "model": {"text": 'a "quoted"\n\t\\ \x7f \x00 é 😀'},
        "python": {"arguments": {"width": 3, "a name": ["x"]}, "nothing": {}},
        "report": {},
    }
    assert tomllib.loads(encode_toml(sections)) == sections
    assert tomllib.loads(encode_toml({"run": {"seed": None, "rate": np.float64(0.5)}})) == {"run": {"rate": 0.5}}
