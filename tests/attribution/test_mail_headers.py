"""Header fields, ids, dates, encoded words and charsets."""

import email.utils
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.attribution.mail_headers import (
    date_seconds,
    decode_text,
    decode_words,
    from_base64,
    header_fields,
    message_ids,
    own_message_id,
    split_message,
)

_WANTED = frozenset({b"to", b"cc", b"subject"})


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r\r\n", b"\r"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\n", b"From ann Mon Jan  1 10:00:00 2024\n"])
def test_every_line_ending_gives_the_same_fields(start, end):
    message = start.replace(b"\n", end) + end.join(
        [b"To: ann@x.org,", b"\tbob@x.org", b"CC : carol@x.org", b"", b"To: no"]
    )
    header, body = split_message(message)
    assert header_fields(header, _WANTED) == {b"to": [b" ann@x.org,\tbob@x.org"], b"cc": [b" carol@x.org"]}
    assert body == b"To: no"


def test_a_line_that_is_no_field_does_not_end_the_header():
    header, _ = split_message(b"Subject: a\nthis is no field\nTo: bob@x.org\nTo: carol@x.org\n\nbody")
    assert header_fields(header, _WANTED)[b"to"] == [b" bob@x.org", b" carol@x.org"]


def test_message_without_body_or_without_header():
    assert split_message(b"To: bob@x.org") == (b"To: bob@x.org", b"")
    assert split_message(b"") == (b"", b"")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("<a@x>", "a@x"), (" <a@x> (added)", "a@x"), ("a@x", "a@x"), ("<>", ""), ("", ""), ("no at sign", "no at sign")],
)
def test_own_message_id(value, expected):
    assert own_message_id(value) == expected


def test_references_are_all_found():
    assert message_ids("<a@x><b@x>\t <c@x>") == ["a@x", "b@x", "c@x"]
    assert message_ids("Your message of Monday <a@x>") == ["a@x"]
    assert message_ids("a@x b@x nonsense") == ["a@x", "b@x"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("=?iso-8859-1?Q?caf=E9_au?= lait", "café au lait"),
        ("=?utf-8?B?w6k=?= =?UTF-8?B?w6k=?=", "éé"),
        ("=?utf-8?b?ww?= =?utf-8?b?qQ==?=", "é"),  # cut inside a character, padding lost
        ("=?utf-8*en?q?hi?=", "hi"),
        ("=?no-such?q?hi?=", "hi"),
        ("=?utf-8?x?hi?=", "=?utf-8?x?hi?="),
        ("1 =? 2 ?= 3", "1 =? 2 ?= 3"),
    ],
)
def test_encoded_words(value, expected):
    assert decode_words(value) == expected


@given(
    st.binary(max_size=200),
    st.text(max_size=12)
    | st.sampled_from(["utf-7", "punycode", "idna", "hex", "unicode_escape", "utf-16", "gb2312", "\0"]),
)
def test_any_bytes_in_any_charset_are_valid_text(raw, charset):
    text, _ = decode_text(raw, charset)
    assert text.encode("utf-8").decode("utf-8") == text


def test_lone_surrogates_do_not_come_through():
    assert decode_text(b"+2AA-", "utf-7")[0].encode("utf-8") == b"?"


@given(st.binary(max_size=100))
def test_base64_never_fails(raw):
    assert isinstance(from_base64(raw), bytes)


@given(st.datetimes())
def test_dates_are_read_in_utc(moment):
    moment = moment.replace(microsecond=0)
    seconds = date_seconds(email.utils.format_datetime(moment))
    if moment.year >= 1000:  # the standard parser takes years of fewer digits for abbreviations
        assert seconds == (moment - moment.__class__(1970, 1, 1)).total_seconds()


def test_dates_with_zones_and_without_sense():
    assert date_seconds("Mon, 1 Jan 2024 02:00:00 +0200") == date_seconds("1 Jan 2024 00:00:00 GMT") == 1704067200
    for value in (
        "",
        "yesterday",
        "Mon, 45 Xyz 2024 99:99:99",
        "1 Jan 99999999999 00:00:00 +0000",
        "\x00",
        ", ,",
        "9" * 5000,
    ):
        assert date_seconds(value) is None


@given(st.text(max_size=60) | st.text("0123456789:+- ,JanMoUTC", max_size=40))
def test_any_date_is_read_or_null(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seconds = date_seconds(value)
    assert seconds is None or -62135596800 <= seconds <= 253402300799


def test_a_message_without_a_header_has_a_body_alone():
    assert split_message(b"From ann Mon Jan  1 10:00:00 2024\n\nTo: zoe@x.org\n\ntext") == (
        b"",
        b"To: zoe@x.org\n\ntext",
    )
