"""Inputs made to hurt: huge, deep, or full of characters that mean something elsewhere. Each is read or refused.

Each test runs in this process; `test_memory` runs all of them in one of their own and states their peak.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import polars as pl
import pytest
from benchmarks import memory
from tests.faults.fuzzing import limited
from tests.faults.world import ROOT

import coowned as co
from coowned.attribution.sources import DataSource
from coowned.certificate import ContributionCertificate
from coowned.errors import CoownedError, InputError
from coowned.runs.config import TrainConfig
from coowned.runs.records import RunRecord

MEMORY_LIMIT = 3.0  # GB, for all of these inputs one after another
MANY = 1_000_000


def huge_csv_line(folder: Path) -> None:
    """A cell of 20 MB, more than is parsed at once."""
    file = folder / "a.csv"
    file.write_bytes(b"id,users,text\n1,ann," + b"x" * 20_000_000 + b"\n2,bob,y\n")
    assert read(file).graph.num_examples == 2


def a_million_users_on_one_example(folder: Path) -> None:
    file = folder / "a.parquet"
    users = [f"user{number}@x.org" for number in range(MANY)]
    pl.DataFrame({"id": ["big", "small"], "users": [users, ["user7@x.org"]]}).write_parquet(file)
    graph = read(file).graph
    assert graph.users_per_example.tolist() == [MANY, 1]
    certificate = co.certify(graph, co.Greedy(contribution_bound=1).select(graph))
    assert (certificate.size, certificate.contribution_bound) == (1, 1)


def a_million_recipients(folder: Path) -> None:
    """A header of more than 10 MB."""
    file = folder / "a.eml"
    people = b", ".join(b"user%d@x.org" % number for number in range(MANY))
    file.write_bytes(b"From: ann@x.org\nTo: " + people + b"\nMessage-ID: <1@x>\n\nHello\n")
    assert read(file).graph.num_users == MANY + 1


def subjects_of_ten_megabytes(folder: Path) -> None:
    _read_long_headers(folder, b"Subject: ")


def dates_of_ten_megabytes(folder: Path) -> None:
    _read_long_headers(folder, b"Date: ")


def charsets_of_ten_megabytes(folder: Path) -> None:
    _read_long_headers(folder, b"Content-Type: text/plain; charset=")


def _read_long_headers(folder: Path, header: bytes) -> None:
    for piece in (b"a", b"=?utf-8?q?a?= ", b"<", b'"', b"(", b"a@", b"\n\t;", b"\\"):
        (folder / "a.eml").write_bytes(b"From: ann@x.org\n" + header + piece * (10_000_000 // len(piece)) + b"\n\nHi\n")
        assert read(folder / "a.eml").user_keys.to_pylist() == ["ann@x.org"]


def recipients_that_are_none(folder: Path) -> None:
    for piece in (b"<", b'"', b"(", b"a@", b"\\", b",", b"a,", b":", b";", b"=?utf-8?b?YQ==?= "):
        (folder / "a.eml").write_bytes(b"From: ann@x.org\nTo: " + piece * (300_000 // len(piece)) + b"\n\nHi\n")
        assert "ann@x.org" in read(folder / "a.eml").user_keys.to_pylist()


def mime_bombs(folder: Path) -> None:
    """Parts in parts in parts, a message in a message, 100,000 empty parts, and words encoded again and again."""
    inner = b"Content-Type: text/plain\n\nHello\n"
    for number in range(3000):
        cut = b"cut%d" % number
        inner = (
            b'Content-Type: multipart/mixed; boundary="'
            + cut
            + b'"\n\n--'
            + cut
            + b"\n"
            + inner
            + b"\n--"
            + cut
            + b"--\n"
        )
    flat = b"Content-Type: multipart/mixed; boundary=c\n\n" + b"--c\n\nx\n" * 100_000 + b"--c--\n"
    messages = b"Content-Type: message/rfc822\n\n" * 10_000 + b"Hello\n"
    words = b"Subject: " + b"=?utf-8?b?PT91dGYtOD9iP1lRPT0/PQ==?= " * 50_000 + b"\n\nHello\n"
    squeezed = b"Content-Transfer-Encoding: base64\nContent-Type: text/html\n\n" + b"PGI+" * 3_000_000
    for body in (inner, flat, messages, words, squeezed):
        (folder / "a.eml").write_bytes(b"From: ann@x.org\nMIME-Version: 1.0\n" + body)
        assert read(folder / "a.eml").user_keys.to_pylist() == ["ann@x.org"]


def nested_documents(folder: Path) -> None:
    """100,000 brackets deep, in everything that parses."""
    deep = "[" * 100_000 + "]" * 100_000
    objects = '{"a":' * 100_000 + "1" + "}" * 100_000
    for text in (deep, objects):
        for parse in (ContributionCertificate.from_json, co.PrivacyGuarantee.from_json):
            with pytest.raises(CoownedError):
                parse(text)
        (folder / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(InputError):
            RunRecord.read(folder)
        refuse(write(folder / "a.jsonl", f'{{"id": 1, "users": ["ann"], "text": {text}}}\n'))
        refuse(write(folder / "b.jsonl", f"{text}\n"))
        refuse(write(folder / "arxiv.json", f'{{"id": "1", "authors_parsed": {text}}}\n'))
        export = folder / "slack"
        (export / "general").mkdir(parents=True, exist_ok=True)
        write(export / "users.json", "[]")
        write(export / "channels.json", '[{"id": "C1", "name": "general", "members": []}]')
        refuse(write(export / "general" / "2024-01-01.json", text).parent.parent)
    for text in (
        f"a = {deep}",
        "a." * 100_000 + "b = 1",
        "[" + "a." * 100_000 + "b]",
        "a = " + "{b = " * 100_000 + "1",
    ):
        with pytest.raises(InputError):
            TrainConfig.from_toml(text, folder=folder, name="run.toml")


def control_characters_in_ids(folder: Path) -> None:
    names = [
        "a\x00b",
        "a\nb",
        "\x1b[2J",
        "a\u202eb",
        "a\u2028b",
        "\ufeffa",
        "../../etc/passwd",
        "<b>&",
        "'; DROP--",
        "\x7f",
    ]
    rows = [{"id": name, "users": [f"u{name}@x.org"]} for name in names]
    file = write(folder / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    examples = read(file)
    assert examples.ids.to_pylist() == names
    assert 0 < co.Greedy(contribution_bound=1).select(examples.graph).size <= len(names)


def archives(folder: Path) -> None:
    """Entries that point elsewhere, a zip that says it is small, and one that is a bomb."""
    messages = json.dumps([{"type": "message", "user": "U1", "ts": "1.0", "text": "x"}]).encode()
    channels = json.dumps([{"id": "C1", "name": "general", "members": ["U1"]}]).encode()
    outside = folder.parent / "outside.json"
    outside.write_bytes(b"[1, 2")
    base = {"users.json": b"[]", "channels.json": channels, "general/2024-01-01.json": messages}
    for name in ("../outside.json", "/etc/2024-01-01.json", "general/../../outside.json", "..\\outside.json"):
        path = zipped(folder / "a.zip", base | {name: b"{"})
        assert DataSource(path=path, format="slack").read().graph.num_examples == 1
    assert outside.read_bytes() == b"[1, 2"
    refuse(zipped(folder / "bomb.zip", base | {"general/2024-01-02.json": b" " * 1_500_000_000}))


HOSTILE = [
    huge_csv_line, a_million_users_on_one_example, a_million_recipients, subjects_of_ten_megabytes,
    dates_of_ten_megabytes, charsets_of_ten_megabytes, recipients_that_are_none, mime_bombs, nested_documents,
    control_characters_in_ids, archives,
]  # fmt: skip


@pytest.mark.full
def test_memory(tmp_path):
    """Every input in a process of its own: none crashes, each takes bounded time, and the peak is stated."""
    command = [sys.executable, "-m", "tests.faults.test_hostile_inputs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["gigabytes"] < MEMORY_LIMIT


def write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def zipped(file: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file


def read(path: Path):
    tables = path.suffix in (".csv", ".jsonl", ".parquet")
    return DataSource(path=path, **({"users": ("users",), "example_id": "id"} if tables else {})).read()


def refuse(path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def main(room: Path) -> None:
    for hostile in HOSTILE:
        folder = room / hostile.__name__
        folder.mkdir()
        with limited():
            hostile(folder)
    sys.stdout.write(json.dumps({"gigabytes": memory.peak() / 1e9}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
