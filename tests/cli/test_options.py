"""The options that say where the data are, and what a shell offers for them."""

import dataclasses
import json
import os
import subprocess
import sys
from email.message import EmailMessage
from pathlib import Path

import pytest

from coowned.attribution import options
from coowned.attribution.options import SOURCES
from coowned.attribution.sources import DataSource
from coowned.cli.main import run
from coowned.exact.keys import RunKey
from coowned.runs.config import TrainConfig
from coowned.runs.run_folder import RunFolder
from coowned.runs.settings import DataSettings
from coowned.runs.stored_run import StoredRun
from coowned.synthetic.toy_emails import EmailWorld


def complete(shell, words, **more):
    """What a shell gets when it asks for the next word of a command line, and what was imported for that."""
    code = (
        "import atexit, sys\n"
        "heavy = {'jax', 'numba', 'pyspark', 'pyarrow'}\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(heavy & set(sys.modules))))\n"
        "from coowned.cli.main import main\nmain()"
    )
    asked = {"_COOWNED_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "COMP_WORDS": words, **more}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )


@pytest.mark.parametrize(
    ("words", "place", "offered"),
    [
        ("coowned ins", 1, {"inspect"}),
        ("coowned select --sel", 2, {"--selector"}),
        ("coowned select mail --selector int", 4, {"integer-program"}),
        ("coowned plan mail --adjacency z", 4, {"zero-out"}),
        ("coowned inspect mail.db --quer", 3, {"--query"}),
        ("coowned inspect export --attribute-to p", 4, {"participants"}),
        ("coowned inspect mail --format s", 4, {"slack", "sql"}),
    ],
)
def test_bash_completion(words, place, offered):
    done = complete("bash", words, COMP_CWORD=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell):
    done = complete(shell, "coowned ins", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert (done.returncode, done.stderr) == (0, "")
    assert "inspect" in done.stdout


def test_completion_can_be_installed(capsys):
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "--install-completion" in text
    assert "--show-completion" in text


def test_options_are_declared_once(capsys):
    names = set(options.declared())
    assert {field.name for field in dataclasses.fields(DataSource)} == {*names, "path"}
    assert {field.name for field in dataclasses.fields(DataSettings)} == {*names, "path", "splits", "shards"}
    for verb in ("inspect", "plan", "select", "certify"):
        assert run([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"--{name.replace('_', '-')}" in text for name in names)


CLAIM = ["--epsilon", "8", "--delta", "1e-6"]
ASKED = ["--label", "folder", "--classes", "work,family", *CLAIM]


@pytest.fixture(scope="module")
def mail(tmp_path_factory) -> Path:
    """900 messages among 150 people as .eml files, in two folders."""
    folder = tmp_path_factory.mktemp("described") / "mail"
    for name in ("work", "family"):
        (folder / name).mkdir(parents=True)
    for number, row in enumerate(EmailWorld(num_people=150, num_emails=900).generate(seed=0).to_pylist()):
        message = EmailMessage()
        message["From"], *others = row["users"]
        message["To"] = ", ".join(others)
        message["Subject"], message["Message-ID"] = row["subject"], f"<{number}@example.org>"
        message.set_content(row["text"])
        (folder / ("work" if row["label"] else "family") / f"{number}.eml").write_bytes(bytes(message))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A table of 300 texts of one or two of 100 users."""
    rows = [{"users": [f"u{i % 100}", f"u{i % 97}"], "body": "ab"[i % 2] * 3, "y": i % 2} for i in range(300)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return tmp_path / "texts.jsonl"


def test_a_folder_of_mail_to_a_good_model(mail: Path, tmp_path: Path, capsys, monkeypatch):
    """Only data, label, classes and the claim are named; the model is clearly better than the trivial answer.

    The key is known, so that nothing is left to chance.
    """
    monkeypatch.setattr(RunKey, "from_operating_system", classmethod(lambda cls: cls(bytes(range(32)))))
    assert run(["train", "--data", str(mail), *ASKED, "-o", str(tmp_path / "RUN")]) == 0, capsys.readouterr().err
    found = StoredRun.open(tmp_path / "RUN")
    assert 7.9 < found.guarantee.epsilon <= 8
    assert found.guarantee.statement() in capsys.readouterr().out
    test = found.evaluations()["test"].row(0, named=True)
    assert test["accuracy_low"] > test["trivial_accuracy"] + 0.1
    assert found.config(tmp_path).model.text == ("subject", "text")
    assert len(found.reasons) == 5


def test_a_plan_is_what_train_chooses(mail: Path, tmp_path: Path, capsys, monkeypatch):
    """The file that a plan writes, wherever it is, and the options make the same run: S, claim and settings."""
    (tmp_path / "elsewhere").mkdir()
    config = tmp_path / "elsewhere" / "run.toml"
    monkeypatch.chdir(mail.parent)
    assert run(["plan", "mail", *ASKED, "-o", str(config)]) == 0, capsys.readouterr().err
    printed, written = capsys.readouterr().out, TrainConfig.read(config)
    assert written.left_out == {}
    assert [line for line in config.read_text(encoding="utf-8").splitlines() if line.startswith("# - ")] == [
        f"# - {line}" for line in printed.splitlines() if line.startswith("[")
    ]
    best = next(line for line in printed.splitlines() if line.endswith("<- best"))
    assert best.split()[:2] == [written.selection.selector, str(written.selection.settings["contribution_bound"])]
    assert run(["train", "--data", "mail", *ASKED, "-o", str(tmp_path / "ONE")]) == 0
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(config), "-o", str(tmp_path / "TWO")]) == 0
    one, two = (StoredRun.open(tmp_path / name) for name in ("ONE", "TWO"))
    claims = [json.loads(found.guarantee.to_json()) for found in (one, two)]
    for claim in claims:
        assert claim.pop("run_id") != claim.pop("checksum")  # of this run alone
    assert claims[0] == claims[1]
    assert one.config(tmp_path).digest == two.config(tmp_path).digest == written.digest
    assert one.reasons == two.reasons
    for name in ("S.parquet", "certificate.json", "config.toml"):
        assert (tmp_path / "ONE" / name).read_bytes() == (tmp_path / "TWO" / name).read_bytes(), name


def test_the_same_command_resumes(texts: Path, monkeypatch, capsys):
    asked = ["train", "--data", str(texts), "--text", "body", "--label", "y", *CLAIM]
    place = texts.with_name("RUN")
    save = RunFolder.save

    def save_then_leave(self, step, tensors):
        save(self, step, tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save_then_leave)
        assert run([*asked, "-o", str(place)]) == 130
    assert "resume from the last checkpoint" in capsys.readouterr().err
    record = (place / "run.json").read_bytes()
    assert run([*asked, "--classes", "1,0", "-o", str(place)]) != 0  # another run's options
    assert (place / "run.json").read_bytes() == record
    assert run([*asked, "-o", str(place)]) == 0, capsys.readouterr().err
    assert json.loads(record)["key"] == json.loads((place / "run.json").read_bytes())["key"]
    assert len(StoredRun.open(place).reasons) == 5


def test_settings_that_are_given_stay(texts: Path, capsys):
    config = texts.with_name("run.toml")
    data = ["plan", str(texts), "--text", "body", "--label", "y", *CLAIM, "--adjacency", "replace", "--seed", "4"]
    given = ["--batch-size", "20", "--iterations", "30", "--contribution-bounds", "2", "--selectors", "greedy"]
    assert run([*data, *given, "--mechanism", "poisson", "-o", str(config)]) == 0, capsys.readouterr().err
    found = TrainConfig.read(config)
    assert found.mechanism.sizes == ("dp-sgd", 20, 30)
    assert (found.selection.selector, found.selection.seed) == ("greedy", 4)
    assert found.selection.settings["contribution_bound"] == 2
    assert found.privacy.adjacency == "replace"
    assert (found.model.text, found.model.classes) == ("body", (0, 1))


def test_rows_are_written_as_before(texts: Path, capsys):
    """A plan for a model that options describe is of the train split and the model's size."""
    rows = texts.with_name("plan.json")
    asked = ["plan", str(texts), *CLAIM, "--selectors", "greedy", "--contribution-bounds", "2", "-o", str(rows)]
    assert run(asked) == 0
    (alone,) = json.loads(rows.read_text(encoding="utf-8"))
    assert run([*asked, "--text", "body", "--label", "y", "--overwrite"]) == 0
    (described,) = json.loads(rows.read_text(encoding="utf-8"))
    assert described["size"] < alone["size"]
    capsys.readouterr()


@pytest.mark.parametrize("name", ["run.toml", "plan.json"])
def test_a_plan_replaces_a_file_only_where_it_is_asked_to(texts: Path, capsys, name: str):
    """A configuration may have been edited since it was written."""
    output = texts.with_name(name)
    output.write_text("mine", encoding="utf-8")
    asked = ["plan", str(texts), "--text", "body", "--label", "y", *CLAIM, "-o", str(output)]
    assert run(asked) == 2
    assert f"{name}: already exists; choose another path, or give --overwrite" in capsys.readouterr().err
    assert output.read_text(encoding="utf-8") == "mine"
    assert run([*asked, "--overwrite"]) == 0
    assert "mine" not in output.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["train", "--data", "DATA", *CLAIM, "-o", "RUN"], "--text is needed: the columns with the text that text-c"),
        (["plan", "DATA", *CLAIM, "-o", "run.toml"], "--text is needed"),
        (["train", "--data", "DATA", "--text", "body", "--delta", "1e-6", "-o", "RUN"], "--epsilon is needed"),
        (["plan", "DATA", "--text", "body", "--epsilon", "8", "-o", "run.toml"], "--delta is needed"),
        (["train", "--data", "DATA", "--text", "body", *CLAIM], "needs CONFIG.toml and -o RUN, or --data"),
        (["train", "--data", "DATA", "--text", "body", *CLAIM, "-o", "RUN"], "column 'label'"),
        (["train", "--data", "DATA", "--model", "bert", *CLAIM, "-o", "RUN"], "not 'bert'; other models"),
        (["train", "--data", "DATA", "--model", "embedding-classifier", "--text", "body", *CLAIM, "-o", "RUN"],
         "encoder"),
        (["train", "--data", "DATA", "--text", "body", "--label", "y", "--classes", "a,a", *CLAIM, "-o", "RUN"],
         "classes must be two or more different"),
        (["train", "--data", "none.csv", "--text", "body", *CLAIM, "-o", "RUN"], "none.csv: no such file"),
    ],
)  # fmt: skip
def test_what_is_missing_is_asked_for(texts: Path, capsys, monkeypatch, asked: list[str], says: str):
    monkeypatch.chdir(texts.parent)
    assert run([str(texts) if word == "DATA" else word for word in asked]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert says in said[0]
    assert [file.name for file in texts.parent.iterdir()] == [texts.name]


def test_two_descriptions_are_refused(mail: Path, texts: Path, capsys):
    config = texts.with_name("run.toml")
    config.write_text("", encoding="utf-8")
    output = ["-o", str(texts.with_name("RUN"))]
    for asked, says in [
        (["train", str(config), "--data", str(mail), *ASKED, *output], "either CONFIG.toml or --data, not both"),
        (["train", str(config), "--label", "y", *output], "--label needs --data; with a configuration, set it there"),
        (["train", str(config), "--epsilon", "8", *output], "--epsilon needs --data"),
        (["train", str(config), "--users", "a", *output], "--users needs DATA; with a configuration, set it there"),
        (["plan", "--config", str(config), "--model", "text-classifier"], "--model needs DATA; with a configuration"),
        (["plan", "--config", str(config), "-o", str(texts.with_name("new.toml"))], "chooses what the file leaves out"),
        (
            ["plan", str(mail), *ASKED, "--batch-size", "8,9", "-o", str(config)],
            "--batch-size: a configuration has one",
        ),
        (["train", "--data", str(mail), *ASKED, "-o", str(mail / "RUN")], "is inside the data folder"),
    ]:
        assert run(asked) == 2, asked
        assert says in capsys.readouterr().err
    assert config.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("kind", [kind for kind, entry in SOURCES.items() if entry.text])
def test_usual_text_columns_are_those_of_the_format(mail: Path, tmp_path: Path, kind: str):
    paper = {"id": "1", "authors_parsed": [["A", "B", ""]], "title": "t", "abstract": "a"}
    (tmp_path / "arxiv.json").write_text(json.dumps(paper) + "\n", encoding="utf-8")
    (tmp_path / "slack" / "all").mkdir(parents=True)
    for name, content in {
        "users": [],
        "channels": [{"id": "C1", "name": "all", "members": ["U1", "U2"]}],
        "all/2024-01-01": [{"type": "message", "user": "U1", "ts": "1.0", "text": "hi"}],
    }.items():
        (tmp_path / "slack" / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    source = DataSource(path={"mail": mail, "arxiv": tmp_path / "arxiv.json", "slack": tmp_path / "slack"}[kind])
    assert set(source.text_columns()) <= set(source.read().payload.schema.names)
