"""What keeps tokens from being cleared is told and tried again; nothing waits (joiner/clearing.py)."""

import threading
import time

import pytest

from joiner import clearing
from photon.core.clock import ManualClock
from photon.core.errors import OverloadedError
from tests.joiner.clearing_kit import Registry, clear, join, made_settings, names, wait_until, workers

DAY_S = 86_400


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def make(tmp_path, registry):
    yield from workers(tmp_path, registry)


@pytest.fixture
def east(tmp_path):
    return tmp_path / "out" / "joined" / "east"


def test_a_registry_that_is_away_is_asked_again_until_it_answers(make, registry, monkeypatch):
    monkeypatch.setattr(clearing, "INTERVAL_S", 0.01)
    monkeypatch.setattr(clearing, "RETRY_S_MAX", 0.02)
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1), names(2))
    worker._completer.step()
    registry.down = True
    worker.start()
    wait_until(lambda: any("tokens can't be cleared" in notice for notice in worker.status()["notices"]))
    assert "no quorum" in worker.status()["clearing"]["trouble"]
    assert registry.cleared == set()
    registry.down = False
    wait_until(lambda: len(registry.cleared) == 12)
    wait_until(lambda: worker.status()["clearing"]["trouble"] is None)
    assert worker.status()["clearing"]["behind"] == 0


def test_a_registry_that_is_away_for_long_lets_no_file_be_passed_over(make, registry):
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    registry.down = True
    for _ in range(3 * clearing.TRIES_MAX):
        worker._clearer.step()
    assert worker.status()["clearing"]["passed_over"] == 0
    registry.down = False
    assert clear(worker)["cleared"] == 6


def test_a_file_that_cannot_be_read_holds_the_others_up_for_a_while_only(make, registry, east):
    settings = made_settings()
    worker = make(settings)
    registered = join(worker, settings, names(0), names(1), names(2))
    worker._completer.step()
    (east / "joiner-000000.jsonl").unlink()
    (east / "joiner-000000.jsonl").mkdir()
    worker._clearer.step()
    assert "joiner-000000.jsonl" in worker.status()["clearing"]["trouble"]
    for _ in range(clearing.TRIES_MAX):
        worker._clearer.step()
    status = worker.status()["clearing"]
    assert (status["cleared"], status["passed_over"], status["trouble"]) == (6, 1, None)
    assert registry.cleared == {key for key, _ in registered[6:12]}
    assert "is passed over" in worker.status()["notices"][-1]


def test_a_damaged_parquet_file_is_passed_over_and_told(make, registry, east):
    settings = made_settings(joiner={"output_format": "parquet"})
    worker = make(settings)
    join(worker, settings, names(0), names(1), names(2))
    worker._completer.step()
    (east / "joiner-000000.parquet").write_bytes(b"PAR1 no more")
    for _ in range(clearing.TRIES_MAX + 1):
        worker._clearer.step()
    status = worker.status()["clearing"]
    assert (status["cleared"], status["passed_over"]) == (6, 1)


def test_an_unknown_failure_does_not_end_the_thread(make, registry, monkeypatch):
    monkeypatch.setattr(clearing, "INTERVAL_S", 0.01)
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    real, failures = registry.clear, [KeyError("odd"), OverloadedError("busy")]

    def broken(ids, times):
        if failures:
            raise failures.pop()
        return real(ids, times)

    registry.clear = broken
    worker.start()
    wait_until(lambda: len(registry.cleared) == 6)
    assert [n for n in worker.status()["notices"] if "odd" in n]
    assert not [n for n in worker.status()["notices"] if "busy" in n], "it may be busy for a moment"


def test_a_full_disk_under_the_place_holds_nothing_up(make, registry, tmp_path):
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    (tmp_path / "state" / "cleared.tmp").mkdir()
    status = clear(worker)
    assert status["cleared"] == 6
    assert "cleared" in status["trouble"]
    (tmp_path / "state" / "cleared.tmp").rmdir()
    assert clear(worker)["trouble"] is None


def test_a_damaged_place_and_one_of_another_output_let_all_be_cleared_again(make, registry, tmp_path):
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker.stop(5)
    place = tmp_path / "state" / "cleared"
    for content in (b"{", b'{"file":"joiner-000000.jsonl","crc32":"00000000","end":1024}'):
        place.write_bytes(content)
        del registry.asked[:]
        worker = make(settings)
        clear(worker)
        assert len([one for call in registry.asked for one in call]) == 12
        worker.close()


def test_files_whose_events_the_registry_has_forgotten_are_not_read(make, registry):
    settings = made_settings(registry={"retention_days": 3.0})
    clock = ManualClock()
    worker = make(settings, clock=clock)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    clock.advance(5 * DAY_S)
    worker.leases.renew_due()
    join(worker, settings, names(2))
    status = clear(worker)
    assert (status["passed_over"], status["cleared"]) == (1, 6)


def test_ids_that_the_registry_has_no_more_are_counted(make, registry):
    settings = made_settings()
    worker = make(settings)
    registered = join(worker, settings, names(0), names(1))
    del registry.tokens[registered[0][0]]
    status = clear(worker)
    assert (status["cleared"], status["absent"]) == (5, 1)


def test_no_more_ids_a_second_are_cleared_than_the_settings_allow(make, registry):
    settings = made_settings(joiner={"clear_ids_per_s": 40})
    worker = make(settings)
    join(worker, settings, *(names(n) for n in range(5)))
    worker._completer.step()
    began_s = time.monotonic()
    worker._clearer.step()
    assert len(registry.cleared) == 24
    assert time.monotonic() - began_s >= (24 - 6) / 40, "the last batch is not waited for"


def test_a_busy_joiner_clears_at_a_tenth_of_the_rate(make, registry):
    settings = made_settings(joiner={"clear_ids_per_s": 400})
    worker = make(settings)
    join(worker, settings, *(names(n) for n in range(5)))
    worker._completer.step()
    worker._pipeline._in_flight = 2
    began_s = time.monotonic()
    worker._clearer.step()
    assert len(registry.cleared) == 24
    assert time.monotonic() - began_s >= (24 - 6) / 40


def test_a_stop_waits_for_neither_the_backlog_nor_the_registry(make, registry, monkeypatch):
    monkeypatch.setattr(clearing, "INTERVAL_S", 0.01)
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    asked, let_go = threading.Event(), threading.Event()

    def hang(ids, times):
        asked.set()
        assert let_go.wait(20)
        return Registry.clear(registry, ids, times)

    registry.clear = hang
    worker.start()
    assert asked.wait(20)
    began_s = time.monotonic()
    assert worker.stop(5)
    assert time.monotonic() - began_s < 4
    let_go.set()
    del registry.clear
    worker = make(settings)
    clear(worker)
    assert len(registry.cleared) == 12
