"""Files of every format as this release writes them: a later one must read them, or refuse them by their version.

Where a format gets another version the old files are refused; `python -m tests.faults.formats` makes new ones.
"""

import json
import re
import shutil

import pytest
from tests.faults.formats import FIXTURES

from coowned import certify
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.attribution.sources import DataSource
from coowned.certificate import ContributionCertificate
from coowned.cli.options import read_certificate
from coowned.errors import CoownedError, InputError
from coowned.runs.signature import verification_key, verify_run
from coowned.runs.stored_run import StoredRun
from coowned.selection.selection_files import read_selection
from coowned.selection.selector import Schedule, Selection

BY_VERSION = r"expected the format 'coowned-[a-z-]+-\d+', not 'coowned-[a-z-]+-\d+'"


@pytest.fixture(scope="module")
def graph():
    return DataSource(path=FIXTURES / "mail.jsonl", users=("users",), example_id="id").read().graph


def read_or_refused(read):
    """What is read; None where it is refused by its version, with a message that names both."""
    try:
        return read()
    except CoownedError as error:
        assert re.search(BY_VERSION, str(error)), error  # noqa: PT017
        return None


@pytest.mark.parametrize(("name", "kind"), [("S", Selection), ("schedule", Schedule)])
def test_selections_and_certificates(graph, name, kind):
    certificate = read_or_refused(lambda: read_certificate(FIXTURES / f"{name}.certificate.json"))
    selected = read_selection(FIXTURES / f"{name}.parquet", graph)
    assert isinstance(selected, kind)
    if certificate is not None:
        certificate.check(graph, selected)


def test_guarantees():
    claim = read_or_refused(lambda: PrivacyGuarantee.from_json((FIXTURES / "guarantee.json").read_text()))
    if claim is not None:
        assert claim.epsilon <= 8
        assert claim.certificate == read_certificate(FIXTURES / "S.certificate.json")


def test_run_folders(tmp_path):
    run = read_or_refused(lambda: StoredRun.open(FIXTURES / "RUN"))
    if run is None:
        return
    data = run.config(FIXTURES).source().read()
    assert run.record.state == "finished"
    assert run.metrics().height > 0
    assert run.evaluations().keys() == {"validation", "test"}
    assert run.private_log()["covered_by_guarantee"] is False
    assert run.audit().audits_run == 1
    assert run.arrays()
    from coowned.content.splits import split_examples

    rows = split_examples(data.graph, run.config(FIXTURES).splits)["train"]
    trained = data.graph.subgraph(rows)
    assert certify(trained, run.selection(trained)).selection_digest == run.certificate.selection_digest
    read_or_refused(lambda: verify_run(FIXTURES / "RUN", verification_key(FIXTURES / "curator.key.pub")))


@pytest.mark.parametrize("name", ["run.json", "guarantee.json", "certificate.json", "audit.json", "signature.json"])
def test_another_version_is_refused_by_its_version(tmp_path, name):
    """Also an older one, whose digests were made otherwise: never as files of another graph or run."""
    folder = shutil.copytree(FIXTURES / "RUN", tmp_path / "RUN")
    content = json.loads((folder / name).read_text())
    kind, number = content["format"].rsplit("-", 1)
    older, newer = (1, 5) if name == "certificate.json" else (int(number) - 1, int(number) + 1)
    for other in (older, newer):
        text = json.dumps({**content, "format": f"{kind}-{other}", "unknown": 1})
        with pytest.raises(InputError, match=f"expected the format .*'{content['format']}'.*, not '{kind}-{other}'"):
            parse(name, text, folder)


def parse(name, text, folder):
    if name == "guarantee.json":
        PrivacyGuarantee.from_json(text)
    elif name == "certificate.json":
        ContributionCertificate.from_json(text)
    else:
        (folder / name).write_text(text)
        key = verification_key(FIXTURES / "curator.key.pub")
        verify_run(folder, key) if name == "signature.json" else StoredRun.open(folder).audit()
