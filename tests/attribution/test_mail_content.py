"""Bodies that are read after S is chosen are those that reading everything gives, and none is read before."""

import os

import numpy as np
import pyarrow as pa
import pytest

from coowned import InputError
from coowned.attribution import mail
from coowned.attribution.sources import DataSource
from coowned.runs import configured_run, tuning_run
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.runs.tuning_config import TuningConfig

_FROM = "From a@x.org Mon Jan  1 10:00:00 2024\n"


def box(folder, count=40):
    """A mailbox with repeated messages, one without an id and an encoded subject."""
    text = ""
    for number in range(count):
        own_id = "" if number == 5 else f"Message-ID: <{number % 30}@x.org>\n"
        head = f"From: u{number % 9}@x.org\nTo: u{number % 7}@x.org, u{number % 4}@x.org\n{own_id}"
        text += f"{_FROM}{head}Subject: =?utf-8?q?caf=C3=A9?= {number}\nX-Label: {number % 2}\n\nbody {number}\n\n"
    file = folder / "box.mbox"
    file.write_text(text)
    return DataSource(path=file)


def maildir(folder):
    for name in ("new", "cur", "tmp"):
        (folder / "Maildir" / name).mkdir(parents=True)
    for number in range(9):
        message = f"From: u{number}@x.org\nDate: Mon, 1 Jan 2024 10:0{number}:00 +0000\n\nbody {number}\n"
        (folder / "Maildir" / "cur" / f"{number}.host").write_text(message)
    return DataSource(path=folder / "Maildir", attribute_to="thread")


SOURCES = [box, maildir]


@pytest.mark.parametrize("make", SOURCES)
def test_mail_without_content(tmp_path, monkeypatch, make):
    monkeypatch.setattr(mail, "_ROWS_AT_ONCE", 4)
    source = make(tmp_path)
    whole, later = source.read(), source.read(content=False)
    assert later.payload.num_columns == 0
    assert later.graph.digest == whole.graph.digest
    assert later.ids.equals(whole.ids)
    assert later.schema == whole.schema
    generator = np.random.default_rng(0)
    for wanted in (np.arange(len(whole.ids)), generator.permutation(len(whole.ids))[:7], [2, 0, 2], []):
        found = {}
        for where, piece in later.pieces(np.asarray(wanted, np.int64)):
            found |= dict(zip(where.tolist(), piece.to_pylist(), strict=True))
        assert [found[index] for index in range(len(wanted))] == whole.payload.take(
            pa.array(wanted, pa.int64())
        ).to_pylist()


@pytest.mark.parametrize("make", SOURCES)
def test_bodies_are_read_when_they_are_asked_for(tmp_path, monkeypatch, make):
    source, read = make(tmp_path), []
    decode = mail.body_text
    monkeypatch.setattr(mail, "body_text", lambda *given, **named: read.append(given) or decode(*given, **named))
    later = source.read(content=False)
    assert not read
    list(later.pieces(np.array([1, 4])))
    assert len(read) == 2


@pytest.mark.parametrize("make", SOURCES)
def test_mail_that_changed_is_refused(tmp_path, make):
    source = make(tmp_path)
    later = source.read(content=False)
    list(later.pieces(np.array([0])))
    changed = max((file for file in tmp_path.rglob("*") if file.is_file()), key=str)
    content = changed.read_bytes()
    changed.write_bytes(content.replace(b"body", b"bodY"))
    os.utime(changed, ns=(1, 1))
    with pytest.raises(InputError, match="changed after its headers were read"):
        list(later.pieces(np.array([0])))
    changed.unlink()
    with pytest.raises(InputError):
        list(later.pieces(np.array([0])))


CONFIG = """
[data]
path = "box.mbox"
splits = [0.6, 0.2, 0.2]
[selection]
selector = "greedy"
contribution_bound = 3
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 2
iterations = 2
clip_norm = 1.0
[model]
kind = "text-classifier"
text = "text"
label = "folder"
classes = ["", "x"]
num_features = 64
[optimizer]
learning_rate = 0.1
"""


class ReadError(Exception):
    """A body was read."""


@pytest.mark.full
def test_a_tuning_reads_no_body_before_its_guarantee(tmp_path, monkeypatch):
    box(tmp_path, count=120)
    read, before = [], []
    cost_of = tuning_run.cost_of

    def decode(*given, **named):
        read.append(given)
        raise ReadError

    def cost(claims):
        before.append(len(read))
        return cost_of(claims)

    monkeypatch.setattr(mail, "body_text", decode)
    monkeypatch.setattr(tuning_run, "cost_of", cost)
    grid = "[tuning]\nexpected_runs = 1\n[tuning.grid]\nlearning_rate = [0.1, 0.2]\n"
    (tmp_path / "tuning.toml").write_text(CONFIG + grid)
    with pytest.raises(ReadError):  # by the first run; no training is needed to see it
        tuning_run.run_tuning(TuningConfig.read(tmp_path / "tuning.toml"), tmp_path / "run")
    assert before == [0]


def test_a_run_reads_no_body_before_its_guarantee(tmp_path, monkeypatch):
    """And then those that were selected or held out, once each."""
    box(tmp_path, count=120)
    decoded, before = [], []
    decode, account = mail.body_text, configured_run.guarantee
    monkeypatch.setattr(mail, "body_text", lambda *given, **named: decoded.append(given) or decode(*given, **named))

    def accounted(*given, **named):
        before.append(len(decoded))
        return account(*given, **named)

    monkeypatch.setattr(configured_run, "guarantee", accounted)
    with RunFolder.open(tmp_path / "run") as folder:
        plan = run_configuration(TrainConfig.from_toml(CONFIG, folder=tmp_path), folder).plan
    assert before == [0]
    graph = DataSource(path=tmp_path / "box.mbox").read().graph
    held_out = graph.num_examples - plan.certificate.num_examples
    assert 0 < plan.certificate.num_distinct < plan.certificate.num_examples
    num_whole = 120  # messages, that reading the graph decoded above
    assert len(decoded) - num_whole == plan.certificate.num_distinct + held_out
