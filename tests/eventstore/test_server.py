"""The event store as others meet it: over gRPC, killed, and on real data (paper 3.4)."""

import hashlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from eventstore.client import EventStoreClient
from eventstore.server import SERVICE_NAME
from photon.core.columns import split_ids
from photon.core.errors import AddressInUseError, StorageError, UnavailableError
from photon.core.fates import Found
from tests.eventstore.kit import PACKER, append, end, line, pack, serve, start_python
from tests.health import NOT_SERVING, SERVING, await_health, health, status_of
from tests.waiting import wait_until

DATA = Path(os.environ.get("PHOTON_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture
def served(root):
    server = serve(root)
    client = EventStoreClient([server.listen], 10.0)
    yield client
    client.close()
    server.stop()


def test_a_batch_is_answered_event_by_event(root, served):
    append(root / "logs" / "a.jsonl", line("x"), line("10.0.0.1:1:5"))
    wait_until(
        lambda: (
            status_of("eventstore", served.addresses[0])["primary_events"] == 2
            and status_of("eventstore", served.addresses[0])["caught_up"]
        )
    )
    column, lines = served.lookup(pack("x") + pack("y") + pack("10.0.0.1:1:5"))
    assert list(column) == [Found.FOUND, Found.ABSENT, Found.FOUND]
    assert lines == [line("x"), b"", line("10.0.0.1:1:5")]
    assert served.lookup(b"") == (b"", [])


def test_a_live_event_is_found_within_milliseconds_of_being_written(root, served):
    append(root / "logs" / "a.jsonl", line("first"))
    wait_until(lambda: status_of("eventstore", served.addresses[0])["primary_events"] == 1)
    waits = []
    for n in range(20):
        ident = f"10.0.0.1:1:{n}"
        append(root / "logs" / "a.jsonl", line(ident))
        began = time.monotonic()
        wait_until(lambda: served.lookup(pack(ident))[0] == bytes([Found.FOUND]))
        waits.append(time.monotonic() - began)
    assert sorted(waits)[10] < 0.05  # about 10 ms on an idle machine


def test_the_status_says_what_the_supervisor_reads(root, served):
    append(root / "logs" / "a.jsonl", line("x"), b"bad", b"not ended", end=b"")
    wait_until(lambda: status_of("eventstore", served.addresses[0])["unended"])
    served.lookup(pack("x"))
    status = status_of("eventstore", served.addresses[0])
    assert (status["primary_events"], status["malformed"], status["caught_up"]) == (1, 1, True)
    assert status["cache"].keys() == {"hits", "misses", "bytes", "events"}
    assert status["logs"].keys() == {"hits", "misses", "bytes_read"}
    assert status["unended"] == {str(root / "logs" / "a.jsonl"): 9}
    assert (status["notices"], status["storage_error"]) == ([], None)


def test_ids_that_are_no_ids_are_refused(served):
    with pytest.raises(UnavailableError, match="5 bytes: send 16 an id, at most 65536"):
        served.lookup(b"short")
    assert served.lookup(b"\x01" * 15 + b"\xff" + b"\xff" * 16)[0][0] in (Found.ABSENT, Found.BEHIND)


def test_a_port_that_is_taken_is_told(root, served):
    with pytest.raises(AddressInUseError, match="choose another"):
        serve(root / "other", listen=served.addresses[0])


def test_a_server_that_is_not_there_is_unavailable():
    client = EventStoreClient(["127.0.0.1:1"], 0.5)
    with pytest.raises(UnavailableError, match=r"event store 127\.0\.0\.1:1"):
        client.lookup(pack("x"))


def test_an_event_store_whose_disk_fails_does_not_serve_until_it_works_again(root, monkeypatch):
    server = serve(root)
    try:
        assert health(server.listen, SERVICE_NAME) == health(server.listen) == SERVING

        def broken(*_):
            raise StorageError("the disk is not there")

        with monkeypatch.context() as failing:
            failing.setattr(server._map, "write", broken)
            append(root / "logs" / "a.jsonl", line("q-1"))
            await_health(NOT_SERVING, server.listen, SERVICE_NAME)
        await_health(SERVING, server.listen, SERVICE_NAME)
        wait_until(lambda: server.status()["primary_events"] == 1)
    finally:
        server.stop()


def test_many_threads_look_up_while_the_logs_grow(root, served):
    path = root / "logs" / "a.jsonl"
    idents = [f"10.0.0.{n % 7}:1:{n}" if n % 2 else f"opaque-{n}" for n in range(3000)]
    lines = [line(i, "x" * 100) for i in idents]
    wrong = []

    def look_up():
        for start in range(0, 3000, 100):
            part = slice(start, start + 100)
            column, found = served.lookup(PACKER.pack(idents[part]))
            for byte, text, expected in zip(column, found, lines[part]):
                if text != (expected if byte == Found.FOUND else b""):
                    wrong.append(expected)

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for start in range(0, 3000, 300):
        append(path, *lines[start : start + 300])
    for thread in threads:
        thread.join()
    assert wrong == []
    wait_until(lambda: status_of("eventstore", served.addresses[0])["primary_events"] == 3000)
    assert served.lookup(PACKER.pack(idents))[1] == lines


CHILD = """
import sys, threading
from pathlib import Path
from photon.core.settings import parse_settings
from photon.core.clock import SystemClock
from eventstore.server import EventStoreServer
root = Path(sys.argv[1])
document = {"logs": {"scan_interval_s": 0.05, "chunk_bytes": 4096}}
import eventstore.log_file_map, eventstore.reader
eventstore.log_file_map.FLUSH_ENTRIES = 300
eventstore.reader.GROUP_BYTES_MAX = 16_384
server = EventStoreServer(parse_settings(document), "127.0.0.1:0", root / "eventstore", [str(root / "logs")],
                          root / "dead-letters", SystemClock(), True)
server.start()
print(server.listen, flush=True)
threading.Event().wait()
"""


@pytest.mark.long
def test_killed_at_random_moments_it_skips_nothing_and_counts_exactly(root):
    """SIGKILL while it catches up, flushes and merges: every id is found, dead letters stand exactly once."""
    rng = random.Random(11)
    expected, bad = {}, []
    for file in range(4):
        lines = []
        for n in range(4000):
            ident = rng.choice([f"10.0.0.{file}:{n % 3}:{n}", f"opaque-{file}-{n}"])
            expected[ident] = line(ident, n)
            lines.append(expected[ident])
            if n % 50 == 0:
                bad.append(f"bad {file} {n}")
                lines.append(bad[-1].encode())
        append(root / "logs" / f"{file}.jsonl", *lines)
    kills = 0
    while True:
        child = start_python(CHILD, root)
        try:
            address = child.stdout.readline().decode().strip()
            client = EventStoreClient([address], 10.0)
            if kills < 6:
                time.sleep(rng.random() * 0.06)
                child.send_signal(signal.SIGKILL)
                kills += 1
                continue
            wait_until(lambda: status_of("eventstore", address)["caught_up"])
            status = status_of("eventstore", address)
            column, lines = client.lookup(PACKER.pack(list(expected)))
        finally:
            client.close()
            end(child)
        break
    assert status["primary_events"] == len(expected)
    assert lines == list(expected.values())
    assert set(column) == {Found.FOUND}
    letters = (root / "dead-letters" / "primary-000000.jsonl").read_bytes().splitlines()
    assert sorted(json.loads(letter)["event"] for letter in letters) == sorted(bad)
    assert status["malformed"] == len(bad)


@pytest.mark.long
@pytest.mark.skipif(
    not (DATA / "spans-logs").is_dir(), reason=f"{DATA}/spans-logs is not there; set PHOTON_SHARED_DATA"
)
def test_real_spans_with_repeats_are_all_found_each_by_its_first_line(root):
    import gzip

    source = DATA / "spans-logs" / "primary.jsonl.gz"
    firsts, read = {}, 0
    with gzip.open(source) as file:
        for text in file:
            read += 1
            firsts.setdefault(json.loads(text)["id"], text[:-1])
    server = serve(root, patterns=[source], drain=True, document={"eventstore": {"cache_bytes": 16 << 20}})
    client = EventStoreClient([server.listen], 10.0)
    try:
        wait_until(lambda: server.status()["caught_up"], 60)
        assert server.status()["primary_events"] == read == 328_848
        assert server.status()["malformed"] == 0
        idents = random.Random(1).sample(list(firsts), 20_000)
        digest, wanted = hashlib.sha256(), hashlib.sha256()
        for start in range(0, len(idents), 4096):
            part = idents[start : start + 4096]
            column, lines = client.lookup(PACKER.pack(part))
            assert set(column) == {Found.FOUND}
            digest.update(b"\n".join(lines))
            wanted.update(b"\n".join(firsts[i] for i in part))
        assert digest.digest() == wanted.digest()
        assert len(split_ids(PACKER.pack(idents))) == 20_000
        assert server.status()["logs"]["hits"] > 10_000
    finally:
        client.close()
        server.stop()
