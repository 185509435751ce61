"""Reading on where the map is behind the logs, and a map that was lost (paper 3.4.2)."""

import itertools
import random
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore import read_on
from eventstore.client import EventStoreClient
from eventstore.log_file_map import LogFileMap
from photon.core.columns import split_ids
from photon.core.errors import DiskFullError
from photon.core.fates import Found
from tests.eventstore.kit import PACKER, Parts, append, line, pack, serve
from tests.in_memory import memory_directory
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(read_on, "_REST_FACTOR", 0)


def behind(parts):
    """The reader knows that there is more to read, and did not come to it yet."""
    for state in parts.reader.follower.scan_if_due():
        parts.reader.positions.setdefault(state.number, state)
    parts.reader.follower.poll()
    parts.reader.caught_up = False
    return parts


def outcomes(parts, *idents):
    column, lines = parts.lookup.look_up(PACKER.pack(idents))
    return [Found(byte) for byte in column], lines


IDS = ["10.0.0.1:1:5", "opaque-a"]


@pytest.fixture
def path(root):
    path = root / "logs" / "a.jsonl"
    append(path, line("10.0.0.1:1:4"))
    return path


@pytest.fixture
def parts(root, path):
    """They have read what is there."""
    return Parts(root, read_on_bytes=1 << 16).read_all()


def test_what_stands_right_behind_the_map_is_found_and_not_called_behind(path, parts):
    append(path, *map(line, IDS))
    behind(parts)
    assert outcomes(parts, *IDS, "not") == (
        [Found.FOUND, Found.FOUND, Found.BEHIND],
        [line(IDS[0]), line(IDS[1]), b""],
    )
    assert parts.map.counts.primary_events == 1
    parts.read_all()
    assert outcomes(parts, *IDS, "not")[0] == [Found.FOUND, Found.FOUND, Found.ABSENT]


def test_while_the_disk_is_full_lookups_still_find_what_comes(path, parts, monkeypatch):

    def full(*_):
        raise DiskFullError("no space left on the device")

    monkeypatch.setattr(parts.map, "write", full)
    append(path, *map(line, IDS))
    with pytest.raises(DiskFullError):
        parts.read_all()
    assert outcomes(parts, *IDS)[1] == list(map(line, IDS))


def test_it_reads_no_more_than_the_bound_and_nothing_twice(root):
    path = root / "logs" / "a.jsonl"
    idents = [f"10.0.0.1:1:{n}" for n in range(100)]
    append(path, line("10.0.0.1:1:1000"))
    parts = Parts(root, read_on_bytes=2000).read_all()
    append(path, *[line(ident, "x" * 50) for ident in idents])
    behind(parts)
    found = outcomes(parts, *idents)[0]
    count = found.count(Found.FOUND)
    assert found == [Found.FOUND] * count + [Found.BEHIND] * (100 - count)
    assert 10 < count <= 2000 // 100
    for _ in range(3):
        outcomes(parts, *idents)
    assert parts.read_on.bytes_read < 2 * 2000
    parts.close()
    assert Parts(root, read_on_bytes=0).read_on.get_many([pack(idents[0])]) == {}


def test_it_rests_so_that_parsing_takes_a_small_share_of_the_time(path, parts, monkeypatch):
    monkeypatch.setattr(read_on, "_REST_FACTOR", 1e9)
    append(path, line(IDS[0]))
    behind(parts)
    assert outcomes(parts, IDS[0])[0] == [Found.FOUND]
    append(path, line(IDS[1]))
    assert outcomes(parts, *IDS)[0] == [Found.FOUND, Found.BEHIND]  # what was parsed is still known


def test_it_reads_on_in_the_file_its_server_wrote_to_last_among_many(root, monkeypatch):
    monkeypatch.setattr(read_on, "FILES_LOOKED_AT_MAX", 0)
    for n in range(50):
        append(root / "logs" / f"{n:02}.jsonl", line(f"10.0.1.{n}:7:5"), line(f"10.0.1.{n}:7:9000005"))
    parts = Parts(root, read_on_bytes=1 << 16).read_all()
    for n in range(50):
        append(root / "logs" / f"{n:02}.jsonl", line(f"10.0.1.{n}:7:70000005"))
    behind(parts)
    assert outcomes(parts, "10.0.1.31:7:70000005")[0] == [Found.FOUND]
    assert parts.read_on.bytes_read < 200


def test_a_half_written_line_is_no_event_yet(path, parts):
    whole = line(IDS[0])
    append(path, whole[:-4], end=b"")
    assert outcomes(behind(parts), IDS[0])[0] == [Found.BEHIND]
    append(path, whole[-4:])
    assert outcomes(parts, IDS[0])[1] == [whole]


def test_a_file_that_was_replaced_is_not_read_on_in(root, path, parts):
    path.rename(root / "elsewhere")
    append(path, line("10.0.0.1:1:4"), line(IDS[0]))
    parts.reader.caught_up = False
    assert outcomes(parts, IDS[0])[0] == [Found.BEHIND]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 60)), max_size=80),
    st.integers(100, 3000),
    st.randoms(use_true_random=False),
)
def test_what_it_finds_is_always_a_line_with_that_id(rows, bytes_max, dice):
    """Files grow, the map follows or not: each line found is one that was written, and nothing is absent."""
    with memory_directory() as root:
        (root / "logs").mkdir()
        for file in range(3):
            (root / "logs" / f"{file}.jsonl").touch()
        parts = Parts(root, read_on_bytes=bytes_max).read_all()
        written = {}
        for file, n, size in rows:
            ident = f"10.0.0.{n % 3}:1:{n}" if n % 2 else f"opaque-{n}"
            text = line(ident, f"{len(written)}{'x' * size}")
            append(root / "logs" / f"{file}.jsonl", text)
            written.setdefault(pack(ident), []).append(text)
            if dice.random() < 0.1:
                parts.read_all()
            behind(parts)
            if dice.random() < 0.3:
                keys = split_ids(b"".join(written))
                for key, found in parts.read_on.get_many(keys).items():
                    assert found in written[key]
        parts.close()


def test_a_lost_map_is_rebuilt_while_lookups_are_answered(root, monkeypatch):
    """Never absent while it is rebuilt; what is there already is found; in the end all of it."""
    monkeypatch.setattr("eventstore.reader.GROUP_BYTES_MAX", 200_000)
    idents = [f"10.0.0.{n % 9}:1:{n}" if n % 2 else f"opaque-{n}" for n in range(20_000)]
    for file in range(4):
        append(root / "logs" / f"{file}.jsonl", *[line(i, "x" * 100) for i in idents[file::4]])
    server = serve(root)
    wait_until(lambda: server.status()["primary_events"] == 20_000)
    server.stop()
    for file in (root / "eventstore" / "map").iterdir():
        file.unlink()
    write, writes, found_early = LogFileMap.write, itertools.count(), threading.Event()

    def held(*given):  # rebuilding goes on once a lookup has found something
        if next(writes) == 3:
            found_early.wait(60)
        return write(*given)

    monkeypatch.setattr(LogFileMap, "write", held)
    server = serve(root)
    client = EventStoreClient([server.listen], 10.0)
    try:
        dice = random.Random(2)
        deadline = time.monotonic() + 60
        while not (status := server.status())["caught_up"]:
            assert time.monotonic() < deadline
            wanted = dice.sample(range(20_000), 100)
            column, lines = client.lookup(PACKER.pack([idents[n] for n in wanted]))
            for n, byte, text in zip(wanted, column, lines):
                assert byte in (Found.FOUND, Found.BEHIND)
                assert text == (line(idents[n], "x" * 100) if byte == Found.FOUND else b"")
            if column.count(Found.FOUND):
                found_early.set()
        assert found_early.is_set()
        assert status["primary_events"] == 20_000
        for start in range(0, 20_000, 2000):
            part = idents[start : start + 2000]
            assert client.lookup(PACKER.pack(part)) == (bytes(2000), [line(i, "x" * 100) for i in part])
    finally:
        client.close()
        server.stop()
