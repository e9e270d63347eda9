"""Attributed examples: rows stay together, unprotected users go, selected rows come back."""

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from tests.attribution.attributed import users_of

from coowned import Aliases, InputError, Selection, from_table, take
from coowned.attribution.examples import Origin, attribute, unify

TABLE = {
    "id": ["m1", "m2", "m3"],
    "users": [["Ann", "bob"], [], ["bob", "carol"]],
    "text": ["one", "two", "three"],
}


@given(
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.sampled_from("abcd"), max_size=4)), unique_by=lambda row: row[0])
)
def test_rows_stay_together(rows):
    ids, users = [row[0] for row in rows], [row[1] for row in rows]
    table = {
        "id": pa.array(ids, pa.int64()),
        "users": pa.array(users, pa.list_(pa.string())),
        "text": [f"text {i}" for i in ids],
    }
    examples = from_table(table, example_id="id")
    assert examples.ids.to_pylist() == ids
    assert examples.payload["text"].to_pylist() == [f"text {i}" for i in ids]
    assert users_of(examples) == [set(row) for row in users]
    assert examples.graph.user_keys.to_pylist() == examples.user_keys.to_pylist()
    assert examples.graph.columns_read == ("id", "users")
    if "a" not in examples.user_keys.to_pylist():
        return
    left = examples.without_users(["a"])
    assert users_of(left) == [set(row) - {"a"} for row in users]
    assert left.payload is examples.payload
    assert left.graph.user_keys.to_pylist() == left.user_keys.to_pylist()


def test_printing_shows_no_content_and_no_keys():
    shown = repr(from_table(TABLE, example_id="id"))
    assert shown == "AttributedExamples(num_examples=3, num_users=3, num_pairs=4, columns=['id', 'users', 'text'])"


def test_ids_default_to_the_row():
    examples = from_table({"users": [["a"], ["b"]]})
    assert examples.ids.to_pylist() == [0, 1]
    assert examples.graph.example_ids is None
    assert examples.graph.columns_read == ("users",)


def test_without_users():
    examples = from_table(TABLE, example_id="id")
    left = examples.without_users([" BOB ", "bob"])
    assert users_of(left) == [{"ann"}, set(), {"carol"}]
    assert left.graph.num_unprotected_users == 1
    with pytest.raises(InputError, match="2 unprotected keys are not in the data, the first is 'also nobody'; correct"):
        examples.without_users([" BOB ", "nobody", "also nobody"])
    with pytest.raises(InputError, match="1 unprotected key is not in the data"):
        left.without_users(["bob"])
    assert left.graph.digest != examples.graph.digest
    twice = left.without_users(["carol"])
    assert twice.graph.num_unprotected_users == 2
    assert users_of(twice) == [{"ann"}, set(), set()]
    assert examples.without_users([]).graph.digest == examples.graph.digest
    assert from_table({"users": [[7], [8]]}).without_users([7]).graph.num_unprotected_users == 1
    with pytest.raises(InputError, match="write \\[key\\]"):
        examples.without_users("bob")


def test_doubtful_keys_are_counted():
    users = [["nan", "None", "ann"], ["7", "7.0", "8.0"], ["NULL"], ["9.5", "9"]]
    assert from_table({"users": users}).notes == {
        "users_named_like_a_missing_value": 3,
        "users_that_are_one_number_in_two_spellings": 1,
    }
    assert from_table({"users": [["ann"], ["7"]]}).notes == {}


@pytest.mark.parametrize(("sign", "after"), [(";", ""), (",", " "), ("|", " "), (" ;", "  ")])
def test_users_in_the_key_of_another_are_counted(sign, after):
    users = [f"ann{sign}{after}bob", "ann", f"Bob{sign}{after}ANN", f"carol{sign}dan", f"{sign}{after}ann{sign}"]
    several = 3 if sign == "," else 4  # "carol, dan" may be one name
    assert from_table({"users": users}).notes == {"users_that_look_like_several": several}
    tagged = {"users": ["ann@x.org", "zoe; Ann+news@x.org"]}
    assert from_table(tagged).notes == {"users_that_look_like_several": 1}
    assert from_table({"users": ["Lee, Ann", "Lee, Carol", sign]}).notes == {}


def test_aliases_without_effect_are_counted():
    table = {"users": ["bob@home.org", "bob@work.org", "Team@x.org"]}
    pairs = [("bob@hone.org", "bob@work.org"), ("TEAM@x.org", "list@x.org"), ("list@x.org", "bob@work.org")]
    pairs += [("bob+a@hone.org", "ann@x.org"), ("none@x.org", "none@x.org")]
    examples = from_table(table, aliases=Aliases.from_pairs(pairs))
    assert examples.notes == {"aliases_that_match_no_user": 2}
    assert examples.user_keys.to_pylist() == ["bob@home.org", "bob@work.org"]
    assert from_table(table, aliases=Aliases.from_pairs(pairs[1:3])).notes == {}


def test_take():
    examples = from_table(TABLE, example_id="id")
    taken = take(examples, Selection.from_copies(examples.graph, [2, 0, 1]))
    assert taken.to_pydict() == {**{name: [TABLE[name][0], TABLE[name][2]] for name in TABLE}, "copies": [2, 1]}
    assert taken.schema.field("copies").type == pa.int32()
    nothing = take(examples, Selection.from_copies(examples.graph, [0, 0, 0]))
    assert (nothing.num_rows, nothing.column_names) == (0, ["id", "users", "text", "copies"])
    other = from_table({"users": [["a"]]})
    with pytest.raises(InputError, match=r"the selection is for 1 examples, not 3; select again"):
        take(examples, Selection.from_copies(other.graph, [1]))
    named = from_table({"users": [["a"]], "copies": [1]})
    with pytest.raises(InputError, match="rename it"):
        take(named, Selection.from_copies(named.graph, [1]))


def test_take_keeps_chunks():
    table = pa.concat_tables([pa.table({"users": [["a"]], "text": [f"t{i}"]}) for i in range(5)])
    examples = from_table(table)
    assert take(examples, Selection.from_copies(examples.graph, [0, 1, 0, 1, 1]))["text"].to_pylist() == [
        "t1",
        "t3",
        "t4",
    ]


@pytest.mark.parametrize(
    "entries",
    [
        pa.array(["b", "a", "b"]),
        pa.array(["b", "a", "b"], pa.string_view()),
        pa.chunked_array([["b"], [], ["a", "b"]], pa.string()),
        pa.chunked_array([pa.array(["b"]).dictionary_encode(), pa.array(["a", "b"]).dictionary_encode()]),
        pa.DictionaryArray.from_arrays(pa.array([2, 1, 2], pa.int8()), pa.array(["unused", "a", "b"])),
        pa.DictionaryArray.from_arrays(pa.array([9, 2, 1, 2, 9][1:4], pa.uint8()), pa.array(["", "a", "b"])),
    ],
)
def test_unify(entries):
    codes, words = unify(entries)
    assert words.type == pa.large_string()
    assert [words[int(code)].as_py() for code in codes] == ["b", "a", "b"]
    assert sorted(words.to_pylist()) == ["a", "b"]


def test_attribute_checks_its_arguments():
    payload = pa.table({"x": [1, 2]})
    with pytest.raises(InputError, match="mail: 1 lists of users for 2 rows"):
        attribute(pa.array([["a"]]), example_ids=None, payload=payload, origin=Origin("mail"))
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2]), hidden)
    with pytest.raises(InputError, match="mail: null user in users at row 1"):
        attribute(lists, example_ids=None, payload=payload, origin=Origin("mail"))
    examples = attribute(pa.array([["a"], ["a"]]), example_ids=[5, 6], payload=payload, origin=Origin(notes={"odd": 3}))
    assert (examples.notes, examples.ids.to_pylist()) == ({"odd": 3}, [5, 6])
    assert np.array_equal(examples.graph.users, [0, 0])
