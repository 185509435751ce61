"""The registry forgets who registered what is safely written (joiner/clearing.py; paper 3.3.3)."""

import json
import os
import random
import threading
import time

import pytest

from joiner import clearing, joined_ids
from joiner.adapter import Adapter, Skip
from joiner.batch import ForeignColumns
from photon.core.clock import ManualClock
from photon.core.columns import join_lines, pack_times, split_ids, unpack_times
from photon.core.errors import OverloadedError
from photon.core.fates import Committed, Joined
from photon.core.formats import JsonLines
from photon.core.ids import IdPacker
from photon.core.settings import parse_settings
from photon.core.tokens import Token
from tests.joiner.fakes import CLEARED, NOW_US, FakeRegistry, make_worker, packed_id

DAY_S = 86_400


class Registry(FakeRegistry):
    """Remembers what it was asked to clear."""

    def __init__(self):
        super().__init__()
        self.asked: list[list[tuple[bytes, int]]] = []

    def clear(self, ids, times):
        outcomes = super().clear(ids, times)
        self.asked.append([*zip(split_ids(ids), unpack_times(times).tolist(), strict=True)])
        return outcomes

    @property
    def cleared(self):
        return {key for key, token in self.tokens.items() if token == CLEARED}


def made_settings(**parts):
    tables = {"joiner": {"fsync": False, "output_file_bytes_max": 1024, "clear_ids_per_s": 1_000_000}}
    for name, table in parts.items():
        tables[name] = tables.get(name, {}) | table
    return parse_settings(tables)


def event(name, **more):
    return {"id": name, "primary_id": f"q-{name}", "ts_us": NOW_US, **more}


def foreign(settings, events):
    """As a dispatcher sends them; the fake event store knows primary events by their names."""
    lines = join_lines([json.dumps(e).encode() for e in events])
    parsed = JsonLines(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode())).parse_foreign(
        lines
    )
    assert not parsed.malformed
    count = len(events)
    primaries = b"".join(packed_id(f"q-{number}") for number in range(count))
    return ForeignColumns(
        parsed.ids, primaries, parsed.times, lines, bytes(4 * count), pack_times([NOW_US] * count)
    )


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def make(tmp_path, registry):
    made = []

    def build(settings=None, **options):
        worker = make_worker(tmp_path, registry, settings=settings or made_settings(), **options)
        made.append(worker)
        return worker

    yield build
    for worker in made:
        worker.close()


@pytest.fixture
def east(tmp_path):
    return tmp_path / "out" / "joined" / "east"


def join(worker, settings, *batches):
    """Each of the batches fills a file. The ids and times of them all."""
    registered = []
    for events in batches:
        batch = foreign(settings, events)
        assert set(worker.join(batch).outcomes) == {Joined.JOINED}
        registered += zip(split_ids(batch.ids), unpack_times(batch.times).tolist(), strict=True)
    return registered


def names(start, count=6):
    """So many fill a file."""
    return [event(f"e{start}-{row}", pad="x" * 100) for row in range(count)]


def clear(worker):
    worker._completer.step()
    worker._clearer.step()
    return worker.status()["clearing"]


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


# --- adapters


class Drops(Adapter):
    def join(self, primary, foreign):
        return {"both": [primary.data["id"], foreign.data["id"]]}


class Overwrites(Adapter):
    """The primary event's id, which may be a foreign event's, stands where the foreign event's was."""

    def join(self, primary, foreign):
        return foreign.data | {"id": foreign.data["primary_id"]} if foreign.data["ts_us"] % 2 else None


class Rewrites(Adapter):
    def join(self, primary, foreign):
        if foreign.data["id"].endswith("0"):
            return Skip("not this one")
        return {"text": primary.data["text"], **foreign.data}


def test_events_whose_adapter_drops_the_ids_keep_their_tokens_and_are_counted(make, registry):
    settings = made_settings(adapter={"use": f"{__name__}:Drops"})
    worker = make(settings)
    join(worker, settings, [event(f"e{n}") for n in range(40)])
    worker._output.end()
    status = clear(worker)
    assert (status["cleared"], status["unclearable"], status["behind"]) == (0, 40, 0)
    assert registry.asked == []
    assert "keeps the tokens" in worker.status()["notices"][-1]


def test_a_file_that_tells_no_ids_is_read_in_parts_all_the_same(make, registry, monkeypatch):
    """Else what is held of it had no bound, and a restart would begin it anew."""
    monkeypatch.setattr(joined_ids, "BLOCK_BYTES", 200)
    monkeypatch.setattr(joined_ids, "BLOCKS_MAX", 3)
    monkeypatch.setattr(clearing, "NOTE_S", 0.0)
    notes = []
    settings = made_settings(adapter={"use": f"{__name__}:Drops"}, joiner={"output_file_bytes_max": 100_000})
    worker = make(settings, checkpoint=lambda step: step == "clearing noted" and notes.append(step))
    join(worker, settings, [event(f"e{n}") for n in range(200)])
    worker._output.end()
    assert clear(worker)["unclearable"] == 200
    assert len(notes) > 5


def test_an_id_that_an_adapter_wrote_over_the_events_own_is_not_cleared(make, registry):
    """It may be another event's, in flight or lost."""
    settings = made_settings(adapter={"use": f"{__name__}:Overwrites"})
    worker = make(settings)
    joined = join(worker, settings, [event("x", ts_us=NOW_US * 2 + 1), event("y", ts_us=NOW_US * 2)])
    other = IdPacker().pack(["q-x"])
    registry.tokens[other] = b"another's"
    worker._output.end()
    assert clear(worker)["unclearable"] == 1
    assert registry.tokens[other] == b"another's"
    assert registry.cleared == {joined[1][0]}


def test_an_adapter_that_keeps_id_and_time_is_cleared_after(make, registry):
    settings = made_settings(adapter={"use": f"{__name__}:Rewrites"})
    worker = make(settings)
    batch = foreign(settings, [event(f"e{n}") for n in range(10)])
    assert worker.join(batch).outcomes.count(Joined.FILTERED) == 1
    worker._output.end()
    assert clear(worker)["cleared"] == 9
    assert registry.cleared == set(split_ids(batch.ids)[1:])


# --- troubles


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


# --- nobody asks again


class Strict(Registry):
    """Notes who asks with the token that held an id before it was cleared."""

    def __init__(self):
        super().__init__()
        self.held: dict[bytes, bytes] = {}
        self.wronged: list[bytes] = []

    def commit(self, ids, times, token):
        outcomes = super().commit(ids, times, token)
        for key, outcome in zip(split_ids(ids), outcomes, strict=True):
            if outcome == Committed.WON:
                self.held[key] = token
            elif self.tokens.get(key) == CLEARED and self.held[key] == token:
                self.wronged.append(key)
        return outcomes

    def like(self):
        other = type(self)()
        other.tokens, other.held = dict(self.tokens), dict(self.held)
        return other


def test_a_retry_with_the_old_token_is_a_duplicate_after_clearing():
    """So what `Strict` looks for would lose an event."""
    registry, mine = Strict(), Token("127.0.0.1:1", 7, 0).pack()
    registry.commit(b"a" * 16, bytes(8), mine)
    registry.clear(b"a" * 16, bytes(8))
    assert registry.commit(b"a" * 16, bytes(8), mine) == bytes([Committed.DUPLICATE])
    assert registry.wronged == [b"a" * 16]


class PowerCut:
    """Keeps what is on disk: of the logs that were written, what was synced."""

    def __init__(self, root, monkeypatch):
        self._root = root
        self._synced: dict[str, int] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync):
        def noted(fd):
            status = os.fstat(fd)
            sync(fd)
            self._synced[os.readlink(f"/proc/self/fd/{fd}")] = status.st_size

        return noted

    def leave(self, target):
        """What the next start finds."""
        for path in self._root.rglob("*"):
            if path.is_dir():
                continue
            to = target / path.relative_to(self._root)
            to.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            volatile = path.suffix in (".jsonl", ".journal", ".manifest")
            to.write_bytes(data[: self._synced.get(str(path), 0)] if volatile else data)


COURSE = [names(n, 3) for n in range(6)]


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_no_life_after_a_power_cut_anywhere_needs_a_token_that_was_cleared(
    tmp_path, monkeypatch, output_format
):
    """Files are listed when the ends of their intents are durable, so no intent is open again."""
    settings = made_settings(joiner={"fsync": True, "output_format": output_format})
    disk = PowerCut(tmp_path / "live", monkeypatch)
    registry = Strict()
    cuts, rng = [], random.Random(5)

    def checkpoint(step):
        if step == "tokens cleared" or rng.random() < 0.25:
            target = tmp_path / f"cut-{len(cuts)}"
            disk.leave(target)
            cuts.append((step, target, registry.like()))

    worker = make_worker(tmp_path / "live", registry, settings=settings, checkpoint=checkpoint)
    monkeypatch.setattr(clearing, "NOTE_S", 0.0)
    for number, events in enumerate(COURSE):
        registry.failures = ["after"] if number == 4 else []
        worker.join(foreign(settings, events))
        clear(worker)
        if number == 5:
            worker._resolver.start()
            wait_until(lambda: not worker.status()["unresolved"])
    worker._output.end()  # no later intent makes the last end durable
    clear(worker)
    worker.close()
    assert len(registry.cleared) == sum(map(len, COURSE))
    assert {"tokens cleared", "clearing noted", "listed", "output synced"} <= {step for step, _, _ in cuts}
    for step, root, left in cuts:
        worker = make_worker(root, left, settings=settings)
        worker.start()
        wait_until(lambda: not worker.status()["unresolved"])
        for events in COURSE:
            worker.join(foreign(settings, events))
        assert worker.stop(5)
        assert left.wronged == [], step
        worker = make_worker(root, left, settings=settings)
        clear(worker)
        worker.close()
        assert len(left.cleared) == sum(map(len, COURSE)), f"{step}: each is written, and so cleared"
