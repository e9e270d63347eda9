"""The package's front: every public name is where it is said to be, and nothing heavy comes with it."""

# ruff: noqa: E501 (tables of cases: one case a line)

import subprocess
import sys

import pytest

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
