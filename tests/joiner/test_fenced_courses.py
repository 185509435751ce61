"""Any course of stand-stills, lost leases, kills, torn lines, fences and recoveries joins each event once."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from photon.core import disk
from photon.core.clock import ManualClock
from photon.core.errors import OverloadedError
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import (
    Crash,
    batch_of,
    lines_of,
    make_worker,
    output_bytes,
    output_lines,
    packed_id,
    path_of,
)

NAMES = [f"e{n}" for n in range(6)]
STEPS = [
    "looked up",
    "intent appended",
    "intent synced",
    "registered",
    "one root appended",
    "one root rotated",
    "output appended",
    "output synced",
    "done",
]
BEFORE, AFTER = "before the write", "after the write"
UNSEEN = "stands before the write, dies behind it"
LONG = 100.0


class World:
    """A joiner that stands still where it is told to; another one that recovery sends its events to."""

    def __init__(self, root, outs, reads):
        """`reads`: the root that recovery reads."""
        self.root, self.outs, self.reads = root, outs, reads
        self.clock = ManualClock()
        self.registry = FakeRegistry()
        self.stand_at = self.kill = self.recover = None
        self.torn_bytes = self.torn_root = 0
        self._before = {}
        self._real = os.write
        disk.os.write = self._write
        self.other = self._worker("other")
        self.life = self._worker("joiner", checkpoint=self._reached)

    def close(self):
        disk.os.write = self._real
        self.life.close()
        self.other.close()

    def join(self, names, stand_at, recover, kill, failure, torn_bytes, torn_root):
        """`torn`: off the end of an append, by a kill in its midst, or of the machine before the sync."""
        self.registry.failures = [failure]
        self.stand_at, self.recover, self.kill = stand_at, recover, kill
        self.torn_bytes, self.torn_root = torn_bytes, torn_root
        try:
            self.life.join(batch_of(names))
        except OverloadedError:
            pass
        except Crash:
            self.next_life()
        self.stand_at = None
        self.registry.failures = []
        self.life.leases.renew_due()
        if self.life.leases.own.fenced:
            self.next_life()

    def next_life(self):
        self.life.close()
        self.life = self._worker("joiner", checkpoint=self._reached)

    def run_recovery(self):
        """After a fence: read what is written, release what is not, have it joined by another joiner."""
        written = output_lines(self.root, self.reads)
        missing = [name for name in NAMES if not lines_of([name]) <= written]
        released = [name for name in missing if self.registry.release_lost(packed_id(name))]
        self.other.leases.renew_due()
        failures, self.registry.failures = self.registry.failures, []
        self.other.join(batch_of(released))
        self.registry.failures = failures

    def _worker(self, name, **options):
        return make_worker(
            self.root,
            self.registry,
            name=name,
            directory=self.root / name,
            clock=self.clock,
            output_file_bytes_max=300,
            output_roots=tuple(str(self.root / out) for out in self.outs[1:]),
            **options,
        )

    def _write(self, fd, data):
        joined = "/joined/east/joiner-" in path_of(fd)
        if joined:
            self._reached(BEFORE)
        unseen = joined and self.stand_at == UNSEEN
        if unseen:
            kill, self.kill = self.kill, False
            self._reached(UNSEEN)
        written = self._real(fd, data)
        if unseen and kill:
            raise Crash
        if joined:
            self._reached(AFTER)
        return written

    def _logs(self):
        """The last one of each root, and how long it is."""
        logs = [max((self.root / out / "joined" / "east").glob("joiner-*.jsonl")) for out in self.outs]
        return {log: log.stat().st_size for log in logs}

    def _reached(self, step):
        if step == "registered":
            self._before = self._logs()
        if step != self.stand_at:
            return
        self.stand_at = None
        self.clock.advance(LONG)
        if self.recover:
            self.registry.fences.add(self.life.leases.own.incarnation)
            self.run_recovery()
        if self.kill:
            if step == "output appended":
                log, size = [*self._logs().items()][self.torn_root % len(self.outs)]
                os.truncate(log, max(self._before.get(log, 0), size - self.torn_bytes))
            raise Crash


COURSE = st.tuples(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    st.sampled_from([None, *STEPS, BEFORE, AFTER, UNSEEN]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "", "before", "after"]),
    st.integers(0, 120),
    st.integers(0, 1),
)


ROOTS = st.sampled_from([(("out",), "out"), (("out", "two"), "out"), (("out", "two"), "two")])


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(COURSE, min_size=1, max_size=7), ROOTS)
@pytest.mark.long
def test_any_course_of_stand_stills_fences_and_recoveries_joins_each_event_once(courses, roots):
    root = Path(tempfile.mkdtemp())
    world = World(root, *roots)
    try:
        for course in courses:
            world.join(*course)
            for out in world.outs:
                assert output_lines(root, out) <= lines_of(NAMES)
        world.life.start()
        assert world.life.stop(20)
        world.run_recovery()
        world.other.join(batch_of(NAMES))
        for out in world.outs:
            assert output_lines(root, out) == lines_of(NAMES)
            assert output_bytes(root, out) == output_bytes(root)
    finally:
        world.close()
        shutil.rmtree(root)
