"""Proposals of keys that may be one person."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coowned import Aliases, InputError, from_table
from coowned.attribution.alias_suggestions import suggest_aliases
from coowned.attribution.sources import DataSource


def proposals(users, **settings):
    found = suggest_aliases(from_table({"users": users}), **settings)
    return dict(found.select("key", "user").iter_rows())


@pytest.mark.parametrize(
    "spellings",
    [
        ["bob.stone@work.org", "bob.stone@home.org"],
        ["bob.stone@work.org", "bobstone@home.org"],
        ["bob.stone@work.org", "bstone@work.org"],
        ["bob.stone@work.org", "stone.bob@home.org"],
        ["bob.stone@work.org", "bob.stne@work.org"],
        ["bob.stone@work.org", "bob stone"],
        ["Bob Stone <rockstar77@home.org>", "Bob Stone <b1962@work.org>"],
        ["Jürgen Groß <jg@x.org>", "Jurgen Gross <post@y.org>"],
        ["robert.oppenheimer@a.org", "robert.openheimer@b.org"],
        ["bob@x.org", "b\u043eb@x.org"],  # a Cyrillic letter
        ["bob@x.org", "bob@\u0445.org"],
        ["info@x.org", "inf\u03bf@x.org"],  # a Greek one
        ["paul.stern@x.org", "pau1.stem@x.org"],
        ["ann", "\u0430nn"],
    ],
)
def test_one_person_is_found(spellings):
    assert len(proposals([[spellings[0]], [spellings[0]], [spellings[1]]])) == 1


@pytest.mark.parametrize(
    "spellings",
    [
        ["ann@x.org", "bob@x.org"],
        ["info@a.org", "info@b.org"],
        ["noreply@a.org", "no-reply@b.org"],
        ["user_17", "user_18"],
        ["17", "18"],
        ["U012AB3CD", "U012AB3CE"],
        ["ann.smith@x.org", "bob.smith@x.org"],
        ["bob.stone@x.org", "bill.stone@x.org"],
        ["maria.rossi@x.org", "paolo.rossi@x.org"],
    ],
)
def test_two_people_are_left_apart(spellings):
    assert proposals([[spelling] for spelling in spellings]) == {}


def test_costs_are_counted_in_examples():
    work, home = "bob.stone@work.org", "bob.stone@home.org"
    found = suggest_aliases(from_table({"users": [[work], [work], [work, home], [home], [work, "ann"]]}))
    assert found.rows(named=True) == [
        {
            "key": home, "user": work, "score": 1.0, "examples_of_key": 2, "examples_of_user": 4,
            "lost_if_wrongly_merged": 2, "exposed_if_wrongly_apart": 1,
        }
    ]  # fmt: skip


def test_the_file_is_an_alias_file(tmp_path):
    users = [["bob.stone@work.org"], ["bob.stone@home.org"], ["bstone@x.org"], ["ann@x.org"]]
    suggest_aliases(from_table({"users": users})).write_csv(tmp_path / "aliases.csv")
    assert len(Aliases.read(tmp_path / "aliases.csv").users_of) == 2
    assert from_table({"users": users}, aliases=tmp_path / "aliases.csv").graph.num_users == 2


NAMES = st.lists(
    st.sampled_from(["bob", "bobby", "stone", "stne", "b", "ann", "lee", "77", "ñu"]), min_size=1, max_size=3
)


@settings(max_examples=60)
@given(st.lists(st.tuples(NAMES, st.sampled_from(["@x.org", "@y.org", ""])), max_size=12))
def test_suggestions_are_stars(people):
    found = proposals([["".join(f"{word}." for word in words).rstrip(".") + domain] for words, domain in people])
    assert set(found).isdisjoint(found.values())


def test_suggestions_do_not_read_content():
    users = [["Bob Stone <bob@work.org>"], ["Bob Stone <b@home.org>"]]
    one, other = (
        suggest_aliases(from_table({"users": users, "text": text}))
        for text in (["a", "b"], ["bob@work.org", "Bob Stone"])
    )
    assert one.equals(other)
    assert len(one) == 1


def test_display_names_of_mail_and_slack(tmp_path):
    box = tmp_path / "box.mbox"
    headers = "From: Bob Stone <rockstar@home.org>\nTo: =?utf-8?q?Bob_Stone?= <b62@work.org>"
    box.write_text(f"From a Mon Jan  1 10:00:00 2024\n{headers}\n\nhi\n")
    source = DataSource(path=box)
    found = suggest_aliases(source.read(), names=source.display_names())
    assert found.select("key", "user").rows() == [("rockstar@home.org", "b62@work.org")]
    folder = tmp_path / "slack"
    (folder / "general").mkdir(parents=True)
    users = [{"id": f"U{n}", "profile": {"real_name": "Bob Stone", "email": None}} for n in (1, 2)]
    messages = [{"type": "message", "ts": f"{n}.0", "user": f"U{n}", "text": "x"} for n in (1, 2)]
    for name, content in (
        ("users.json", users),
        ("channels.json", [{"id": "C1", "name": "general", "members": []}]),
        ("general/2024-01-01.json", messages),
    ):
        (folder / name).write_text(json.dumps(content))
    source = DataSource(path=folder)
    assert suggest_aliases(source.read(), names=source.display_names()).rows()[0][:3] == ("U2", "U1", 1.0)


def test_a_large_block_says_nothing():
    assert proposals([[f"smith{chr(97 + n // 26)}{chr(97 + n % 26)} smith"] for n in range(300)], threshold=0.99) == {}
    with pytest.raises(InputError, match="threshold must be"):
        proposals([["a"]], threshold=2)
