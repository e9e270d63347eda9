"""Run folders for tests: one that looks finished without training, and digests made again after a change."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from coowned.accounting.claim_file import write_claim
from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.runs.records import RunRecord
from coowned.training.plan import claim_terms, plan_digest


def write_run(
    folder: Path,
    guarantee: PrivacyGuarantee,
    *,
    model: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Path:
    """Writes what `coowned train` leaves, but for the selection and the metrics, with a model of one zero."""
    strategy = guarantee.mechanism.strategy()
    plan = claim_terms(guarantee.certificate, guarantee.mechanism, guarantee) | {
        "clip_norm": 1.0,
        "optimizer": ["sgd", 0.1, *([options] if options else ())],
        "configuration": "",
        "coefficients": [1.0] if strategy is None else strategy.coefficients.tolist(),
        "public": False,
        "test_run": guarantee.test_run,
    }
    (folder / "config.toml").write_text("", encoding="utf-8")
    (folder / "certificate.json").write_text(guarantee.certificate.to_json(), encoding="utf-8")
    claim = write_claim(guarantee, guarantee.mechanism, public=False)
    (folder / "guarantee.json").write_text(claim, encoding="utf-8")
    metadata = {"statement": guarantee.statement(), "plan": plan_digest(plan)}
    save_file({"weights": np.zeros(1, np.float32)}, folder / "model.safetensors", metadata=metadata)
    names = ("config.toml", "certificate.json", "guarantee.json", "model.safetensors")
    model = model or {"kind": "logistic-regression", "num_features": 5}
    record = RunRecord(
        state="finished", plan=plan, model=model, run_id=guarantee.run_id, files=dict.fromkeys(names, "")
    )
    (folder / "run.json").write_bytes(record.to_json())
    return reseal(folder)


def reseal(folder: Path) -> Path:
    """Computes the digests in run.json anew, as somebody would who changes a file on purpose."""
    file = folder / "run.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record["files"]}
    file.write_text(json.dumps({**record, "files": files}), encoding="utf-8")
    return folder
