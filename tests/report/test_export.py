"""What is exported with a model."""

import json
import shutil

import pytest
from tests.report.readme import run_readme
from tests.runs.run_folders import reseal

from coowned import CertificateMismatchError, CyclicGroups, InputError, certify
from coowned.report import export
from coowned.report.export import export_model, released_certificate
from coowned.runs.stored_run import StoredRun


def test_only_what_is_covered(audited, tmp_path):
    output = tmp_path / "model"
    names = export_model(audited, output)
    assert sorted(names) == sorted(file.name for file in output.iterdir()) == sorted([*export.FILES, "README.md"])
    made = StoredRun.open(audited).guarantee
    assert made is not None
    readme = (output / "README.md").read_text(encoding="utf-8")
    assert made.statement() in readme
    assert "graph statistics" in readme
    everything = b"".join(file.read_bytes() for file in output.iterdir())
    for secret in (b"61739485", b"0.6174", b"73519264", b"4.713", b"example_id_", b"run-key"):
        assert secret not in everything
    assert (output / "model.safetensors").read_bytes() == (audited / "model.safetensors").read_bytes()


def test_code_of_the_readme_runs(runs, tmp_path):
    export_model(runs["public"], tmp_path / "model")
    assert 0 < float(run_readme(tmp_path / "model").strip("[]\n ")) < 1  # a probability


def test_counts_of_users_stay(audited, tmp_path):
    """As on a page for a release: how many users are in how many copies stays with the curator."""
    export_model(audited, tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "certificate.json").read_text(encoding="utf-8"))
    certificate = StoredRun.open(audited).certificate
    assert stored["contribution_bound"] == certificate.contribution_bound
    assert stored["graph_digest"] == certificate.graph_digest
    assert not {"copies_per_user", "checksum"} & stored.keys()


def test_groups_of_examples_stay(regular_graph):
    certificate = certify(regular_graph, CyclicGroups(num_groups=2, contribution_bound=1).select(regular_graph))
    stored = released_certificate(certificate)
    assert json.loads(stored)["groups"] == {
        "sizes": list(certificate.groups.sizes),
        "bounds": list(certificate.groups.bounds),
    }


def test_public_data_say_so(runs, tmp_path):
    export_model(runs["public"], tmp_path / "model")
    readme = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "no guarantee (public data)" in readme


@pytest.mark.parametrize("name", ["seeded", "none"])
def test_refused_exports(runs, copy, tmp_path, name):
    with pytest.raises(InputError, match=r"no guarantee \("):
        export_model(runs[name], tmp_path / "model")
    folder = copy("scheduled")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "state": "training"}), encoding="utf-8")
    with pytest.raises(InputError, match="is not finished"):
        export_model(folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_foreign_model_is_refused(copy, runs, tmp_path):
    folder = copy("scheduled")
    shutil.copy(runs["simulated"] / "model.safetensors", folder / "model.safetensors")
    for matches in ("changed since this run wrote", "statement inside the model"):
        with pytest.raises(CertificateMismatchError, match=matches):
            export_model(folder, tmp_path / "model")
        reseal(folder)
    assert not (tmp_path / "model").exists()


def test_export_is_whole_or_none(runs, tmp_path, monkeypatch):
    def broken(run):
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "readme", broken)
        with pytest.raises(OSError, match="No space left"):
            export_model(runs["scheduled"], tmp_path / "model")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="already exists"):
        export_model(runs["scheduled"], tmp_path / "model")
