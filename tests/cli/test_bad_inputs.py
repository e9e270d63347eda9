"""Each verb's answer to bad input: exit code 2, one sentence on stderr that says what and where, nothing left behind."""

# ruff: noqa: E501 (tables of cases: one case a line)

import contextlib
import json
import os
import re
import sqlite3
import zipfile

import pytest

from coowned.cli import main
from coowned.runs.config import example

DATA = ["mail.csv", "--separator", ";", "--example-id", "id"]
SELECT = ["--contribution-bound", "2", "-o", "new.parquet"]
PLAN = ["--epsilon", "8", "--delta", "1e-8", "--batch-size", "8", "--iterations", "10"]
CALIBRATE = ["--certificate", "S.certificate.json", "--delta", "1e-8"]
STEPS = ["--batch-size", "2", "--iterations", "10"]
TARGET = ["--epsilon", "8"]

# What can be wrong with DATA and its options, whatever the verb does with them.
BAD_DATA = [
    (["no.csv"], "no.csv: no such file or folder; check the path"),
    (["nowhere/no.csv"], "no.csv: no such file or folder"),
    (["empty"], "empty: no file of a known format in it; choose one with --format"),
    (["empty", "--format", "csv"], "empty: the folder has no .csv or .tsv file"),
    (["mail.csv", "--users", "person"], "there is no column 'person'; choose from 'id', 'users', 'text'"),
    (["mail.csv", "--users", "user"], "did you mean 'users'?"),
    (["mail.csv", "--example-id", "name"], "there is no column 'name'"),
    (["mail.csv", "--user", "users"], "user= (--user) needs example_id= (--example-id)"),
    (["mail.csv", "--users", "users", "--user", "users", "--example-id", "id"], "not both"),
    (["mail.csv", "--format", "excel"], "format must be one of 'parquet', 'csv'"),
    (["mail.csv", "--attribute-to", "sender"], "attribute_to does not apply to csv data"),
    (["mail.csv", "--attribute-to", "nobody"], "attribute_to must be one of"),
    (["mail.csv", "--mbox-dialect", "mboxo"], "mbox_dialect does not apply to csv data"),
    (["mail.csv", "--mbox-dialect", "mbox"], "mbox_dialect must be one of 'mboxo', 'mboxrd', 'mboxcl', 'mboxcl2'"),
    (["mail.csv", "--query", "SELECT 1"], "query does not apply to csv data"),
    (["mail.csv", "--separator", ";", "--aliases", "no.txt"], "no.txt: cannot be read"),
    (["mail.csv", "--separator", ";", "--aliases", "corrupt.jsonl"], "corrupt.jsonl"),
    (["mail.csv", "--separator", ";", "--unprotected", "empty"], "empty: cannot be read"),
    (["corrupt.parquet"], "corrupt.parquet: cannot be read"),
    (["corrupt.jsonl"], "corrupt.jsonl, line 2: not JSON"),
    (["corrupt.csv"], "corrupt.csv, row 1: 1 cell where the header has 2"),
    (["nothing.csv"], "nothing.csv: the file is empty"),
    (["corrupt.bin"], "corrupt.bin: unknown format; choose one with --format"),
    (["corrupt.bin", "--format", "mail"], "corrupt.bin"),
    (["mail.csv", "--format", "arxiv"], "mail.csv, line 1: not JSON"),
    (["mail.csv", "--format", "slack"], "mail.csv: neither a folder nor a readable zip file"),
    (["photos.zip"], "photos.zip: unknown format"),
    (["photos.zip", "--format", "slack"], "photos.zip: not a Slack export"),
    (["slack"], "slack: general/2024-01-01.json: not JSON"),
    (["slack", "--attribute-to", "sender"], "attribute_to must be one of 'participants', 'channel'"),
    (["mail.db"], "mail.db: a database needs a query"),
    (["mail.db", "--query", "SELECT * FROM mail"], "mail.db: query results have no row order"),
    (["mail.db", "--query", "SELECT * FROM post", "--example-id", "id"], "mail.db: the database rejected the query (no such table: post)"),
    (["mail.db", "--query", "DROP TABLE mail", "--example-id", "id"], "mail.db: the database rejected the query (not authorized)"),
    (["sqlite:///no.db", "--query", "SELECT 1", "--example-id", "id"], "no.db: no such file"),
    (["sqlite:mail.db", "--query", "SELECT 1"], "write sqlite:///file.db"),
    (["mail.csv", "--format", "sql", "--query", "SELECT * FROM t", "--example-id", "id"], "mail.csv: the database rejected the query (file is not a database)"),
]  # fmt: skip
AFTER_DATA = {"inspect": [], "plan": PLAN, "select": SELECT, "certify": ["S.parquet"]}

BAD_SETTINGS = [
    (["inspect"], "Missing argument"),
    (["inspect", *DATA, "--jsn"], "No such option"),
    (["plan", *DATA], "plan needs --epsilon or --config"),
    (["plan"], "plan needs either DATA or --config TRAIN.toml"),
    (["plan", *DATA, *PLAN, "--selectors", "best"], "best"),
    (["plan", *DATA, *PLAN, "--contribution-bounds", "1,two"], "--contribution-bounds takes integers"),
    (["plan", *DATA, *PLAN, "--contribution-bounds", "0"], "contribution_bound"),
    (["plan", *DATA, *PLAN, "--mechanism", "magic"], "magic"),
    (["plan", *DATA, *PLAN, "--adjacency", "near"], "near"),
    (["plan", *DATA, "--epsilon", "-1", *PLAN[2:]], "epsilon"),
    (["plan", *DATA, *PLAN[:2], "--delta", "2", *PLAN[4:]], "delta"),
    (["plan", *DATA, *PLAN, "-o", "nowhere/plan.json"], "the folder nowhere does not exist; create it first"),
    (["plan", *DATA, *PLAN, "--overwrite", "-o", "full"], "full: a folder with other files in it"),
    (["select", *DATA, "--selector", "best", "-o", "new.parquet"], "Unknown selector 'best'; choose greedy"),
    (["select", *DATA, "-o", "new.parquet"], "The selector greedy needs --contribution-bound"),
    (["select", *DATA, "--contribution-bound", "0", "-o", "new.parquet"], "contribution_bound must be an integer of at least 1"),
    (["select", *DATA, *SELECT, "--size", "3"], "The selector greedy has no option --size"),
    (["select", *DATA, *SELECT, "--ties", "random"], "ties must be one of"),
    (["select", *DATA, *SELECT, "--seed", "-1"], "seed must be an integer of at least 0"),
    (["select", *DATA, *SELECT, "--engine", "steam"], "steam"),
    (["select", *DATA, *SELECT[:2], "-o", "nowhere/S.parquet"], "the folder nowhere does not exist"),
    (["select", *DATA, *SELECT[:2], "-o", "mail.csv/S.parquet"], "mail.csv is not a folder; choose another path"),
    (["select", *DATA, *SELECT[:2], "-o", "mail.csv"], "would overwrite its own input"),
    (["select", *DATA, *SELECT[:2], "-o", "full"], "full: already exists; choose another path, or give --overwrite"),
    (["select", *DATA, *SELECT[:2], "--overwrite", "-o", "full"], "full: a folder with other files in it"),
    (["select", *DATA, "--selector", "greedy-min-separation", "--batch-size", "500", "--iterations", "9", "--min-separation", "9", "-o", "new.parquet"], "reduce batch_size (500) or min_separation (9)"),
    (["certify", *DATA, "no.parquet"], "no.parquet: no such file or folder"),
    (["plan", *DATA, *PLAN, "-o", "mail.csv"], "mail.csv: would overwrite its own input"),
    (["plan", *DATA, *PLAN, "--html", "mail.csv"], "mail.csv: would overwrite its own input"),
    (["plan", *DATA, *PLAN, "--aliases", "corrupt.jsonl", "-o", "corrupt.jsonl"], "corrupt.jsonl: would overwrite its own input"),
    (["plan", "sqlite:///mail.db", "--query", "SELECT 1", *PLAN, "-o", "mail.db"], "mail.db: would overwrite its own input"),
    (["plan", "slack", *PLAN, "-o", "slack/plan.json"], "slack/plan.json: is inside the data folder"),
    (["plan", *DATA, *PLAN, "-o", "plan", "--html", "plan"], "plan: two outputs have this path"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "-o", "S.certificate.json"], "S.certificate.json: would overwrite its own input"),
    (["demo", "--trials", "3", "-o", "new"], "trials must be an integer of at least 8"),
    (["certify", *DATA, "no.parquet", "--certificate", "S.certificate.json"], "no.parquet: no such file or folder"),
    (["certify", *DATA, "corrupt.parquet", "--certificate", "S.certificate.json"], "corrupt.parquet: cannot be read"),
    (["certify", *DATA, "S.parquet", "--certificate", "empty"], "empty: cannot read the certificate"),
    (["certify", *DATA, "S.parquet", "--certificate", "corrupt.jsonl"], "corrupt.jsonl: "),
    (["certify", *DATA, "S.parquet", "--certificate", "corrupt.bin"], "corrupt.bin: is not UTF-8 text"),
    (["calibrate", *CALIBRATE, *STEPS], "epsilon"),
    (["calibrate", *CALIBRATE, *STEPS, *TARGET, "--noise-multiplier", "2"], "epsilon"),
    (["calibrate", *CALIBRATE, *TARGET], "The mechanism 'poisson' needs batch_size and iterations (--batch-size, --iterations)"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "--mechanism", "magic"], "Unknown mechanism 'magic'"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "--mechanism", "min-separation"], ""),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "--num-bands", "3"], "remove num_bands"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "--adjacency", "near"], "adjacency must be one of"),
    (["calibrate", *CALIBRATE, *TARGET, "--batch-size", "100000", "--iterations", "10"], "batch_size"),
    (["calibrate", *CALIBRATE[:2], "--delta", "0", *TARGET, *STEPS], "delta"),
    (["calibrate", *CALIBRATE, "--epsilon", "nan", *STEPS], "epsilon"),
    (["calibrate", "--certificate", "no.json", *CALIBRATE[2:], *TARGET, *STEPS], "no.json: cannot read the certificate"),
    (["calibrate", "--certificate", "empty", *CALIBRATE[2:], *TARGET, *STEPS], "empty: cannot read the certificate"),
    (["calibrate", "--certificate", "corrupt.jsonl", *CALIBRATE[2:], *TARGET, *STEPS], "corrupt.jsonl: "),
    (["calibrate", "--certificate", "S.parquet", *CALIBRATE[2:], *TARGET, *STEPS], "S.parquet: is not UTF-8 text"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "-o", "nowhere/g.json"], "the folder nowhere does not exist"),
    (["calibrate", *CALIBRATE, *TARGET, *STEPS, "-o", "full"], "full: a folder with other files in it"),
    (["spark-package", "-o", "nowhere/coowned.zip"], "the folder nowhere does not exist"),
    (["train"], "train needs CONFIG.toml and -o RUN"),
    (["train", "run.toml"], "train needs CONFIG.toml and -o RUN"),
    (["train", "no.toml", "-o", "RUN"], "no.toml: cannot be read"),
    (["train", "empty", "-o", "RUN"], "empty: cannot be read"),
    (["train", "mail.csv", "-o", "RUN"], "mail.csv: is not TOML"),
    (["train", "corrupt.bin", "-o", "RUN"], "corrupt.bin: is not UTF-8 text"),
    (["train", "typo.toml", "-o", "RUN"], "typo.toml: [privacy] has no key 'epsilom'; did you mean 'epsilon'?"),
    (["train", "selector.toml", "-o", "RUN"], "selector.toml: [selection] selector must be"),
    (["train", "column.toml", "-o", "RUN"], "there is no column 'person'"),
    (["train", "run.toml", "-o", "RUN"], "papers.parquet: no such file or folder"),
    (["train", "database.toml", "-o", "RUN"], "mail.db: query results have no row order"),
    (["train", "run.toml", "-o", "mail.csv"], "mail.csv"),
    (["tune"], "Missing argument"),
    (["tune", "no.toml", "-o", "RUN"], "no.toml: cannot be read"),
    (["tune", "corrupt.bin", "-o", "RUN"], "corrupt.bin: is not UTF-8 text"),
    (["tune", "run.toml", "-o", "RUN"], "[tuning]"),
    (["train", "run.toml", "-o", "mail.csv/RUN"], "mail.csv is not a folder"),
    (["train", "run.toml", "-o", "full"], "full"),
    (["demo", "-o", "mail.csv"], "mail.csv: cannot create the folder (File exists); choose another with -o"),
    (["demo", "-o", "mail.csv/demo"], "mail.csv/demo: cannot create the folder"),
    (["demo", "--epsilon", "3"], "No such option"),
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with good data, a selection, and one of each thing that is wrong."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "mail.csv").write_text("id,users,text\n" + "".join(f"m{i},u{i % 7};u{i % 5},hello\n" for i in range(60)))
    output = str(folder / "S.parquet")
    options = ["--separator", ";", "--example-id", "id", "--contribution-bound", "2", "-o", output]
    assert main.run(["select", str(folder / "mail.csv"), *options]) == 0
    for name in ("empty", "full", "slack/general"):
        (folder / name).mkdir(parents=True)
    (folder / "full" / "letter.txt").write_text("precious")
    (folder / "corrupt.parquet").write_bytes((folder / "S.parquet").read_bytes()[:-20])
    (folder / "corrupt.jsonl").write_text('{"users": ["a"]}\n{"users": [')
    (folder / "corrupt.csv").write_text("users,text\na,1\nb\n")
    (folder / "nothing.csv").write_bytes(b"")
    (folder / "corrupt.bin").write_bytes(b"\x00\xff\xfe" * 50)
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        archive.writestr("beach.jpg", b"x")
    (folder / "slack/users.json").write_text("[]")
    (folder / "slack/channels.json").write_text(json.dumps([{"id": "C1", "name": "general", "members": []}]))
    (folder / "slack/general/2024-01-01.json").write_text('[{"type": "message", "ts": "1.0"')
    with contextlib.closing(sqlite3.connect(folder / "mail.db")) as connection, connection:
        connection.execute("CREATE TABLE mail (id, users)")
        connection.execute("INSERT INTO mail VALUES ('m1', 'ann')")
    (folder / "run.toml").write_text(example())
    (folder / "typo.toml").write_text(example().replace("epsilon = 8.0", "epsilom = 8.0"))
    (folder / "selector.toml").write_text(example().replace('"greedy"', '"best"'))
    at_column = 'path = "mail.csv"\nseparator = ";"'
    (folder / "column.toml").write_text(
        example().replace('path = "papers.parquet"', at_column).replace('users = "users"', 'users = "person"')
    )
    query = 'path = "sqlite:///mail.db"\nquery = "SELECT * FROM mail"'
    (folder / "database.toml").write_text(
        example().replace('path = "papers.parquet"', query).replace('example_id = "example_id"', "")
    )
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def answer(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    before = contents(folder)
    code = main.run(arguments)
    output = capsys.readouterr()
    assert (code, output.out) == (2, ""), output.err
    assert re.fullmatch(r"coowned: [^\n]+\n", output.err)
    assert message in output.err
    assert "Traceback" not in output.err
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_DATA, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_data(prepared, arguments, message, monkeypatch, capsys):
    for verb, more in AFTER_DATA.items():
        own = arguments if verb != "certify" else [arguments[0], *more, *arguments[1:]]
        answer(prepared, [verb, *own, *(more if verb != "certify" else [])], message, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_SETTINGS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_settings(prepared, arguments, message, monkeypatch, capsys):
    answer(prepared, arguments, message, monkeypatch, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *DATA, *PLAN, "-o", "plan.json"],
        ["select", *DATA, *SELECT],
        ["calibrate", *CALIBRATE, *TARGET, *STEPS, "-o", "guarantee.json"],
    ],
    ids=lambda value: value[0],
)
def test_unwritable_folders(prepared, arguments, monkeypatch, capsys):
    allowed = os.access
    # Permissions do not stop everybody who may run the tests.
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and allowed(path, mode))
    answer(prepared, arguments, "cannot be written to; choose another", monkeypatch, capsys)


def test_every_verb_is_here():
    verbs = {command.name for command in main.commands().registered_commands}
    elsewhere = {
        "aliases",
        "audit",
        "report",
        "export-model",
        "predict",
        "compose",
    }  # their own tests hold their bad inputs
    assert {arguments[0] for arguments, _ in BAD_SETTINGS} == verbs - elsewhere
