"""An adapter that hangs or kills its process takes one event with it, and no other."""

import ctypes
import json
import os
import re
import time

import pytest

from joiner.adapter import Adapter, BatchAdapter, Guard
from photon.core.suspects import DEATHS_MAX
from tests.forked import Child


class Poisoned(Adapter):
    def join(self, primary, foreign):
        match foreign.data["id"]:
            case "regex":
                re.match(r"(a+)+$", "a" * 60 + "b")
            case "sleep":
                time.sleep(1e6)
            case "exit":
                os._exit(3)
            case "segv":
                ctypes.string_at(0)
            case "slow":
                time.sleep(0.2)


def life(directory, names, timeout_s):
    """Of a joiner that has these events to adapt: what becomes of them stands in `answer`."""
    guard = Guard(directory, timeout_s)
    if guard.found:
        print(guard.found, flush=True)
    adapted = BatchAdapter(Poisoned(), guard).join(
        [b'{"id":1}'] * len(names),
        b"".join(b'{"id":"%s"}\n' % name.encode() for name in names),
        b"".join(name.encode().ljust(16) for name in names),
    )
    guard.close()
    (directory / "answer").write_text(json.dumps([adapted.rows, adapted.failed]))


class Lives:
    """Of joiners one after the other."""

    def __init__(self, directory):
        self._directory = directory

    def next(self, events, timeout_s=60.0):
        """What it answers; None if it ends before."""
        answer = self._directory / "answer"
        answer.unlink(missing_ok=True)
        self._told = self._directory / "told"
        self._told.unlink(missing_ok=True)
        status = Child(life, self._directory, events.split(), timeout_s, told=self._told).wait()
        assert answer.exists() == (status == 0)
        return json.loads(answer.read_text()) if answer.exists() else None

    @property
    def told(self):
        return self._told.read_text()


@pytest.fixture
def lives(tmp_path):
    return Lives(tmp_path)


@pytest.mark.parametrize(
    ("poison", "told"),
    [
        ("regex", "not back within 0.5 s"),
        ("sleep", "not back within 0.5 s"),
        ("exit", "killed"),
        ("segv", "killed"),
    ],
)
def test_an_event_at_which_its_joiner_ends_again_and_again_is_answered_without_the_adapter(
    lives, poison, told
):
    for _ in range(DEATHS_MAX):
        assert lives.next(f"a {poison} b", 0.5) is None
    rows, failed = lives.next(f"a {poison} b", 0.5)
    assert rows == [0, 2] and "while the adapter worked on this event" in failed["1"]
    assert told in lives.told and (told == "killed" or "in join" in lives.told)
    # The adapter may be mended by now: when the event comes again it is asked again.
    assert lives.next("a b") == [None, {}]
    assert lives.next(poison, 0.5) is None


def test_a_slow_adapter_has_its_time_for_each_event_and_a_single_death_is_forgiven(lives, tmp_path):
    assert lives.next("slow " * 7, 1.0) == [None, {}]
    for _ in range(2 * DEATHS_MAX):
        # Killed, by whomever, while it worked on that.
        (tmp_path / "adapter.mark").write_bytes(b"a".ljust(16))
        assert lives.next("a b") == [None, {}]


def test_a_list_of_suspects_that_cannot_be_read_stops_nobody(tmp_path):
    (tmp_path / "adapter.suspects").write_bytes(b"{")
    (tmp_path / "adapter.mark").write_bytes(b"x" * 16)
    guard = Guard(tmp_path, 1.0)
    assert guard.found == (
        f"the joiner ended while its adapter worked on an event (1 of {DEATHS_MAX}): the process was killed"
    )
    guard.close()
