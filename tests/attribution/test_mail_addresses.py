"""Nobody is lost because of how a header is written."""

import email.utils

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coowned.attribution.mail_addresses import AddressList, named_addresses, parse_addresses

_WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_", min_size=1, max_size=12)
_ADDRESS = st.builds(lambda local, domain: f"{local}@{domain}.org", _WORD, _WORD)


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ("ann@x.org", ["ann@x.org"]),
        ("Ann <ann@x.org>, bob@x.org", ["ann@x.org", "bob@x.org"]),
        ('"Doe, Ann" <ann@x.org>', ["ann@x.org"]),
        (r'"Ann \"A\" Doe" <ann@x.org>', ["ann@x.org"]),
        ("=?utf-8?q?Doe=2C_Ann?= <ann@x.org>", ["ann@x.org"]),
        ("ann@x.org (Ann, of x)", ["ann@x.org"]),
        ("(a (nested) comment) ann@x.org", ["ann@x.org"]),
        ("team: ann@x.org, Bob <bob@x.org>;, carol@x.org", ["ann@x.org", "bob@x.org", "carol@x.org"]),
        ("ann@x.org; bob@x.org;", ["ann@x.org", "bob@x.org"]),
        ("<@relay.org,@other.org:ann@x.org>", ["ann@x.org"]),
        ("ann@[IPv6:::1], bob@x.org", ["ann@[IPv6:::1]", "bob@x.org"]),
        ('"ann"@x.org', ["ann@x.org"]),
        ('"ann b"@x.org', ['"ann b"@x.org']),
        ('Ann <"ann b"@x.org>', ['"ann b"@x.org']),
        (r'"a\nn"@x.org, <"b\ob"@x.org>', ["ann@x.org", "bob@x.org"]),
        (r'"a\"b"@x.org', [r'"a\"b"@x.org']),
        ('ann."b".lee@x.org', ["ann.b.lee@x.org"]),
        ("ann(Ann)@x.org (home)", ["ann@x.org"]),
        ("o'brien@x.org", ["o'brien@x.org"]),
        ("Jürgen <jürgen@bücher.de>", ["jürgen@bücher.de"]),
        ("", []),
        (" , ,", []),
        ("<>", []),
    ],
)
def test_well_formed(value, addresses):
    assert parse_addresses(value) == AddressList(tuple(addresses), 0, False)


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ("<ann@x.org", ["ann@x.org"]),
        ("ann@x.org>", ["ann@x.org"]),
        ("<<ann@x.org>>", ["ann@x.org"]),
        ("<ann@x.org, Bob <bob@x.org>", ["ann@x.org", "bob@x.org"]),
        ("<ann@x.org, bob@x.org>", ["ann@x.org", "bob@x.org"]),
        ("ann@x.org bob@x.org", ["ann@x.org", "bob@x.org"]),
        ('"Ann" ann@x.org', ["ann@x.org"]),
        ('"ann@x.org"', ["ann@x.org"]),
        ('"Ann <ann@x.org>, bob@x.org', ["ann@x.org", "bob@x.org"]),
        ("Ann (of x <ann@x.org>, bob@x.org", ["ann@x.org", "bob@x.org"]),
        ("ann @ x.org", ["ann@x.org"]),
        ("'ann@x.org'", ["ann@x.org"]),
        ("ann@x.org.", ["ann@x.org"]),
        ("mailto:ann@x.org", ["ann@x.org"]),
        ("@relay.org,@other.org:ann@x.org, bob@x.org", ["ann@x.org", "bob@x.org"]),
        (r"a\nn@x.org", ["ann@x.org"]),
        ("<mailto:ann@x.org>", ["ann@x.org"]),
        ("ann at x.org (Ann)", ["ann@x.org"]),
        ("ann@x.org: bob@x.org", ["ann@x.org", "bob@x.org"]),
        ("ann@x.org <bob@x.org>", ["bob@x.org", "ann@x.org"]),
        ("=?utf-8?q?Ann_=3Cann=40x=2Eorg=3E?=", ["ann@x.org"]),
    ],
)
def test_malformed_but_clear(value, addresses):
    assert parse_addresses(value) == AddressList(tuple(addresses), 0, False)


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("Root", ["root"]),
        ("broken@", ["broken@"]),
        ("@x.org", ["@x.org"]),
        ("Ann@x@y.org", ["ann@x@y.org"]),
        ('b"o"b@x.org', ['b"o"b@x.org']),
        ('Bob <b"o"b@x.org>', ['b"o"b@x.org']),
        ('b"ob@x.org', ['b"ob@x.org']),
        ("b(o)b@x.org", ["b(o)b@x.org"]),
        ("Ann Doe <>", ["ann doe"]),
        ("Ann </O=ORG/CN=ANN>", ["/o=org/cn=ann"]),
        ("Doe, Ann <ann@x.org>", ["doe", "ann@x.org"]),
        ("(only a comment)", ["only a comment"]),
        ("=?utf-8?q?J=C3=BCrgen?=", ["jürgen"]),
    ],
)
def test_unparsable_entries_are_kept(value, keys):
    parsed = parse_addresses(value)
    assert list(parsed.addresses) == keys
    assert parsed.unreadable == 1


@pytest.mark.parametrize(
    "value",
    [
        "undisclosed-recipients:;",
        "undisclosed-recipients:",
        "Undisclosed recipients",
        "unlisted-recipients:; (no To-header)",
    ],
)
def test_recipients_that_are_not_listed_are_nobody_but_said(value):
    assert parse_addresses(value) == AddressList((), 0, True)


def test_empty_group_is_said_even_beside_others():
    assert parse_addresses("friends:;, ann@x.org") == AddressList(("ann@x.org",), 0, True)


@given(st.lists(st.tuples(st.text(max_size=15), _ADDRESS), min_size=1, max_size=5))
def test_what_the_standard_library_writes_is_read(people):
    written = ", ".join(email.utils.formataddr((" ".join(name.split()), address)) for name, address in people)
    assert list(parse_addresses(written).addresses) == [address for _, address in people]


@given(
    before=st.text('<>,;"() \\[]@', max_size=8),
    after=st.text('<>,;"() \\[]@', max_size=8),
    address=_ADDRESS,
)
@example(before='"', after="", address="a@x.org")
def test_damage_hides_nobody(before, after, address):
    # A bracket that closes after the address makes it a comment or a display name: those do not count as damage.
    if ("(" in before and ")" in after) or ('"' in before and '"' in after):
        return
    found = parse_addresses(f"{before} {address} {after}").addresses
    assert any(address in entry for entry in found)


def test_a_question_mark_is_part_of_a_name():
    assert parse_addresses("who?me@x.org, <mailto:ann@x.org?subject=hi>").addresses == ("who?me@x.org", "ann@x.org")


@given(st.text())
@example("?@")
def test_any_text_is_parsed(value):
    parsed = parse_addresses(value)
    assert all(address.strip() for address in parsed.addresses)
    assert 0 <= parsed.unreadable <= len(parsed.addresses)


@pytest.mark.parametrize(
    "unit",
    [
        '"',
        '\\"',
        "(",
        "<",
        "[",
        "a@[",
        " ",
        ",",
        ":",
        "@",
        "=?",
        "<a@b",
        '"a" ',
        "a <",
        'b"',
        "a()b",
        "a(b",
        "@a:",
        "@a,",
        '<b"',
    ],
)
def test_long_damaged_values_are_read(unit):
    # Each of these takes minutes where any part of the parser goes back over what it has read.
    assert "ann@x.org" in parse_addresses(unit * (400_000 // len(unit)) + ", ann@x.org").addresses


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ('"Doe, Ann" <ann@x.org>, bob@x.org (Bob Lee), c@x.org', [("Doe, Ann", "ann@x.org"), ("Bob Lee", "bob@x.org")]),
        (r'"Ann \"A\" Lee" <ann@x.org>', [('Ann "A" Lee', "ann@x.org")]),
        ("team: Ann <ann@x.org>;", [("Ann", "ann@x.org")]),
        # The standard library gives these no name, or a name without its address.
        ("Ann [lead] <ann@x.org>", [("Ann [lead]", "ann@x.org")]),
        ("Ann Lee <<ann@x.org>", [("Ann Lee", "ann@x.org")]),
        ("Ann <ann@x.org> <lee@x.org>", []),  # whose name is it?
        ("ann@x.org, broken, <>", []),
    ],
)
def test_names_of_addresses(value, names):
    assert named_addresses(value) == names


@given(st.text(st.sampled_from(list('ab@.,;:<>()[]" \\=?')), max_size=60))
def test_named_addresses_are_those_parsed(value):
    found = named_addresses(value)
    assert {address for _, address in found} <= set(parse_addresses(value).addresses)
    assert all(name for name, _ in found)
