"""A joiner's process stops for longer than its lease and goes on: the zombie that fencing is there for."""

import signal
import time
from collections import Counter

import psutil
import pytest

from photon.core.fates import Joined
from tests.fake_registry import SKEW_S, FakeRegistry
from tests.forked import Child
from tests.joiner import stopped_child
from tests.joiner.fakes import batch_of, end_all, lines_of, make_worker, output_lines, packed_id
from tests.joiner.stopped_child import AFTER, BEFORE, NAMES
from tests.waiting import wait_until

LEASE_S = 0.5
WHERE = ["intent synced", "registered", BEFORE, AFTER, "output appended", "output synced"]


@pytest.fixture
def registry(tmp_path):
    return FakeRegistry(tmp_path / "registry")


@pytest.fixture
def stop(tmp_path, registry):
    """Start a joiner and wait until it has stopped itself at the step."""
    children = []

    def run(where, *roots):
        child = Child(stopped_child.main, tmp_path, where, LEASE_S, [str(tmp_path / root) for root in roots])
        children.append(child)
        wait_until(lambda: state_of(child) == psutil.STATUS_STOPPED)
        return child

    yield run
    for child in children:
        child.kill()
        child.wait()


def state_of(child):
    assert child.poll() is None, f"the joiner ended with status {child.poll()}"
    return psutil.Process(child.pid).status()


def go_on(child):
    child.send_signal(signal.SIGCONT)
    return child.wait()


def recover(root, registry, other, reads="out"):
    """What recovery does: read the joined logs, release what is missing, have another joiner join it."""
    missing = [name for name in NAMES if not lines_of([name]) <= output_lines(root, reads)]
    released = [name for name in missing if registry.release_lost(packed_id(name))]
    if released:
        assert set(other.join(batch_of(released)).outcomes) == {Joined.JOINED}
    return released


@pytest.mark.parametrize("where", WHERE)
def test_a_zombie_writes_nothing_after_recovery_and_nothing_is_doubled_or_lost(
    stop, registry, tmp_path, where
):
    child = stop(where)
    (incarnation,) = registry.leased()
    assert not registry.fence(incarnation)
    wait_until(lambda: registry.fence(incarnation))
    other = make_worker(tmp_path, registry, name="other", directory=tmp_path / "other")
    seen = output_lines(tmp_path)
    released = recover(tmp_path, registry, other)
    assert released == (NAMES if where in ("registered", BEFORE) else [])
    assert go_on(child) == 1
    if where == AFTER:  # taken back, so recovery's next reading finds them missing
        assert seen == lines_of(NAMES)
        assert recover(tmp_path, registry, other) == NAMES
    if where == "intent synced":  # never registered: the dispatcher, which got no answer, sends it again
        other.join(batch_of(NAMES))
    assert output_lines(tmp_path) == lines_of(NAMES)
    life = make_worker(tmp_path, registry)
    end_all(life)
    assert recover(tmp_path, registry, other) == []
    assert output_lines(tmp_path) == lines_of(NAMES)
    for worker in (life, other):
        assert worker.stop(1)


@pytest.mark.parametrize("reads", ["out", "two"])
@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_a_zombie_between_two_roots_takes_its_lines_back_or_its_next_life_does(
    stop, registry, tmp_path, reads, end
):
    """Whichever root recovery reads: in one the lines stand already, in the other they do not."""
    child = stop("one root appended", "two")
    assert (output_lines(tmp_path), output_lines(tmp_path, "two")) == (lines_of(NAMES), Counter())
    (incarnation,) = registry.leased()
    wait_until(lambda: registry.fence(incarnation))
    roots = {"fsync": True, "output_roots": (str(tmp_path / "two"),)}
    other = make_worker(tmp_path, registry, name="other", directory=tmp_path / "other", **roots)
    released = recover(tmp_path, registry, other, reads)
    assert released == ([] if reads == "out" else NAMES)
    if end == "goes on":
        assert go_on(child) == 1
    else:
        child.kill()
        child.wait()
    life = make_worker(tmp_path, registry, **roots)
    end_all(life)
    recover(tmp_path, registry, other, reads)
    for out in ("out", "two"):
        assert output_lines(tmp_path, out) == lines_of(NAMES)
    assert recover(tmp_path, registry, other, reads) == []
    for worker in (life, other):
        assert worker.stop(1)


@pytest.mark.long
@pytest.mark.parametrize("where", WHERE)
def test_a_joiner_that_was_only_slow_goes_on_and_writes_all_once(stop, registry, tmp_path, where):
    child = stop(where)
    time.sleep(LEASE_S + SKEW_S)  # the lease runs out by the machine's clock alone
    assert go_on(child) == 0
    assert output_lines(tmp_path) == lines_of(NAMES)
