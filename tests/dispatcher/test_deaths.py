"""What the dead leave of a worker's slot: dead letters that nobody counted, and what they were reading."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispatcher.ledger import Entry
from dispatcher.membership import READERS_S
from dispatcher.rows import Rows
from tests.dispatcher.test_sharing import LEASE_S, Worker, World, totals


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.file.close()


def uncounted(world) -> Path:
    """What the worker in slot 1 has written after `b`, and not counted."""
    path = world.root / "dead" / "foreign-w1-000000.jsonl"
    with path.open("ab") as file:
        file.write(b"not counted\n")
    return path


def test_dead_letters_of_the_dead_are_cut_though_who_comes_to_do_it_dies_meanwhile(world, monkeypatch):
    first, second, third = Worker(world, "d0"), Worker(world, "d1"), Worker(world, "d2")
    second.ledger.record(Entry([], totals(1, filtered=1), b"b\n"))
    path = uncounted(world)
    second.die()

    def killed(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as kill:
        kill.setattr("dispatcher.membership.cut_letters", killed)
        with pytest.raises(RuntimeError):
            first.tick()
    first.die()
    third.tick()
    assert path.read_bytes() == b"b\n"
    with world.file.read() as rows:
        assert rows.live() == [third.ledger.slot]


def test_dead_letters_are_cut_before_the_dead_is_buried(world, monkeypatch):
    """So that whoever finds it buried finds its dead letters as they were counted."""
    first, second = Worker(world, "d0"), Worker(world, "d1")
    second.ledger.record(Entry([], totals(1, filtered=1), b"b\n"))
    path = uncounted(world)
    second.die()
    at_burial = []
    drop_claims = Rows.drop_claims

    def bury(rows, slot):
        at_burial.append(path.read_bytes())
        drop_claims(rows, slot)

    monkeypatch.setattr(Rows, "drop_claims", bury)
    first.tick()
    assert at_burial == [b"b\n"]


def test_dead_letters_of_one_that_stood_still_and_never_went_on_are_cut_when_it_is_gone(world):
    first, second = Worker(world, "d0"), Worker(world, "d1")
    second.ledger.record(Entry([], totals(1, filtered=1), b"b\n"))
    path = uncounted(world)
    for _ in range(4):
        world.clock.advance(LEASE_S / 2)
        first.tick()
    with world.file.read() as rows:
        assert rows.live() == [first.ledger.slot]
    assert path.read_bytes() == b"b\nnot counted\n"
    second.die()
    first.tick()
    assert path.read_bytes() == b"b\n"


READER = """
import sys, time
from pathlib import Path
from dispatcher.ledger import Group, Ledger
from dispatcher.rows import LedgerFile, Rows
from photon.core.clock import SystemClock
root = Path(sys.argv[1])
if sys.argv[2] == "worker":
    file = Ledger(root / "state", root / "dead", 1 << 26, Group(4, 60.0, SystemClock(), "killed")).file
else:
    file = LedgerFile(root / "state", 1 << 26)
with file.read() as rows:
    rows.known_state()
    print("reads", flush=True)
    time.sleep(60)
"""


def killed_while_it_reads(world, kind: str) -> int:
    """The process id of one that was; what it read is kept for it until it is forgotten."""
    command = [sys.executable, "-c", READER, str(world.root), kind]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout.readline() == b"reads\n"
        child.kill()
    assert str(child.pid) in world.file._environment.readers()
    return child.pid


@pytest.mark.cluster
def test_who_takes_a_slot_lets_go_of_what_its_killed_predecessor_was_reading(world):
    first = Worker(world, "d0")
    pid = killed_while_it_reads(world, "worker")
    second = Worker(world, "d1")
    assert (first.ledger.slot, second.ledger.slot) == (0, 1)
    assert str(pid) not in world.file._environment.readers()


@pytest.mark.cluster
def test_readers_that_were_killed_are_forgotten_now_and_then(world):
    first = Worker(world, "d0")
    pid = killed_while_it_reads(world, "reader")
    world.clock.advance(READERS_S)
    first.tick()
    assert str(pid) not in world.file._environment.readers()
