"""Beginning anew where the state is lost: from the start, from now, from a time (paper 3.2.2)."""

import gzip
import json
import os
import random

import pytest

from dispatcher import initialise as module
from dispatcher.initialise import initialise
from photon.core.clock import SystemClock
from photon.core.errors import LockedError, StorageError, UnavailableError, UsageError
from tests.dispatcher.fakes import adds_up, click_number, clicks, fast_settings
from tests.waiting import wait_until


def initialised(site, start):
    told = []
    patterns = [str(site.logs / "*")]
    found = initialise(site.root / "state", patterns, fast_settings(), start, SystemClock(), told.append)
    return {os.path.basename(name): offset for name, offset in found.items()}, told


def read_then(site, patterns=None) -> set[int]:
    """The clicks that a dispatcher reads from there."""
    assert adds_up(site.drain(patterns=patterns or [str(site.logs / "*")]))
    return {click_number(line) for line in site.joiner.handed}


def test_from_now_only_what_is_written_later_is_read_and_a_torn_line_as_it_is_whole(site):
    path, text = site.logs / "a.jsonl", clicks(0, 10)
    path.write_bytes(text[:-7])
    (site.logs / "b.jsonl").write_bytes(clicks(50, 60))
    offsets, _ = initialised(site, "now")
    assert offsets == {"a.jsonl": len(clicks(0, 9)), "b.jsonl": len(clicks(50, 60))}
    path.write_bytes(text + clicks(10, 12))
    (site.logs / "c.jsonl").write_bytes(clicks(100, 103))
    assert read_then(site) == {9, 10, 11, 100, 101, 102}


def test_from_a_time_on_each_file_is_read_from_its_first_event_of_that_time(site):
    for number, low in enumerate((0, 500, 990, 2000)):
        (site.logs / f"{number}.jsonl").write_bytes(b"bad\n" + clicks(low, low + 1000))
    offsets, _ = initialised(site, 1_000_000 + 1_200)
    assert offsets["0.jsonl"] == len(b"bad\n" + clicks(0, 1000))
    assert offsets["1.jsonl"] == len(b"bad\n" + clicks(500, 1200))
    assert offsets["3.jsonl"] == len(b"bad\n")
    assert read_then(site) == set(range(1200, 1990)) | set(range(2000, 3000))


def test_a_file_last_changed_before_the_time_is_passed_unread(site):
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 10))
    os.utime(path, ns=(0, 1_000_000_000))
    offsets, _ = initialised(site, 1_000_005)
    assert offsets == {"a.jsonl": len(clicks(0, 10))}
    os.utime(path)
    offsets, _ = initialised(site, 1_000_005)
    assert offsets == {"a.jsonl": len(clicks(0, 5))}


def test_the_time_is_found_in_files_of_many_chunks_and_in_compressed_ones(site):
    text = clicks(0, 30_000)
    (site.logs / "a.jsonl").write_bytes(text)
    (site.logs / "b.jsonl.gz").write_bytes(gzip.compress(text))
    offsets, _ = initialised(site, 1_000_000 + 29_990)
    assert set(offsets.values()) == {len(clicks(0, 29_990))}
    assert read_then(site) == set(range(29_990, 30_000))


def test_an_existing_state_goes_back_to_the_start_and_its_counts_stay(site):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 10))
    assert read_then(site) == set(range(10))
    site.joiner.handed.clear()
    assert read_then(site) == set()
    assert initialised(site, "start") == ({"a.jsonl": 0}, [])
    assert read_then(site) == set(range(10))
    server = site.server()
    assert server.status()["foreign_events"] == 20
    server.stop()


def test_it_refuses_while_a_dispatcher_runs_and_names_a_directory_that_is_not_there(site):
    server = site.server()
    with pytest.raises(LockedError):
        initialised(site, "now")
    server.stop()
    with pytest.raises(UsageError):
        initialise(site.root / "state", [str(site.root / "x" / "*")], fast_settings(), "now", SystemClock())


def test_archives_that_take_long_to_unpack_are_waited_for(site):
    rng = random.Random(1)
    for name in "ab":
        rows = [
            {"id": f"{name}{n}", "primary_id": "q", "ts_us": 1, "x": rng.randbytes(700).hex()}
            for n in range(2500)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path = site.logs / f"{name}.jsonl.gz"
        path.write_bytes(gzip.compress(text, 1))
        assert path.stat().st_size > 1 << 20
        os.utime(path, (0, 0))
    offsets, told = initialised(site, "now")
    assert (offsets, told) == ({"a.jsonl.gz": len(text), "b.jsonl.gz": len(text)}, [])


def test_an_archive_that_is_never_whole_is_named_and_nothing_is_written(site, monkeypatch):
    monkeypatch.setattr(module, "_SETTLE_S", 0.2)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 3))
    (site.logs / "b.jsonl.gz").write_bytes(gzip.compress(clicks(0, 10))[:-9])
    with pytest.raises(StorageError, match=r"b\.jsonl\.gz: still written to"):
        initialised(site, "now")
    (site.logs / "b.jsonl.gz").unlink()
    assert read_then(site) == {0, 1, 2}


def test_a_file_that_gets_no_place_is_named(site):
    (site.logs / "b.jsonl.gz").write_bytes(b"no gzip at all")
    offsets, told = initialised(site, "now")
    assert offsets == {}
    assert any("b.jsonl.gz is left as it was" in line for line in told)


def test_a_file_that_was_passed_over_and_is_written_anew_is_read_from_its_start(site):
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 100))
    initialised(site, "now")
    path.write_bytes(clicks(1000, 1150))
    assert read_then(site) == set(range(1000, 1150))


@pytest.mark.parametrize("packed", [False, True], ids=["renamed out of the pattern", "packed"])
def test_a_file_that_was_passed_over_is_known_again_after_a_rotation(site, packed):
    path = site.logs / "a.jsonl"
    path.write_bytes(clicks(0, 100))
    patterns = [str(site.logs / "*.jsonl*" if packed else site.logs / "*.jsonl")]
    initialise(site.root / "state", patterns, fast_settings(), "now", SystemClock())
    path.write_bytes(clicks(0, 120))
    if packed:
        (site.logs / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    else:
        path.rename(site.logs / "a.1")
    assert read_then(site, patterns) == set(range(100, 120))


def unavailable(_events: list[bytes]) -> None:
    raise UnavailableError("away")


def test_what_waits_in_the_inbox_is_not_passed_over(site):
    (site.logs / "a.jsonl").write_bytes(clicks(0, 5))
    inbox = site.root / "state" / "inbox"
    inbox.mkdir(parents=True)
    (inbox / "replay.jsonl").write_bytes(clicks(10, 13))
    site.joiner.before = unavailable
    server = site.server(patterns=[str(site.logs / "*")])
    server.start()
    wait_until(lambda: server.status()["in_flight"] >= 8)
    server.stop()
    site.joiner.before = lambda _: None
    offsets, _ = initialised(site, "now")
    assert offsets == {"a.jsonl": len(clicks(0, 5))}
    assert read_then(site) == {10, 11, 12}
