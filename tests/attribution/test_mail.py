"""From mailboxes to attributed examples: who, under which id, with what text."""

import datetime
import email.message
import mailbox

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.mail import display_names, looks_like_mail, read_mail
from coowned.attribution.sources import DataSource
from coowned.attribution.user_keys import UserKeyRules
from coowned.errors import InputError

_FROM = "From ann@x.org Mon Jan  1 10:00:00 2024\n"
_SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


def _text(text="hello", **headers) -> str:
    """A message; underscores in header names stand for dashes."""
    return "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in headers.items()) + f"\n{text}\n"


def _mbox(folder, *messages: str):
    file = folder / "box.mbox"
    file.write_text("".join(f"{_FROM}{message}\n" for message in messages), encoding="utf-8", newline="")
    return file


def _users(examples: AttributedExamples) -> list[set[str]]:
    keys = examples.user_keys.to_pylist()
    indptr, users = examples.graph.indptr, examples.graph.users
    return [{keys[user] for user in users[indptr[row] : indptr[row + 1]]} for row in range(examples.graph.num_examples)]


def _column(examples: AttributedExamples, name: str) -> list:
    return examples.payload[name].to_pylist()


_LETTER = _text(
    From="Ann <ann@x.org>",
    Sender="secretary@x.org",
    To='"Doe, Bob" <BOB@x.org>,\n\tcarol@x.org',
    Cc="=?utf-8?q?J=C3=BCrgen?= <j@x.org>",
    Bcc="team: dora@x.org, emil@x.org;",
    Resent_To="fritz@x.org",
    Reply_To="list@x.org",
    Message_ID="<1@x.org>",
    Subject="=?utf-8?q?Gr=C3=BC=C3=9Fe?=\n  an alle",
    Date="Mon, 01 Jan 2024 12:00:00 +0200",
)


def test_every_address_is_a_user(tmp_path):
    examples = read_mail(_mbox(tmp_path, _LETTER))
    names = ("ann", "secretary", "list", "bob", "carol", "j", "dora", "emil", "fritz")
    assert _users(examples) == [{f"{name}@x.org" for name in names}]
    assert examples.ids.to_pylist() == ["1@x.org"]
    assert _column(examples, "subject") == ["Grüße an alle"]
    assert _column(examples, "date") == [datetime.datetime(2024, 1, 1, 10, tzinfo=datetime.UTC)]
    assert _column(examples, "text") == ["hello"]


def test_attribution_to_sender_or_recipients(tmp_path):
    file = _mbox(tmp_path, _LETTER)
    sender = read_mail(file, attribute_to="sender")
    recipients = read_mail(file, attribute_to="recipients")
    assert _users(sender) == [{"ann@x.org", "secretary@x.org", "list@x.org"}]
    assert _users(recipients) == [{f"{name}@x.org" for name in ("bob", "carol", "j", "dora", "emil", "fritz")}]
    assert "To" not in sender.graph.columns_read
    assert "From" not in recipients.graph.columns_read
    assert sender.graph.columns_read[:2] == ("Message-ID", "From")
    with pytest.raises(InputError, match="attribute_to must be one of"):
        read_mail(file, attribute_to="nobody")


def test_thread_attributes_to_everyone_connected(tmp_path):
    file = _mbox(
        tmp_path,
        _text(From="ann@x.org", To="bob@x.org", Message_ID="<1@x>"),
        _text(From="bob@x.org", To="carol@x.org", Message_ID="<2@x>", In_Reply_To="<1@x>"),
        _text(From="dora@x.org", To="emil@x.org", Message_ID="<3@x>", References="<lost@x>\n <2@x>"),
        _text(From="fritz@x.org", References="<lost@x>"),  # joined by a message that is not in the box
        _text(From="gina@x.org", To="ann@x.org", Message_ID="<4@x>"),
    )
    everyone = {f"{name}@x.org" for name in ("ann", "bob", "carol", "dora", "emil", "fritz")}
    examples = read_mail(file, attribute_to="thread")
    assert _users(examples) == [everyone] * 4 + [{"gina@x.org", "ann@x.org"}]
    assert {"References", "In-Reply-To"} <= set(examples.graph.columns_read)
    assert _users(read_mail(file))[1] == {"bob@x.org", "carol@x.org"}


def test_an_address_in_a_reply_header_joins_no_threads(tmp_path):
    file = _mbox(
        tmp_path,
        _text(From="ann@x.org", Message_ID="<1@x>"),
        _text(From="bob@x.org", Message_ID="<2@x>", In_Reply_To="Message of Ann <ann@x.org> <0@x>"),
        _text(From="carol@x.org", Message_ID="<3@x>", In_Reply_To="Message of Ann <ann@x.org> <1@x>"),
    )
    assert _users(read_mail(file, attribute_to="thread")) == [
        {"ann@x.org", "carol@x.org"},
        {"bob@x.org"},
        {"ann@x.org", "carol@x.org"},
    ]


@given(st.data())
@_SAME_FOLDER
def test_threads_are_connected_components(tmp_path, data):
    count = data.draw(st.integers(1, 8))
    mentions = data.draw(st.lists(st.lists(st.integers(0, 11), max_size=2), min_size=count, max_size=count))
    messages = [
        _text(
            From=f"u{row}@x.org",
            Message_ID=f"<m{row}@y>",
            References=" ".join(f"<m{other}@y>" for other in row_mentions),
        )
        for row, row_mentions in enumerate(mentions)
    ]
    group = list(range(12))  # a plain union of labels, to compare with
    for row, row_mentions in enumerate(mentions):
        for other in row_mentions:
            group = [group[row] if label == group[other] else label for label in group]
    expected = [{f"u{other}@x.org" for other in range(count) if group[other] == group[row]} for row in range(count)]
    assert _users(read_mail(_mbox(tmp_path, *messages), attribute_to="thread")) == expected


def test_repeated_messages_are_one_example(tmp_path):
    file = _mbox(
        tmp_path,
        _text("first", From="ann@x.org", To="bob@x.org", Message_ID="<1@x>"),
        _text("second", From="Ann@X.org", To="bob@x.org, BOB@x.org", Message_ID="<1@x>"),
        _text("third", From="ann@x.org", To="carol@x.org", Message_ID="<1@x>"),
        _text("fourth", From="dora@x.org", Message_ID="<1@x>"),
        _text("fifth", From="ann@x.org", Message_ID="<2@x>"),
    )
    for attribute_to in ("everyone", "thread"):
        examples = read_mail(file, attribute_to=attribute_to)
        assert examples.ids.to_pylist() == ["1@x", "2@x"]
        assert _column(examples, "text") == ["first", "fifth"]
        assert _users(examples) == [{f"{name}@x.org" for name in ("ann", "bob", "carol", "dora")}, {"ann@x.org"}]
        assert (examples.notes["messages"], examples.notes["repeated_messages"]) == (5, 3)


def test_copies_in_several_folders(tmp_path):
    """A copy in the Sent folder names Bob in Bcc; those in the inboxes do not."""
    sent = _text("about Bob", From="ann@x.org", To="carol@x.org", Bcc="bob@x.org", Message_ID="<1@x>")
    inbox = _text("about Bob", From="ann@x.org", To="carol@x.org", Message_ID="<1@x>")
    for folder, content in (("carol/inbox", inbox), ("dan/inbox", inbox), ("ann/sent", sent)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.eml").write_text(content)
    examples = read_mail(tmp_path)
    assert examples.ids.to_pylist() == ["1@x"]
    assert _users(examples) == [{"ann@x.org", "bob@x.org", "carol@x.org"}]


@pytest.mark.parametrize(
    "header", ["Reply-To", "X-Original-From", "X-Original-Sender", "Resent-Reply-To", "Mail-Reply-To"]
)
def test_senders_whose_address_a_list_rewrote(tmp_path, header):
    letter = f'From: "Bob via dev" <dev@lists.org>\nTo: dev@lists.org\n{header}: Bob <bob@x.org>\n\nhello\n'
    assert _users(read_mail(_mbox(tmp_path, letter))) == [{"dev@lists.org", "bob@x.org"}]


def test_repeats_are_found_across_batches(tmp_path, monkeypatch):
    messages = [_text(f"text {row}", From=f"u{row % 3}@x.org", Message_ID=f"<{row % 5}@x>") for row in range(40)]
    file = _mbox(tmp_path, *messages)
    whole = read_mail(file)
    monkeypatch.setattr("coowned.attribution.examples.BATCH_CHARACTERS", 1)
    split = read_mail(file)
    assert split.graph.digest == whole.graph.digest
    assert split.payload.to_pylist() == whole.payload.to_pylist()
    assert _users(split) == _users(whole)
    assert whole.graph.num_examples == 5
    assert whole.graph.users_per_example.tolist() == [3] * 5
    assert whole.notes == split.notes


def test_user_key_rules_are_used(tmp_path):
    file = _mbox(tmp_path, _text(From="ann+lists@x.org", To="ann@x.org", Message_ID="<1@x>"))
    assert _users(read_mail(file)) == [{"ann@x.org"}]
    assert _users(read_mail(file, user_keys=UserKeyRules.email(plus_tags=False))) == [{"ann+lists@x.org", "ann@x.org"}]


def test_without_message_id_the_position_is_the_id(tmp_path):
    examples = read_mail(_mbox(tmp_path, _text(From="ann@x.org"), _text(From="ann@x.org"), _text(Message_ID="<>")))
    assert examples.ids.to_pylist() == ["message 1", "message 2", "message 3"]
    assert examples.notes["messages_without_id"] == 3
    assert examples.graph.columns_read[:2] == ("Message-ID", "file name or position")
    folder = tmp_path / "mail"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.eml").write_text(_text(From="ann@x.org"))
    (folder / "b.eml").write_text(_text(From="ann@x.org"))
    assert read_mail(folder).ids.to_pylist() == ["b.eml", "sub/a.eml"]


_BODIES = st.lists(st.text(st.characters(codec="utf-8"), max_size=80), min_size=4, max_size=4)


@given(_BODIES)
@example(["Content-Type: text/html", "\n\nTo: zoe@x.org\n", "Message-ID: <9@x>\n\nFrom: zoe", "--B\n\xff"])
@_SAME_FOLDER
@pytest.mark.parametrize("attribute_to", ["everyone", "thread"])
def test_bodies_do_not_reach_the_graph(tmp_path, attribute_to, bodies):
    # Written by a writer of mbox, which escapes what would look like the start of a message.
    headers = [
        {"From": "ann@x.org", "To": "bob@x.org"},
        {"From": "ann@x.org", "Message_ID": "<1@x>", "Content_Type": "multipart/mixed; boundary=B"},
        {"From": "bob@x.org", "Message_ID": "<1@x>", "References": "<0@x>"},
        {"From": "carol@x.org", "In_Reply_To": "<0@x>", "Content_Transfer_Encoding": "base64"},
    ]

    def digest(texts):
        messages = [
            _text(text.replace("From ", ">From "), **header) for text, header in zip(texts, headers, strict=True)
        ]
        return read_mail(_mbox(tmp_path, *messages), attribute_to=attribute_to).graph.digest

    assert digest(bodies) == digest(["", "", "", ""])


def test_maildir_mbox_and_eml_written_by_the_standard_library_agree(tmp_path):
    messages = []
    for row in range(5):
        message = email.message.EmailMessage()
        message["From"], message["To"] = f"Änne <u{row}@x.org>", "bob@x.org"
        message["Message-ID"], message["Subject"] = f"<{row}@x>", f"Größe {row}"
        message["Date"] = datetime.datetime(2024, 1, 1 + row, tzinfo=datetime.UTC)
        message.set_content(f"Text {row}:\n\nFrom here on\nßß\n")
        message.add_alternative("<p>rich</p>", subtype="html")
        message.add_attachment(b"1234", maintype="image", subtype="png", filename="a.png")
        messages.append(message)
    box = mailbox.mbox(tmp_path / "inbox")
    folder = mailbox.Maildir(tmp_path / "Maildir")
    (tmp_path / "eml").mkdir()
    for row, message in enumerate(messages):
        (tmp_path / "eml" / f"{row}.eml").write_bytes(message.as_bytes())
        folder.add(message)
        box.add(message)  # last: escaping "From " changes the message itself
    box.close()
    expected = [{"subject": f"Größe {row}", "text": f"Text {row}:\n\nFrom here on\nßß"} for row in range(5)]
    digests = set()
    for place in ("inbox", "Maildir", "eml"):
        examples = read_mail(tmp_path / place)
        rows = examples.payload.select(["subject", "text"]).to_pylist()
        assert sorted(rows, key=lambda row: row["subject"]) == expected
        assert examples.notes["attachments_ignored"] == 5
        digests.add(examples.graph.digest)
        assert looks_like_mail(tmp_path / place)
    assert len(digests) == 1
    assert read_mail(tmp_path / "eml" / "3.eml").ids.to_pylist() == ["3@x"]


def test_folders_are_those_of_the_files(tmp_path):
    """Of a file in a folder its folder, of a Maildir the Maildir, of an mbox the mbox; at the top none."""
    for inside in ("work/plans/1.eml", "2.eml", "home/cur/3", "lists/dev.mbox"):
        file = tmp_path / inside
        file.parent.mkdir(parents=True, exist_ok=True)
        text = _text("hello", From="ann@x.org", Message_ID=f"<{inside}>")
        file.write_text(f"From x Mon Jan  1 00:00:00 2024\n{text}" if inside.endswith("mbox") else text)
    examples = read_mail(tmp_path)
    found = dict(zip(examples.ids.to_pylist(), examples.payload["folder"].to_pylist(), strict=True))
    assert found == {"work/plans/1.eml": "work/plans", "2.eml": "", "home/cur/3": "home", "lists/dev.mbox": "lists/dev"}
    assert read_mail(tmp_path / "2.eml").payload["folder"].to_pylist() == [""]


def test_what_is_wrong_is_counted_and_kept(tmp_path):
    file = _mbox(
        tmp_path,
        _text(From="ann", To="undisclosed-recipients:;", Message_ID="<1@x>", Date="never"),
        _text(X_Other="no header of use"),
        "Subject: \x00\nContent-Type: text/plain; charset=none\n\nß\n",
    )
    examples = read_mail(file)
    assert _users(examples) == [{"ann"}, set(), set()]
    assert dict(examples.notes) == {
        "messages": 3, "messages_without_id": 2, "unreadable_headers": 1, "unreadable_addresses": 1,
        "unnamed_recipients": 1, "undated_messages": 3, "attachments_ignored": 0, "undecodable_bodies": 1,
        "repeated_messages": 0, "messages_without_users": 2,
    }  # fmt: skip


def test_unreadable_files_of_a_folder_are_examples_without_users(tmp_path):
    (tmp_path / "a.eml").write_text(_text(From="ann@x.org", Message_ID="<1@x>"))
    (tmp_path / "b.eml").write_bytes(b"")
    (tmp_path / "c.eml").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "note.txt").write_text("not mail")
    examples = read_mail(tmp_path)
    assert examples.notes["other_files_ignored"] == 1
    assert examples.ids.to_pylist() == ["1@x", "b.eml", "c.eml"]
    assert _users(examples) == [{"ann@x.org"}, set(), set()]
    assert examples.notes["unreadable_headers"] == 2


def test_order_is_that_of_the_file(tmp_path):
    examples = read_mail(_mbox(tmp_path, *(_text(f"{row}", Message_ID=f"<{97 - row}@x>") for row in range(97))))
    assert _column(examples, "text") == [str(row) for row in range(97)]
    assert examples.ids.to_pylist() == [f"{97 - row}@x" for row in range(97)]


def test_progress_grows_to_one(tmp_path):
    seen = []
    read_mail(_mbox(tmp_path, _LETTER), progress=lambda done, message: seen.append((done, message)))
    assert seen == sorted(seen)
    assert seen[-1] == (1.0, "reading mail")
    with pytest.raises(InputError, match="progress must be callable"):
        read_mail(tmp_path / "box.mbox", progress=3)  # type: ignore[arg-type]


def test_looks_like_mail(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return looks_like_mail(tmp_path / name)

    assert write("a.eml", b"anything")
    assert write("plain", b"From: ann@x.org\nSubject: a\n\nhello")
    assert write("box", _FROM.encode() + b"Subject: a\n\nhello")
    assert not write("data.yaml", b"from: ann\nname: b\n")
    assert not write("data.csv", b"from,to\nann,bob\n")
    assert not write("picture", b"\x89PNG\r\n")
    assert not write("empty", b"")
    assert not looks_like_mail(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    assert not looks_like_mail(tmp_path / "folder")
    (tmp_path / "folder" / "1.").write_bytes(b"From: ann@x.org\n\nhello")
    assert looks_like_mail(tmp_path / "folder")


_WHOLE = (
    _FROM + _LETTER + "\n" + _FROM
    + _text(
        "--B\nContent-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\ncaf=E9\n"
        "--B\nContent-Type: text/html\nContent-Transfer-Encoding: base64\n\nPHA+Jmx0O2E8L3A+\n--B--",
        From="bob@x.org", Message_ID="<1@x.org>", References="<0@x> <1@x>",
        Content_Type='multipart/alternative; boundary="B"',
    )
    + "\n" + _FROM + _text(">From the start", From="=?utf-8?b?w6k=?= <e@x.org>", Date="1 Jan 2024 00:00:00 +0000")
).encode()  # fmt: skip
_SPLICES = st.sampled_from(
    [
        b"",
        b"\n",
        b"\n\n",
        b"\r",
        b"\0",
        b'"',
        b"(",
        b"<",
        b"=?",
        b"?=",
        b":",
        b";",
        b"\xff\xfe",
        b"\nFrom ",
        _FROM.encode(),
        b"--B",
    ]
)


@given(
    st.lists(st.tuples(st.integers(0, len(_WHOLE)), st.integers(0, 9), _SPLICES | st.binary(max_size=4)), max_size=8),
    st.integers(0, len(_WHOLE)),
    st.sampled_from(["box.mbox", "letter.eml"]),
    st.sampled_from(["everyone", "thread"]),
)
@settings(parent=_SAME_FOLDER, max_examples=200)
def test_mangled_mailboxes(tmp_path, damage, length, name, attribute_to):
    content = _WHOLE
    for place, gone, put in damage:
        content = content[:place] + put + content[place + gone :]
    (tmp_path / name).write_bytes(content[: length + 100])
    try:
        examples = read_mail(tmp_path / name, attribute_to=attribute_to)
    except InputError:
        return
    rows = examples.graph.num_examples
    assert rows == examples.payload.num_rows == len(examples.ids) == len(set(examples.ids.to_pylist())) >= 1
    assert rows + examples.notes["repeated_messages"] == examples.notes["messages"]
    assert all(key.strip() for key in examples.user_keys.to_pylist())
    assert examples.payload.column_names == ["subject", "date", "text", "folder"]
    examples.payload.validate(full=True)


def test_names_in_brackets_without_end(tmp_path):
    """Damage in a header costs no time and no name."""
    file = tmp_path / "a.eml"
    file.write_text(f"From: Ann Lee <ann@x.org>\nTo: {'(' * 9000} Bob <bob@x.org>\n\nHello\n")
    assert display_names(file) == {"ann@x.org": {"Ann Lee"}, "bob@x.org": {"Bob"}}


@pytest.mark.parametrize("counted", ["all", "all but one", "none"])
def test_nobody_is_made_by_a_body(tmp_path, counted):
    """A body that holds a whole message, in a box that escapes nothing."""
    forged = f"she wrote:\n\n{_FROM}From: eve@x.org\nTo: dan@x.org\nMessage-ID: <9@x>\n\nFrom here on\nhello\n"
    box = ""
    for number, text in enumerate([forged, "two\n", "three\n"]):
        length = counted == "all" or (counted == "all but one" and number != 1)
        header = f"From: u{number}@x.org\n" + (f"Content-Length: {len(text)}\n" if length else "")
        box += f"{_FROM}{header}\n{text}\n"
    (tmp_path / "box.mbox").write_text(box)
    with pytest.raises(InputError, match=r"box\.mbox, message [12]: .*--mbox-dialect"):
        read_mail(tmp_path / "box.mbox")
    if counted == "all":
        for read in (read_mail, lambda path, **named: DataSource(path=path, **named).read()):
            examples = read(tmp_path / "box.mbox", mbox_dialect="mboxcl2")
            assert _users(examples) == [{"u0@x.org"}, {"u1@x.org"}, {"u2@x.org"}]
        names = DataSource(path=tmp_path / "box.mbox", mbox_dialect="mboxcl2").display_names()
        assert "eve@x.org" not in names
    with pytest.raises(InputError, match="mbox_dialect must be one of"):
        read_mail(tmp_path / "box.mbox", mbox_dialect="mbox")
