"""The package without its extras: selection, certificates and accounting work, the rest says what to install."""

import subprocess
import sys

import pytest

import coowned
from coowned import extras

WITHOUT_TRAIN = "import sys; sys.modules.update(dict.fromkeys({packages}))\n".format(  # None: cannot be imported
    packages=(*extras._PACKAGES["train"], "jaxlib")
)


def run(code: str, folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TRAIN + code], cwd=folder, capture_output=True, text=True, check=False
    )


def test_missing_extra_is_named(monkeypatch):
    extras.require("train", "training")
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(
        coowned.MissingExtraError, match="training needs jax, optax, which are not installed; run: "
    ) as e:
        extras.require("train", "training")
    assert "pip install 'coowned[train]'" in str(e.value)
    assert isinstance(e.value, ImportError)


def test_without_torch_it_says_what_to_install(monkeypatch):
    import coowned.torch

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(coowned.MissingExtraError, match=r"coowned.torch needs torch, .* 'coowned\[torch\]'"):
        from coowned.torch import fit  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = coowned.torch.fitt


TRAINING = """
import coowned as co
from coowned.cli.main import run
rows = [{"users": [f"u{i % 40}"], "x": 1.0, "y": i % 2} for i in range(100)]
try:
    co.fit(co.from_table(rows), co.LogisticRegression(features=["x"], label="y"), epsilon=8.0, delta=1e-6,
           adjacency="zero-out", selector=co.Greedy(contribution_bound=2), batch_size=40, iterations=3)
except co.MissingExtraError as error:
    print(error)
sys.exit(run(["demo"]))
"""


def test_training_without_jax_says_what_to_install(tmp_path):
    done = run(TRAINING, tmp_path)
    assert done.stdout.startswith("training needs jax, optax, tokenizers, jinja2, altair, vl_convert, which are not")
    assert done.stderr.startswith("coowned: the demo needs jax, ")
    assert (done.stderr.count("\n"), done.returncode, list(tmp_path.iterdir())) == (1, 2, [])


def test_report_without_jax_says_what_to_install(tmp_path):
    done = run("import coowned.report.page", tmp_path)
    assert "MissingExtraError: a report needs jax, " in done.stderr
    assert "pip install 'coowned[train]'" in done.stderr


VERBS = """
import json, pathlib
import coowned as co
from coowned.cli.main import run
pathlib.Path("mail.csv").write_text("users\\n" + "".join(f"u{i % 40};u{3 * i % 40}\\n" for i in range(100)))
data = ["mail.csv", "--users", "users", "--separator", ";"]
steps = ["--epsilon", "8", "--delta", "1e-6", "--batch-size", "10", "--iterations", "5"]
for words in (
    ["inspect", *data], ["aliases", *data, "-o", "aliases.csv"],
    ["plan", *data, *steps, "--selectors", "greedy", "--contribution-bounds", "2", "-o", "plan.json"],
    ["select", *data, "--contribution-bound", "2", "-o", "S.parquet"],
    ["certify", *data, "S.parquet"],
    ["calibrate", "--certificate", "S.certificate.json", *steps, "-o", "guarantee.json"],
):
    assert run(words) == 0, words
for name in co.__all__:
    getattr(co, name)
claim = co.PrivacyGuarantee.from_json(pathlib.Path("guarantee.json").read_text())
another = co.guarantee(claim.certificate, claim.mechanism, epsilon=8.0, delta=1e-6, adjacency="zero-out")
print(co.compose([claim, another], delta=1e-5).epsilon > claim.epsilon)
sys.exit(any(name.split(".")[0] in ("jax", "altair") and sys.modules[name] for name in sys.modules))
"""


@pytest.mark.full
def test_selection_certificates_and_accounting_without_jax(tmp_path):
    done = run(VERBS, tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True"), done.stderr
