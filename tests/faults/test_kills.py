"""A process killed at any moment, run again, ends in the bits of one that was not; `make faults` kills 100."""

import pytest
from tests.faults.killing import Killer

pytestmark = pytest.mark.full

# A writer that does not write beside the target first: a kill leaves half a file under its name.
NOT_ATOMIC = """
import contextlib, coowned.files
from pathlib import Path

@contextlib.contextmanager
def _in_place(*targets):
    yield [Path(target) for target in targets]
    for target in targets:
        with open(target) as file:
            os.fsync(file.fileno())

coowned.files.whole_files = _in_place
"""


@pytest.fixture(scope="module")
def killer(tmp_path_factory):
    return Killer(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize(("verb", "kills"), [("select", 2), ("train", 3), ("audit", 1), ("report", 2), ("predict", 2)])
def test_killed_and_run_again(killer: Killer, verb: str, kills: int):
    tally = killer.run(verb, kills)
    assert tally.failures == []
    assert tally.num_kills == kills


def test_a_writer_in_place_is_seen(tmp_path):
    killer = Killer(tmp_path / "room", verbs=["select"])
    killer.before = NOT_ATOMIC
    tally = killer.run("select", 2)
    assert any("is not whole" in failure for failure in tally.failures)
