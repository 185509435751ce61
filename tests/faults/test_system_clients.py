"""What a system under faults holds on to."""

import threading

import pytest

from tests.faults.kit.system import FaultSystem


def asking():
    """Threads that ask processes for their status."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("status")]


class Nothing:
    """A launcher of a system that is not started."""

    def close(self):
        pass


@pytest.mark.parametrize("end", [FaultSystem.close, lambda system: system.use(system.topology)])
def test_who_was_asked_is_let_go_when_it_ends_and_when_others_are_there(tmp_path, end):
    system = FaultSystem(tmp_path, seed=1, launcher=Nothing())
    before = asking()
    assert system.status("joiner-east") is None
    assert len(asking()) > len(before)
    end(system)
    assert asking() == before
    system.close()
