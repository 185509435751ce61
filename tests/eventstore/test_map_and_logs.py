"""The log file map and LogsEventStore find exactly the first line of every id (paper 3.4.2)."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore.log_file_map import Counts, LogFileMap
from photon.core.errors import CorruptStateError, DiskFullError, LockedError, SettingsError, StorageError
from photon.core.fates import Found
from photon.core.settings import EventStore, Logs
from tests.eventstore.kit import Parts, append, line, pack
from tests.in_memory import memory_directory


def first_lines(root):
    """id -> its first line, by file and offset: what must be found."""
    firsts = {}
    for path in sorted((root / "logs").iterdir()):
        for text in path.read_bytes().splitlines():
            ident = text.split(b'"')[3].decode()
            firsts.setdefault(ident, text)
    return firsts


events = st.lists(
    st.tuples(
        st.integers(0, 2),  # file
        st.integers(0, 3),  # server
        st.integers(0, 300),  # time
        st.integers(0, 40),  # length of the payload
    ),
    max_size=60,
)


@pytest.mark.long
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(events, min_size=1, max_size=4), st.booleans())
def test_every_photon_id_is_found_whatever_order_files_and_servers_are_in(rounds, reopen):
    """Random order of times, servers interleaved, several files that grow between the readings."""
    with memory_directory() as root:
        (root / "logs").mkdir()
        for file in range(3):
            (root / "logs" / f"{file}.jsonl").touch()
        parts = Parts(root)
        number, expected = 0, {}
        for rows in rounds:
            firsts = {}  # of each file; which of these files is read first is nobody's promise
            for file, server, second, size in rows:
                number += 1
                ident = f"10.0.0.{server}:7:{second * 1_000_000}"
                firsts.setdefault(ident, {}).setdefault(file, line(ident, f"{number}{'x' * size}"))
                append(root / "logs" / f"{file}.jsonl", line(ident, f"{number}{'x' * size}"))
            expected = firsts | expected
            parts.read_all()
            if reopen:
                parts.close()
                parts = Parts(root).read_all()
        for found, firsts in zip(parts.in_logs(*expected), expected.values()):
            assert found in firsts.values()
        absent = [f"10.0.0.{server}:7:{second}999999" for server in range(5) for second in (0, 150, 301)]
        lines, doubtful = parts.logs.get_many([pack(i) for i in absent])
        assert lines == [None] * 15
        assert not any(doubtful)
        assert parts.map.counts.primary_events == number
        parts.close()


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_thousands_of_interleaved_servers_are_found(root, chunk_bytes):
    rng = random.Random(5)
    idents = [f"10.1.{n // 250}.{n % 250}:{p}:{1000 + p}" for n in range(2000) for p in range(2)]
    rng.shuffle(idents)
    append(root / "logs" / "a.jsonl", *[line(i, n) for n, i in enumerate(idents)])
    parts = Parts(root, logs_settings=Logs(chunk_bytes=chunk_bytes, scan_interval_s=0.01)).read_all()
    assert parts.in_logs(*idents) == [line(i, n) for n, i in enumerate(idents)]


def test_ipv6_ids_and_ids_written_with_escapes_are_found(root):
    plain, escaped = "[2001:db8::1]:42:1700", "10.0.0.1:42:1800"
    text = b'{"id":"10.0.0.1:42\\u003a1800","payload":"first"}'
    append(root / "logs" / "a.jsonl", line(plain), text, line(escaped, "second"))
    parts = Parts(root).read_all()
    assert parts.in_logs(plain, escaped) == [line(plain), text]


def test_an_id_that_stands_in_another_field_too_is_not_taken_for_the_event(root):
    wanted = "10.0.0.1:42:1700"
    child = b'{"parent":"10.0.0.1:42:1700","id":"10.0.0.1:42:1699"}'
    other = line("10.0.0.2:42:1700")
    append(root / "logs" / "a.jsonl", child, other, line(wanted))
    parts = Parts(root).read_all()
    assert parts.in_logs(wanted, "10.0.0.1:42:1699", "10.0.0.2:42:1700") == [line(wanted), child, other]


def test_the_first_line_wins_over_files_also_where_only_parsing_can_tell(root):
    """The first stands after a line that names it."""
    wanted = "10.0.0.1:42:1700"
    child = b'{"parent":"10.0.0.1:42:1700","id":"10.0.0.1:42:1699"}'
    append(root / "logs" / "a.jsonl", child, line(wanted, "first"))
    append(root / "logs" / "b.jsonl", line(wanted, "second"), line("10.0.0.1:42:9001700"))
    parts = Parts(root).read_all()
    assert parts.in_logs(wanted) == [line(wanted, "first")]


def test_white_space_around_lines_does_not_shift_what_is_found(root):
    for n, ident in enumerate(("10.0.0.1:42:1700", "opaque-1")):
        (root / "logs" / f"{n}.jsonl").write_bytes(
            b"\r\n  \n \t" + line(ident) + b" \r\n\n" + line("z") + b"\n"
        )
    parts = Parts(root).read_all()
    assert parts.in_logs("10.0.0.1:42:1700", "opaque-1") == [line("10.0.0.1:42:1700"), line("opaque-1")]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=40), max_size=4))
def test_of_ids_that_repeat_the_first_wins_in_map_segments_and_cache(rounds):
    with memory_directory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr("eventstore.log_file_map.FLUSH_ENTRIES", 10)
        (root / "logs").mkdir()
        path = root / "logs" / "a.jsonl"
        path.touch()
        parts = Parts(root)
        number = 0
        for rows in rounds:
            texts = []
            for n, is_photon in rows:
                number += 1
                texts.append(line(f"10.0.0.1:1:{n}" if is_photon else f"opaque-{n}", number))
            if texts:
                append(path, *texts)
            parts.read_all()
        expected = first_lines(root)
        assert dict(zip(expected, parts.in_logs(*expected))) == expected
        cached = parts.cache.get_many([pack(i) for i in expected])
        assert cached == list(expected.values())
        parts.close()


def test_a_repeat_does_not_get_into_the_cache_when_the_first_is_no_longer_there(root):
    path = root / "logs" / "a.jsonl"
    append(path, line("opaque", 1))
    parts = Parts(root).read_all()
    parts.cache.clear()
    append(path, line("opaque", 2), line("other", 3))
    parts.read_all()
    assert parts.cache.get_many([pack("opaque"), pack("other")]) == [None, line("other", 3)]


def test_a_second_process_or_map_in_the_same_directory_is_refused(tmp_path):
    first = LogFileMap(tmp_path / "map", EventStore())
    with pytest.raises(LockedError, match="another process"):
        LogFileMap(tmp_path / "map", EventStore())
    first.close()
    LogFileMap(tmp_path / "map", EventStore()).close()


@pytest.mark.parametrize("damage", ["garbage", "cut"])
def test_a_damaged_map_is_refused_with_the_mend(tmp_path, damage):
    file_map = LogFileMap(tmp_path / "map", EventStore())
    file_map.write(None, [], Counts(5))
    file_map.flush()
    file_map.close()
    data = tmp_path / "map" / "manifest"
    data.write_bytes(b"garbage" if damage == "garbage" else data.read_bytes()[:-3])
    with pytest.raises(CorruptStateError, match=f"remove {tmp_path}/map: the map is rebuilt"):
        LogFileMap(tmp_path / "map", EventStore())


def test_a_map_of_other_ids_is_refused(tmp_path):
    file_map = LogFileMap(tmp_path, EventStore(), "key = 'a'")
    file_map.write(None, [], Counts(5))
    file_map.flush()
    file_map.close()
    with pytest.raises(SettingsError, match="key = 'a', now key = 'b'"):
        LogFileMap(tmp_path, EventStore(), "key = 'b'")


def test_a_full_map_says_which_setting_to_raise_and_its_events_are_found_all_the_while(root):
    idents = [f"opaque-{n}" for n in range(50_000)]
    append(root / "logs" / "a.jsonl", *map(line, idents))
    small = EventStore(map_bytes_max=1 << 20)
    parts = Parts(root, settings=small).read_all()
    for _ in range(3):
        with pytest.raises(DiskFullError, match=r"eventstore\.map_bytes_max"):
            parts.map.flush()
    assert parts.in_logs(*idents) == list(map(line, idents))
    parts.close()
    parts = Parts(root)
    assert parts.map.counts == Counts()
    parts.read_all().close()
    parts = Parts(root)
    assert parts.in_logs(*idents) == list(map(line, idents))


def test_nothing_is_called_absent_while_the_map_is_flushed(root, monkeypatch):
    """However slow the disk is: what was logged meanwhile has not been read."""
    monkeypatch.setattr("eventstore.log_file_map.FLUSH_ENTRIES", 10)
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}") for n in range(10)])
    parts = Parts(root)
    while not parts.map.flush_due:
        parts.reader.step()
    assert parts.reader.caught_up
    answers, flush = [], parts.map.flush

    def slow():
        append(root / "logs" / "a.jsonl", line("late"))
        answers.append(parts.lookup.look_up(pack("late"))[0][0])
        flush()

    monkeypatch.setattr(parts.map, "flush", slow)
    parts.reader.step()
    assert answers == [Found.BEHIND]
    assert parts.in_logs("late") == [line("late")]


def test_a_map_that_cannot_be_flushed_stops_the_reader_and_nothing_is_called_absent(root, monkeypatch):
    monkeypatch.setattr("eventstore.log_file_map.FLUSH_ENTRIES", 10)
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}") for n in range(10)])
    parts = Parts(root, settings=EventStore(map_bytes_max=1 << 20))
    while not parts.map.flush_due:
        parts.reader.step()
    monkeypatch.setattr("eventstore.segments.Writer.bytes_of", lambda entries: 1 << 30)
    append(root / "logs" / "a.jsonl", line("late"))
    for _ in range(3):
        with pytest.raises(DiskFullError):
            parts.reader.step()
        column, _ = parts.lookup.look_up(pack("late"))
        assert column[0] == Found.BEHIND
    monkeypatch.undo()
    parts.read_all()
    assert parts.in_logs("id-3", "late") == [line("id-3"), line("late")]


def test_a_closed_map_refuses_instead_of_crashing(tmp_path):
    file_map = LogFileMap(tmp_path, EventStore())
    file_map.close()
    with pytest.raises(StorageError, match="closed"):
        file_map.look_up(pack("x"))


@pytest.fixture
def collide(monkeypatch):
    """All ids have one of three hashes."""

    def few(ids):
        return np.array([ids[n + 15] % 3 for n in range(0, len(ids), 16)], np.uint64)

    for module in ("log_file_map", "lookup"):
        monkeypatch.setattr(f"eventstore.{module}.hash_ids", few)


def test_ids_of_one_hash_are_told_apart_by_their_lines(root, collide, monkeypatch):
    """Those that are there and those that are not, over memory, segments and deleted logs."""
    monkeypatch.setattr("eventstore.log_file_map.FLUSH_ENTRIES", 10)
    idents = [f"10.0.0.1:1:{n}" if n % 2 else f"opaque-{n}" for n in range(40)]
    for start in range(0, 40, 8):
        append(root / "logs" / f"{start:02}.jsonl", *map(line, idents[start : start + 8]))
    append(root / "logs" / "99.jsonl", line("opaque-0", "again"))
    parts = Parts(root).read_all()
    absent = [f"absent-{n}" for n in range(9)]
    lines, doubtful = parts.logs.get_many([pack(i) for i in [*idents, *absent]])
    assert lines == [*map(line, idents), *[None] * 9]
    assert not any(doubtful)
    parts.delete("00.jsonl")
    assert parts.in_logs(*idents) == [line("opaque-0", "again"), *[None] * 7, *map(line, idents[8:])]


def test_where_a_log_cannot_be_read_an_id_whose_hash_it_has_is_in_doubt(root, collide):
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}") for n in range(9)])
    parts = Parts(root).read_all()
    (root / "logs" / "a.jsonl").rename(root / "elsewhere")
    lines, doubtful = parts.logs.get_many([pack("id-3"), pack("absent")])
    assert (lines, doubtful) == ([None, None], [True, True])
