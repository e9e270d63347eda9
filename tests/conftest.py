"""What all tests share: hypothesis profiles, a cache of their own, and skips that fail where all is required."""

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
# In CI a pass must be repeatable; at a desk new examples are welcome.
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the person's own cache."""
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("COOWNED_REQUIRE_ALL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped where everything is required: {report.longrepr}"
