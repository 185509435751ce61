"""The log file map and LogsEventStore find exactly the first line of every id (paper 3.4.2)."""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore.log_file_map import Counts, LogFileMap
from photon.core.errors import CorruptStateError, DiskFullError, LockedError, SettingsError, StorageError
from photon.core.settings import EventStore, Logs
from tests.eventstore.kit import Parts, append, line, pack


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
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(events, min_size=1, max_size=4),
    st.integers(512, 2000),
    st.floats(0.001, 400.0),
    st.booleans(),
)
def test_every_photon_id_is_found_whatever_order_files_and_servers_are_in(
    rounds, interval_bytes, interval_s, reopen
):
    """Random order of times, servers interleaved, several files that grow between the readings."""
    store = EventStore(map_interval_bytes=interval_bytes, map_interval_s=interval_s)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "logs").mkdir()
        for file in range(3):
            (root / "logs" / f"{file}.jsonl").touch()
        parts = Parts(root, settings=store)
        number = 0
        for rows in rounds:
            for file, server, second, size in rows:
                number += 1
                ident = f"10.0.0.{server}:7:{second * 1_000_000}"
                append(root / "logs" / f"{file}.jsonl", line(ident, f"{number}{'x' * size}"))
            parts.read_all()
            if reopen:
                parts.close()
                parts = Parts(root, settings=store).read_all()
        expected = first_lines(root)
        assert dict(zip(expected, parts.in_logs(*expected))) == expected
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


def test_a_log_of_one_server_has_an_entry_per_m_bytes_though_it_grew_line_by_line(root):
    path = root / "logs" / "a.jsonl"
    path.touch()
    parts = Parts(root, settings=EventStore(map_interval_bytes=4096))
    for n in range(60):
        append(path, line(f"10.0.0.1:7:{n}", "x" * 250))
        parts.read_all()
    assert parts.map.entries()["sparse"] == -(-path.stat().st_size // 4096)
    assert None not in parts.in_logs(*[f"10.0.0.1:7:{n}" for n in range(60)])


def test_an_entry_points_to_about_m_bytes(root):
    path = root / "logs" / "a.jsonl"
    idents = [f"10.0.0.1:7:{n}" for n in range(500)]
    append(path, *[line(i, "x" * 50) for i in idents])
    parts = Parts(root, settings=EventStore(map_interval_bytes=4096)).read_all()
    assert parts.map.entries()["sparse"] == -(-path.stat().st_size // 4096)
    for ident in idents:
        before = parts.logs.bytes_read
        assert parts.in_logs(ident) == [line(ident, "x" * 50)]
        assert parts.logs.bytes_read - before <= 4096 + 100


def test_an_entry_covers_less_than_w_of_event_time(root):
    path = root / "logs" / "a.jsonl"
    append(path, *[line(f"10.0.0.1:7:{n * 1_000_000}") for n in range(100)])
    parts = Parts(root, settings=EventStore(map_interval_s=10.0, map_interval_bytes=1 << 20)).read_all()
    assert parts.map.entries()["sparse"] == 10


def test_a_smaller_w_after_a_restart_still_finds_what_was_entered_with_the_greater(root):
    path = root / "logs" / "a.jsonl"
    idents = [f"10.0.0.1:7:{n * 100_000}" for n in range(90)]
    append(path, *[line(i) for i in idents[:45]])
    for interval_s in (8.0, 0.1):
        parts = Parts(root, settings=EventStore(map_interval_s=interval_s)).read_all()
        parts.close()
        append(path, *[line(i) for i in idents[45:]]) if interval_s > 1 else None
    parts = Parts(root, settings=EventStore(map_interval_s=0.1)).read_all()
    assert None not in parts.in_logs(*idents)


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
    """The first is in a narrow run after a line that names it, the second in a wide one."""
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.tuples(st.integers(0, 25), st.booleans()), max_size=40), max_size=4))
def test_of_opaque_ids_that_repeat_the_first_wins_in_map_segments_and_cache(rounds):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("eventstore.dense.FLUSH_ENTRIES", 10)
        root = Path(directory)
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


def test_lookups_answer_while_a_write_is_under_way(root):
    append(root / "logs" / "a.jsonl", line("opaque"), line("10.0.0.1:1:5"))
    parts = Parts(root).read_all()
    with parts.map._file.transaction(write=True):
        assert None not in parts.in_logs("opaque", "10.0.0.1:1:5")


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
    file_map.close()
    data = tmp_path / "map" / "data.mdb"
    data.write_bytes(b"no lmdb" * 5000 if damage == "garbage" else data.read_bytes()[: 5 * 4096])
    with pytest.raises(CorruptStateError, match=f"remove {tmp_path}/map: the map is rebuilt"):
        LogFileMap(tmp_path / "map", EventStore())


def test_an_lmdb_of_somebody_else_is_refused(tmp_path):
    import lmdb

    environment = lmdb.open(str(tmp_path), max_dbs=2)
    environment.open_db(b"theirs")
    environment.close()
    with pytest.raises(CorruptStateError, match="something else"):
        LogFileMap(tmp_path, EventStore())


def test_a_map_of_other_ids_is_refused(tmp_path):
    file_map = LogFileMap(tmp_path, EventStore(), "key = 'a'")
    file_map.write(None, [], Counts(5))
    file_map.close()
    with pytest.raises(SettingsError, match="key = 'a', now key = 'b'"):
        LogFileMap(tmp_path, EventStore(), "key = 'b'")


def test_a_full_map_says_which_setting_to_raise_and_nothing_is_half_written(root):
    append(root / "logs" / "a.jsonl", *[line(f"opaque-{n}") for n in range(40_000)])
    small = EventStore(map_bytes_max=1 << 20)
    parts = Parts(root, settings=small)
    for _ in range(3):
        with pytest.raises(DiskFullError, match=r"eventstore\.map_bytes_max"):
            while parts.reader.step():
                pass
    assert parts.map.counts == Counts()
    assert parts.map.entries()["dense"] == 0
    assert not parts.reader.caught_up
    parts.close()
    parts = Parts(root).read_all()
    assert None not in parts.in_logs(*[f"opaque-{n}" for n in range(40_000)])


def test_a_closed_map_refuses_instead_of_crashing(tmp_path):
    file_map = LogFileMap(tmp_path, EventStore())
    file_map.close()
    with pytest.raises(StorageError, match="closed"):
        file_map.look_up([pack("x")])
