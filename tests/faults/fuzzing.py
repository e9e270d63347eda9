"""Damaged files of every kind we read: each is read, or refused with a CoownedError, in bounded time.

`python -m tests.faults.fuzzing NAME CASES` fuzzes one target in a process of its own and prints a row.
"""

import contextlib
import dataclasses
import faulthandler
import io
import itertools
import json
import mailbox
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks import memory
from hypothesis import strategies as st
from tests.runs.run_folders import reseal, write_run

import coowned as co
from coowned import codec
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.attribution.sources import DataSource
from coowned.attribution.user_keys import read_keys
from coowned.certificate import ContributionCertificate
from coowned.errors import CoownedError
from coowned.exact.keys import RunKey
from coowned.runs.config import TrainConfig, example
from coowned.runs.records import RunRecord
from coowned.runs.run_folder import RunFolder
from coowned.runs.signature import verification_key, verify_run
from coowned.runs.stored_run import StoredRun, read_claim
from coowned.selection.selection_files import read_selection, write_selection

SECONDS = 20  # of processor time for one case
_WALL_SECONDS = 300  # then the process ends with a traceback: compiled code cannot be interrupted otherwise

# Pieces that have broken parsers before.
_TOKENS = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc3", b"\r\n", b"\r", b"\n\n", b"\t", b"\x1b[2J", b"\x85",
    "\u202e\u200b\u2028".encode(), b'"', b"'", b"\\", b"\\u0000", b"\\ud800", b",", b";", b":", b"{", b"}", b"[", b"]",
    b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"-0.0", b"99999999999999999999", b"9" * 5000, b"true", b"{}", b"[]",
    b"[" * 3000, b'{"a":' * 3000, b"<script>alert(1)</script>", b"../../etc/passwd", b"=?utf-8?b?/////?=",
    b"=?x?q?=00?=", b"From ", b"\nFrom a@b Mon Jan  1 10:00:00 2024\nTo: x@y\n\n", b"Content-Length: 99999999999\n",
    b"Content-Type: multipart/mixed; boundary=x\n\n--x\n", b"Content-Type: text/plain; charset=idna\n",
    b"Date: Mon, 99 Foo 99999 99:99:99 +9999\n", b"PAR1", b"PK\x03\x04", b"a" * 70000,
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """Valid files, and what reads the folder they are in.

    Attributes:
      files: content by path below the folder; one of them is damaged at a time.
      read: called with the folder.
      spared: files that are never damaged.
    """

    files: dict[str, bytes]
    read: Callable[[Path], object]
    spared: tuple[str, ...] = ()


@dataclasses.dataclass
class Outcome:
    """How many cases were read and refused, the slowest, and whatever else came out: exception, damage, traceback."""

    read: int = 0
    refused: int = 0
    slowest: float = 0.0
    failures: dict[str, str] = dataclasses.field(default_factory=dict)


class TooSlow(BaseException):
    """Not an Exception, so that no reader takes it for one of its own."""


Damage = tuple[str, float, int, bytes]
_VALUES = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, 1e308, -0.0, "", "x", "\0", "\ud800", "x" * 70000,
    "<b>", "../..", [], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, ["a", 1, None, {}], [0] * 5000,
]  # fmt: skip


def damages() -> st.SearchStrategy[tuple[int, list[Damage]]]:
    """Which file, and what is done to it: kind, where (a share of the length), how many bytes, which bytes."""
    kinds = st.sampled_from(
        ["value", "value", "flip", "set", "delete", "truncate", "insert", "replace", "repeat", "move"]
    )
    one = st.tuples(
        kinds,
        st.integers(0, 999_999).map(lambda number: number / 1e6),
        st.integers(1, 200) | st.integers(1, 7),
        st.sampled_from(_TOKENS) | st.binary(min_size=1, max_size=8),
    )
    return st.tuples(st.integers(0, 1000), st.lists(one, min_size=1, max_size=4))


def damaged(content: bytes, damage: list[Damage]) -> bytes:
    """The content after each damage in turn."""
    for kind, share, length, token in damage:
        at = int(share * len(content))
        piece = content[at : at + length]
        if kind == "flip" and piece:
            content = content[:at] + bytes([piece[0] ^ 1 << length % 8]) + content[at + 1 :]
        elif kind == "set":
            content = content[:at] + token[:1] + content[at + 1 :]
        elif kind == "delete":
            content = content[:at] + content[at + length :]
        elif kind == "truncate":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + token + content[at:]
        elif kind == "replace":
            content = content[:at] + token + content[at + length :]
        elif kind == "repeat":
            content = content[:at] + piece * 20 + content[at:]
        elif kind == "value":
            content = _with_another_value(content, at, length)
        elif kind == "move":
            other = (at * 7919 + length) % (len(content) + 1)
            content = content[:other] + piece + content[other:]
    return content


def _with_another_value(content: bytes, at: int, number: int) -> bytes:
    """JSON, or the line of JSON there, with one value replaced, removed or given another name; else unchanged."""
    begin, end = 0, len(content)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        begin = content.rfind(b"\n", 0, at) + 1
        end = content.find(b"\n", begin) if b"\n" in content[begin:] else end
        try:
            document = json.loads(content[begin:end])
        except (ValueError, RecursionError):
            return content
    if not isinstance(document, (dict, list)) or not document:
        return content
    nodes = list(_nodes(document))
    parent, key = nodes[at * 31 % len(nodes)]
    value = _VALUES[number % len(_VALUES)]
    if number % 5 == 0:
        del parent[key]
    elif number % 7 == 0 and isinstance(parent, dict):
        parent[f"{key}s"] = parent.pop(key)
    else:
        parent[key] = value
    return content[:begin] + json.dumps(document).encode() + content[end:]


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _nodes(inner)


def resealed(text: bytes) -> bytes:
    """JSON with the checksum of what it holds, as somebody would write who forges it; unchanged where it has none."""
    try:
        fields = json.loads(text)
        del fields["checksum"]
        plain = {key: value for key, value in fields.items() if key != "format"}
        return json.dumps({**fields, "checksum": codec.checksum(plain)}).encode()
    except (ValueError, RecursionError, TypeError, KeyError):
        return text


def fuzz(target: Target, cases: int, *, seed: int = 0) -> Outcome:
    """Damages a target so often; failures are collected by the place they come from."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as room:
        folders = (Path(room) / str(number) for number in itertools.count())
        target.read(_written(next(folders), target.files))  # undamaged; without a limit, since kernels are compiled

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=cases,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(damages())
        def try_one(drawn: tuple[int, list[Damage]]) -> None:
            number, damage = drawn
            names = sorted(target.files.keys() - set(target.spared))
            name = names[number % len(names)]
            folder = _written(next(folders), target.files | {name: damaged(target.files[name], damage)})
            _try(target, folder, f"{name} {damage}", outcome)
            shutil.rmtree(folder)

        try_one()
    return outcome


def _try(target: Target, folder: Path, case: str, outcome: Outcome) -> None:
    begun = time.process_time()
    try:
        with limited():
            target.read(folder)
        outcome.read += 1
    except CoownedError as error:
        outcome.refused += 1
        if "\n" in str(error) or not str(error):
            outcome.failures["not one sentence"] = f"{case}: {error}"
    except (Exception, TooSlow) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        outcome.failures.setdefault(where, f"{case}\n{traceback.format_exc()[-3000:]}")
    outcome.slowest = max(outcome.slowest, time.process_time() - begun)


class limited:
    """Ends what takes longer than SECONDS of processor time, or waits for longer than any test may."""

    def __enter__(self) -> None:
        def late(*_: object) -> None:
            raise TooSlow

        self._before = signal.signal(signal.SIGPROF, late)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        faulthandler.dump_traceback_later(_WALL_SECONDS, exit=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)


def _written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


# -- what is read ------------------------------------------------------------------------------------------------------

_ROWS = [
    {"id": "a1", "users": ["ann@x.org", "Bob <bob@x.org>"], "text": "See you, ann", "n": 1, "when": "2024-01-01"},
    {"id": "a2", "users": ["bob@x.org"], "text": 'A "quoted", text', "n": 2.5, "when": None},
    {"id": "a3", "users": [], "text": "Zoë\nline", "n": None, "when": "2024-01-03"},
    {"id": "a4", "users": ["cy@y.org", "dan", "ANN@x.org"], "text": "", "n": -4, "when": "x"},
]
_MAIL = b"""From ann@x.org Mon Jan  1 10:00:00 2024
From: "Ann, A." <ann@x.org>
To: =?utf-8?q?B=C3=B6b?= <bob@x.org>, undisclosed-recipients:;
Cc: list: cy@y.org, dan@y.org;
Message-ID: <1@x.org>
Date: Mon, 1 Jan 2024 10:00:00 +0100
Subject: =?utf-8?b?SGVsbG8=?= again
Content-Type: multipart/mixed; boundary="cut"

--cut
Content-Type: text/plain; charset=iso-8859-1
Content-Transfer-Encoding: quoted-printable

Gr=FC=DFe
>From the start
--cut
Content-Type: text/html; charset=utf-8
Content-Transfer-Encoding: base64

PGI+aGk8L2I+
--cut
Content-Type: message/rfc822

Subject: inner

inner text
--cut--

From bob@x.org Tue Jan  2 10:00:00 2024
From: bob@x.org
Reply-To: cy@y.org
To: ann@x.org
In-Reply-To: <1@x.org>
Content-Length: 6

Hello

"""


def _table_target(suffix: str, content: bytes, **options: Any) -> Target:
    options = {"users": ("users",), "example_id": "id", **options}
    return Target(
        {f"data.{suffix}": content}, lambda folder: _selected(DataSource(path=folder / f"data.{suffix}", **options))
    )


def _selected(source: DataSource) -> object:
    """Reads, and does what every verb does next."""
    graph = source.read().graph
    return co.certify(graph, co.Greedy(contribution_bound=1).select(graph))


def _mail_target(files: dict[str, bytes], path: str = "") -> Target:
    def read(folder: Path) -> None:
        for whom in ("everyone", "thread"):
            _selected(DataSource(path=folder / path, format="mail", attribute_to=whom))
        DataSource(path=folder / path, format="mail").display_names()

    return Target(files, read)


def _slack_files() -> dict[str, bytes]:
    people = [{"id": "U1", "real_name": "Ann", "profile": {"email": "ann@x.org"}}, {"id": "U2", "profile": {}}]
    channels = [{"id": "C1", "name": "general", "members": ["U1", "U2"]}]
    messages = [
        {
            "type": "message",
            "user": "U1",
            "ts": "1.0001",
            "text": "Lunch?",
            "thread_ts": "1.0001",
            "reply_users": ["U2"],
        },
        {"type": "message", "user": "U2", "ts": "1.0002", "text": "Yes", "thread_ts": "1.0001", "parent_user_id": "U1"},
        {"type": "message", "subtype": "bot_message", "bot_id": "B1", "ts": "1.0003", "text": "ping"},
    ]
    contents = {"users.json": people, "channels.json": channels, "general/2024-01-01.json": messages}
    return {name: json.dumps(content).encode() for name, content in contents.items()}


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _slack_target(files: dict[str, bytes], path: str = "") -> Target:
    def read(folder: Path) -> None:
        _selected(DataSource(path=folder / path, format="slack"))
        _selected(DataSource(path=folder / path, format="slack", attribute_to="channel"))
        DataSource(path=folder / path, format="slack").display_names()

    return Target(files, read)


def _sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as room:
        file = Path(room) / "mail.db"
        connection = sqlite3.connect(file)
        connection.execute("CREATE TABLE mail (id TEXT, users TEXT, text TEXT)")
        connection.executemany(
            "INSERT INTO mail VALUES (?, ?, ?)", [(row["id"], ";".join(row["users"]), row["text"]) for row in _ROWS]
        )
        connection.commit()
        connection.close()
        return file.read_bytes()


def _maildir() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as room:
        (Path(room) / "box").write_bytes(_MAIL)
        with contextlib.closing(mailbox.mbox(Path(room) / "box")) as box:
            return {f"new/{number}.host:2,S": message.as_bytes() for number, message in enumerate(box)} | {"cur/x": b""}


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


_ARXIV = {
    "id": "0704.0001", "authors": "A. Ann, B. Bob", "authors_parsed": [["Ann", "A.", ""], ["Bob", "B.", "Jr."]],
    "title": "T", "abstract": "Text", "categories": "math.CO", "update_date": "2024-01-01",
}  # fmt: skip


def _graph() -> co.AttributionGraph:
    return co.AttributionGraph.from_users_per_example([[0, 1], [0, 1, 2], [1, 3], [2, 1], [3, 2], [4], [5], [4, 5]])


def _selection_target(selected: Any) -> Target:
    graph = _graph()
    with tempfile.TemporaryDirectory() as room:
        write_selection(Path(room) / "S.parquet", graph, selected)
        content = (Path(room) / "S.parquet").read_bytes()
    return Target({"S.parquet": content}, lambda folder: co.certify(graph, read_selection(folder / "S.parquet", graph)))


def _claim() -> PrivacyGuarantee:
    graph = _graph()
    certificate = co.certify(graph, co.Greedy(contribution_bound=2).select(graph))
    mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=2, iterations=5)
    return co.guarantee(certificate, mechanism, noise_multiplier=2.0, delta=1e-3, adjacency="zero-out")


def _run_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as room:
        folder = write_run(Path(room), _claim())
        for name in ("metrics.parquet", "validation.parquet"):
            (folder / name).write_bytes(_parquet(pa.table({"step": [1, 2], "loss": [0.5, 0.25]})))
        (folder / "private-log.json").write_text('{"covered_by_guarantee": false, "unreadable": 3}', encoding="utf-8")
        record = json.loads((folder / "run.json").read_bytes())
        record["files"] |= dict.fromkeys(("metrics.parquet", "validation.parquet", "private-log.json"), "")
        (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
        reseal(folder)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _read_run(folder: Path) -> None:
    reseal_if_possible(folder)
    run = StoredRun.open(folder)
    run.audit()
    run.private_log()
    run.metrics()
    run.evaluations()
    run.arrays()
    assert run.headline
    read_claim(folder)


def reseal_if_possible(folder: Path) -> None:
    """Makes the digests in run.json those of the damaged files, so that their own readers see them."""
    for name in ("certificate.json", "guarantee.json"):
        (folder / name).write_bytes(resealed((folder / name).read_bytes()))
    try:
        reseal(folder)
    except Exception:
        return


def _read_checkpoint(folder: Path) -> None:
    opened = RunFolder(folder)
    opened._record = RunRecord.read(folder) or opened._record
    opened._read_checkpoint()


def _checkpoint_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as room, RunFolder.open(Path(room)) as folder:
        folder.run_key(1)
        folder.begin({})
        folder.save(3, {"parameters": np.arange(4.0), "metrics": np.zeros((2, 3))})
        return {name: (folder.path / name).read_bytes() for name in ("run.json", "checkpoint.safetensors")}


def _read_signed(folder: Path) -> None:
    verify_run(folder, verification_key(folder / "key.pub"))


def _signed_files() -> dict[str, bytes]:
    from coowned.runs.signature import sign_run, signing_key

    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        (folder / "run.json").write_bytes(RunRecord(state="finished").to_json())
        sign_run(folder, signing_key(folder / "key"))
        return {name: (folder / name).read_bytes() for name in ("run.json", "key.pub", "signature.json")}


def targets() -> dict[str, Callable[[], Target]]:
    """Every kind of file that is read, by name; each is made when it is asked for."""
    lines = "".join(json.dumps(row) + "\n" for row in _ROWS).encode()
    csv = b'id,users,text,n\na1,ann@x.org;"Bob" <bob@x.org>,"See, you",1\na2,bob@x.org,"two\nlines",2.5\n,,,\n'
    papers = "".join(json.dumps(_ARXIV | {"id": f"0704.{n:04}"}) + "\n" for n in range(3)).encode()
    audit = b'{"format": "coowned-audit-2", "audits_run": 1, "holds": true, "alpha": 0.001, "curves": [{"a": [1]}]}'
    return {
        "Parquet": lambda: _table_target("parquet", _parquet(pa.Table.from_pylist(_ROWS[:2]))),
        "CSV": lambda: _table_target("csv", csv, separator=";"),
        "JSON lines": lambda: _table_target("jsonl", lines),
        "pairs": lambda: _table_target("csv", b"id,user\n1,ann\n1,bob\n2,ann\n", users=None, user="user"),
        "mbox": lambda: _mail_target({"box.mbox": _MAIL}, "box.mbox"),
        ".eml": lambda: _mail_target({"a.eml": _MAIL.split(b"\n\nFrom ")[0].split(b"\n", 1)[1]}, "a.eml"),
        "Maildir": lambda: _mail_target(_maildir()),
        "Slack folder": lambda: _slack_target(_slack_files()),
        "Slack zip": lambda: _slack_target({"export.zip": _zip(_slack_files())}, "export.zip"),
        "SQLite": lambda: Target(
            {"mail.db": _sqlite()},
            lambda folder: _selected(
                DataSource(
                    path=folder / "mail.db",
                    format="sql",
                    query="SELECT * FROM mail",
                    users=("users",),
                    example_id="id",
                    separator=";",
                )
            ),
        ),
        "arXiv": lambda: Target(
            {"papers.json": papers}, lambda folder: _selected(DataSource(path=folder / "papers.json", format="arxiv"))
        ),
        "aliases and key lists": lambda: Target(
            {
                "data.jsonl": lines,
                "aliases.csv": b"key,user\nann@x.org,cy@y.org\n",
                "keys.txt": b"# public\nbob@x.org\n",
            },
            lambda folder: (
                read_keys(folder / "keys.txt"),
                DataSource(
                    path=folder / "data.jsonl", users=("users",), example_id="id", aliases=folder / "aliases.csv"
                ).read(),
            ),
            spared=("data.jsonl",),
        ),
        "configuration": lambda: Target(
            {"run.toml": example().encode()}, lambda folder: TrainConfig.read(folder / "run.toml").source()
        ),
        "certificate": lambda: Target(
            {"c.json": _claim().certificate.to_json().encode()},
            lambda folder: ContributionCertificate.from_json(resealed((folder / "c.json").read_bytes()), name="c.json"),
        ),
        "guarantee": lambda: Target(
            {"g.json": _claim().to_json().encode()},
            lambda folder: PrivacyGuarantee.from_json(resealed((folder / "g.json").read_bytes())),
        ),
        "selection": lambda: _selection_target(co.Greedy(contribution_bound=2).select(_graph())),
        "schedule": lambda: _selection_target(
            co.GreedyMinSeparation(batch_size=2, iterations=3, min_separation=1).select(_graph())
        ),
        "run folder": lambda: Target(_run_files() | {"audit.json": audit}, _read_run),
        "checkpoint": lambda: Target(_checkpoint_files(), _read_checkpoint),
        "run key": lambda: Target(
            {"run-key.json": RunKey.from_seed(5).to_json().encode()},
            lambda folder: RunFolder(folder)._stored_key(),
        ),
        "signature": lambda: Target(_signed_files(), _read_signed),
    }


def main(name: str, cases: int) -> None:
    outcome = fuzz(targets()[name](), cases)
    failures = [f"{where}: {case}" for where, case in outcome.failures.items()]
    row = dataclasses.asdict(outcome) | {"failures": failures, "peak_megabytes": memory.peak() / 2**20}
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
