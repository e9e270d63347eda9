"""A process killed at any moment, run again, ends in the bits of one that was not; `make faults` kills 100."""

import pytest
from tests.faults.killing import Killer

pytestmark = pytest.mark.full

# A writer that copies to the target instead of renaming: a kill leaves half a file under its name.
NOT_ATOMIC = """
import shutil, coowned.files

def _copy(path, target, undo):
    shutil.copyfile(path, target)
    with open(target) as file:
        os.fsync(file.fileno())

coowned.files._move = _copy
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
    tally = killer.kill_once("select", {"sync": 3})  # after those of two temporary files
    assert tally.num_kills == 1
    assert any("is not whole" in failure for failure in tally.failures)
