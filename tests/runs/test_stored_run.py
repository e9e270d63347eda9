"""`Run`: a folder is read as a whole, and refused where its parts do not agree."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.runs.run_folders import claim, reseal, write_run

from coowned import CertificateMismatchError, InputError
from coowned.accounting.privacy_guarantee import stated_origins
from coowned.runs.records import RunRecord
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import StoredRun
from coowned.training.plan import plan_digest


def test_what_was_written_is_read(tmp_path):
    made = claim()
    run = StoredRun.open(write_run(tmp_path, made))
    assert (run.guarantee, run.certificate, run.mechanism) == (made, made.certificate, made.mechanism)
    assert run.statement() == made.statement()
    assert run.claims
    assert not run.public
    assert run.audit() is None
    assert "graph_digest" not in (tmp_path / "guarantee.json").read_text(encoding="utf-8")  # the certificate, once


@pytest.mark.parametrize("name", ["config.toml", "certificate.json", "guarantee.json", "model.safetensors"])
def test_changed_files_are_refused(tmp_path, name):
    file = write_run(tmp_path, claim()) / name
    whole = file.read_bytes()
    file.write_bytes(whole + b"\n")
    with pytest.raises(CertificateMismatchError, match=f"{name}: changed since this run wrote"):
        StoredRun.open(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=f"{name}: cannot be read"):
        StoredRun.open(tmp_path)


def test_claim_plan_and_model_must_agree(tmp_path):
    """Ten times the noise in guarantee.json, with every checksum made again: a smaller epsilon than the run's."""
    made = claim()
    write_run(tmp_path, made)
    larger = claim(10.0, run_id=made.run_id)
    assert larger.epsilon < made.epsilon / 5
    (tmp_path / "guarantee.json").write_text(larger.to_json(embed_certificate=False), encoding="utf-8")
    reseal(tmp_path)
    with pytest.raises(CertificateMismatchError, match=r"do not agree with the plan in run\.json .noise_multiplier"):
        StoredRun.open(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    record["plan"]["noise_multiplier"] = 10.0
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="statement inside the model"):
        StoredRun.open(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    for metadata in (
        {"statement": larger.statement(), "plan": plan_digest({})},
        {"statement": made.statement(), "plan": plan_digest(record["plan"])},
    ):
        save_file(arrays, tmp_path / "model.safetensors", metadata=metadata)
        reseal(tmp_path)
        with pytest.raises(CertificateMismatchError, match="statement inside the model"):
            StoredRun.open(tmp_path)


def test_guarantee_of_another_run_is_refused(tmp_path):
    write_run(tmp_path, claim())
    (tmp_path / "guarantee.json").write_text(claim().to_json(embed_certificate=False), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match=r"plan in run\.json .claim"):
        StoredRun.open(reseal(tmp_path))


def test_private_files_are_read_when_asked_for(tmp_path):
    write_run(tmp_path, claim())
    for name in ("metrics.parquet", "test.parquet", "private-log.json"):
        (tmp_path / name).write_bytes(b"not what the run wrote")
    run = StoredRun.open(tmp_path)
    for read in (run.metrics, run.evaluations, run.private_log):
        with pytest.raises(CertificateMismatchError, match="changed since this run wrote"):
            read()


def test_folders_without_a_finished_run(tmp_path):
    with pytest.raises(InputError, match="not a folder"):
        StoredRun.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no run in this folder"):
        StoredRun.open(tmp_path)
    for text in ("{", "[]", "{}", '{"format": "coowned-run-1"}', '{"format": "coowned-run-2", "state": "lost"}'):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=r"run\.json: .*use another folder"):
            StoredRun.open(tmp_path)
    (tmp_path / "run.json").write_bytes(RunRecord(state="training").to_json())
    with pytest.raises(InputError, match="is not finished"):
        StoredRun.open(tmp_path)
    with pytest.raises(InputError, match="a sweep, or a run of"):
        StoredRun.open(tmp_path, finished=False)


def test_record_is_read_as_it_was_written(tmp_path):
    record = RunRecord(
        state="training", plan={"mechanism": {"bounds": (1, 2)}}, model={"layers": (3, 4)}, key="k", iterations=5
    )
    (tmp_path / "run.json").write_bytes(record.to_json())
    assert RunRecord.read(tmp_path) == record.as_stored()
    assert RunFolder(tmp_path).is_begun


def test_origins_of_weights(tmp_path):
    assert stated_origins(tmp_path) == []
    save_file({"weights": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    assert stated_origins(tmp_path) == []
    made = claim()
    write_run(tmp_path, made)
    assert stated_origins(tmp_path) == ["a guarantee", made.statement()]
    for damaged in (b"{", b"\xff", b"[]", b'{"format": NaN}', b'{"public": true, "public": true}'):
        (tmp_path / "guarantee.json").write_bytes(damaged)
        with pytest.raises(InputError, match=r"guarantee\.json: .*; the checkpoint is not a run's folder$"):
            stated_origins(tmp_path)
