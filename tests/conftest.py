"""What all tests share: hypothesis profiles, surroundings of their own, and skips that fail where all is required."""

import fcntl
import functools
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

import coowned

# A busy machine is slow, not wrong: neither an example nor the drawing of it (which may compile kernels) is timed.
untimed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("default", **untimed)
# In CI a pass must be repeatable; at a desk new examples are welcome.
hypothesis.settings.register_profile("ci", derandomize=True, **untimed)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# Colours and widths that somebody asked for elsewhere; typer looks for them when it is imported.
for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    """The same step is compiled once, not by every test, command and worker that needs it."""
    if hasattr(config, "workerinput"):  # a worker: the process that started it has made the folder
        return
    folder = tempfile.mkdtemp(prefix="coowned-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(
        2**34
    )  # with a limit, JAX lets one process at a time read or write
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_runtest_setup() -> None:
    """Runs that other tests trained without a folder are none of a test's own."""
    if "coowned.runs.ledger" in sys.modules:
        sys.modules["coowned.runs.ledger"].OF_THIS_PROCESS.clear()


def pytest_collection_finish() -> None:
    """What was imported stays until the end: it need not be looked through for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def _by_one_worker_at_a_time(compile_: Callable) -> Callable:
    """Who comes second finds the kernel on disk, and no two workers write to the list of its versions at once."""
    held: set[str] = set()

    @functools.wraps(compile_)
    def locked(self: Any, signature: Any) -> Any:
        with global_compiler_lock:  # of this process, before any lock between processes: no circle of waiting
            path = getattr(getattr(self._cache, "_cache_file", None), "_index_path", None)
            if path is None or path in held:
                return compile_(self, signature)
            with open(f"{path}.lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                held.add(path)
                try:
                    return compile_(self, signature)
                finally:
                    held.remove(path)

    return locked


if "PYTEST_XDIST_WORKER" in os.environ:
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import Dispatcher

    Dispatcher.compile = _by_one_worker_at_a_time(Dispatcher.compile)


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test or fixture reads or writes the person's own cache; what is printed is broken alike everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOWNED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        patch.setenv("COLUMNS", "80")
        patch.setenv("TERM", "xterm")
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("COOWNED_REQUIRE_ALL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped where everything is required: {report.longrepr}"


@pytest.fixture(scope="session")
def regular_graph() -> coowned.AttributionGraph:
    from coowned.synthetic.regular_graph import RegularGraph

    return RegularGraph(num_examples=2000).generate(seed=0)


@pytest.fixture(scope="session")
def greedy_certificate(regular_graph: coowned.AttributionGraph) -> coowned.ContributionCertificate:
    return coowned.certify(regular_graph, coowned.Greedy(contribution_bound=3).select(regular_graph))


@pytest.fixture(scope="session")
def schedule_certificate() -> coowned.ContributionCertificate:
    """Six batches of two; user 0 in batches 0 and 3, the others alone: separation 3, bound 2."""
    graph = coowned.AttributionGraph.from_users_per_example([[user] for user in range(12)])
    return coowned.certify(
        graph, coowned.Schedule.from_batches(graph, [[0, 1], [2, 3], [4, 5], [0, 6], [7, 8], [9, 10]])
    )


@pytest.fixture(scope="session")
def group_certificate() -> coowned.ContributionCertificate:
    """Two groups: {0, 1} with a user in two copies, {2} in one."""
    graph = coowned.AttributionGraph.from_users_per_example([[0], [0, 1], [2], [1]])
    return coowned.certify(graph, coowned.Selection.from_copies(graph, [1, 1, 1, 0], groups=[0, 0, 1, -1]))


@pytest.fixture(scope="session")
def small():
    """`tests.small_world.Small`: 300 examples, 120 users."""
    from tests.small_world import small_world

    return small_world()
