"""Run folders for tests: one that looks finished without training, and digests made again after a change."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from coowned import AttributionGraph, Greedy, PoissonSampling, certify, guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee, write_claim
from coowned.runs.records import RunRecord
from coowned.training.plan import claim_terms, plan_digest

GRAPH = AttributionGraph.from_users_per_example([[i // 3] for i in range(240)])


def claim(noise_multiplier: float = 1.0, **more: Any) -> PrivacyGuarantee:
    """Returns a guarantee for DP-SGD on two copies of each user of `GRAPH`."""
    certificate = certify(GRAPH, Greedy(contribution_bound=2).select(GRAPH))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=16, iterations=10)
    settings = {"delta": 1e-6, "adjacency": "zero-out"} | more
    return guarantee(certificate, mechanism, noise_multiplier=noise_multiplier, **settings)


def write_run(
    folder: Path,
    made: PrivacyGuarantee,
    *,
    model: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> Path:
    """Writes what `coowned train` leaves, but for the selection and the metrics, with a model of one zero."""
    strategy = made.mechanism.strategy()
    plan = claim_terms(made.certificate, made.mechanism, made) | {
        "clip_norm": 1.0,
        "optimizer": ["sgd", 0.1, *([options] if options else ())],
        "configuration": "",
        "coefficients": [1.0] if strategy is None else strategy.coefficients.tolist(),
        "public": False,
        "test_run": made.test_run,
    }
    (folder / "config.toml").write_text("", encoding="utf-8")
    (folder / "certificate.json").write_text(made.certificate.to_json(), encoding="utf-8")
    text = write_claim(made, made.mechanism, public=False)
    (folder / "guarantee.json").write_text(text, encoding="utf-8")
    metadata = {"statement": made.statement(), "plan": plan_digest(plan)}
    save_file({"weights": np.zeros(1, np.float32)}, folder / "model.safetensors", metadata=metadata)
    names = ("config.toml", "certificate.json", "guarantee.json", "model.safetensors")
    model = model or {"kind": "logistic-regression", "num_features": 5}
    record = RunRecord(state="finished", plan=plan, model=model, run_id=made.run_id, files=dict.fromkeys(names, ""))
    (folder / "run.json").write_bytes(record.to_json())
    return reseal(folder)


def reseal(folder: Path) -> Path:
    """Computes the digests in run.json anew, as somebody would who changes a file on purpose."""
    file = folder / "run.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record["files"]}
    file.write_text(json.dumps({**record, "files": files}), encoding="utf-8")
    return folder


def weights(folder: Path, name: str) -> dict[str, bytes]:
    """Returns the arrays of a run's model."""
    return {key: array.tobytes() for key, array in load_file(folder / name / "model.safetensors").items()}
