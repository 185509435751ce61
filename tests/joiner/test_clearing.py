"""The registry forgets who registered what is safely written (joiner/clearing.py; paper 3.3.3)."""

import os

import pytest

from joiner import clearing, joined_ids
from tests.joiner.clearing_kit import Registry, clear, event, join, made_settings, names, workers
from tests.joiner.fakes import NOW_US


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def make(tmp_path, registry):
    yield from workers(tmp_path, registry)


@pytest.fixture
def east(tmp_path):
    return tmp_path / "out" / "joined" / "east"


def test_tokens_of_events_in_listed_files_are_cleared_and_those_in_the_growing_file_stay(make, registry):
    """Paper 3.3.3: what was successfully committed to the output logs needs no token."""
    settings = made_settings()
    worker = make(settings)
    safe = join(worker, settings, names(0), names(1))
    join(worker, settings, names(2))
    status = clear(worker)
    assert registry.cleared == {key for key, _ in safe}
    assert len(registry.tokens) == 18
    assert (status["cleared"], status["behind"], status["trouble"]) == (12, 0, None)
    assert clear(worker) == status
    assert len([key for call in registry.asked for key in call]) == 12


@pytest.mark.parametrize(
    ("reading", "make_event"),
    [
        ({}, lambda n: event(f"opaque {n}", ts_us=NOW_US - n)),
        ({}, lambda n: event(f"10.0.0.{n}:17:{NOW_US - n}", ts_us=5)),
        ({}, lambda n: event(n + 1) if n % 2 else event(f"10.0.0.{n}:17:{NOW_US - n}")),
        (
            {"time": "when", "time_unit": "rfc3339"},
            lambda n: event(n, when=f"2026-01-01T00:00:0{n}.123456+01:00"),
        ),
        ({"time": "at", "time_unit": "s"}, lambda n: event(f"é{n}", at=1.7e9 + n / 8)),
        (
            {"id": "ctx.span..id", "primary_id": "ctx.of", "time": "ctx.ts"},
            lambda n: {"ctx": {"span.id": f"s{n}", "of": f"q{n}", "ts": NOW_US + n}, "id": "other"},
        ),
    ],
    ids=["opaque", "photon", "mixed", "rfc3339", "seconds", "nested"],
)
@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_ids_and_times_are_those_that_were_registered(make, registry, reading, make_event, output_format):
    settings = made_settings(foreign=reading, joiner={"output_format": output_format}, ids={"key": "ours"})
    worker = make(settings)
    registered = join(worker, settings, [make_event(n) for n in range(9)])
    worker._output.end()
    clear(worker)
    assert [one for call in registry.asked for one in call] == registered
    assert registry.cleared == {key for key, _ in registered}


def test_rows_that_parquet_keeps_as_lines_are_cleared_too(make, registry, east):
    settings = made_settings(joiner={"output_format": "parquet"})
    worker = make(settings)
    registered = join(worker, settings, [event("a", odd=1), event("b", odd="text")])
    worker._output.end()
    assert clear(worker)["cleared"] == 2
    assert [one for call in registry.asked for one in call] == registered


def test_a_new_life_goes_on_where_the_one_before_was(make, registry, tmp_path):
    settings = made_settings()
    worker = make(settings)
    first = join(worker, settings, names(0), names(1))
    join(worker, settings, names(2))
    clear(worker)
    worker.close()
    del registry.asked[:]
    worker = make(settings)
    status = clear(worker)  # the file that grew is complete now
    assert status["cleared"] == 6
    assert not {key for call in registry.asked for key, _ in call} & {key for key, _ in first}
    assert len(registry.cleared) == 18


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_in_a_long_file_too_it_goes_on_where_it_was(make, registry, monkeypatch, output_format):
    monkeypatch.setattr(joined_ids, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(joined_ids, "ROWS_MAX", 5)
    monkeypatch.setattr(clearing, "BATCH_IDS_MAX", 4)
    monkeypatch.setattr(clearing, "NOTE_S", 0.0)
    settings = made_settings(joiner={"output_format": output_format, "output_file_bytes_max": 100_000})
    registered = []

    class Kill(BaseException):
        pass

    def kill(step):
        if step == "tokens cleared" and len(registry.asked) == 4:
            raise Kill

    worker = make(settings, checkpoint=kill)
    for number in range(5):
        registered += join(worker, settings, names(number))
    worker._output.end()
    with pytest.raises(Kill):
        clear(worker)
    assert 0 < len(registry.cleared) < 30
    before = [one for call in registry.asked for one in call]
    del registry.asked[:]
    worker.close()
    worker = make(settings)
    clear(worker)
    after = [one for call in registry.asked for one in call]
    assert [*dict.fromkeys(before + after)] == registered
    assert 0 < len(before) + len(after) - 30 <= 6, "what was under way, and no more, is done again"


def test_a_backlog_of_old_files_is_cleared_oldest_first_in_small_batches(make, registry, monkeypatch):
    """As after an upgrade: nothing was ever cleared."""
    monkeypatch.setattr(joined_ids, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(clearing, "BATCH_IDS_MAX", 3)
    off = made_settings(joiner={"clear_tokens": False})
    registered = []
    for life in range(4):
        worker = make(off)
        assert worker.status()["clearing"] is None
        registered += join(worker, off, *(names(f"{life}-{n}") for n in range(3)))
        worker.stop(5)
    assert not registry.cleared
    worker = make()
    assert worker.status()["clearing"]["behind"] == 12
    assert clear(worker)["behind"] == 0
    assert [one for call in registry.asked for one in call] == registered
    assert max(map(len, registry.asked)) <= 3


def test_a_file_that_was_taken_away_is_passed_over(make, registry, east):
    settings = made_settings()
    worker = make(settings)
    registered = join(worker, settings, names(0), names(1), names(2))
    worker._completer.step()
    (east / "joiner-000000.jsonl").unlink()
    status = clear(worker)
    assert (status["cleared"], status["passed_over"], status["behind"]) == (6, 1, 0)
    assert registry.cleared == {key for key, _ in registered[6:12]}
    worker.close()
    worker = make(settings)
    assert worker.status()["clearing"]["behind"] == 0


def test_a_file_that_is_taken_away_while_it_is_read_is_passed_over(make, registry, east, monkeypatch):
    monkeypatch.setattr(joined_ids, "BLOCK_BYTES", 300)
    monkeypatch.setattr(clearing, "BATCH_IDS_MAX", 1)
    settings = made_settings()
    taken = east / "joiner-000000.jsonl"
    worker = make(
        settings, checkpoint=lambda step: step == "tokens cleared" and taken.unlink(missing_ok=True)
    )
    join(worker, settings, names(0), names(1), names(2))
    status = clear(worker)
    assert (status["passed_over"], status["behind"], status["trouble"]) == (1, 0, None)
    assert 6 < status["cleared"] < 12


def test_lines_are_read_from_another_root_where_the_first_has_them_no_more(make, registry, east, tmp_path):
    settings = made_settings(joiner={"output_roots": [str(tmp_path / "two")]})
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    (east / "joiner-000000.jsonl").unlink()
    status = clear(worker)
    assert (status["cleared"], status["passed_over"]) == (6, 0)


def test_a_root_that_is_not_there_is_waited_for(make, registry, east):
    settings = made_settings()
    worker = make(settings)
    join(worker, settings, names(0), names(1))
    worker._completer.step()
    away = east.with_name("away")
    east.rename(away)
    for _ in range(2):
        worker._clearer.step()
    status = worker.status()["clearing"]
    assert "mount it" in status["trouble"]
    assert (status["cleared"], status["passed_over"], status["behind"]) == (0, 0, 1)
    assert len([notice for notice in worker.status()["notices"] if "mount it" in notice]) == 1
    away.rename(east)
    status = clear(worker)
    assert (status["cleared"], status["behind"], status["trouble"]) == (6, 0, None)


def test_a_torn_or_foreign_line_in_a_listed_file_tells_nothing(make, registry, east):
    settings = made_settings()
    worker = make(settings)
    registered = join(worker, settings, names(0), names(1))
    worker._completer.step()
    with (east / "joiner-000000.jsonl").open("r+b") as file:
        file.write(b"no event " * 2)
        file.truncate(os.fstat(file.fileno()).st_size - 3)
    status = clear(worker)
    assert (status["cleared"], status["unclearable"]) == (4, 1)
    assert registry.cleared == {key for key, _ in registered[1:5]}
