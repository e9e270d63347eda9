"""Data, a model and a claim are enough: `fit` chooses the rest, and the model clearly beats the trivial answer.

The key of each run is known, so that nothing is left to chance; the claim is that of a run with a secret one.
"""

import contextlib
import hashlib
import mailbox
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import coowned as co
from coowned.exact.keys import RunKey
from coowned.synthetic.toy_emails import EmailWorld, write_mbox

OWNER = "Owner@Example.org"


@pytest.fixture(autouse=True)
def known_key(monkeypatch, request):
    key = hashlib.sha256(request.node.name.encode()).digest()
    monkeypatch.setattr(RunKey, "from_operating_system", classmethod(lambda cls: cls(key)))


def toy_mail(folder: Path) -> Any:
    del folder
    mail = EmailWorld(num_people=300, num_emails=1500).generate(seed=2)
    examples = co.from_table(mail, example_id="message_id")
    return examples, co.TextClassifier(text=["subject", "text"], label="label")


def messy_table(folder: Path) -> Any:
    """The mail of one mailbox as it is published: people in three columns, in many spellings, some cells empty.

    The owner is on every message and leaves themselves unprotected.
    """
    del folder
    mail = EmailWorld(num_people=300, num_emails=1500).generate(seed=3).to_pylist()
    rows = [
        {
            "from": spelled(row["sender"], number),
            "to": "; ".join([spelled(OWNER, number), *(spelled(who, number + 1) for who in row["to"])]),
            "cc": ";".join(spelled(who, number + 2) for who in row["cc"]) or (None, "", "  ")[number % 3],
            "subject": row["subject"].upper() if number % 4 else None,
            "body": row["text"],
            "topic": ("private", "work")[row["label"]],
        }
        for number, row in enumerate(mail)
    ]
    examples = co.from_table(pl.DataFrame(rows), ["from", "to", "cc"], separator=";")
    assert set(examples.user_keys.to_pylist()) == {OWNER.lower(), *(who for row in mail for who in row["users"])}
    model = co.TextClassifier(text=["subject", "body"], label="topic", classes=["work", "private"])
    return examples.without_users([OWNER.lower()]), model


def spelled(address: str, number: int) -> str:
    """One of six spellings of the same address."""
    name = address.partition("@")[0]
    return (
        address,
        address.upper(),
        f"  {address} ",
        f"{name.capitalize()} <{address}>",
        f'"{name.capitalize()} (office)" <{address.title()}>',
        f"<{address}>",
    )[number % 6]


def folder_of_messages(folder: Path) -> Any:
    """One .eml file a message, in a folder for each class."""
    mail = EmailWorld(num_people=300, num_emails=1500).generate(seed=4)
    labels = mail.column("label").to_pylist()
    write_mbox(mail, folder / "all.mbox")
    with contextlib.closing(mailbox.mbox(folder / "all.mbox")) as messages:
        for number, message in enumerate(messages):
            place = folder / "mail" / ("family", "work")[labels[number]] / f"{number}.eml"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(bytes(message))
    model = co.TextClassifier(text=["subject", "text"], label="folder", classes=["work", "family"])
    return co.read_mail(folder / "mail"), model


@pytest.mark.full
@pytest.mark.parametrize("data", [toy_mail, messy_table, folder_of_messages])
def test_three_lines_are_enough(data, tmp_path):
    examples, model = data(tmp_path)
    run = co.fit(examples, model, epsilon=8, delta=1e-6, adjacency="zero-out")
    assert 7.9 < run.claim.epsilon <= 8
    test = run.evaluations()["test"].row(0, named=True)
    assert test["accuracy_low"] > test["trivial_accuracy"] + 0.1
    said = str(run)
    assert "the most frequent class" in said
    assert "of little use" not in said
    assert all(reason in " ".join(said.split()) for reason in run.reasons)
    assert len(run.reasons) == 5
