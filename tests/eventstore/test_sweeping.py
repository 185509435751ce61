"""Entries of deleted logs leave the map; reads of the logs are few and bounded (paper 3.4.2)."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventstore.lookup import GAP_BYTES_MAX, SPAN_BYTES_MAX, spans_of
from eventstore.rules.entries import PLACE
from photon.core.fates import Found
from tests.eventstore.kit import Parts, append, line, pack, settled
from tests.waiting import wait_until


def fill(root, name, count, server):
    idents = [f"10.0.0.{server}:1:{n * 20_000_000}" if n % 2 else f"{name}-{n}" for n in range(count)]
    append(root / "logs" / name, *map(line, idents))
    return idents


def sweep(parts):
    """All that is in memory to segments, and these without what is dead in them."""
    parts.map.flush()
    assert settled(parts.map, 10)


def test_entries_of_deleted_logs_are_swept_out_and_those_of_others_stay(root):
    kept, gone = fill(root, "a.jsonl", 60, 1), fill(root, "b.jsonl", 60, 2)
    parts = Parts(root).read_all()
    fill(root, "c.jsonl", 2, 3)
    parts.read_all()
    sweep(parts)
    assert parts.map.entries() == 122
    parts.delete("b.jsonl")
    sweep(parts)
    assert parts.map.entries() == 62
    assert parts.map.swept == 60
    assert {state.name.rpartition("/")[2] for state in parts.map.states()} == {"a.jsonl", "c.jsonl"}
    assert parts.in_logs(*kept) == list(map(line, kept))
    assert parts.in_logs(*gone) == [None] * 60
    parts.close()
    parts = Parts(root).read_all()
    assert parts.in_logs(*kept) == list(map(line, kept))
    assert parts.map.entries() == 62


def test_the_number_of_a_swept_log_is_never_given_to_another(root):
    fill(root, "a.jsonl", 4, 1)
    fill(root, "b.jsonl", 4, 2)
    Parts(root).read_all().close()
    (root / "logs" / "b.jsonl").unlink()
    parts = Parts(root).read_all()
    sweep(parts)
    parts.close()
    late = fill(root, "c.jsonl", 4, 3)
    parts = Parts(root).read_all()
    assert sorted(state.number for state in parts.map.states()) == [0, 2]
    assert parts.in_logs(*late) == list(map(line, late))


def test_an_id_of_a_deleted_log_that_comes_again_stays(root):
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}") for n in range(30)])
    append(root / "logs" / "z.jsonl", line("other"))
    parts = Parts(root).read_all()
    parts.delete("a.jsonl")
    append(root / "logs" / "b.jsonl", *[line(f"id-{n}", "again") for n in range(30)])
    parts.read_all()
    assert parts.cache.get_many([pack("id-7")]) == [line("id-7")]  # as it was read first
    sweep(parts)
    assert parts.in_logs(*[f"id-{n}" for n in range(30)]) == [line(f"id-{n}", "again") for n in range(30)]


def test_a_running_event_store_sweeps_by_itself(root):
    fill(root, "a.jsonl", 60, 1)
    fill(root, "b.jsonl", 2, 2)
    parts = Parts(root).read_all()
    parts.map.flush()
    parts.reader.start()
    (root / "logs" / "a.jsonl").unlink()
    wait_until(lambda: parts.map.entries() == 2)
    parts.reader.stop()


lines = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 900_000), st.integers(1, 70_000)), min_size=1, unique=True
).map(sorted)


def as_places(wanted):
    return np.array([(offset, file, length) for file, offset, length in wanted], PLACE)


@given(lines)
def test_spans_cover_each_place_and_little_else(wanted):
    found = spans_of(as_places(wanted))
    assert found.of.tolist() == sorted(found.of.tolist())
    assert set(found.of.tolist()) == set(range(len(found.places)))
    for number, span in enumerate(found.places):
        places = [place for place, of in zip(wanted, found.of.tolist()) if of == number]
        assert (places[0][0], places[0][1]) == (span["file"], span["offset"])
        for (_, offset, length), (file, after, _) in pairwise(places):
            assert file == span["file"]
            assert after <= offset + length + GAP_BYTES_MAX
        assert span["length"] == max(offset + length for _, offset, length in places) - places[0][1]
        assert span["length"] <= SPAN_BYTES_MAX or len(places) == 1


def test_a_span_is_bounded_though_places_go_on_and_on():
    wanted = spans_of(as_places([(0, 16_384 * n, 16_384) for n in range(100)]))
    assert np.bincount(wanted.of).tolist() == [16] * 6 + [4]
    assert len(spans_of(as_places([(0, 0, 2 * SPAN_BYTES_MAX), (0, 5, 6)])).places) == 2


def test_events_close_to_each_other_are_read_at_once(root, monkeypatch):
    idents = [f"10.0.0.{n % 8}:1:{n}" for n in range(8000)]
    append(root / "logs" / "a.jsonl", *[line(i, "x" * 80) for i in idents])
    parts = Parts(root).read_all()
    size = (root / "logs" / "a.jsonl").stat().st_size
    reads, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *place: reads.append(place) or pread(*place))
    assert parts.in_logs(*idents) == [line(i, "x" * 80) for i in idents]
    assert len(reads) == -(-size // SPAN_BYTES_MAX)
    assert parts.logs.bytes_read <= size


@pytest.mark.parametrize("cold", [True, False])
def test_places_that_the_kernel_must_fetch_are_announced_to_it_all_at_once(root, monkeypatch, cold):
    idents = [f"id-{n}" for n in range(40)]
    append(root / "logs" / "a.jsonl", *[line(i, "x" * 5000) for i in idents])
    parts = Parts(root).read_all()
    steps, pread, preadv = [], os.pread, os.preadv

    def sampled(fd, buffers, offset, _flags):  # which not every file system knows
        if cold and offset > 50_000:
            raise BlockingIOError
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", sampled)
    monkeypatch.setattr(os, "pread", lambda *place: steps.append("read") or pread(*place))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: steps.append("told"))
    assert None not in parts.in_logs(*idents[::2])
    assert steps == ["told"] * (20 if cold else 0) + ["read"] * 20


def open_files():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def test_few_of_many_logs_are_held_open_and_none_that_was_deleted(root, monkeypatch):
    idents = [f"id-{n}" for n in range(100)]
    for n, ident in enumerate(idents):
        append(root / "logs" / f"{n:03}.jsonl", line(ident))
    parts = Parts(root).read_all()
    monkeypatch.setattr(parts.logs._logs, "_open_max", 10)

    def held():
        return [name for name in open_files() if name.startswith(str(root / "logs"))]

    before = len(held())
    assert parts.in_logs(*idents) == list(map(line, idents))
    assert len(held()) - before == 10
    parts.delete("099.jsonl")
    assert parts.in_logs("id-98") == [line("id-98")]
    assert not [name for name in held() if "099.jsonl" in name]


def test_of_a_log_that_was_cut_off_what_is_still_there_is_found(root):
    idents = [f"opaque-{n}" for n in range(40)]
    append(root / "logs" / "a.jsonl", *map(line, idents))
    Parts(root).read_all().close()
    parts = Parts(root)
    with open(root / "logs" / "a.jsonl", "r+b") as file:
        file.truncate(len(line(idents[0])) * 20)
    lines, doubtful = parts.logs.get_many([pack(i) for i in idents])
    assert lines[:19] == [line(i) for i in idents[:19]]
    assert lines[25:] == [None] * 15
    assert doubtful[25:] == [True] * 15


@pytest.mark.parametrize("kind", ["photon", "opaque"])
def test_of_repeated_primaries_the_first_is_taken(root, kind):
    """Said in docs/eventstore.md: the first that was read."""
    ident = "10.0.0.1:1:5" if kind == "photon" else "opaque"
    append(root / "logs" / "a.jsonl", line(ident, "first"), line("10.0.0.1:1:4"), line(ident, "second"))
    append(root / "logs" / "b.jsonl", line(ident, "third"))
    parts = Parts(root).read_all()
    for _ in range(2):
        column, lines = parts.lookup.look_up(pack(ident))
        assert (column[0], lines) == (Found.FOUND, [line(ident, "first")])
        assert parts.in_logs(ident) == [line(ident, "first")]
        parts.cache.clear()
        append(root / "logs" / "b.jsonl", line("more"))
        parts.read_all()


def test_an_id_that_was_repeated_in_another_log_is_found_there_when_its_first_is_deleted(root):
    idents = [f"10.0.0.1:1:{n}" if n % 2 else f"id-{n}" for n in range(20)]
    append(root / "logs" / "a.jsonl", *[line(i, "first") for i in idents])
    parts = Parts(root).read_all()
    append(root / "logs" / "b.jsonl", *[line(i, "second") for i in idents[:10]], line(idents[3], "third"))
    append(root / "logs" / "c.jsonl", *[line(i, "fourth") for i in idents[:5]])
    parts.read_all()
    assert parts.in_logs(*idents) == [line(i, "first") for i in idents]
    parts.delete("a.jsonl")
    seconds = [line(i, "second") for i in idents[:10]]
    assert parts.in_logs(*idents) == [*seconds, *[None] * 10]
    sweep(parts)
    assert parts.in_logs(*idents) == [*seconds, *[None] * 10]
    parts.delete("b.jsonl")
    assert parts.in_logs(*idents[:6]) == [*[line(i, "fourth") for i in idents[:5]], None]


def test_repeats_in_deleted_logs_are_swept_out_too(root):
    idents = [f"id-{n}" for n in range(20)]
    for name in ("a", "b", "c"):
        append(root / "logs" / f"{name}.jsonl", *[line(ident, name) for ident in idents])
    append(root / "logs" / "z.jsonl", line("other"))
    parts = Parts(root).read_all()
    sweep(parts)
    for left, name in ((41, "b"), (21, "a"), (1, "c")):
        parts.delete(f"{name}.jsonl")
        sweep(parts)
        assert parts.map.entries() == left
        assert parts.in_logs(*idents) == [
            line(i, "c") if left == 21 else None if left == 1 else line(i, "a") for i in idents
        ]
    assert parts.map.swept == 60
