"""What one event store takes of what another tells that it has read."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from eventstore.peers import Membership
from eventstore.reader import STANDS_S
from eventstore.rules.ring import Ring
from photon.core.clock import ManualClock
from photon.core.fates import Found
from photon.logs.files import digest
from photon.rpc import eventstore_pb2 as pb
from tests.eventstore.kit import PACKER, Parts, append, line

THEIRS = Membership(Ring(["other:1"], 8))
"""All logs are the other's to read."""


class Told:
    """Parts of an event store, all of whose logs another one reads; `told`: what that has told."""

    def __init__(self, root, *idents):
        self.log = root / "logs" / "a.jsonl"
        append(self.log, *map(line, idents))
        self.clock = ManualClock()
        self.told = []
        peers = SimpleNamespace(
            address="me:1",
            others=True,
            membership=lambda: THEIRS,
            take=self.take,
            feed=SimpleNamespace(followed=False),
        )
        self.parts = Parts(root, clock=self.clock, peers=peers)

    def take(self):
        told, self.told = self.told, []
        return told

    def stretch(self, first, last, **more):
        """Of the lines of the log from one to before the other."""
        data = self.log.read_bytes()
        ends = [n + 1 for n, byte in enumerate(data) if byte == 10]
        starts = [0, *ends]
        lines = data.splitlines()
        return pb.Stretch(
            **{
                "key": str(os.stat(self.log).st_ino),
                "name": str(self.log),
                "head_bytes": min(1024, starts[last]),
                "head": digest(data[: min(1024, starts[last])]),
                "start": starts[first],
                "end": starts[last],
                "ids": PACKER.pack([one.split(b'"')[3].decode() for one in lines[first:last]]),
                "starts": np.array(starts[first:last], "<u8").tobytes(),
                "lengths": np.array([len(one) for one in lines[first:last]], "<u4").tobytes(),
                **more,
            }
        )

    def hears(self, *stretches):
        self.told += stretches
        self.steps()

    def steps(self, count=3):
        for _ in range(count):
            self.clock.advance(0.02)
            self.parts.reader.step()

    def events(self):
        assert self.parts.map.entries() == self.parts.map.counts.primary_events
        return self.parts.map.entries()

    @property
    def offset(self):
        [state] = self.parts.map.states()
        return state.offset


@pytest.fixture
def told(root):
    """Four lines are read by the first look, as nobody has told of the log yet; then more are there."""
    made = Told(root, *"abcd")
    made.parts.read_all()
    assert made.events() == 4
    made.hears(made.stretch(0, 4))  # it is somebody's
    append(made.log, *map(line, "efgh"))
    made.steps()
    assert made.events() == 4, "it is left to the other"
    yield made
    made.parts.close()


def test_what_follows_upon_what_is_known_is_taken_and_found(told):
    told.hears(told.stretch(4, 6), told.stretch(6, 8))
    assert (told.events(), told.offset) == (8, told.log.stat().st_size)
    outcomes, lines = told.parts.lookup.look_up(PACKER.pack(list("abcdefgh")))
    assert (outcomes, lines) == (bytes(8), [line(ident) for ident in "abcdefgh"])
    assert told.parts.reader.caught_up
    assert told.parts.lookup.look_up(PACKER.pack(["x"]))[0] == bytes([Found.ABSENT])


def test_of_what_is_known_in_part_the_rest_is_taken(told):
    told.hears(told.stretch(2, 6), told.stretch(0, 6), told.stretch(5, 8))
    assert (told.events(), told.offset) == (8, told.log.stat().st_size)


def test_after_a_gap_nothing_is_taken_until_the_log_was_read_here(told):
    told.hears(told.stretch(6, 8))
    assert told.events() == 4
    told.clock.advance(STANDS_S + 1)
    told.steps()
    assert told.events() == 8


def test_a_log_of_which_nobody_tells_any_more_is_read_here(told):
    told.clock.advance(STANDS_S - 0.5)
    told.steps()
    assert told.events() == 4
    told.clock.advance(1.0)
    told.steps()
    assert told.events() == 8


def test_one_who_tells_of_what_is_known_is_still_there(told):
    for _ in range(5):
        told.clock.advance(STANDS_S - 0.5)
        told.hears(told.stretch(0, 4))
    assert told.events() == 4


def test_a_log_that_begins_otherwise_is_another_one(told):
    size = told.log.stat().st_size
    wrong = {"head_bytes": told.parts.map.states()[0].head_bytes, "head": digest(b"other")}
    told.hears(told.stretch(4, 8, **wrong))
    assert (told.events(), told.offset < size) == (4, True)


def test_what_is_told_before_the_log_is_seen_waits_for_it(told):
    fresh = told.log.with_name("b.jsonl")
    data = line("new") + b"\n"
    hidden = told.log.parent.parent / "b.hidden"
    hidden.write_bytes(data)
    told.hears(
        pb.Stretch(
            key=str(os.stat(hidden).st_ino),
            name=str(fresh),
            head_bytes=len(data),
            head=digest(data),
            end=len(data),
            ids=PACKER.pack(["new"]),
            starts=bytes(8),
            lengths=np.array([len(data) - 1], "<u4").tobytes(),
        )
    )
    assert told.events() == 4
    hidden.rename(fresh)
    told.parts.reader.follower._next_scan = float("-inf")
    told.hears(told.stretch(4, 8))
    assert told.events() == 9


def test_a_line_that_is_no_event_is_counted_where_it_was_not_read(told):
    told.hears(told.stretch(4, 8, malformed=np.array([0, told.offset + 1], "<u8").tobytes()))
    assert told.parts.map.counts.malformed == 1


def test_what_another_has_read_further_than_can_be_seen_here_waits(told):
    at = told.log.stat().st_size
    told.hears(told.stretch(4, 8, end=at + 10))
    assert told.events() == 4
    append(told.log, b"1234567 x")
    told.steps()
    assert (told.events(), told.offset) == (8, at + 10)
