"""The log file map in sorted segments: the same answers, whatever is flushed, merged and killed when."""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore import log_file_map as maps
from eventstore.log_file_map import Counts, LogFileMap, Rows
from eventstore.rules import entries
from eventstore.rules.entries import (
    FAN,
    PLACE,
    Entries,
    Listed,
    all_places,
    entries_of,
    first_places,
    job_of,
    joined,
    level_of,
)
from eventstore.segments import Segment, Writer, merged, read_manifest, segment_name
from photon.core.clock import Backoff
from photon.core.columns import hash_ids
from photon.core.errors import CorruptStateError, DiskFullError
from photon.core.settings import EventStore
from photon.logs.files import FileState
from tests.eventstore.kit import PACKER, killed_at, pack, settled
from tests.in_memory import memory_directory
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_ENTRIES", 10)
    monkeypatch.setattr(maps, "_PAUSE_S", 0.0)
    monkeypatch.setattr("eventstore.segments._PART_ENTRIES", 16)


@pytest.fixture
def held(tmp_path):
    held = LogFileMap(tmp_path / "map", EventStore())
    yield held
    held.close()


@pytest.fixture
def merge(held, monkeypatch):
    """Merges happen when the test says so, in its thread."""
    monkeypatch.setattr(held, "wake", lambda: None)
    return held._work_off


def files_of(held):
    return sorted(path.name for path in held.directory.glob("segment-*"))


def text(n):
    """Of every kind of id one in three."""
    return f"10.0.0.{n % 5}:7:{n}" if n % 3 == 1 else f"[2001:db8::1]:7:{n}" if n % 3 == 2 else f"id-{n}"


def ids_of(numbers):
    return PACKER.pack([text(n) for n in numbers])


def add(held, ids, number, start=0, gone=(), counts=Counts()):
    """As the reader does: what is due is flushed before. The rows that are not the first with their id."""
    if held.flush_due:
        held.flush()
    count = len(ids) // 16
    states = [FileState(n, f"/{n}", f"/{n}", 1, n, gone=n in gone) for n in {number, *gone}]
    rows = Rows(ids, np.full(count, number), np.arange(start, start + count) * 100, np.full(count, 50))
    hashes, firsts = held.write(rows, states, counts)
    assert hashes.tolist() == sorted(hash_ids(ids)[firsts].tolist()) == hash_ids(ids)[firsts].tolist()
    return sorted({*range(count)} - {*firsts.tolist()})


def found_in(held, ids):
    """Row -> file and offset."""
    rows, places, _ = held.look_up(ids)
    places = zip(places["file"].tolist(), places["offset"].tolist())
    return dict(zip(rows.tolist(), places))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 60), max_size=25),
            st.integers(0, 6),
            st.sampled_from(["", "settle", "reopen"]),
            st.sets(st.integers(0, 6), max_size=1),
        ),
        max_size=14,
    )
)
def test_it_holds_what_a_plain_list_would(steps):
    """The first of each id that is still there; flushes, merges, restarts, deleted files between."""
    with memory_directory() as directory:
        held = LogFileMap(directory, EventStore())
        read, gone, offset = {}, set(), 0
        for numbers, file, then, deleted in steps:
            gone |= deleted
            live_file = 100 + file if file in gone else file
            repeats = add(held, ids_of(numbers), live_file, offset, deleted)
            expected = []
            for row, n in enumerate(numbers):
                read[n] = [place for place in read.get(n, []) if place[0] not in gone]
                if read[n]:
                    expected.append(row)
                read[n].append((live_file, (offset + row) * 100))
            offset += len(numbers)
            assert repeats == expected
            if then == "settle":
                held.flush()
                assert settled(held, 10)
            elif then == "reopen":
                held.flush()
                held.close()
                held = LogFileMap(directory, EventStore())
            there = {n: [p for p in places if p[0] not in gone] for n, places in read.items()}
            assert found_in(held, ids_of(range(61))) == {n: p[0] for n, p in there.items() if p}
            for n, places in there.items():
                all_of = held.places_of(pack(text(n)))[0]
                assert list(zip(all_of["file"].tolist(), all_of["offset"].tolist())) == places
        held.close()


table = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=30)


@given(st.lists(table, max_size=5), st.lists(st.booleans(), min_size=4, max_size=4))
def test_tables_answer_as_a_list_of_all_rows_would(tables, live):
    """Hashes that are equal, in one table and over several; files that are gone."""
    rows, built = [], []
    for number, table in enumerate(tables):
        hashes, files = (np.array(column, np.int64) for column in (zip(*table) if table else ((), ())))
        starts = 100 * number + np.arange(len(table))
        rows += zip(hashes.tolist(), files.tolist(), starts.tolist())
        built.append(entries_of(hashes.astype(np.uint64), files, starts, starts)[0])
    live = np.array(live)
    wanted = np.arange(11, dtype=np.uint64)
    expected = {n: [start for hash, file, start in rows if hash == n and live[file]] for n in range(11)}
    for asked in (built, [joined(built)] if built else []):
        chosen, places = first_places(asked, wanted, live)
        assert dict(zip(chosen.tolist(), places["offset"].tolist())) == {
            n: starts[0] for n, starts in expected.items() if starts
        }
        whose, places = all_places(asked, wanted, live)
        found = list(zip(whose.tolist(), places["offset"].tolist()))
        assert found == [(n, start) for n, starts in expected.items() for start in starts]


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5) | st.just(2**63), min_size=1, max_size=300),
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=30),
)
def test_a_guessed_row_is_the_one_that_a_search_finds(stand, others):
    hashes = np.sort(np.array(stand, np.uint64))
    wanted = np.sort(np.array([*others, *stand[:20]], np.uint64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "GREAT", 1)
        patch.setattr(entries, "_AROUND", 2)
        found = entries.lower_bounds(hashes, wanted)
    assert found.tolist() == np.searchsorted(hashes, wanted).tolist()


def test_rows_of_many_even_hashes_are_guessed_and_none_is_searched_for(monkeypatch):
    hashes = np.arange(0, 2**64, 2**40, dtype=np.uint64) + np.uint64(17)
    wanted = hashes[::1000] + np.uint64(1)
    expected = np.searchsorted(hashes, wanted)
    monkeypatch.setattr(entries, "GREAT", len(hashes))
    searched = []
    real = np.searchsorted
    monkeypatch.setattr(np, "searchsorted", lambda a, v: searched.append(len(v)) or real(a, v))
    assert entries.lower_bounds(hashes, wanted).tolist() == expected.tolist()
    assert searched == [0]


@given(st.lists(st.integers(1, 10), max_size=10))
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


def test_a_large_segment_gets_the_level_that_merges_would_have_given_it():
    assert [level_of(10 * n, 10) for n in (0, 1, 4, 15, 16, 64)] == [0, 0, 1, 1, 2, 3]


def test_segments_are_merged_and_their_files_removed(held):
    for k in range(40):
        assert add(held, ids_of(range(12 * k, 12 * k + 12)), 1, 12 * k) == []
        assert settled(held, 10)
    levels = [one.level for one in held.segments]
    assert levels == sorted(levels, reverse=True)
    assert len(levels) < 2 * FAN
    assert max(levels) == 2
    assert files_of(held) == sorted(segment_name(one.number) for one in held.segments)
    assert held.entries() == 480
    assert found_in(held, ids_of(range(480))) == {n: (1, 100 * n) for n in range(480)}


def test_entries_of_deleted_logs_are_swept_out_of_the_segments_and_those_of_others_stay(held):
    for k in range(6):
        add(held, ids_of(range(12 * k, 12 * k + 12)), k % 2, 12 * k)
    held.flush()
    add(held, b"", 3, gone={0})
    assert settled(held, 10)
    assert (held.entries(), held.swept) == (36, 36)
    assert set(found_in(held, ids_of(range(72)))) == {n for n in range(72) if n // 12 % 2}


def test_a_segment_of_which_little_is_dead_is_left_as_it_is(held, merge, monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_ENTRIES", 100)
    add(held, ids_of(range(20)), 0)
    add(held, ids_of(range(20, 22)), 1, 20)
    held.flush()
    add(held, ids_of([99]), 2, 99, gone={1})
    files = files_of(held)
    merge()
    assert files_of(held) == files
    assert set(found_in(held, ids_of(range(22)))) == set(range(20))


def test_what_is_in_memory_is_in_few_parts_though_it_comes_one_by_one(held, monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_ENTRIES", 10_000)
    for n in range(1000):
        add(held, ids_of([n]), 1, n)
    assert len(held._recent) <= 10
    assert found_in(held, ids_of(range(1000))) == {n: (1, 100 * n) for n in range(1000)}


def test_it_is_flushed_by_bytes_where_lines_are_long(held, monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_BYTES", 1000)
    held.write(None, [FileState(1, "/1", "/1", 1, 1, offset=700)], Counts())
    assert not held.flush_due
    held.write(None, [FileState(1, "/1", "/1", 1, 1, offset=1400)], Counts())
    assert held.flush_due
    held.flush()
    assert not held.flush_due


def fill(held, low, high):
    for k in range(low, high):
        ids = ids_of(range(12 * k, 12 * k + 12))
        assert add(held, ids, 1, 12 * k, counts=Counts(12 * k + 12)) == []
        held.flush()


def check_whole(directory):
    """A map that `fill` wrote: all that it says it has read is found, once. How many that is."""
    held = LogFileMap(directory, EventStore())
    count = held.counts.primary_events
    assert found_in(held, ids_of(range(count + 20))) == {n: (1, 100 * n) for n in range(count)}
    assert held.entries() == count
    assert files_of(held) == sorted(segment_name(one.number) for one in held.segments)
    held.close()
    return count


def _killed_at(directory, step):
    """A child that writes and merges, and is killed before the n-th call that changes the disk."""

    def work(counted):
        for name in ("fsync", "rename", "replace", "unlink", "write"):
            setattr(os, name, counted(getattr(os, name)))
        Writer.append = counted(Writer.append)
        held = LogFileMap(directory, EventStore())
        held.wake = lambda: None
        for k in range(2 * FAN):
            fill(held, k, k + 1)
            held._work_off()

    return killed_at(step, work)


def test_a_map_killed_at_any_step_is_whole_up_to_where_it_says(tmp_path):
    step, counts = 0, []
    while _killed_at(tmp_path / str(step), step):
        counts.append(check_whole(tmp_path / str(step)))
        step += 1
    assert step > 60
    assert counts == sorted(counts)
    assert set(counts) == {12 * n for n in range(2 * FAN + 1)}


def test_what_a_manifest_names_is_on_disk_before_it_and_what_it_named_goes_after_it(held, merge, monkeypatch):
    """A power cut between any two of these steps leaves a manifest whose segments are there."""
    fill(held, 0, FAN)
    steps = []
    fsync, unlink = os.fsync, os.unlink

    def synced(fd):
        fsync(fd)
        steps.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    def unlinked(path, **named):
        unlink(path, **named)
        steps.append(f"gone {Path(path).name}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "unlink", unlinked)
    merge()
    fresh = segment_name(held.segments[0].number)
    assert steps == [
        f"{fresh}.partial",
        "map",
        "manifest.tmp",
        "map",
        *[f"gone {segment_name(n)}" for n in range(FAN)],
    ]


def test_merged_segments_stay_while_the_manifest_without_them_cannot_be_written(held, merge, monkeypatch):
    fill(held, 0, FAN)
    files, size = files_of(held), held.disk_bytes

    def fail(*_):
        raise DiskFullError("no space left")

    with monkeypatch.context() as failing:
        failing.setattr(maps, "write_manifest", fail)
        for _ in range(3):
            with pytest.raises(DiskFullError):
                merge()
        with pytest.raises(DiskFullError):
            fill(held, FAN, FAN + 1)
    assert (files_of(held), held.disk_bytes) == (files, size)
    assert found_in(held, ids_of(range(12 * FAN + 12))) == {n: (1, 100 * n) for n in range(12 * FAN + 12)}
    held.flush()
    merge()
    assert files_of(held) == sorted(segment_name(one.number) for one in held.segments)
    held.close()
    assert check_whole(held.directory) == 12 * (FAN + 1)


def test_a_manifest_that_was_written_though_its_directory_could_not_be_synced_keeps_its_segment(
    held, merge, monkeypatch
):
    fill(held, 0, 2)
    real = maps.write_manifest

    def written_and_failed(*given):
        real(*given)
        raise DiskFullError("the directory could not be synced")

    with monkeypatch.context() as failing:
        failing.setattr(maps, "write_manifest", written_and_failed)
        with pytest.raises(DiskFullError):
            fill(held, 2, 3)
    held.close()
    assert check_whole(held.directory) == 36


@pytest.mark.long
def test_lookups_go_on_while_segments_are_exchanged(held):
    wrong, stop = [], threading.Event()
    add(held, ids_of(range(12)), 1)
    known = [12]

    def look_up():
        dice = random.Random(1)
        try:
            while not stop.is_set():
                n = dice.randrange(known[0])
                assert found_in(held, ids_of([n, 10_000])) == {0: (1, n * 100)}
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=look_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for k in range(1, 40):
        add(held, ids_of(range(12 * k, 12 * k + 12)), 1, 12 * k)
        known[0] = 12 * k + 12
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_segment_is_refused_with_the_mend(held, damage):
    fill(held, 0, 2)
    held.close()
    path = held.directory / files_of(held)[0]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:90] if damage == "cut" else b"x" * path.stat().st_size)
    with pytest.raises(CorruptStateError, match=f"remove {held.directory}: the map is rebuilt"):
        LogFileMap(held.directory, EventStore())


def test_a_full_map_says_so_and_nothing_is_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_ENTRIES", 3000)
    held = LogFileMap(tmp_path, EventStore(map_bytes_max=1 << 20))
    written = 0
    with pytest.raises(DiskFullError, match=r"eventstore\.map_bytes_max"):
        for k in range(40):
            add(held, ids_of(range(3000 * k, 3000 * k + 3000)), 1, 3000 * k)
            written += 1
    assert written > 5
    assert held.entries() == 3000 * written
    assert held.disk_bytes < 1 << 20
    held.close()


def test_a_merge_that_is_under_way_takes_no_room_that_others_fill_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "FLUSH_ENTRIES", 3000)
    monkeypatch.setattr(maps, "_MERGE_WAIT_S", 0.2)
    held, go_on, sizes = LogFileMap(tmp_path, EventStore(map_bytes_max=1 << 20)), threading.Event(), []

    def held_up(*given):
        assert go_on.wait(30)
        return merged(*given)

    def listed(manifest, number, put=held._put_manifest):
        sizes.append(held.disk_bytes)
        put(manifest, number)

    monkeypatch.setattr(maps, "merged", held_up)
    monkeypatch.setattr(held, "_put_manifest", listed)
    with pytest.raises(DiskFullError, match=r"eventstore\.map_bytes_max"):
        for k in range(40):
            add(held, ids_of(range(3000 * k, 3000 * k + 3000)), 1, 3000 * k)
    go_on.set()
    assert settled(held, 30)
    assert len(held.segments) < 8 < len(sizes)
    assert max(sizes) <= 1 << 20
    held.close()


def test_what_no_manifest_names_is_removed_at_start(tmp_path):
    (tmp_path / "segment-00000007").write_bytes(b"x")
    (tmp_path / "segment-00000008.partial").write_bytes(b"x")
    held = LogFileMap(tmp_path, EventStore())
    assert files_of(held) == []
    held.close()


def test_a_segment_of_unlike_parts_is_what_was_written_and_counts_its_files(tmp_path):
    hashes = np.array([3, 3, 3, 5, 2**64 - 1], np.uint64)
    places = np.array([(n, n % 2, 7) for n in range(5)], PLACE)
    writer = Writer(tmp_path / "s", 9)
    for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
        writer.append(Entries(hashes[part], places[part]))
    writer.close()
    segment = Segment(tmp_path / "s")
    assert segment.entries.hashes.tolist() == hashes.tolist()
    assert segment.entries.places.tolist() == places.tolist()
    assert dict(zip(segment.files.tolist(), segment.counts.tolist())) == {0: 3, 1: 2}
    assert segment.dead(np.array([True, False])) == 2
    assert segment.entries.find(np.array([0, 3, 4, 2**64 - 1], np.uint64)).tolist() == [-1, 0, -1, 4]
    twice = joined(list(merged([segment, segment], np.array([True, False]))))
    assert twice.places["offset"].tolist() == [0, 2, 0, 2, 4, 4]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DiskFullError("no space left on the device"), "no space left on the device"),
        (RuntimeError("a bug"), "RuntimeError: a bug"),
    ],
)
def test_a_merge_that_fails_is_told_and_tried_again_and_lookups_go_on(held, monkeypatch, error, told):
    monkeypatch.setattr(held._merger, "_retries", Backoff(0.01, 0.01))
    real = held._write_segment
    full = threading.Event()
    full.set()

    def failing(parts, capacity):
        if full.is_set() and threading.current_thread().name == "map-merger":
            raise error
        return real(parts, capacity)

    monkeypatch.setattr(held, "_write_segment", failing)
    fill(held, 0, 10)
    wait_until(lambda: held.trouble == told)
    assert len(found_in(held, ids_of(range(120)))) == 120
    full.clear()
    assert settled(held, 10)
    wait_until(lambda: held.trouble is None)
    assert len(held.segments) < FAN + 2
    assert len(found_in(held, ids_of(range(120)))) == 120


def test_the_manifest_says_of_each_log_how_far_its_segments_reach(held):
    add(held, ids_of(range(12)), 1)
    held.flush()
    held.write(None, [FileState(1, "/1", "/1", 1, 1, offset=5000)], Counts(99))
    assert [state.offset for state in read_manifest(held.directory).states()] == [0]
    held.flush()
    assert [state.offset for state in read_manifest(held.directory).states()] == [5000]
