"""Texts as training data."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.arrays import filled, same
from tests.small_world import part_of

from coowned import InputError, from_table, read_mail
from coowned.content.columns import read_labels
from coowned.content.data import Draw
from coowned.content.text import SPECIAL_TOKENS, Vocabulary
from coowned.content.token_table import LabelledTokenTable, TokenTable
from coowned.exact.keys import RunKey
from coowned.models.bert import BertMaskedLM
from coowned.runs.config import TrainConfig

WORDS = tuple(f"w{number}" for number in range(60))
VOCABULARY = Vocabulary((*SPECIAL_TOKENS, *WORDS))
LENGTH = 40
KEY = RunKey.from_seed(3)


def corpus(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 60))) for _ in range(count)]


def table(texts, **columns):
    users = [[f"u{number % 7}", f"u{number % 3}"] for number in range(len(texts))]
    columns = {"users": users, "text": pa.array(texts, pa.string()), **columns}
    return from_examples(from_table(pa.table(columns), example_id="id" if "id" in columns else None))


def from_examples(examples, text="text"):
    return TokenTable.from_examples(examples, text=text, vocabulary=VOCABULARY, sequence_length=LENGTH)


def draw(step=0, copies=0, count=1, key=KEY):
    return Draw(key, step, np.broadcast_to(np.asarray(copies, np.int32), count))


def restored(found):
    """Tokens as they were before some were hidden."""
    rows = []
    for tokens, length, positions, targets, weights in zip(*found.values(), strict=True):
        whole = tokens.copy()
        whole[positions[weights > 0]] = targets[weights > 0]
        assert (whole[length:] == VOCABULARY.pad_id).all()
        rows.append([VOCABULARY.tokens[number] for number in whole[:length]])
    return rows


def test_shapes_and_types():
    data = table(corpus())
    assert data.shapes() == {"tokens": (40,), "lengths": (), "positions": (6,), "targets": (6,), "weights": (6,)}
    assert data.dtypes()["weights"] == np.float32
    assert {data.dtypes()[name] for name in ("tokens", "lengths", "positions", "targets")} == {np.dtype(np.int32)}
    assert list(data.dtypes()) == list(data.shapes())


def test_fill_gives_the_tokens():
    texts = [*corpus(), None, "", "w1"]
    data = table(texts)
    expected = [["[CLS]", *text.split()[: LENGTH - 2], "[SEP]"] if text else [] for text in texts]
    assert restored(filled(data, np.arange(33))) == expected
    assert restored(filled(data, [4, 4, 31], draw(copies=[0, 1, 0], count=3))) == [expected[4], expected[4], []]
    assert data.texts.num_empty == 2


def test_masks_are_new_for_every_step_and_copy():
    data = table(corpus())
    long = np.flatnonzero(np.diff(data.texts.offsets) == LENGTH)[:8]
    masks = [
        filled(data, long, which)["positions"].tobytes()
        for which in (
            draw(0, 0, 8), draw(1, 0, 8), draw(0, 1, 8), draw(1, 1, 8), draw(0, 0, 8, RunKey.from_seed(4)), None,
        )
    ]  # fmt: skip
    assert len(set(masks)) == 6
    assert filled(data, long, draw(1, 1, 8))["positions"].tobytes() == masks[3]
    assert filled(data, long)["positions"].tobytes() == masks[5]  # outside training there is nothing to be drawn


def test_part_equals_the_whole():
    data = table(corpus())
    part = part_of(part_of(data, np.arange(10, 25)), np.array([5, 3, 9]))
    assert part.graph.num_examples == 3
    assert same(filled(part, [1, 0, 2]), filled(data, [13, 15, 19]))
    which = draw(7, [0, 2, 1], 3)
    assert same(filled(part, [1, 0, 2], which), filled(data, [13, 15, 19], which))
    assert np.shares_memory(part.texts.ids, data.texts.ids)


def test_examples_do_not_depend_on_each_other():
    texts = corpus()
    data, other = table(texts), table([*corpus(seed=1)[:12], texts[12], *[None] * 17])
    for which in (None, draw(2, 1)):
        alone = filled(data, [12], which)
        assert same(alone, filled(other, [12], which))
    together = filled(data, [3, 12, 5], draw(2, [0, 1, 0], 3))
    assert all(np.array_equal(together[name][1], alone[name][0]) for name in alone)


def test_text_without_tokens_adds_nothing():
    found = filled(table(["w1 w2", None, " \n"]), [0, 1, 2], draw(count=3))
    assert found["lengths"].tolist() == [4, 0, 0]
    assert found["weights"].sum(axis=1).tolist() == [1, 0, 0]
    assert (found["tokens"][1:] == VOCABULARY.pad_id).all()


def test_several_columns_are_read_one_after_another():
    columns = {"users": [["a"], ["b"], ["c"]], "subject": ["w1", None, "w3"], "body": ["w4 w5", "w6", None]}
    data = from_examples(from_table(pa.table(columns)), ["subject", "body"])
    assert [row[1:-1] for row in restored(filled(data, [0, 1, 2]))] == [["w1", "w4", "w5"], ["w6"], ["w3"]]


def test_example_files_name_columns_there_are(tmp_path):
    folder = Path(__file__).parents[2] / "examples"
    configs = [TrainConfig.read(folder / name) for name in ("abstracts.toml", "mailbox.toml")]
    (tmp_path / "mail.mbox").write_text("From a\nFrom: a@x.org\nMessage-ID: <1@x>\nSubject: w1\n\nw2 w3\n")
    abstracts = from_table(pa.table({"users": [["a"]], "text": ["w1 w2 w3"], "example_id": ["p1"]}))
    for config, examples in zip(configs, (abstracts, read_mail(tmp_path / "mail.mbox")), strict=True):
        assert isinstance(config.model, BertMaskedLM)
        assert restored(filled(from_examples(examples, config.model.text), [0]))[0][1:-1] == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("body", "no column 'body', which the model reads; they have .*text"),
        ("number", "column 'number' must contain text, not int64; name a column of text"),
        (["text", "number"], "column 'number' must contain text"),
        ([], "must name one or more columns"),
    ],
)
def test_bad_text_columns(text, says):
    columns = {"text": ["w1", "w2"], "number": [1, 2], "nothing": pa.nulls(2), "blank": ["", " "]}
    examples = from_table(pa.table({"users": [["a"], ["b"]], **columns}))
    with pytest.raises(InputError, match=says):
        from_examples(examples, text)


def test_empty_texts_do_not_refuse():
    examples = from_table(pa.table({"users": [["a"], ["b"]], "nothing": pa.nulls(2), "blank": ["", " "]}))
    for text in ("nothing", "blank", ["blank", "nothing"]):
        assert from_examples(examples, text).texts.num_empty == 2


def test_bad_rows_and_arrays():
    data = table(corpus(3))
    for rows in ([0, 0, 1], [0, 1, 3], [0, 1]):
        with pytest.raises(InputError, match="rows must"):
            dataclasses.replace(data, rows=np.array(rows))
    with pytest.raises(InputError, match="examples must be in"):
        filled(data, [3])
    with pytest.raises(InputError, match="copy_numbers must have 2 entries"):
        filled(data, [0, 1], draw(count=1))
    out = {name: np.zeros((2, *shape), data.dtypes()[name]) for name, shape in data.shapes().items()}
    out["tokens"] = out["tokens"][:, :-1]
    with pytest.raises(InputError, match="'tokens'"):
        data.fill(np.array([0, 1]), out)


def test_token_digest_follows_content():
    texts = corpus(6)
    data = table(texts, id=list("abcdef"))
    assert data.digest == table(texts, id=list("abcdef")).digest
    changed = [*texts[:5], texts[5] + " w1" if len(texts[5].split()) < 38 else "w1"]
    swapped = pa.table({"users": [["u"]] * 2, "text": ["w1", "w2"], "id": ["a", "b"]})
    backwards = swapped.set_column(2, "id", pa.array(["b", "a"]))
    digests = [
        data.digest,
        table(changed, id=list("abcdef")).digest,
        table(texts[::-1], id=list("abcdef")).digest,
        table(texts, id=list("abcdeg")).digest,
        table(texts).digest,
        part_of(data, np.arange(5)).digest,
        part_of(data, np.arange(6)[::-1]).digest,
        # One set of ids and users, one list of texts; but whose text is whose differs.
        from_examples(from_table(swapped, example_id="id")).digest,
        from_examples(from_table(backwards, example_id="id")).digest,
    ]
    assert len(set(digests)) == 9


# ---- with labels -----------------------------------------------------------------------------------------------------


def labelled(labels, texts=("w1 w2", "", "w3 w4 w5")):
    users = [[f"u{number}"] for number in range(len(texts))]
    examples = from_table(pa.table({"users": users, "text": list(texts), "kind": labels}))
    known = read_labels(examples.payload, "kind", ("a", "b"))
    return LabelledTokenTable.from_examples(
        examples, text="text", vocabulary=VOCABULARY, sequence_length=LENGTH, labels=known
    )


def test_labelled_fill_gives_tokens_and_labels():
    data = labelled(["b", "a", "c"])
    found = filled(data, [2, 0, 1])
    ids = VOCABULARY.ids
    assert found["tokens"][0, :5].tolist() == [ids["[CLS]"], ids["w3"], ids["w4"], ids["w5"], ids["[SEP]"]]
    assert found["lengths"].tolist() == [5, 4, 0]
    np.testing.assert_array_equal(found["labels"], [np.nan, 1, 0])
    assert found["weights"].tolist() == [0, 1, 0]  # of no class; usable; no text
    assert all(
        np.array_equal(array, found[name], equal_nan=name == "labels")
        for name, array in filled(data, [2, 0, 1], draw(step=5, copies=1, count=3)).items()
    )
    part = part_of(data, [2, 0])
    np.testing.assert_array_equal(filled(part, [1])["tokens"], found["tokens"][1:2])
    assert data.counts() == {"truncated_texts": 0, "empty_texts": 1, "unusable_labels": 1}


def test_labelled_digest_follows_the_labels():
    assert labelled(["b", "a", "c"]).digest == labelled(["b", "a", "x"]).digest
    assert labelled(["b", "a", "c"]).digest != labelled(["a", "a", "c"]).digest
