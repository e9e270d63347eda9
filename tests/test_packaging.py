"""The wheel: what it holds, what it asks for, and that this is enough in an environment that has nothing else."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {"train", "spark", "cyclic", "docs", "dev", "peers", "build"}

USE = """
import coowned as co
from coowned.synthetic.toy_emails import five_emails
graph = co.from_table(five_emails(), users="users", example_id="example_id").graph
certificate = co.certify(graph, co.Greedy(contribution_bound=2).select(graph, seed=0))
mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=1, iterations=10)
print(certificate.size, round(co.epsilon(mechanism, noise_multiplier=5.14, delta=1e-6, adjacency="zero-out"), 1))
print(co.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def required(distribution: importlib.metadata.Distribution, extras: set[str]) -> set[str]:
    """Names of what a distribution asks for on this machine, with the given extras."""
    from packaging.requirements import Requirement

    wanted = map(Requirement, distribution.requires or ())
    return {
        one.name
        for one in wanted
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    }


def link_requirements(names: set[str], site: Path) -> set[str]:
    """Links the installed packages of these names, and all that they ask for, into another environment."""
    linked: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in linked:
            continue
        linked.add(name)
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
        names |= required(distribution, set())
    return linked


@pytest.mark.full
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"coowned", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    shipped = {name for name in names if name.startswith("coowned/")}
    sources = {p for p in (ROOT / "src/coowned").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert shipped == {str(path.relative_to(ROOT / "src")) for path in sources}


@pytest.mark.full
def test_wheel_in_an_empty_environment(wheel, tmp_path):
    """The environment has what the wheel's metadata ask for, linked from this one, and nothing else: no JAX."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)  # what an installer does with a wheel of pure Python
    (metadata,) = importlib.metadata.distributions(name="coowned", path=[str(site)])
    assert set(metadata.metadata.get_all("Provides-Extra") or ()) >= EXTRAS
    linked = link_requirements(required(metadata, set()), site)
    assert not linked & {"jax", "jaxlib", "optax", "altair", "vl-convert-python", "jinja2", "tokenizers"}
    python = tmp_path / "env" / "bin" / "python"
    done = subprocess.run([python, "-I", "-c", USE], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures, where = done.stdout.splitlines()
    assert figures == "3 2.0"
    assert Path(where).is_relative_to(site)


def test_make_test_says_what_it_does_before_it_does_it(tmp_path):
    """Collecting and compiling take a while: what `make test` is about to do is on the screen before it begins."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "<$*>"\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", "test"], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    setup, testing = (
        next(i for i, line in enumerate(lines) if line.startswith(f"<{start}")) for start in ("-m pip", "-u")
    )
    assert lines[setup - 1] == "setting up .venv (once) ..."
    assert "tests" in lines[testing - 1]
    assert "compiles" in lines[testing - 1]
    assert "-m pytest" in lines[testing]


def test_ci_begins_with_what_a_newcomer_does():
    """In clones that hold nothing else: what is installed for development must not hide what a newcomer lacks."""
    steps = re.findall(r"(?m)^step (.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    names = [re.sub(r' PYTHON="\$PYTHON"', "", step) for step in steps]
    newcomer = ["fresh make demo", "fresh make test", "fresh readme_example", "fresh select_certify_calibrate"]
    assert names == [*newcomer, "make setup", "make lint", "make docs", "make test-full", "make test-peers"]
