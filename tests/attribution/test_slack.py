"""Slack exports: folders and zips, threads, channels, and files that are none."""

# ruff: noqa: E501 (tables of cases: one case a line)

import contextlib
import json
import zipfile

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from coowned import InputError, UserKeyRules, read_slack
from coowned.attribution.slack import looks_like_slack

USERS = [{"id": "U1", "name": "ann"}, {"id": "U2", "name": "bob", "deleted": True}, {"id": "U3"}, {"id": "U4"}]
CHANNELS = [
    {"id": "C1", "name": "general", "members": ["U1", "U2", "U4"]},
    {"id": "C2", "name": "empty", "members": ["U9"]},
]
DMS = [{"id": "D1", "members": ["U1", "U3"]}]
MPIMS = [{"id": "G7", "name": "mpdm-ann--bob--1", "members": ["U1", "U2", "U3"]}]


def message(ts, user=None, text="hello", **more):
    return {"type": "message", "ts": ts, "text": text, **({"user": user} if user else {}), **more}


def export(**conversations):
    """The files of an export, by name; conversations: lists of messages by folder, a day each."""
    files = {"users.json": USERS, "channels.json": CHANNELS, "dms.json": DMS, "mpims.json": MPIMS}
    for folder, days in conversations.items():
        for number, day in enumerate(days, start=1):
            files[f"{folder.replace('__', '-')}/2024-01-{number:02}.json"] = day
    return files


def content_of(value):
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def write_folder(root, files):
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content_of(value))
    return root


def write_zip(file, files, inside="", compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, value in files.items():
            archive.writestr(inside + name, content_of(value))
    return file


def people(examples):
    """The users of each message, by the message's id."""
    graph, keys = examples.graph, examples.user_keys.to_pylist()
    ends = zip(examples.ids.to_pylist(), graph.indptr[:-1], graph.indptr[1:], strict=True)
    return {example: {keys[user] for user in graph.users[a:b]} for example, a, b in ends}


SMALL = export(
    general=[
        [message("1.0", "U1", "see <@U4>"), message("2.0", "U2", thread_ts="2.0", reply_users=["U3"])],
        [message("3.0", "U3", thread_ts="2.0"), message("3.5", "U4", subtype="channel_join"), message("4.0", "U5")],
    ],
    D1=[[message("5.0", "U1")]],
)


def test_messages_and_people(tmp_path):
    examples = read_slack(write_folder(tmp_path, SMALL))
    assert people(examples) == {
        "C1:1.0": {"U1"}, "C1:2.0": {"U2", "U3"}, "C1:3.0": {"U2", "U3"}, "C1:4.0": {"U5"}, "D1:5.0": {"U1", "U3"},
    }  # fmt: skip
    assert examples.payload.to_pylist()[1] == {"channel": "C1", "ts": "1.0", "text": "see <@U4>"}
    assert examples.notes == {
        "conversations": 2, "messages": 5, "repeated_messages": 0, "notices_left_out": 1, "bot_messages": 0,
        "messages_without_author": 0, "unlisted_folders_left_out": 0, "other_files_ignored": 0,
    }  # fmt: skip
    assert "user" in examples.graph.columns_read
    assert "text" not in examples.graph.columns_read


def test_folder_and_zip_are_the_same(tmp_path):
    folder = write_folder(tmp_path / "export", SMALL)
    for other in (
        write_zip(tmp_path / "a.zip", SMALL),
        write_zip(tmp_path / "b.zip", {**SMALL, "__MACOSX/channels.json": b"\0"}, compression=zipfile.ZIP_STORED),
        write_zip(tmp_path / "c.zip", {f"My workspace/{name}": value for name, value in SMALL.items()}),
        write_folder(tmp_path / "outer", {f"inner/{name}": value for name, value in SMALL.items()}),
    ):
        assert looks_like_slack(other)
        for attribute_to in ("participants", "channel"):
            one, two = (read_slack(path, attribute_to=attribute_to) for path in (folder, other))
            assert one.graph.digest == two.graph.digest
            assert one.payload.equals(two.payload)
            assert one.notes == two.notes


def test_threads(tmp_path):
    """The people of a thread come from all that names them, in whatever order and on whatever day."""
    general = [
        [message("9.0", "U3", thread_ts="2.0", parent_user_id="U8")],
        [message("2.0", "U1", thread_ts="2.0", reply_users=["U6"], replies=[{"user": "U7", "ts": "8.0"}])],
        [message("9.5", "U4", thread_ts="2.0", subtype="thread_broadcast"), message("9.6", "U5", thread_ts="9.9")],
        [message("9.7", "U9", subtype="tombstone", thread_ts="9.9")],
    ]
    found = people(read_slack(write_folder(tmp_path, export(general=general))))
    everyone = {"U1", "U3", "U4", "U6", "U7", "U8"}
    assert found == {"C1:9.0": everyone, "C1:2.0": everyone, "C1:9.5": everyone, "C1:9.6": {"U5", "U9"}}


def test_the_same_time_in_two_channels(tmp_path):
    files = export(general=[[message("1.0", "U1", thread_ts="1.0")]], D1=[[message("1.0", "U3", thread_ts="1.0")]])
    assert people(read_slack(write_folder(tmp_path, files)))["C1:1.0"] == {"U1"}


def test_channel(tmp_path):
    examples = read_slack(write_folder(tmp_path, SMALL), attribute_to="channel")
    # U5 wrote and U3 answered though neither is a member on the day of the export.
    everyone = {"U1", "U2", "U3", "U4", "U5"}
    assert people(examples) == {
        **{f"C1:{ts}": everyone for ts in ("1.0", "2.0", "3.0", "4.0")}, "D1:5.0": {"U1", "U3"},
    }  # fmt: skip


def test_direct_messages_belong_to_all_members(tmp_path):
    files = export(D1=[[message("1.0", "U1")]], mpdm__ann____bob____1=[[message("2.0", "U2")]])
    files["groups.json"] = [{"id": "G9", "name": "mp", "is_mpim": True, "members": ["U4", "U5"]}]
    files["mp/2024-01-01.json"] = [message("3.0", "U4")]
    found = people(read_slack(write_folder(tmp_path, files)))
    assert found == {"D1:1.0": {"U1", "U3"}, "G7:2.0": {"U1", "U2", "U3"}, "G9:3.0": {"U4", "U5"}}


def test_programs_and_notices(tmp_path):
    general = [
        [
            message("1.0", None, subtype="bot_message", bot_id="B1", username="deploy"),
            message("2.0", None, subtype="bot_message", username="U1"),
            message("3.0", "U2", bot_id="B2"),
            message("4.0", None, subtype="file_comment", comment={"user": "U3", "comment": "x"}),
            message("5.0", "U4", subtype="me_message"),
            message("6.0", None),
            message("7.0", "U1", subtype="slackbot_response"),
            {"type": "huddle", "ts": "8.0", "user": "U1"},
            message("9.0", "U1", subtype="file_share", text=None),
        ]
    ]
    examples = read_slack(write_folder(tmp_path, export(general=general)))
    assert people(examples) == {
        "C1:1.0": {"bot:B1"}, "C1:2.0": {"bot:unnamed"}, "C1:3.0": {"U2"}, "C1:4.0": {"U3"}, "C1:5.0": {"U4"}, "C1:6.0": set(), "C1:9.0": {"U1"},
    }  # fmt: skip
    assert (examples.notes["bot_messages"], examples.notes["messages_without_author"]) == (3, 1)
    assert examples.notes["notices_left_out"] == 2
    assert examples.payload["text"][-1].as_py() == ""
    assert people(examples.without_users(["bot:B1"]))["C1:1.0"] == set()


def test_repeated_messages(tmp_path):
    general = [
        [message("1.0", "U1", "first"), message("1.0", "U1", "edited"), message("2.0", "U2", thread_ts="2.0")],
        [message("1.0", "U1", "again", thread_ts="2.0", subtype="thread_broadcast")],
    ]
    files = export(general=general)
    files["C1/2024-02-01.json"] = [message("2.0", "U2"), message("3.0", "U3")]  # the folder under its other name
    examples = read_slack(write_folder(tmp_path, files))
    assert people(examples) == {"C1:2.0": {"U1", "U2"}, "C1:1.0": {"U1", "U2"}, "C1:3.0": {"U3"}}
    assert (examples.notes["repeated_messages"], examples.notes["conversations"]) == (3, 1)
    row = examples.ids.to_pylist().index("C1:1.0")
    assert examples.payload["text"][row].as_py() == "first"


def test_what_is_left_out_is_counted(tmp_path):
    files = export(general=[[message("1.0", "U1")]])
    files["FC:F1:x/2024-01-01.json"] = [message("1.0", "U1")]
    files["unlisted/2024-01-01.json"] = b"not even read"
    files["general/canvas_in_the_conversation.json"] = b"{}"
    files["general/attachments/2024-01-01.json"] = b"{}"
    files["integration_logs.json"] = b"?"
    examples = read_slack(write_zip(tmp_path / "e.zip", files))
    assert examples.graph.num_examples == 1
    assert (examples.notes["unlisted_folders_left_out"], examples.notes["other_files_ignored"]) == (2, 2)


def test_no_messages(tmp_path):
    examples = read_slack(write_folder(tmp_path, export()))
    assert (examples.graph.num_examples, examples.graph.num_users, examples.payload.num_rows) == (0, 0, 0)


def test_keys_are_exact_unless_asked_otherwise(tmp_path):
    files = export(general=[[message("1.0", "U1"), message("2.0", "u1")]])
    write_folder(tmp_path, files)
    assert read_slack(tmp_path).graph.num_users == 2
    assert read_slack(tmp_path, user_keys=UserKeyRules()).graph.num_users == 1
    (tmp_path / "aliases.csv").write_text("key,user\nu1,U1\n")
    assert read_slack(tmp_path, aliases=tmp_path / "aliases.csv").graph.num_users == 1


def test_progress_is_told(tmp_path):
    told = []
    read_slack(write_folder(tmp_path, SMALL), progress=lambda done, message: told.append(done))
    assert told == sorted(told)
    assert told[-1] == 1.0
    with pytest.raises(InputError, match="progress must be callable"):
        read_slack(tmp_path, progress=3)


def test_batches_of_text(tmp_path, monkeypatch):
    whole = read_slack(write_folder(tmp_path, SMALL))
    monkeypatch.setattr("coowned.attribution.examples.BATCH_CHARACTERS", 150)
    cut = read_slack(tmp_path)
    assert cut.payload.column("text").num_chunks > 1
    assert cut.payload.equals(whole.payload)
    assert cut.graph.digest == whole.graph.digest


def replaced(text, value):
    """The same messages with other words, wherever Slack keeps words."""
    if isinstance(value, dict):
        words = {
            "text": text,
            "blocks": [{"type": "user", "user_id": text}],
            "attachments": [{"text": text, "author_id": text}],
        }
        return {**value, **(words if value.get("type") == "message" else {})}
    return value


@settings(max_examples=40)
@given(st.lists(st.text() | st.sampled_from(["<@U4>", "<!channel>", "thread_ts", "/me U9"]), min_size=1, max_size=4))
def test_texts_do_not_reach_the_graph(tmp_path_factory, texts):
    def with_words(texts):
        return {
            name: [replaced(texts[row % len(texts)], value) for row, value in enumerate(values)]
            for name, values in SMALL.items()
        }

    root = tmp_path_factory.mktemp("slack")
    plain = write_zip(root / "a.zip", SMALL)
    other = write_zip(root / "b.zip", with_words(texts))
    for attribute_to in ("participants", "channel"):
        one, two = (read_slack(path, attribute_to=attribute_to) for path in (plain, other))
        assert two.graph.digest == one.graph.digest
        assert two.ids.equals(one.ids)
        assert people(two) == people(one)
        assert two.notes == one.notes
        assert one.payload["text"].to_pylist() != two.payload["text"].to_pylist() or set(texts) <= {"hello"}


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("general/2024-01-01.json", b'[{"type": "message", "ts"', r"general/2024-01-01.json: not JSON in UTF-8 \(.* line 1 column 26 .*\); export it again"),
        ("general/2024-01-01.json", b'["\xff"]', "general/2024-01-01.json: not JSON in UTF-8 .*byte 0xff in position 2"),
        ("general/2024-01-01.json", b"{}", "general/2024-01-01.json: expected array, got object"),
        ("general/2024-01-01.json", b"", "general/2024-01-01.json: not JSON"),
        ("general/2024-01-01.json", b"[" * 100_000, "general/2024-01-01.json: not JSON"),
        ("general/2024-01-01.json", b"[7]", "general/2024-01-01.json: entry 0: expected object, got int"),
        ("general/2024-01-01.json", [message("1.0"), {"user": "U1"}], "general/2024-01-01.json: entry 1: object missing required field ts"),
        ("general/2024-01-01.json", [message("soon", "U1")], "entry 0, 'ts': expected str matching"),
        ("general/2024-01-01.json", [message(1.5, "U1")], "entry 0, 'ts': expected str, got float"),
        ("general/2024-01-01.json", [message("1.0", "U1", thread_ts="x")], "entry 0, 'thread_ts': expected str matching"),
        ("general/2024-01-01.json", [message("1.0", 7)], "entry 0, 'user': expected str"),
        ("general/2024-01-01.json", [message("1.0", None, comment={"user": 7})], "entry 0: comment.user: expected str"),
        ("general/2024-01-01.json", [message("1.0", None, comment={"user": "U 1"})], "entry 0: comment.user: expected str matching"),
        ("general/2024-01-01.json", [message("1.0", "U 1")], "entry 0, 'user': expected str matching"),
        ("general/2024-01-01.json", [message("1.0", "\ud800")], "entry 0, 'user': expected str matching"),
        ("general/2024-01-01.json", [message("1.0", "U1", reply_users="U2")], "entry 0, 'reply_users': expected array"),
        ("general/2024-01-01.json", [message("1.0", "U1", reply_users=[{}])], r"entry 0, 'reply_users\[0\]': expected str"),
        ("general/2024-01-01.json", [message("1.0", "U1", replies=["U2"])], r"entry 0, 'replies\[0\]': expected object"),
        ("channels.json", b'[{"id": "C1"', "channels.json: not JSON"),
        ("channels.json", [{"name": "general"}], "channels.json: entry 0: object missing required field id"),
        ("channels.json", [{"id": "C1", "name": 7}], "channels.json: entry 0, 'name': expected str"),
        ("channels.json", [{"id": "C1", "members": "U1"}], "channels.json: entry 0, 'members': expected array"),
        ("dms.json", [{"id": "D1"}], "D1: has no member list; use attribute_to participants"),
    ],
)  # fmt: skip
def test_mangled_files_are_named(tmp_path, name, content, error):
    files = {**SMALL, name: content}
    for path in (write_folder(tmp_path / "export", files), write_zip(tmp_path / "e.zip", files)):
        with pytest.raises(InputError, match=error) as caught:
            read_slack(path)
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("comment", [["x"], 7, 10**400, 1e999, True, "x", {"user": None}, {"comment": 5}], ids=range(8))
def test_comments_of_any_kind(tmp_path, comment):
    files = export(general=[[message("1.0", None, subtype="file_comment", comment=comment)]])
    assert people(read_slack(write_folder(tmp_path, files))) == {"C1:1.0": set()}


@pytest.mark.parametrize("text", [["x"], 7, {"a": []}])
def test_a_text_that_is_none_stops_nothing(tmp_path, text):
    examples = read_slack(write_folder(tmp_path, export(general=[[message("1.0", "U1", text)]])))
    assert examples.payload["text"].to_pylist() == [""]


def test_half_a_surrogate_pair_in_a_text(tmp_path):
    files = export(general=[b'[{"type": "message", "ts": "1.0", "user": "U1", "text": "a\\ud800b"}]'])
    assert read_slack(write_folder(tmp_path, files)).payload["text"].to_pylist() == ["a?b"]


def test_channels_without_members(tmp_path):
    files = {**SMALL, "channels.json": [{"id": "C1", "name": "general", "members": None}]}
    write_folder(tmp_path, files)
    assert read_slack(tmp_path).graph.num_examples == 5
    with pytest.raises(InputError, match="general: has no member list"):
        read_slack(tmp_path, attribute_to="channel")


def test_not_an_export(tmp_path):
    with pytest.raises(InputError, match="no: no such file or folder"):
        read_slack(tmp_path / "no")
    with pytest.raises(InputError, match="attribute_to must be one of 'participants', 'channel', not 'sender'"):
        read_slack(tmp_path, attribute_to="sender")
    with pytest.raises(InputError, match=r"not a Slack export: there is no channels.json, .* in it"):
        read_slack(tmp_path)
    (tmp_path / "x.zip").write_bytes(b"PK and no more")
    with pytest.raises(InputError, match=r"x.zip: neither a folder nor a readable zip file"):
        read_slack(tmp_path / "x.zip")
    write_zip(tmp_path / "other.zip", {"photo.jpg": b"x"})
    with pytest.raises(InputError, match="not a Slack export"):
        read_slack(tmp_path / "other.zip")
    for path in (tmp_path, tmp_path / "no", tmp_path / "x.zip", tmp_path / "other.zip"):
        assert not looks_like_slack(path)


def test_a_file_beyond_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("coowned.attribution.slack.LARGEST_FILE", 10)
    with pytest.raises(InputError, match=r"channels.json: has \d+ bytes, too many for one day"):
        read_slack(write_zip(tmp_path / "e.zip", SMALL))


@settings(max_examples=150)
@given(st.data())
def test_mangled_exports(tmp_path_factory, data):
    """Whatever happens to its bytes, an export is read or refused, never a traceback."""
    root = tmp_path_factory.mktemp("slack")
    if data.draw(st.booleans(), label="zip"):
        file = write_zip(root / "e.zip", SMALL)
    else:
        write_folder(root / "export", SMALL)
        file = root / "export" / data.draw(st.sampled_from(sorted(SMALL)))
    content = bytearray(file.read_bytes())
    for place, byte in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=5)
    ):
        content[place] = byte
    file.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    with contextlib.suppress(InputError):
        path = file if file.suffix == ".zip" else root / "export"
        looks_like_slack(path)
        assert read_slack(path).graph.num_examples <= 6
