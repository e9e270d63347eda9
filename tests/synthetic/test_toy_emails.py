import email.policy
import hashlib
import json
import mailbox

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coowned.errors import InputError
from coowned.synthetic import toy_emails
from coowned.synthetic.toy_emails import EmailWorld, five_emails, hashed_words, write_mbox

BOB = "bob@example.org"


def rows(seed=0, **changes):
    return EmailWorld(**({"num_people": 15, "num_emails": 400} | changes)).generate(seed=seed).to_pylist()


def test_five_emails_are_the_papers_graph():
    table = five_emails()
    assert table.column_names == ["example_id", "sender", "recipients", "users", "text"]
    assert table.column("example_id").to_pylist() == ["e1", "e2", "e3", "e4", "e5"]
    initials = ["".join(user[0] for user in users) for users in table.column("users").to_pylist()]
    assert initials == ["AB", "ABC", "BD", "CB", "DC"]
    for row in table.to_pylist():
        assert row["users"] == [row["sender"], *row["recipients"]]
        assert row["text"]
        assert "\n" not in row["text"]


@pytest.mark.parametrize("seed", range(5))
def test_secret_is_only_in_received_mail(seed):
    with_secret = [row for row in rows(seed, num_people=4) if "knee surgery" in row["text"] + row["subject"]]
    assert len(with_secret) == 8
    for row in with_secret:
        assert BOB in row["to"]
        assert row["sender"] != BOB
    assert any(row["sender"] == BOB for row in rows(seed, num_people=4))  # he does write, just not of this


def test_secret_of_another_person():
    with_secret = [row for row in rows(secret_about="carol", secret="lottery ticket") if "lottery" in row["text"]]
    assert len(with_secret) == 8
    assert all(row["to"] == ["carol@example.org"] for row in with_secret)


@settings(max_examples=30, deadline=None)
@given(
    num_people=st.integers(3, 90),
    num_emails=st.integers(8, 60),
    reply_probability=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_users_are_everyone_on_the_message(num_people, num_emails, reply_probability, seed):
    world = EmailWorld(num_people=num_people, num_emails=num_emails, reply_probability=reply_probability)
    people = {f"{name}@example.org" for name in world.names}
    assert len(people) == num_people
    for row in world.generate(seed=seed).to_pylist():
        everyone = [row["sender"], *row["to"], *row["cc"]]
        assert row["users"] == everyone  # the sender first
        assert len(set(everyone)) == len(everyone) >= 2  # nobody twice
        assert set(everyone) <= people
        assert row["label"] in (0, 1)


def test_replies_point_backwards():
    table = rows()
    place = {row["message_id"]: index for index, row in enumerate(table)}
    assert len(place) == len(table)
    replies = [row for row in table if row["in_reply_to"] is not None]
    assert len(replies) > 50
    for row in replies:
        parent = table[place[row["in_reply_to"]]]
        assert place[parent["message_id"]] < place[row["message_id"]]
        assert parent["date"] < row["date"]
        assert row["references"] == [*parent["references"], parent["message_id"]]
        assert row["to"] == [parent["sender"]]
        assert row["sender"] in [*parent["to"], *parent["cc"]]
        assert set(parent["users"]) <= set(row["users"])
        assert row["subject"].count("Re: ") == 1
    assert any(len(row["references"]) > 1 for row in replies)
    assert any(set(row["users"]) - set(table[place[row["in_reply_to"]]]["users"]) for row in replies)


def test_replies_quote_the_words_they_answer():
    table = {row["message_id"]: row for row in rows()}
    for row in table.values():
        quoted = [line[2:] for line in row["text"].splitlines() if line.startswith("> ")]
        if row["in_reply_to"] is None:
            assert quoted == []
        elif quoted:
            assert quoted[0] in table[row["in_reply_to"]]["text"]
            assert not quoted[0].startswith(">")
    assert sum("\n> " in row["text"] for row in table.values()) > 50


def test_activity_is_skewed():
    sent = sorted(
        sum(row["sender"] == f"{name}@example.org" for row in rows()) for name in EmailWorld(num_people=15).names
    )
    assert sent[-1] > 5 * max(sent[0], 1)


def test_both_labels_and_their_words():
    table = [row for row in rows() if row["in_reply_to"] is None and "knee" not in row["text"]]
    for label, topic in ((1, toy_emails.WORK), (0, toy_emails.PRIVATE)):
        chosen = [row for row in table if row["label"] == label]
        assert len(chosen) > 50
        assert all(row["subject"] in topic[0] for row in chosen)


def test_same_table_everywhere():
    text = json.dumps(rows(seed=3), default=lambda date: date.isoformat())
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_HASH
    assert rows(seed=3) != rows(seed=4)


def test_mbox_reads_back(tmp_path):
    table = EmailWorld(num_people=15, num_emails=200).generate(seed=0)
    path = tmp_path / "mail.mbox"
    write_mbox(table, path)
    assert [file.name for file in tmp_path.iterdir()] == ["mail.mbox"]
    content = path.read_bytes()
    parsed = [email.message_from_bytes(bytes(message), policy=email.policy.default) for message in opened(path)]
    assert len(parsed) == 200
    for message, row in zip(parsed, table.to_pylist(), strict=True):
        assert addresses(message["From"]) == [row["sender"]]
        assert addresses(message["To"]) == row["to"]
        assert addresses(message["Cc"]) == row["cc"]
        assert message["Subject"] == row["subject"]
        assert message["Message-ID"] == row["message_id"]
        assert message["In-Reply-To"] == row["in_reply_to"]
        assert (message["References"] or "").split() == row["references"]
        assert message["Date"].datetime == row["date"]
        assert message.get_content().strip() == row["text"]
        assert not message.defects
    write_mbox(table, path)
    assert path.read_bytes() == content


def test_mbox_escapes_lines_that_look_like_separators(tmp_path):
    table = EmailWorld(num_people=3, num_emails=8).generate(seed=0)
    texts = ["Hello,\n\nFrom here on it is quiet.\n\nBob"] * 8
    table = table.set_column(table.column_names.index("text"), "text", pa.array(texts))
    write_mbox(table, tmp_path / "mail.mbox")
    assert len(opened(tmp_path / "mail.mbox")) == 8
    assert b"\n>From here" in (tmp_path / "mail.mbox").read_bytes()


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "mail.mbox"
    path.write_text("old")

    def fail(row):
        raise OSError("disk full")

    monkeypatch.setattr(toy_emails, "as_message", fail)
    with pytest.raises(OSError, match="disk full"):
        write_mbox(EmailWorld(num_people=3, num_emails=8).generate(seed=0), path)
    assert [file.name for file in tmp_path.iterdir()] == ["mail.mbox"]
    assert path.read_text() == "old"


def test_mbox_of_a_foreign_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="message_id"):
        write_mbox(five_emails(), tmp_path / "mail.mbox")
    with pytest.raises(InputError, match=r"the folder .* does not exist"):
        write_mbox(EmailWorld(num_emails=8).generate(seed=0), tmp_path / "missing" / "mail.mbox")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_people": 2}, "num_people"),
        ({"num_emails": 0}, "num_emails"),
        ({"num_secret_emails": 500}, "num_secret_emails"),
        ({"reply_probability": 1.5}, "reply_probability"),
        ({"secret_about": "nobody"}, "secret_about"),
        ({"secret": " "}, "secret"),
        ({"secret": "two\nlines"}, "secret"),
        ({"secret": "report"}, "rarer"),
        ({"secret": "Alice"}, "rarer"),
    ],
)
def test_bad_settings_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        rows(**wrong)


def test_world_without_a_secret():
    assert not any("surgery" in row["text"] for row in rows(num_secret_emails=0))


def addresses(header):
    return [] if header is None else [address.addr_spec for address in header.addresses]


def opened(path):
    box = mailbox.mbox(path, create=False)
    try:
        return list(box)
    finally:
        box.close()


GOLDEN_HASH = "ccae22b054a1349d07c42b670f40ac753969772f8b05b03a7894d71b9c17b42f"


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.integers(1, 32))
def test_a_row_depends_on_its_text_alone(texts, num_features):
    rows = hashed_words(texts, num_features)
    for text, row in zip(texts, rows, strict=True):
        np.testing.assert_array_equal(hashed_words([text], num_features)[0], row)
        assert np.linalg.norm(row) <= 1 + 1e-6


def test_other_words_are_other_rows():
    assert not np.array_equal(*hashed_words(["knee surgery", "budget report"], 64))
