"""`coowned calibrate`."""

import json
from pathlib import Path

import pytest

from coowned.accounting.guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.cli.main import run


@pytest.fixture
def certificate(table: Path) -> Path:
    options = ["--example-id", "id", "--separator", ";", "--contribution-bound", "3"]
    assert run(["select", str(table), *options, "-o", str(table.with_name("S.parquet"))]) == 0
    return table.with_name("S.certificate.json")


@pytest.fixture
def tiered(certificate: Path) -> Path:
    folder = certificate.parent
    names = "".join(f"user{number},1,customers\n" for number in range(10)) + "user10,0,out\n"
    (folder / "tiers.csv").write_text(f"user,bound,tier\n{names}", encoding="utf-8")
    options = ["--example-id", "id", "--separator", ";", "--contribution-bound", "3"]
    options += ["--contribution-bounds-file", str(folder / "tiers.csv"), "-o", str(folder / "T.parquet")]
    assert run(["select", str(folder / "data.csv"), *options]) == 0
    return folder / "T.certificate.json"


def calibrate(certificate: Path, *more: str) -> int:
    return run(
        [
            "calibrate",
            "--certificate",
            str(certificate),
            "--delta",
            "1e-6",
            "--batch-size",
            "10",
            "--iterations",
            "20",
            *more,
        ]
    )


def test_statement_and_file(certificate: Path, capsys):
    output = certificate.with_name("guarantee.json")
    capsys.readouterr()
    assert calibrate(certificate, "--epsilon", "4", "-o", str(output)) == 0
    printed = capsys.readouterr().out
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert 3.99 < stored["epsilon"] <= 4.0
    assert f"noise multiplier {stored['noise_multiplier']:.6g}" in printed
    assert f"({rounded_up(stored['epsilon'])}, 1e-06)-differentially private" in printed
    assert "Under replace adjacency" in printed  # the other one stands beside it


def test_json(certificate: Path, capsys):
    capsys.readouterr()
    assert calibrate(certificate, "--noise-multiplier", "2", "--adjacency", "replace", "--json") == 0
    assert json.loads(capsys.readouterr().out)["adjacency"] == "replace"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--epsilon", "4", "--noise-multiplier", "1"],
        ["--epsilon", "-1"],
        ["--epsilon", "4", "--mechanism", "shuffle"],
        ["--epsilon", "4", "--mechanism", "min-separation"],
        ["--epsilon", "4", "--mechanism", "cyclic"],
        ["--epsilon", "4", "--num-bands", "4"],
        ["--epsilon", "4", "--adjacency", "remove"],
        ["--epsilon", "4", "-o", "/no/such/folder/g.json"],
    ],
)
def test_bad_input(certificate: Path, capsys, wrong: list[str]):
    capsys.readouterr()
    assert calibrate(certificate, *wrong) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("coowned: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_tampered_certificate_is_a_claim_that_does_not_hold(certificate: Path, capsys):
    stored = json.loads(certificate.read_text(encoding="utf-8"))
    certificate.write_text(json.dumps({**stored, "contribution_bound": 1}), encoding="utf-8")
    assert calibrate(certificate, "--epsilon", "4") == 1
    assert "changed" in capsys.readouterr().err


def test_missing_certificate(tmp_path: Path, capsys):
    assert calibrate(tmp_path / "none.json", "--epsilon", "4") == 2
    assert "none.json" in capsys.readouterr().err


def test_batch_larger_than_the_training_set(certificate: Path, capsys):
    arguments = ["calibrate", "--certificate", str(certificate), "--delta", "1e-6", "--epsilon", "1"]
    assert run([*arguments, "--batch-size", "100000", "--iterations", "20"]) == 2
    assert "at most the size of S" in capsys.readouterr().err
    assert run(arguments) == 2
    assert "--batch-size" in capsys.readouterr().err


def test_large_delta(certificate: Path, capsys):
    settings = ["--epsilon", "4", "--batch-size", "10", "--iterations", "20"]
    arguments = ["calibrate", "--certificate", str(certificate), *settings]
    capsys.readouterr()
    assert run([*arguments, "--delta", "0.1"]) == 2
    assert "--allow-large-delta" in capsys.readouterr().err
    assert run([*arguments, "--delta", "0.1", "--allow-large-delta"]) == 0
    assert "Warning: delta 0.1 is above 1 / (users" in capsys.readouterr().out
    assert run([*arguments, "--delta", "2e-5", "--json"]) == 0
    printed = capsys.readouterr()
    assert "Warning: delta 2e-05 is above 1e-05" in printed.err
    assert json.loads(printed.out)["target_epsilon"] == 4.0


def test_noise_that_is_hardly_needed_is_refused(certificate: Path, capsys):
    settings = ["--noise-multiplier", "0.1", "--delta", "0.09", "--batch-size", "1", "--iterations", "1"]
    capsys.readouterr()
    assert run(["calibrate", "--certificate", str(certificate), *settings]) == 2
    assert "is not below the probability" in capsys.readouterr().err


def test_target_for_each_tier(tiered: Path, capsys):
    capsys.readouterr()
    assert calibrate(tiered, "--epsilon", "bound 3=8, customers=1", "--json") == 0
    found = PrivacyGuarantee.from_json(capsys.readouterr().out)
    epsilons = dict(found.by_tier().select("tier", "epsilon").iter_rows())
    assert 0.999 < epsilons["customers"] <= 1  # the stricter target sets the noise
    assert found.epsilon == epsilons["bound 3"] < 8
    assert calibrate(tiered, "--epsilon", "bound 3=1,customers=8") == 0
    assert "By tier, at the same delta: 'bound 3' (bound 3): epsilon " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("epsilon", "says"),
    [
        ("bound 3=8", "10 users are of tier 'customers', which has no target"),
        ("bound 3=8,customer=1", "tier 'customer' is unknown"),
        ("bound 3=8,customers=1,out=1", "tier 'out' has bound 0"),
        ("bound 3=8,customers=0", "epsilon must be"),
        ("bound 3=8,customers=nan", "epsilon must be"),
        ("bound 3=8,customers=2,customers=1", "one for each tier by name"),
        ("8,customers=1", "one for each tier by name"),
        ("bound 3=8,customers", "one for each tier by name"),
        ("", "one for each tier by name"),
        ("=8", "one for each tier by name"),
    ],
)
def test_wrong_targets(tiered: Path, capsys, epsilon: str, says: str):
    capsys.readouterr()
    assert calibrate(tiered, "--epsilon", epsilon) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert len(captured.err.splitlines()) == 1


def test_targets_without_tiers(certificate: Path, capsys):
    capsys.readouterr()
    assert calibrate(certificate, "--epsilon", "staff=8") == 2
    assert "select with contribution_bounds" in capsys.readouterr().err
