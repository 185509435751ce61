"""The dense map in sorted segments: the same answers, whatever is flushed and merged when."""

import os
import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore import dense
from eventstore.dense import FAN, job_of
from eventstore.log_file_map import Counts, LogFileMap, Rows
from eventstore.segments import Listed, Segment, Writer, columns_of, merged, segment_name
from photon.core.clock import Backoff
from photon.core.errors import CorruptStateError, DiskFullError
from photon.core.settings import EventStore
from photon.logs.files import FileState
from tests.eventstore.kit import PACKER, pack
from tests.power_cut import PowerCuts
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(dense, "FLUSH_ENTRIES", 10)
    monkeypatch.setattr(dense, "_PAUSE_S", 0.0)
    monkeypatch.setattr("eventstore.segments._PART_ENTRIES", 16)


@pytest.fixture
def held(tmp_path):
    held = LogFileMap(tmp_path / "map", EventStore())
    yield held
    held.close()


@pytest.fixture
def merger(held, monkeypatch):
    """Merges happen when the test says so, in its thread."""
    return by_hand(held, monkeypatch)


def segments_of(log_file_map):
    return log_file_map._dense.all_listed()


def files_of(log_file_map):
    return sorted(path.name for path in log_file_map.directory.glob("dense-*"))


def add(log_file_map, ids, number, start=0, gone=(), counts=Counts()):
    count = len(ids) // 16
    states = [FileState(n, f"/{n}", f"/{n}", 1, n, gone=n in gone) for n in {number, *gone}]
    rows = Rows(ids, np.full(count, number), np.arange(start, start + count) * 100, np.full(count, 50))
    return log_file_map.write(rows, states, counts)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 60), max_size=25),
            st.integers(0, 6),
            st.sampled_from(["", "settle", "reopen", "sweep"]),
            st.sets(st.integers(0, 6), max_size=1),
        ),
        max_size=14,
    )
)
def test_it_holds_what_a_plain_dictionary_would(steps):
    """The first of each id, or where else it stands; flushes, merges, restarts, deleted files between."""
    with tempfile.TemporaryDirectory() as directory:
        held = LogFileMap(Path(directory), EventStore())
        first, anywhere, gone, offset = {}, {}, set(), 0
        for numbers, file, then, deleted in steps:
            gone |= deleted
            live_file = 100 + file if file in gone else file
            ids = PACKER.pack([f"id-{n}" for n in numbers])
            repeats = add(held, ids, live_file, offset, deleted)
            expected = []
            for row, n in enumerate(numbers):
                anywhere.setdefault(n, []).append((live_file, (offset + row) * 100))
                if n in first and first[n][0] not in gone:
                    expected.append(row)
                else:
                    first[n] = anywhere[n][-1]
            offset += len(numbers)
            assert sorted(repeats) == expected
            if then == "settle":
                held._dense.wake()
                assert held._dense.settle(10)
            elif then == "sweep":
                while held.sweep_step():
                    pass
                assert held._dense.settle(10)
            elif then == "reopen":
                held.close()
                held = LogFileMap(Path(directory), EventStore())
            places, states = held.look_up([pack(f"id-{n}") for n in range(61)])
            for n, found in enumerate(places):
                found = [(p.file, p.offset) for p in found if not states[p.file].gone]
                there = [place for place in anywhere.get(n, []) if place[0] not in gone]
                if n in first and first[n] in there:
                    assert found == [first[n]]
                else:
                    assert set(found) <= set(there)
                    assert {place[0] for place in found} == {place[0] for place in there}
        held.close()


def test_segments_are_merged_and_their_files_removed(held):
    ids = [PACKER.pack([f"{k}-{n}" for n in range(12)]) for k in range(40)]
    for k, part in enumerate(ids):
        assert add(held, part, 1, 12 * k) == []
        assert held._dense.settle(10)
    listed = segments_of(held)
    assert [one.level for one in listed] == sorted([one.level for one in listed], reverse=True)
    assert len(listed) < 2 * FAN
    assert max(one.level for one in listed) == 2
    assert files_of(held) == sorted(segment_name(one.number) for one in listed)
    assert held.entries() == {"sparse": 0, "dense": 480, "repeated": 0}
    for k, part in enumerate(ids):
        places, _ = held.look_up([part[n : n + 16] for n in range(0, len(part), 16)])
        assert [[p.offset for p in found] for found in places] == [[(12 * k + n) * 100] for n in range(12)]


def test_what_points_to_deleted_logs_is_swept_out_of_the_segments_too(held):
    for k in range(6):
        add(held, PACKER.pack([f"{k}-{n}" for n in range(12)]), k % 2, 12 * k)
    add(held, b"", 3, gone={0})
    while held.sweep_step():
        pass
    assert held._dense.settle(10)
    assert held.entries()["dense"] == 36
    places, _ = held.look_up([pack("0-0"), pack("1-0"), pack("4-3"), pack("5-3")])
    assert [len(found) for found in places] == [0, 1, 0, 1]


def by_hand(held, monkeypatch):
    """Merges happen when the test says so, in its thread."""
    monkeypatch.setattr(held._dense, "wake", lambda sweep=False: None)
    return held._dense


def fill(held, low, high):
    for k in range(low, high):
        ids = PACKER.pack([f"id-{n}" for n in range(12 * k, 12 * k + 12)])
        assert add(held, ids, 1, 12 * k, counts=Counts(12 * k + 12)) == []


def check_whole(directory):
    """A map that `fill` wrote: all that it says it has read is found, once. How many that is."""
    held = LogFileMap(directory, EventStore())
    count = held.counts.primary_events
    places, _ = held.look_up([pack(f"id-{n}") for n in range(count + 20)])
    assert [[p.offset for p in found] for found in places] == [[n * 100] for n in range(count)] + [[]] * 20
    assert held.entries()["dense"] == count
    held.close()
    return count


def test_a_power_cut_right_after_merged_segments_were_removed_leaves_a_whole_map(tmp_path, monkeypatch):
    cuts = PowerCuts(monkeypatch, tmp_path / "map", tmp_path)
    held = LogFileMap(tmp_path / "map", EventStore())
    merger = by_hand(held, monkeypatch)
    fill(held, 0, FAN + 1)
    assert merger._step()
    fill(held, FAN + 1, 2 * FAN + 1)
    assert merger._step()
    fill(held, 2 * FAN + 1, 2 * FAN + 3)
    held.close()
    assert sorted(name for name, _ in cuts.left) == [segment_name(n) for n in (0, 1, 2, 3, 5, 6, 7, 8)]
    monkeypatch.undo()
    assert {check_whole(left) for _, left in cuts.left} == {12 * (FAN + 1), 12 * (2 * FAN + 1)}


def test_a_power_cut_right_after_a_start_has_removed_what_a_kill_left_leaves_a_whole_map(
    tmp_path, monkeypatch
):
    """Killed between the commit of the new list and the removal, and a power cut after the restart."""
    cuts = PowerCuts(monkeypatch, tmp_path / "map", tmp_path)
    held = LogFileMap(tmp_path / "map", EventStore())
    merger = by_hand(held, monkeypatch)
    fill(held, 0, FAN + 1)
    with monkeypatch.context() as killed:
        killed.setattr(held._dense, "_remove_merged_away", lambda: None)
        assert merger._step()
    held.close()
    LogFileMap(tmp_path / "map", EventStore()).close()
    assert len(cuts.left) == FAN
    monkeypatch.undo()
    assert {check_whole(left) for _, left in cuts.left} == {12 * (FAN + 1)}


def test_a_segment_and_its_name_are_on_disk_before_the_list_names_it(held, merger, monkeypatch):
    steps = []
    fsync, put_list = os.fsync, held._dense._put_list

    def noted(fd):
        fsync(fd)
        steps.append(Path(f"/proc/self/fd/{fd}").readlink())

    def listed(transaction, segments):
        named = {segment.number for segment in segments} - {one.number for one in segments_of(held)}
        assert steps == [held.directory / f"{segment_name(number)}.partial" for number in named] + [
            held.directory
        ]
        steps.clear()
        put_list(transaction, segments)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(held._dense, "_put_list", listed)
    fill(held, 0, FAN + 1)
    assert merger._step()
    assert len(segments_of(held)) == 1


def test_merged_segments_stay_while_the_list_without_them_cannot_be_synced(held, merger, monkeypatch):
    fill(held, 0, FAN + 1)

    def fail():
        raise DiskFullError("EIO")

    with monkeypatch.context() as failing:
        failing.setattr(held._file, "sync", fail)
        with pytest.raises(DiskFullError):
            merger._step()
    assert len(files_of(held)) == FAN + 1
    assert held.entries()["dense"] == 12 * (FAN + 1)
    fill(held, FAN + 1, 2 * FAN + 1)
    assert merger._step()
    assert files_of(held) == [segment_name(one.number) for one in segments_of(held)]


def test_a_segment_that_is_in_no_list_yet_is_not_counted(held, merger, monkeypatch):
    fill(held, 0, FAN + 1)
    counted = []
    exchange = held._dense.exchange

    def counting(*args):
        counted.append((len(files_of(held)), held.entries()["dense"]))
        exchange(*args)

    monkeypatch.setattr(held._dense, "exchange", counting)
    assert merger._step()
    assert counted == [(FAN + 1, 12 * (FAN + 1))]
    assert held.entries()["dense"] == 12 * (FAN + 1)


def test_a_merge_whose_list_cannot_be_written_leaves_no_file_behind(held, merger, monkeypatch):
    fill(held, 0, FAN + 1)
    files, size = files_of(held), held.disk_bytes

    def fail(*_):
        raise DiskFullError("no space left")

    with monkeypatch.context() as failing:
        failing.setattr(held._dense, "_put_list", fail)
        for _ in range(3):
            with pytest.raises(DiskFullError):
                merger._step()
        with pytest.raises(DiskFullError):
            fill(held, FAN + 1, FAN + 2)
    assert (files_of(held), held.disk_bytes) == (files, size)


@pytest.mark.long
def test_lookups_go_on_while_segments_are_exchanged(held):
    wrong, stop = [], threading.Event()
    add(held, PACKER.pack([f"id-{n}" for n in range(12)]), 1)
    known = [12]

    def look_up():
        dice = random.Random(1)
        try:
            while not stop.is_set():
                n = dice.randrange(known[0])
                places, _ = held.look_up([pack(f"id-{n}"), pack("nobody")])
                assert [[p.offset for p in found] for found in places] == [[n * 100], []]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=look_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for k in range(1, 40):
        add(held, PACKER.pack([f"id-{n}" for n in range(12 * k, 12 * k + 12)]), 1, 12 * k)
        known[0] = 12 * k + 12
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_segment_is_refused_with_the_mend(tmp_path, damage):
    held = LogFileMap(tmp_path, EventStore())
    for k in range(2):
        add(held, PACKER.pack([f"{k}-{n}" for n in range(12)]), 1)
    held.close()
    path = tmp_path / files_of(held)[0]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:90] if damage == "cut" else b"x" * path.stat().st_size)
    with pytest.raises(CorruptStateError, match=f"remove {tmp_path}: the map is rebuilt"):
        LogFileMap(tmp_path, EventStore())


def test_segments_count_for_the_bound_of_the_map_and_nothing_is_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "FLUSH_ENTRIES", 3000)
    held = LogFileMap(tmp_path, EventStore(map_bytes_max=1 << 20))
    written = 0
    with pytest.raises(DiskFullError, match=r"eventstore\.map_bytes_max"):
        for k in range(40):
            add(held, PACKER.pack([f"{k}-{n}" for n in range(3000)]), 1)
            written += 1
    assert written > 5
    assert held.entries()["dense"] == 3000 * written
    assert held.disk_bytes < 3 << 20
    held.close()


def test_what_no_list_names_is_removed_at_start(tmp_path):
    LogFileMap(tmp_path, EventStore()).close()
    (tmp_path / "dense-00000007").write_bytes(b"x")
    (tmp_path / "dense-00000008.partial").write_bytes(b"x")
    held = LogFileMap(tmp_path, EventStore())
    assert files_of(held) == []
    held.close()


def test_ids_whose_high_halves_are_equal_are_told_apart(tmp_path):
    keys = [b"\xe1" + b"\0" * 7 + n.to_bytes(8, "big") for n in range(20)]
    keys += [b"\xe2" + b"\0" * 14 + b"\1"]
    values = b"".join(b"\0\0\0\5" + n.to_bytes(8, "big") + b"\0\0\0\7" for n in range(21))
    columns = columns_of(b"".join(keys), values)
    writer = Writer(tmp_path / "s", 30)
    writer.append(columns.take(slice(0, 9)))
    writer.append(columns.take(slice(9, None)))
    writer.close()
    segment = Segment(tmp_path / "s")
    rows = segment.find(columns.high, columns.low)
    assert rows.tolist() == list(range(21))
    assert [segment.place(row) for row in (0, 20)] == [(5, 0, 7), (5, 20, 7)]
    assert segment.find(columns.high, columns.low + np.uint64(50)).tolist() == [-1] * 21
    assert sum(len(part) for part in merged([segment, segment], np.array([5]))) >= 21


@given(st.lists(st.integers(1, 10).flatmap(lambda n: st.just(n)), max_size=10))
def test_only_neighbours_of_one_level_are_merged(runs):
    levels = [level for level, count in zip(range(len(runs), 0, -1), runs) for _ in range(count)]
    listed = [Listed(n, level) for n, level in enumerate(levels)]
    job = job_of(listed)
    if job is None:
        assert all(count < FAN for count in runs)
    else:
        at = listed.index(job[0])
        assert job == listed[at : at + FAN]
        assert len({one.level for one in job}) == 1


def test_of_an_id_in_two_segments_the_later_counts(held, monkeypatch):
    """It came since the log of the first was deleted."""
    monkeypatch.setattr(dense, "FAN", 100)
    ids = PACKER.pack([f"id-{n}" for n in range(12)])
    add(held, ids, 0)
    add(held, PACKER.pack([f"others-{n}" for n in range(12)]), 1)
    add(held, ids, 2, 100, gone={0})
    add(held, PACKER.pack([f"more-{n}" for n in range(12)]), 1)
    add(held, b"", 1)
    assert len(segments_of(held)) >= 3
    places, _ = held.look_up([ids[:16]])
    assert [(p.file, p.offset) for p in places[0]] == [(2, 10_000)]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DiskFullError("no space left on the device"), "no space left on the device"),
        (RuntimeError("a bug"), "RuntimeError: a bug"),
    ],
)
def test_a_merge_that_fails_is_told_and_tried_again_and_lookups_go_on(held, monkeypatch, error, told):
    monkeypatch.setattr(held._dense._work, "_retries", Backoff(0.01, 0.01))
    real = held._dense.write_segment
    full = threading.Event()
    full.set()

    def failing(parts, capacity):
        if full.is_set() and threading.current_thread().name == "dense-merger":
            raise error
        return real(parts, capacity)

    monkeypatch.setattr(held._dense, "write_segment", failing)
    ids = [PACKER.pack([f"{k}-{n}" for n in range(12)]) for k in range(10)]
    for k, part in enumerate(ids):
        add(held, part, 1, 12 * k)
    wait_until(lambda: held.trouble == told)
    assert all(held.look_up([part[:16]])[0][0] for part in ids)
    full.clear()
    assert held._dense.settle(10)
    assert held.trouble is None
    assert len(segments_of(held)) < FAN + 2
    assert all(held.look_up([part[:16]])[0][0] for part in ids)
