"""User keys: one person, one key; merging is safe, splitting is not."""

# ruff: noqa: E501 (tables of cases: one case a line)

import base64
import dataclasses
import re

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings

from coowned import Aliases, InputError, UserKeyRules, from_table
from coowned.attribution.user_keys import read_keys

RULES = [field.name for field in dataclasses.fields(UserKeyRules)]

# Letters, marks and signs that the rules look at, their look-alikes among the compatibility forms, and odd cases of case.
ALPHABET = "aBbéÉe\u0301ßẞSsςσΣİıiKÅﬁ½김 \t\u00a0\n,，.．+＋@＠<>＜-'|ᾳΑ\u0345¨;。｡\u2800\"\\%()"
ENCODED = [
    "xn--mnchen-3ya.de",
    "MÜnchen.de>",
    "XN--Mnchen-3YA.de",
    "xn--.xn--a",
    "a.xn--ß",
    "xn--gmail-.com",
    "xn--oh7c.c",
    "xn--5g7c.de",
    "xn--n--b--9s33a.c",
]
spellings = st.one_of(
    st.text(st.sampled_from(ALPHABET), max_size=10),
    st.text(max_size=8),
    st.builds(
        "{}=?{}?{}?{}?={}".format,
        st.sampled_from(["", "＝?q?q?a?=", "a "]),
        st.sampled_from(["utf-8", "x"]),
        st.sampled_from("qQbB"),
        st.sampled_from(["", "bob", "b=6Fb=40x.org", "Qm9i", "=3D=3Fx=3Fq=3Fa=3F=3D", "=E2=80=8B", "=00"]),
        st.sampled_from(["", "@x.org", " <b@x.org>"]),
    ),
    st.builds(
        "{}{}{}@{}".format,
        st.sampled_from(["", "Bob <", "a, b <"]),
        st.sampled_from(
            ["bob", "B.ob", ".", "b..ob+x", ".+x", "+x", "bob+", "bob+é", "bob+＠", '"b\\ob"', 'b"o"b', "b%a"]
        ),
        st.sampled_from(["", "+lists", ".", "+a.b"]),
        st.sampled_from(
            ["gmail.com", "gmail。com", "googlemail.com>", "GMAIL.com", "x.org>", "x.org", "x.org> ", *ENCODED]
        ),
    ),
)
rule_sets = st.sets(st.sampled_from(RULES))


def rules_of(names):
    return UserKeyRules(**{name: name in names for name in RULES})


@given(st.lists(spellings, min_size=1, max_size=5), rule_sets)
@settings(max_examples=150)
@example([",,"], {"author_names"})
@example(["a@xn--xn--b-.c", "a@xn--ssxn---ib5gcwqr8u.c"], {"international_domains", "unicode"})
@example(["Σ̃ΑΣ"], {"case", "unicode"})
def test_canonical_is_idempotent(words, names):
    rules = rules_of(names)
    keys = rules.canonical(words).to_list()
    assert rules.canonical(keys).to_list() == keys


@given(st.lists(spellings, min_size=2, max_size=6), rule_sets, rule_sets)
@settings(max_examples=200)
@example(["x <a@b.c>", "x a b c"], {"author_names"}, {"bracketed_addresses"})
@example(["a+z@x.y", "a z x y"], {"author_names"}, {"plus_tags"})
@example(["x，y", "x y"], {"author_names"}, {"unicode"})
@example(["x,y,\nz", "x y z"], {"author_names"}, {"whitespace"})
@example([".+x@gmail.com", "+x@gmail.com"], {"dots"}, {"plus_tags"})
@example(["a+＠@x.y", "a@x.y"], {"plus_tags"}, {"unicode"})
@example(["a@xn--Mnchen-3ya.de", "a@München.de"], {"international_domains"}, {"case"})
def test_rules_only_merge(words, few, more):
    fewer = rules_of(few).canonical(words).to_list()
    many = rules_of(few | more).canonical(words).to_list()
    for i in range(len(words)):
        for j in range(i):
            if fewer[i] == fewer[j]:
                assert many[i] == many[j], (words[i], words[j], many[i], many[j])


@given(
    st.lists(st.text(st.sampled_from("ab@ \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u3000"), max_size=7), min_size=1)
)
def test_runs_of_white_space_are_one_space(words):
    """By one plain replacement of every key, where the rules change only those that need it."""
    plain = pl.Series(words).str.replace_all(r"\s+", " ").str.strip_chars()
    assert rules_of({"whitespace"}).canonical(words).to_list() == plain.to_list()


@pytest.mark.parametrize(
    ("rules", "one", "other"),
    [
        (UserKeyRules(), "Ann@X.org", "ann@x.org"),
        (UserKeyRules(), "Ann <ann+x@XN--MNCHEN-3YA.de>", "ann@München.de"),
        (UserKeyRules(), "ann@mail.xn--strae-oqa.de", "ann@mail.strasse.de"),
        (UserKeyRules(), "  Carol   Jones", "carol jones"),
        (UserKeyRules(), "Bob Stone <bob@x.org>", "bob@x.org"),
        (UserKeyRules(), "bob+news@x.org", "bob@x.org"),
        (UserKeyRules(), "b.o.b@gmail.com", "bob@googlemail.com"),
        (UserKeyRules(), "STRASSE", "Straße"),
        (UserKeyRules(), "ΟΔΥΣΣΕΥΣ", "οδυσσευς"),
        (UserKeyRules(), "e\u0301", "é"),
        (UserKeyRules(), "ｂｏｂ", "bob"),
        (UserKeyRules(), "bob@mail.x\u3002org", "bob@mail.x.org"),
        (UserKeyRules(), "Bob <bob@mail\uff61x\uff0eorg\u3002>", "bob@mail.x.org"),
        (UserKeyRules(), '"b\\ob"@x.org', "bob@x.org"),
        (UserKeyRules(), 'Bob <"b\\ob"@x.org>', "bob@x.org"),
        (UserKeyRules(), '"b\\o\\b stone"@x.org', '"bob stone"@x.org'),
        (UserKeyRules(), 'bob."q".stone@x.org', "bob.q.stone@x.org"),
        (UserKeyRules(), "b\\ob@x.org", "bob@x.org"),
        (UserKeyRules(), "<@a.org,@b.org:bob@x.org>", "bob@x.org"),
        (UserKeyRules(), "@a.org,@b.org:bob@x.org", "bob@x.org"),
        (UserKeyRules(), "Ann\u2800Lee", "ann lee"),
        (UserKeyRules(), "\u3164Ann\uffa0Lee\u2800", "ann lee"),
        (UserKeyRules(), "=?utf-8?q?J=C3=BCrgen?=", "Jürgen"),
        (UserKeyRules(), "=?utf-8?b?SsO8cmdlbg==?= =?utf-8?q?_K=2E?=", "Jürgen K."),
        (UserKeyRules(), "=?utf-8?q?Bob_=3Cbob=40x=2Eorg=3E?=", "bob@x.org"),
        (UserKeyRules(), "=?utf-8?q?bob?=@x.org", "bob@x.org"),
        (UserKeyRules.authors(), "Müller, Jean-Luc", "Jean Luc Muller"),
        (UserKeyRules.authors(), "김 철수", "김  철수"),
        (UserKeyRules.authors(initials=True), "Müller, Jean-Luc", "J. Müller"),
        (UserKeyRules.authors(initials=True), "Jean Luc Müller", "J. L. Muller"),
    ],
)
def test_one_person(rules, one, other):
    keys = rules.canonical([one, other]).to_list()
    assert keys[0] == keys[1] != ""


INVISIBLE = [
    "\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\ufeff", "\u00ad", "\u2060", "\u202c", "\ufe0f", "\u180e", "\x00",
    "\x07", "\x1f", "\x7f", "\u0080", "\u2066", "\U000e0041", "\u115f", "\u1160", "\u2800", "\u3164", "\uffa0", "\U0001d159",
    "\U00013441", "\U00013442", "\U00016fe4",
]  # fmt: skip


@pytest.mark.parametrize("mark", INVISIBLE, ids=lambda mark: f"U+{ord(mark):04X}")
def test_invisible_characters_make_no_other_person(mark):
    spellings = [f"{mark}bob@x.org", f"b{mark}ob@x.org", f"bob@x{mark}.org", f"bob@x.org{mark}", "bob@x.org"]
    assert set(UserKeyRules().canonical(spellings)) == {"bob@x.org"}
    examples = from_table({"users": [[spelling] for spelling in spellings]})
    assert examples.graph.num_users == 1
    assert examples.user_mapping.spellings_of("bob@x.org") == spellings
    assert UserKeyRules.authors().canonical([f"Ann{mark} Lee"]).to_list() == ["ann lee"]


SPELLINGS = [
    "bob@x.org", "BOB@X.ORG", "mailto:bob@x.org", "MAILTO:Bob@x.org", "SMTP:bob@x.org", "smtp:bob@x.org", '"bob@x.org"', "'bob@x.org'",
    "bob@x.org.", "bob@x.org;", "bob@x.org,", "<bob@x.org>", "Bob <bob@x.org>", "Bob (bob@x.org)", "Bob [bob@x.org]", "[bob@x.org]",
    "(bob@x.org)", '"Bob" <bob@x.org> (home)', "bob@x.org (Bob)", '"Stone, Bob" <bob@x.org>', "Bob <mailto:bob@x.org>",
    "Bob [mailto:bob@x.org]", "Bob [SMTP:bob@x.org]", "mailto:bob%2Bnews@x.org", "`bob@x.org`", "{bob@x.org}", "\u2018bob@x.org\u2019",
    "\u201cbob@x.org\u201d", "Bob \xabbob@x.org\xbb", "\u201ebob@x.org\u201c", "Bob <\u2039bob@x.org\u203a>", "\u2018bob@x.org\u2019,",
    "mailto:bob@x.org?subject=hello", "bob @ x.org", "Bob bob@x.org", "bob@x.org\u200b;", " bob+news@x.org. ",
]  # fmt: skip


@pytest.mark.parametrize("column", ["users", "from", "Recipients", "e-mail", "authors"])
def test_one_address_in_the_ways_of_mail(column):
    examples = from_table({column: SPELLINGS}, users=column)
    assert examples.user_keys.to_pylist() == ["bob@x.org"]
    assert examples.user_mapping.spellings_of("bob@x.org") == SPELLINGS


def test_one_i():
    for name in ("İBRAHIM", "ibrahim", "IBRAHIM", "ıbrahim", "i\u0307brahim"):
        assert UserKeyRules().canonical([name, f"{name}@x.org"]).to_list() == ["ibrahim", "ibrahim@x.org"]


@pytest.mark.parametrize(
    ("column", "options", "keys"),
    [
        ("to", {}, ["ann@x.org", "bob@x.org"]),
        ("Cc Addresses", {}, ["ann@x.org", "bob@x.org"]),
        ("senderEmail", {}, ["ann@x.org", "bob@x.org"]),
        ("people", {"addresses": True}, ["ann@x.org", "bob@x.org"]),
        ("people", {"addresses": False}, ["ann <ann@x.org>, bob@x.org"]),
        ("to", {"addresses": False}, ["ann <ann@x.org>, bob@x.org"]),
        ("to", {"user_keys": UserKeyRules.exact()}, ["Ann <ann@x.org>, bob@x.org"]),
        ("topic", {"addresses": False}, ["ann <ann@x.org>, bob@x.org"]),
    ],
)
def test_address_columns_may_name_several_people_in_a_cell(column, options, keys):
    """By the column's name or the option, never by what the cells hold."""
    examples = from_table({column: ["Ann <ann@x.org>, bob@x.org"]}, users=column, **options)
    assert examples.user_keys.to_pylist() == keys
    assert examples.user_mapping.users_of("Ann <ann@x.org>, bob@x.org") == keys


@pytest.mark.parametrize("column", ["users", "people", "topic"])
@pytest.mark.parametrize(
    "cell",
    [
        "Ann <ann@x.org>, bob@x.org", "ann@x.org, bob@x.org", "Bob <bob@x.org>; ann@x.org", "ann@x.org bob@x.org",
        "Ann <ann@x.org>, Bob <bob@x.org>", "ann@x.org; Bob <bob@x.org>", "ann@x.org | bob@x.org", "ann@x.org|bob@x.org",
        "ann＠x.org,\nzoe, bob@x.org", "Ann <ann@x.org> Bob <bob@x.org>", "bob@x.org\u200b,ann+a@x.org",
    ],
)  # fmt: skip
def test_two_addresses_are_no_user(column, cell):
    """They would be a third user beside the two; or, with brackets at the end, one user in place of two."""
    table = {column: ["ann@x.org", "bob@x.org", cell, cell], "id": [5, 6, 7, 8]}
    message = f"one user with two addresses in column '{column}' at row 2; give separator= .* or addresses=True"
    for more in ({}, {"example_id": "id"}, {"user_keys": UserKeyRules.authors()}):
        with pytest.raises(InputError, match=message):
            from_table(table, users=column, **more)
    assert from_table(table, users=column, addresses=False).graph.num_users == 3
    if "|" not in cell and "＠" not in cell:
        several = from_table(table, users=column, addresses=True)
        assert several.user_keys.to_pylist()[:2] == ["ann@x.org", "bob@x.org"]
        assert several.graph.users_per_example.tolist() == [1, 1, 2, 2]


def test_two_addresses_at_a_bar_are_no_user_of_an_address_column():
    with pytest.raises(InputError, match="one user with two addresses in column 'to' at row 1; give separator="):
        from_table({"to": ["ann@x.org", "ann@x.org|bob@x.org"]}, users="to")
    assert from_table({"to": ["ann@x.org", "ann@x.org|bob@x.org"]}, users="to", separator="|").graph.num_users == 2


@pytest.mark.parametrize(
    "cell",
    ["Lee, Ann <ann@x.org>", "ann@y.org <ann@x.org>", "Ann (ann@y.org) <ann@x.org>", '"ann@y.org, Ann" <ann@x.org>'],
)
def test_one_address_with_more_in_front_is_a_user(cell):
    assert from_table({"users": [cell, "ann@x.org"]}).user_keys.to_pylist() == ["ann@x.org"]


def test_an_alias_can_say_whose_two_addresses_are():
    pairs = [("ann@x.org, bob@x.org", "ann@x.org"), ("ann@x.org, bob@x.org", "bob@x.org")]
    examples = from_table({"users": ["Ann@x.org,  bob@x.org", "bob@x.org"]}, aliases=Aliases.from_pairs(pairs))
    assert examples.user_keys.to_pylist() == ["ann@x.org", "bob@x.org"]


@pytest.mark.parametrize(
    ("rules", "one", "other"),
    [
        (UserKeyRules(), "b.ob@x.org", "bob@x.org"),
        (UserKeyRules(), "ann", "anne"),
        (UserKeyRules(), 'b"o"b@x.org', "b@x.org"),
        (UserKeyRules(), 'b"o"b@x.org', "bob@x.org"),
        (UserKeyRules(), 'Bob <b"o"b@x.org>', "b@x.org"),
        (UserKeyRules(), 'b"ob@x.org', "ob@x.org"),
        (UserKeyRules(), "b(o)b@x.org", "bb@x.org"),
        (UserKeyRules(), 'Bob <"ann b"@x.org>', "b@x.org"),
        (UserKeyRules(), "b\u043eb@x.org", "bob@x.org"),
        (UserKeyRules.exact(), "=?utf-8?q?a?=", "a"),
        (UserKeyRules.exact(), "Ann", "ann"),
        (UserKeyRules.exact(), "ann ", "ann"),
        (UserKeyRules.email(plus_tags=False), "bob+a@x.org", "bob@x.org"),
        (UserKeyRules.email(dots=False), "b.ob@gmail.com", "bob@gmail.com"),
        (UserKeyRules.authors(), "J. Müller", "Jean Müller"),
        (UserKeyRules.authors(), "--", "..."),
    ],
)
def test_two_people(rules, one, other):
    keys = rules.canonical([one, other]).to_list()
    assert keys[0] != keys[1]


def _quoted(local, pairs):
    return '"' + "".join(f"\\{letter}" if pair else letter for letter, pair in zip(local, pairs, strict=True)) + '"'


@given(
    local=st.text("abcxyz", min_size=2, max_size=5),
    stops=st.lists(st.sampled_from(".\u3002\uff0e\uff61"), min_size=2, max_size=2),
    pairs=st.none() | st.lists(st.booleans(), min_size=5, max_size=5),
    blank=st.sampled_from(["", "\u2800", "\u3164", "\uffa0", "\u200b"]),
    frame=st.sampled_from(
        ["{}", "Bob <{}>", "<@a.org,@b.org:{}>", "=?utf-8?q?B=C3=B6b?= <{}>", "{} (Bob)", "mailto:{}"]
    ),
    encoded=st.booleans(),
)
def test_no_way_of_writing_splits_a_person(local, stops, pairs, blank, frame, encoded):
    written = local if pairs is None else _quoted(local, pairs[: len(local)])
    cell = frame.format(f"{written}@mail{stops[0]}x{stops[1]}org{blank}")
    if encoded:
        cell = f"=?utf-8?b?{base64.b64encode(cell.encode()).decode()}?="
    plain = f"{local}@mail.x.org"
    for column in ("users", "to"):
        examples = from_table({column: [plain, "ann@x.org", cell]}, users=column)
        assert examples.user_keys.to_pylist() == [plain, "ann@x.org"]
        assert examples.user_mapping.users_of(cell) == [plain]


def _keys_of_rows(column, cells):
    """The user keys of each row that has a cell; None where the table is refused."""
    try:
        examples = from_table({column: cells}, users=column)
    except InputError:
        return None
    keys = examples.user_keys.to_pylist()
    rows = np.split(examples.graph.users, examples.graph.indptr[1:-1])
    return [{keys[user] for user in row} for row in rows]


@given(
    st.lists(st.one_of(spellings, st.sampled_from(["ann@x.org", "Bob <bob@x.org>"])), min_size=2, max_size=5),
    spellings,
    st.data(),
)
def test_one_spelling_changes_no_other_row(cells, other, data):
    """However one person is written, the users of all other rows, and their ids, stay what they are."""
    changed = data.draw(st.integers(0, len(cells) - 1))
    for column in ("users", "to"):
        before = _keys_of_rows(column, cells)
        after = _keys_of_rows(column, [*cells[:changed], other, *cells[changed + 1 :]])
        if before is not None and after is not None:
            del before[changed], after[changed]
            assert before == after


@given(
    st.text("ab", min_size=1, max_size=2),
    st.text('ab"()', min_size=1, max_size=5),
    st.text("ab", min_size=1, max_size=2),
)
def test_a_malformed_word_is_nobody_else(before, inside, after):
    for local in (f'{before}"{inside}"{after}', f"{before}({inside}){after}"):
        key = UserKeyRules().canonical([f"{local}@x.org"]).to_list()[0]
        assert not re.fullmatch(r"[ab]+@x\.org", key), key


@pytest.mark.parametrize("column", ["users", "to"])
def test_an_address_through_a_relay_stands_for_both(column):
    """Bob is not split where the relay forwards, and nobody becomes Bob where it does not."""
    cells = ["Bob <bob%x.org@relay.net>", "bob@x.org", "bob%x.org%y.org@relay.net", "100%@x.org", "bob%x.org@relay.net"]
    examples = from_table({column: cells}, users=column)
    keys = examples.user_keys.to_pylist()
    rows = np.split(examples.graph.users, examples.graph.indptr[1:-1])
    through, twice = {"bob%x.org@relay.net", "bob@x.org"}, {"bob%x.org%y.org@relay.net", "bob@x.org"}
    assert [{keys[user] for user in row} for row in rows] == [through, {"bob@x.org"}, twice, {"100%@x.org"}, through]
    assert set(examples.user_mapping.users_of(cells[0])) == through
    exact = from_table({column: cells}, users=column, user_keys=UserKeyRules.exact())
    assert exact.user_keys.to_pylist() == cells


def test_encoded_words_in_a_column_of_addresses():
    cell = "=?utf-8?q?Ann_=3Cann=40x=2Eorg=3E=2C_bob=40x=2Eorg?="
    assert from_table({"to": [cell]}, users="to").user_keys.to_pylist() == ["ann@x.org", "bob@x.org"]
    with pytest.raises(InputError, match="one user with two addresses"):
        from_table({"users": [cell]})


def test_canonical_leaves_its_argument_alone():
    series = pl.Series("names", ["Müller, Jean", "Bob <b@x.org>", "a+b@x.org"])
    before = series.to_list()
    UserKeyRules.authors().canonical(series)
    assert (series.to_list(), series.name) == (before, "names")
    assert UserKeyRules().canonical(pa.array(["A"], pa.large_string())).to_list() == ["a"]
    assert UserKeyRules().canonical([]).to_list() == []


def test_aliases_chains_lists_and_circles():
    rules = UserKeyRules()
    pairs = [("Bob@Home", "bob@work"), ("bob@old", "bob@home"), ("team@x", "ann@x"), ("team@x", "bob@old"),
             ("all@x", "team@x"), ("all@x", "carol@x"), ("carol@x", "carol@x")]  # fmt: skip
    resolved = Aliases.from_pairs(pairs).canonical(rules).users_of
    assert resolved["bob@old"] == ("bob@work",)
    assert resolved["team@x"] == ("ann@x", "bob@work")
    assert resolved["all@x"] == ("ann@x", "bob@work", "carol@x")
    assert resolved["carol@x"] == ("carol@x",)
    with pytest.raises(InputError, match="the aliases form a cycle: b -> c -> b; remove one of these lines"):
        Aliases.from_pairs([("a", "b"), ("b", "c"), ("c", "B")]).canonical(rules)
    for wrong in [("", "b"), ("a", " ")]:
        with pytest.raises(InputError, match="an alias needs a key and a user"):
            Aliases.from_pairs([wrong])


def test_aliases_go_deep_and_wide():
    long = [(f"k{i}", f"k{i + 1}") for i in range(5000)]
    assert Aliases.from_pairs(long).canonical(UserKeyRules()).users_of["k0"] == ("k5000",)
    # Sixty layers of two: 2^60 paths, two users.
    layers = [(f"l{i}{a}", f"l{i + 1}{b}") for i in range(60) for a in "xy" for b in "xy"]
    assert Aliases.from_pairs(layers).canonical(UserKeyRules()).users_of["l0x"] == ("l60x", "l60y")


def test_aliases_in_data(tmp_path):
    file = tmp_path / "aliases.csv"
    file.write_text(
        "\ufeffkey,user,why\nbob@home,Bob@Work,two addresses\nteam@x,ann@x\nteam@x,bob@home\n", encoding="utf-8"
    )
    table = {"users": [["bob@work", "BOB@home"], ["team@x"], ["carol@x"], ["team@x", "ann@x"]]}
    examples = from_table(table, aliases=file)
    keys = examples.user_keys.to_pylist()
    rows = np.split(examples.graph.users, examples.graph.indptr[1:-1])
    assert [{keys[user] for user in row} for row in rows] == [
        {"bob@work"},
        {"ann@x", "bob@work"},
        {"carol@x"},
        {"ann@x", "bob@work"},
    ]
    mapping = examples.user_mapping
    assert mapping.users_of("team@x") == ["ann@x", "bob@work"]
    assert mapping.users_of("nobody") == []
    assert mapping.spellings_of("bob@work") == ["bob@work", "BOB@home", "team@x"]
    assert mapping.spellings_of("nobody") == []
    left = examples.without_users(["ANN@x"])
    assert left.user_mapping.users_of("team@x") == ["bob@work"]
    assert left.user_mapping.users_of("ann@x") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: expected the header key,user, not ''"),
        (b"from,to\na,b\n", "line 1: expected the header key,user, not 'from,to'"),
        (b"key,user\na,b\nc\n", "line 3: the key or user is missing; give both or remove the line"),
        (b"key,user\na, \n", "line 2: the key or user is missing"),
        (b"key,user\n\xff,b\n", "not UTF-8 .*; save the aliases as CSV in UTF-8"),
        (b'key,user\n"a"b,c\n', "not CSV .*; save the aliases as CSV"),
    ],
)
def test_bad_alias_files(tmp_path, content, message):
    file = tmp_path / "aliases.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"aliases.csv.*{message}"):
        Aliases.read(file)
    with pytest.raises(InputError, match=r"no.csv: cannot be read \(No such file or directory\); check the path"):
        Aliases.read(tmp_path / "no.csv")


def test_key_files(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_bytes("\ufeff# robots\nbot@x\r\n\n  list@x  \n".encode())
    assert read_keys(file) == ["bot@x", "list@x"]
    file.write_bytes(b"bot@x\n\xff\n")
    with pytest.raises(InputError, match=r"keys.txt: not UTF-8 at byte 6; save the keys"):
        read_keys(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(tmp_path)
