"""The package's front: every public name is where it is said to be, and nothing heavy comes with it."""

# ruff: noqa: E501 (tables of cases: one case a line)

import subprocess
import sys

import pytest
from tests.public_stub import FILE, stub

import coowned


@pytest.mark.parametrize("name", coowned.__all__)
def test_every_public_name_exists(name):
    value = getattr(coowned, name)
    assert name == "__version__" or value.__name__ == name
    assert name in dir(coowned)


def test_unknown_name():
    with pytest.raises(AttributeError, match="has no attribute 'Greedyy'"):
        _ = coowned.Greedyy


def test_errors_have_one_base():
    for name in (
        "InputError",
        "ConfigError",
        "InfeasibleScheduleError",
        "CertificateMismatchError",
        "UncertifiableError",
        "MissingExtraError",
    ):
        assert issubclass(getattr(coowned, name), coowned.CoownedError)
    assert issubclass(coowned.InputError, ValueError)


def test_import_is_light():
    heavy = "jax, numba, pyspark, polars, pyarrow, numpy, scipy, rich"
    code = f"import sys, coowned; found = sorted(set('{heavy}'.split(', ')) & set(sys.modules)); sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_type_checkers_see_every_public_name():
    assert FILE.read_text(encoding="utf-8") == stub()  # otherwise: python -m tests.public_stub


@pytest.mark.full
def test_a_wrong_call_is_found_by_the_type_checker(tmp_path):
    """A call with an unknown argument is an error; the same call without it is none."""
    right = "import coowned as co\n\nselector: co.Selector = co.Greedy(contribution_bound=2)\n"
    for name, code, found in (("right", right, 0), ("wrong", right + "co.fit(1, 2, no_such=3)\n", 1)):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, tmp_path / f"{name}.py"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == found, done.stdout
        assert ("no_such" in done.stdout) == bool(found)
