"""How much a worker takes on at a time: as much as it can do in a moment."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from millwheel.engine.plan import Plan, numbered
from millwheel.engine.records import FRAME_RECORDS, SLOTS, Part, Records, by_frames, coded
from millwheel.engine.shares import even, slots_of
from millwheel.engine.store import MemoryStore
from millwheel.engine.wheel import TURN_S, Pace, Wheel
from millwheel.testing import _packed, _parsers
from millwheel.worker import Worker
from photon.core.clock import SystemClock
from tests.millwheel.test_sources import Read
from tests.millwheel.topologies import SECOND, two_stages
from tests.waiting import wait_until


def made(me=0, workers=1):
    topology = two_stages()
    plan = Plan(topology, numbered(topology, {}))
    store = MemoryStore().claim(slots_of(even(workers), me), 1)
    return Wheel(plan, store, me, even(workers), 1)


def with_records(wheel, count, keys=40):
    lines = [{"user": f"u{row % keys}", "ts": row, "what": "click"} for row in range(count)]
    wheel.inject("clicks", _parsers(wheel.plan)["clicks"].parse(_packed(lines)).records, {})
    return wheel


def paced(fixed, whole, turns=400, stop_at=None):
    """The shares of turns that take so long, and longer the more they take on; one stands still for long."""
    pace, shares = Pace(), []
    for turn in range(turns):
        shares.append(pace.share)
        pace.took(30.0 if turn == stop_at else fixed + whole * pace.share, more=True)
    return shares


@pytest.mark.parametrize("whole", [10.0, 100.0, 10_000.0])
def test_turns_of_slow_code_take_a_moment_each(whole):
    lasting = [0.01 + share * whole for share in paced(0.01, whole)[20:]]
    assert max(lasting) <= 2 * TURN_S and sum(lasting) / len(lasting) >= TURN_S / 4


@pytest.mark.parametrize("fixed", [0.0, 0.05, 0.13, 0.2, 0.24, 0.26, 0.5, 5.0])
@pytest.mark.parametrize("stop_at", [None, 0, 100])
def test_what_takes_long_for_another_reason_is_done_in_turns_that_are_not_small(fixed, stop_at):
    shares = paced(fixed, 0.2, stop_at=stop_at)[200:]
    could = 1.0 if fixed >= TURN_S else min((TURN_S - fixed) / 0.2, 1.0)
    assert sum(shares) / len(shares) >= 0.7 * could


def test_slow_code_beside_what_takes_long_in_any_case_is_done_in_turns_of_a_few_moments():
    shares = paced(fixed=0.3, whole=64.0)[200:]
    assert 0.3 / 64 <= sum(shares) / len(shares) <= 1.0 / 64


def test_without_more_to_do_a_turn_does_not_grow():
    pace = Pace()
    for _ in range(9):
        pace.took(0.0, more=False)
    assert pace.share == Pace().share


def test_a_frame_has_no_more_than_who_gets_it_can_do_in_a_moment_and_all_of_it_arrives():
    one, two = with_records(made(0, 2), 10_000), made(1, 2)
    one.turn(0)
    one.begin_commit()
    frames = [frame for to, frame in one.committed().frames if to == 1]
    sizes = [sum(map(len, frame.parts)) for frame in frames]
    theirs = sum(sizes)
    assert max(sizes) <= FRAME_RECORDS and len(frames) == -(-theirs // FRAME_RECORDS)
    for frame in frames:
        two.receive(frame)
    two.pace.share = 1e-9
    heard = 0
    for _ in frames:
        assert two.turn(0) == (two.stages["windows"].counts["records"] < theirs)
        heard, before = two.stages["windows"].counts["records"], heard
        assert 0 < heard - before <= FRAME_RECORDS
    assert heard == theirs and not two.due


def test_small_parts_go_together():
    sizes = [1000, 20, 1024, 500, 500]
    parts = [Part.of(0, Records(*coded(["a"] * count), np.arange(count), None)) for count in sizes]
    assert [[len(part) for part in frame] for frame in by_frames(parts)] == [[1000, 20], [1024], [500, 500]]


def test_timers_of_a_turn_are_as_many_as_its_share_and_the_rest_is_due():
    wheel = with_records(made(), 400)
    wheel.turn(0)
    wheel.told(dict.fromkeys(wheel.marks | {"clicks": 10_000_000}, 10_000_000))
    wheel.pace.share = 1e-9
    turns = 0
    while wheel.turn(0):
        turns += 1
    assert wheel.stages["windows"].counts["timers"] == 40 and turns >= 39


@pytest.mark.parametrize(("share", "lines"), [(1e-9, 1), (0.001, 12), (1.0, 500)])
def test_a_source_reads_about_so_much_and_one_line_at_least(tmp_path, share, lines):
    read = Read(tmp_path)
    read.write("a.jsonl", *range(500))
    read.source.look()
    found = read.source.read(share)
    count = sum(map(len, found.records.values()))
    assert count <= lines + 2 and count >= min(lines, 500) - 2
    assert (read.source.read() is not None) == (lines < 500), "there is more"


def test_many_small_files_are_read_in_one_turn(tmp_path):
    read = Read(tmp_path)
    for number in range(300):
        read.write(f"{number}.jsonl", number)
    read.source.look()
    injected = []
    worker = SimpleNamespace(
        _wheel=SimpleNamespace(pace=Pace(), inject=lambda name, records, *_: injected.append(records)),
        _clock=SystemClock(),
        _spent=np.zeros(SLOTS),
        _reading=0.0,
        _more=False,
        _chunks=0,
    )
    worker._wheel.pace.share = 1.0
    assert Worker._read(worker, read.source)  # there is more
    assert len(injected) == 128 and worker._more and worker._chunks == 1
    assert Worker._read(worker, read.source) and not Worker._read(worker, read.source)
    assert len(injected) == 300 and worker._chunks == 3
    worker._more = False
    assert not Worker._read(worker, read.source) and not worker._more and worker._chunks == 3


@pytest.mark.long
def test_what_slow_code_has_done_so_far_is_seen_before_all_is_read(system):
    """Eight seconds of it, which fit into a chunk."""
    later = time.time_ns() // 1_000 + 3_600 * SECOND  # none is late
    lines = [{"user": f"u{row % 50}", "ts": later + row, "what": "click"} for row in range(8_000)]
    system.write("a.jsonl", lines)
    system.start("--follow", name="tests.millwheel.topologies:SLOW")
    wait_until(system.is_up)
    seen = set()

    def done():
        seen.add(system.status()["counts"].get("clicks", {}).get("records", 0))
        return max(seen) == 8_000

    wait_until(done)
    assert seen - {0, 8_000}
