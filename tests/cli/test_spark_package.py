"""`coowned spark-package`: a zip from which another Python imports the package."""

import json
import os
import subprocess
import sys
import zipfile

import coowned as co
from coowned.cli.main import run


def test_the_package_is_imported_from_the_zip(tmp_path, capsys):
    file = tmp_path / "coowned.zip"
    assert run(["spark-package", "-o", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(file), "version": co.__version__}
    names = zipfile.ZipFile(file).namelist()
    assert "coowned/spark/log4j2.properties" in names
    assert not [name for name in names if "__pycache__" in name]
    code = "import coowned; from coowned.spark import attribution; print(coowned.__file__, coowned.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(file)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{file / 'coowned' / '__init__.py'} {co.__version__}\n"


def test_the_same_code_is_the_same_zip(tmp_path, capsys):
    for name in ("one.zip", "other.zip"):
        assert run(["spark-package", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "other.zip").read_bytes()
    assert "wrote " in capsys.readouterr().out
