"""`coowned audit`: reads a run's claim, tries to break it, says so.

Honest audits may alarm falsely with probability 1e-3 at most; seeds are fixed.
"""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.audit import planted_bugs
from tests.runs.run_folders import reseal, write_run

from coowned import CyclicPoisson, MinSeparation, PoissonSampling, codec
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import NO_GUARANTEE, write_claim
from coowned.accounting.tuning import TuningClaim
from coowned.attribution.graph import AttributionGraph
from coowned.audit import run_audit
from coowned.audit.canaries import CanaryAudit
from coowned.audit.run_audit import LARGEST_SEED, audit_run, plan_of, store_canaries
from coowned.certificate import certify
from coowned.cli import audit as command
from coowned.cli import main
from coowned.errors import CertificateMismatchError, InputError
from coowned.runs.records import AuditRecord
from coowned.runs.stored_run import StoredRun
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Schedule, Selection
from coowned.training.plan import plan_digest

FORMAT = AuditRecord().format
GRAPH = AttributionGraph.from_users_per_example([[i // 3] for i in range(240)])


def poisson():
    certificate = certify(GRAPH, Greedy(contribution_bound=2).select(GRAPH))
    return certificate, PoissonSampling.from_certificate(certificate, batch_size=16, iterations=10)


def cyclic():
    groups = np.arange(240) // 3 % 2
    certificate = certify(GRAPH, Selection.from_copies(GRAPH, np.ones(240, int), groups))
    return certificate, CyclicPoisson.from_certificate(certificate, batch_size=30, iterations=8)


def schedule():
    batches = [[60 * (t % 4) + 3 * j + t // 4 for j in range(20)] for t in range(12)]
    certificate = certify(GRAPH, Schedule.from_batches(GRAPH, batches))
    return certificate, MinSeparation.from_certificate(certificate)


def claim(parts=poisson, **more):
    settings = {"noise_multiplier": 1.0, "delta": 1e-6, "adjacency": "zero-out"} | more
    return guarantee(*parts(), **settings)


@pytest.fixture(scope="module")
def one_audit(tmp_path_factory):
    return audit_run(write_run(tmp_path_factory.mktemp("run"), claim()), trials=1000, seed=1)


@pytest.fixture
def audited_before(monkeypatch, one_audit):
    """What an audit finds is what one has found: for tests of what becomes of it."""
    monkeypatch.setattr(run_audit, "audit_plan", lambda *given, **settings: one_audit)


@pytest.mark.parametrize(("parts", "laws"), [(poisson, 8), (cyclic, 8), (schedule, 6)])
def test_audit_of_a_run(tmp_path, parts, laws):
    made = claim(parts)
    found = audit_run(write_run(tmp_path, made), trials=2000, seed=1)
    stored = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert stored["format"] == FORMAT
    assert stored == json.loads(codec.encode_json(found.to_record()))
    assert codec.to_plain(StoredRun.open(tmp_path).audit()) == stored
    assert stored["holds"] is True
    assert len(stored["laws"]) == laws
    assert [curve["adjacency"] for curve in stored["curves"]] == ["zero-out", "replace"]
    assert stored["claim"]["epsilon"] == made.epsilon
    assert stored["claim"]["unit"] == "user, fixed graph"
    assert stored["claim"]["contribution_bound"] == made.contribution_bound
    assert made.terms() in stored["verdict"]
    assert 0 < stored["epsilon_lower_bound"] < made.epsilon
    assert stored["repeatable"] is True
    # The false-alarm probability is shared among all tests that depend on chance.
    random = ("noise", "participation", "sweep", "noise of all trials")
    chances = [*stored["curves"], *(law for law in stored["laws"] if law["law"] in random)]
    assert sum(test["alpha"] for test in chances) <= stored["alpha"] * (1 + 1e-9)
    assert all(
        check["p_value"] in (0, 1) for law in stored["laws"] if law["law"] not in random for check in law["checks"]
    )


@pytest.mark.usefixtures("audited_before")
def test_audits_are_counted_and_other_entries_kept(tmp_path):
    write_run(tmp_path, claim())
    earlier = {"format": FORMAT, "audits_run": 2, "canaries": {"epsilon": 1.0}, "holds": False}
    (tmp_path / "audit.json").write_text(json.dumps(earlier), encoding="utf-8")
    audit_run(tmp_path, trials=1000, seed=1)
    stored = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert stored["canaries"] == {"epsilon": 1.0}
    assert (stored["audits_run"], stored["holds"]) == (3, True)
    assert "audit 3 of this run" in stored["verdict"]


@pytest.mark.usefixtures("audited_before")
@pytest.mark.parametrize("count", ["x", None, -3, 1.5])
def test_what_is_no_count_is_none(tmp_path, count):
    earlier = {"format": FORMAT, "audits_run": count}
    (write_run(tmp_path, claim()) / "audit.json").write_text(json.dumps(earlier), encoding="utf-8")
    assert audit_run(tmp_path, trials=1000, seed=1).audits_run == 1


def test_seeds(tmp_path):
    write_run(tmp_path, claim())
    assert audit_run(tmp_path, trials=1000, seed=LARGEST_SEED).repeatable
    for wrong in (-1, LARGEST_SEED + 1, 1.5):
        with pytest.raises(InputError, match=f"seed must be .* not {wrong}"):
            audit_run(tmp_path, trials=1000, seed=wrong)  # type: ignore[arg-type]


def test_broken_claim(tmp_path, capsys, monkeypatch):
    write_run(tmp_path, claim())
    planted_bugs.scaled_noise(0.5)(monkeypatch)
    with pytest.raises(CertificateMismatchError, match="Broken"):
        command.run(tmp_path, trials=2000, seed=1)
    assert "ALARM" in capsys.readouterr().out
    stored = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert stored["holds"] is False
    assert {law["law"] for law in stored["laws"] if not law["holds"]} >= {"noise", "noise of all trials"}
    assert not any(curve["holds"] for curve in stored["curves"])


def test_output_for_people_and_machines(tmp_path, capsys):
    write_run(tmp_path, claim(test_run=True))
    command.run(tmp_path, trials=1000, seed=1)
    printed = capsys.readouterr().out
    assert "Not broken" in printed
    assert "false-alarm probability at most 0.001" in printed
    assert "Trials cannot see events rarer than" in printed
    assert "has no guarantee" in printed
    command.run(tmp_path, trials=1000, seed=1, json=True)
    assert json.loads(capsys.readouterr().out)["audits_run"] == 2


@pytest.mark.full
def test_an_audit_says_what_it_does_not_see(tmp_path):
    """`scale_gradients` is trained as it is; of a loss that nobody knows, a stand-in is."""
    scaled = write_run(tmp_path, claim(), model=planted_bugs.ROWS.describe(), options={"scale_gradients": True})
    assert plan_of(StoredRun.open(scaled)).scale_gradients
    own = audit_run(scaled, trials=1000, seed=1)
    assert own.holds
    assert "scale_gradients" not in own.not_seen()
    assert "the gradients of the model's own loss" in own.not_seen()
    assert "own loss" not in dataclasses.replace(own, stand_in=False).not_seen()
    assert "tuning" not in own.not_seen()
    alone = own.claim
    tuning = TuningClaim(
        weights=(1, 1), settings=(alone.setting(),), grid={"learning_rate": [0.1]}, untuned_noise_multiplier=1.0
    )
    tuned = alone.of_tuning(tuning, target_epsilon=2 * alone.epsilon, run_id="x")
    assert "the choice among the runs of the tuning" in dataclasses.replace(own, claim=tuned).not_seen()


def test_changed_claim_is_refused(tmp_path):
    write_run(tmp_path, claim())
    file = tmp_path / "guarantee.json"
    text = file.read_text(encoding="utf-8")
    stored = json.loads(text)
    file.write_text(json.dumps(stored | {"epsilon": stored["epsilon"] / 2}), encoding="utf-8")
    with pytest.raises(CertificateMismatchError):
        audit_run(tmp_path, trials=1000)
    with pytest.raises(CertificateMismatchError, match="changed after it was written"):
        audit_run(reseal(tmp_path), trials=1000)
    file.write_text(text, encoding="utf-8")
    (tmp_path / "certificate.json").write_text(cyclic()[0].to_json(), encoding="utf-8")
    with pytest.raises(CertificateMismatchError, match="another certificate"):
        audit_run(reseal(tmp_path), trials=1000)
    assert not (tmp_path / "audit.json").exists()


@pytest.mark.parametrize("verb", ["audit", "report", "export-model", "predict"])
def test_more_noise_than_the_run_had_is_refused(tmp_path, capsys, verb):
    """Ten times the noise multiplier in guarantee.json, all checksums made again."""
    folder = tmp_path / "RUN"
    folder.mkdir()
    made = claim()
    write_run(folder, made)
    larger = claim(noise_multiplier=10.0, run_id=made.run_id)
    (folder / "guarantee.json").write_text(larger.to_json(embed_certificate=False), encoding="utf-8")
    more = {"export-model": ["-o", str(tmp_path / "out")], "predict": ["new.parquet", "-o", str(tmp_path / "out")]}
    command_line = [verb, str(folder), *more.get(verb, [])]
    assert main.run(command_line) == 1
    assert "guarantee.json: changed since this run wrote" in " ".join(capsys.readouterr().err.split())
    reseal(folder)
    assert main.run(command_line) == 1
    assert "do not agree with the plan in run.json" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("change", [{"clip_norm": "inf"}, {"coefficients": [1.0, 0.5]}, {"configuration": "a"}])
def test_another_plan_is_refused(tmp_path, change):
    write_run(tmp_path, claim())
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    record["plan"] |= change
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises((CertificateMismatchError, InputError)):
        audit_run(tmp_path, trials=1000)


@pytest.mark.full
def test_time_is_kept_or_explained(tmp_path, capsys):
    write_run(tmp_path, claim())
    audit_run(tmp_path, trials=1000, seed=1)  # compiles
    found = audit_run(tmp_path, seconds=1.5)
    assert found.taken < 4.5 or found.overtime()
    command.run(tmp_path, seconds=0.01)
    assert "instead of 0.01" in " ".join(capsys.readouterr().out.split())


def test_run_without_a_guarantee_is_refused(tmp_path):
    made = claim()
    write_run(tmp_path, made)
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    record["plan"] |= {"noise_multiplier": 0.0, "claim": None}
    (tmp_path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "guarantee.json").write_text(write_claim(None, made.mechanism, public=False), encoding="utf-8")
    metadata = {"statement": NO_GUARANTEE, "plan": plan_digest(record["plan"])}
    save_file({"weights": np.zeros(1, np.float32)}, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(InputError, match="no guarantee"):
        audit_run(reseal(tmp_path))
    with pytest.raises(InputError, match="not a folder"):
        audit_run(tmp_path / "nowhere")


def test_canaries_are_kept_beside_the_mechanism(tmp_path):
    folder = write_run(tmp_path, claim())
    audit_run(folder, trials=1000, seed=0)
    found = CanaryAudit(
        epsilon_lower_bound=0.1,
        gaussian_lower_bound=0.2,
        claimed_epsilon=1.0,
        gaussian_claim=1.1,
        delta=1e-5,
        alpha=1e-3,
        canaries=100,
        largest_bound=3.0,
        included=49,
        area_under_curve=0.5,
        adjacency="zero-out",
        contribution_bound=2,
    )
    store_canaries(StoredRun.open(folder), found)
    stored = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    assert stored["canaries"]["epsilon_lower_bound"] == 0.1
    assert stored["canaries"]["claim_holds"] is True
    assert stored["audits_run"] == 1  # the mechanism's entries are still there
    assert audit_run(folder, trials=1000, seed=1).audits_run == 2
    assert json.loads((folder / "audit.json").read_text(encoding="utf-8"))["canaries"] == stored["canaries"]
    assert (folder / "audit.json").stat().st_mode & 0o077 == 0  # learned from the data
