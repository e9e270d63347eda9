"""Reading a large mbox: peak memory against the arrays produced, speed against the standard library.

    python -m benchmarks mail

The default box has 200 MB; COOWNED_BENCH_MAIL_MB=2000 makes it 2 GB.
"""

import base64
import email
import email.policy
import email.utils
import json
import mailbox
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import memory
from benchmarks.timing import Figure

_SAMPLE = 2000  # messages that the standard library reads, to compare with


def run() -> list[Figure]:
    """Writes a box, reads it in a process of its own, and reads its beginning with the standard library."""
    megabytes = int(os.environ.get("COOWNED_BENCH_MAIL_MB", "200"))
    with tempfile.TemporaryDirectory() as folder:
        box = Path(folder) / "box.mbox"
        sample = Path(folder) / "sample.mbox"
        write_mbox(box, megabytes << 20)
        write_mbox(sample, _sample_bytes(box))
        rows = []
        for attribute_to in ("everyone", "thread"):
            read = _in_a_process(box, attribute_to)
            ratio = read["peak"] / read["arrays"]
            label = f"read_mail {megabytes} MB mbox, {attribute_to}"
            rows += [
                Figure(f"{label}: peak memory / {read['arrays'] >> 20} MB of arrays", ratio, "x", "<= 3"),
                Figure(f"{label}: messages a second of one core", read["rate"], "messages/s", ">= 3000"),
            ]
        ours, theirs = _in_a_process(sample, "everyone")["rate"], _standard_library_rate(sample)
        rows.append(Figure("read_mail against mailbox + email.policy.default: speed", ours / theirs, "x", ">= 3"))
    return rows


def write_mbox(file: Path, size: int, seed: int = 0) -> int:
    """Writes messages of several kinds until the file has the size; gives their number."""
    randomness = random.Random(seed)
    words = ["".join(randomness.choices("abcdefghijklmnoprstuvwé", k=randomness.randint(2, 9))) for _ in range(5000)]
    lines = [" ".join(randomness.choices(words, k=11)) for _ in range(20_000)]
    attachment = base64.encodebytes(randomness.randbytes(20_000)).decode()
    number = written = 0
    with file.open("w", encoding="utf-8", newline="\n") as out:
        while written < size:
            written += out.write(_message(number, randomness, lines, attachment))
            number += 1
    return number


def _message(number: int, randomness: random.Random, lines: list[str], attachment: str) -> str:
    people = [int(randomness.paretovariate(0.8)) % 20_000 for _ in range(1 + min(int(randomness.expovariate(0.4)), 60))]
    recipients = ",\n\t".join(f'"Person, {person}" <person{person}@example{person % 97}.org>' for person in people)
    start = randomness.randrange(len(lines) - 200)
    text = "\n".join(lines[start : start + 5 + min(int(randomness.expovariate(1 / 25)), 190)])
    parent = max(0, number - 1 - int(randomness.expovariate(0.05)))
    reply = (
        f"References: <{parent}.b@example.org>\nIn-Reply-To: <{parent}.b@example.org>\n"
        if randomness.random() < 0.6
        else ""
    )
    sender = randomness.randrange(20_000)
    head = (
        f"From person{sender}@example.org Mon Jan  1 10:00:00 2024\n"
        f"Return-Path: <person{sender}@example.org>\n"
        + "".join(
            f"Received: from relay{hop}.example.org (relay{hop}.example.org [192.0.2.{hop}])\n\tby mx{hop}.example.org "
            f"with ESMTPS id {number:x}{hop}\n\tfor <list@example.org>; Mon, 01 Jan 2024 10:00:0{hop} +0000\n"
            for hop in range(4)
        )
        + f"From: =?utf-8?q?J=C3=BCrgen?= {sender} <person{sender}@example{sender % 97}.org>\nTo: {recipients}\n"
        f"Subject: {lines[start][:50].encode('ascii', 'ignore').decode()}\nDate: Mon, 01 Jan 2024 10:00:00 +0000\n"
        f"Message-ID: <{number}.b@example.org>\n{reply}MIME-Version: 1.0\nX-Mailer: none\n"
    )
    kind = randomness.random()
    if kind < 0.6:
        return f"{head}Content-Type: text/plain; charset=utf-8\n\n{text}\n\n"
    if kind < 0.7:
        encoded = base64.encodebytes(text.encode()).decode()
        return f"{head}Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64\n\n{encoded}\n"
    rich = "<html><body>" + "".join(f"<p class=3D'x'>{line}</p>\n" for line in text.split("\n")) + "</body></html>"
    alternative = (
        'Content-Type: multipart/alternative; boundary="BB"\n\n'
        f"--BB\nContent-Type: text/plain; charset=utf-8\n\n{text}\n"
        f"--BB\nContent-Type: text/html; charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n{rich}\n--BB--\n"
    )
    if kind < 0.9:
        return f"{head}{alternative}\n"
    if kind < 0.95:
        html = f"Content-Type: text/html; charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n{rich}\n\n"
        return head + html
    image = (
        "Content-Type: image/png\nContent-Transfer-Encoding: base64\n"
        f'Content-Disposition: attachment; filename="a.png"\n\n{attachment}'
    )
    return f'{head}Content-Type: multipart/mixed; boundary="CC"\n\n--CC\n{alternative}\n--CC\n{image}\n--CC--\n\n'


def _sample_bytes(box: Path) -> int:
    """About as many bytes as hold the sampled messages."""
    with box.open("rb") as opened:
        start = opened.read(16 << 20)
    return len(start) * _SAMPLE // max(start.count(b"\nMessage-ID: "), 1)


def _in_a_process(box: Path, attribute_to: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.mail", str(box), attribute_to]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    return json.loads(done.stdout)


def _read(box: str, attribute_to: str) -> dict:
    from coowned.attribution.mail import read_mail

    with tempfile.TemporaryDirectory() as folder:  # once on a small box, so that the baseline has every import
        small = Path(folder) / "small.mbox"
        write_mbox(small, 1 << 20)
        read_mail(small, attribute_to=attribute_to).graph.digest  # noqa: B018
    before = memory.resident()
    started = time.process_time()
    examples = read_mail(box, attribute_to=attribute_to)
    seconds = time.process_time() - started
    peak = memory.peak()
    graph = examples.graph
    arrays = (
        graph.indptr.nbytes
        + graph.users.nbytes
        + examples.ids.nbytes
        + examples.user_keys.nbytes
        + examples.payload.nbytes
    )
    return {"peak": peak - before, "arrays": arrays, "rate": examples.notes["messages"] / seconds}


def _standard_library_rate(sample: Path) -> float:
    """Messages a second of one core, the usual way: mailbox, the modern policy, the same fields."""
    started = time.process_time()
    messages = 0
    box = mailbox.mbox(sample, factory=lambda file: email.message_from_binary_file(file, policy=email.policy.default))
    for message in box:
        found = [message[name] for name in ("From", "To", "Cc", "Bcc", "Message-ID", "Subject", "Date")]
        body = message.get_body(("plain", "html"))
        messages += bool(found and body and body.get_content())
    return messages / (time.process_time() - started)


if __name__ == "__main__":
    print(json.dumps(_read(*sys.argv[1:])))
