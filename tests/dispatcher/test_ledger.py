"""The durable state: what one transaction holds, and what a crash leaves."""

import os
import subprocess
import sys
from contextlib import contextmanager

import lmdb
import numpy as np
import pytest

from dispatcher.ledger import Entry, Ledger
from dispatcher.rules.events import pack_values
from dispatcher.rules.verdicts import Totals
from photon.core.errors import CorruptStateError, DiskFullError, LockedError, StorageError
from photon.core.fates import Fate
from photon.core.status import BUCKETS
from photon.logs.files import FileState
from tests.dispatcher.fakes import full_beyond, some_events
from tests.power_cut import PowerCuts

ROOMY = 1 << 30


def totals(events: int, **fates: int) -> Totals:
    return Totals(events, {Fate(name): count for name, count in fates.items()}, 0, [0] * BUCKETS)


def waiting(count: int, due_us: int = 5_000, **kwargs) -> dict:
    events = some_events(count, **kwargs)
    return {"retries": pack_values(events), "due_us": np.full(count, due_us)}


@pytest.fixture
def opened(tmp_path):
    ledgers = []

    def open_(bytes_max: int = ROOMY) -> Ledger:
        while ledgers:
            ledgers.pop().close()
        ledgers.append(Ledger(tmp_path / "state", tmp_path / "dead", bytes_max))
        return ledgers[-1]

    yield open_
    while ledgers:
        ledgers.pop().close()


def dead(tmp_path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((tmp_path / "dead").glob("*.jsonl")))


def everything(ledger: Ledger) -> list:
    return [*ledger.waiting()]


def test_what_was_recorded_is_there_after_reopening(opened, tmp_path):
    ledger = opened()
    file = FileState(3, "/logs/\udcff.jsonl", "\udcff.jsonl", 64769, 1 << 40, 77, 5, b"\x00\xff" * 8)
    keys = ledger.record(Entry([file], totals(9, joined=4, filtered=2), b"one\ntwo\n", **waiting(3)))
    ledger.record(Entry([], totals(0, joined=1), retries_removed=keys[:1]))
    ledger = opened()
    assert ledger.files() == [file]
    assert ledger.totals.fates[Fate.JOINED] == 5
    assert (ledger.totals.foreign_events, ledger.pending) == (9, 2)
    assert [key for key, _ in everything(ledger)] == keys[1:]
    assert dead(tmp_path) == b"one\ntwo\n"


def test_keys_are_never_given_twice_though_due_at_the_same_moment(opened):
    keys = opened().record(Entry([], totals(2), **waiting(2)))
    keys += opened().record(Entry([], totals(2), **waiting(2)))
    assert len(set(keys)) == 4


def test_counts_that_do_not_add_up_are_not_committed(opened):
    ledger = opened()
    with pytest.raises(CorruptStateError, match="3 events read, but 1 have a fate and 1 wait"):
        ledger.record(Entry([], totals(3, joined=1), **waiting(1)))
    assert ledger.totals.foreign_events == 0
    assert everything(opened()) == []


def test_files_that_are_gone_are_forgotten(opened):
    ledger = opened()
    ledger.record(Entry([FileState(0, "a", "a", 1, 1), FileState(1, "b", "b", 1, 2)], totals(0)))
    ledger.record(Entry([FileState(0, "a", "a", 1, 1, gone=True)], totals(0)))
    assert [state.number for state in ledger.files()] == [1]
    ledger.record(Entry([FileState(0, "a", "a", 1, 1, gone=True)], totals(0)))
    assert [state.number for state in opened().files()] == [1]


def test_dead_letters_after_the_last_counted_one_are_cut_at_start(opened, tmp_path):
    opened().record(Entry([], totals(1, filtered=1), b"counted\n"))
    opened()
    with (tmp_path / "dead" / "foreign-000000.jsonl").open("ab") as file:
        file.write(b"not counted\ntorn")
    (tmp_path / "dead" / "foreign-000001.jsonl").write_bytes(b"nor this\n")
    opened().record(Entry([], totals(1, filtered=1), b"next\n"))
    assert dead(tmp_path) == b"counted\nnext\n"


def test_a_power_cut_takes_the_last_entry_with_its_dead_letters_and_its_place_in_the_file(
    tmp_path, monkeypatch
):
    cuts = PowerCuts(monkeypatch, tmp_path / "all", tmp_path)
    state, dead_letters = tmp_path / "all" / "state", tmp_path / "all" / "dead"
    ledger = Ledger(state, dead_letters, ROOMY)
    for count in (1, 2, 3):
        ledger.record(Entry([FileState(0, "a", "a", 1, 1, count)], totals(1, filtered=1), b"%d\n" % count))
    ledger.close()
    cuts.restore(cuts.cut())
    ledger = Ledger(state, dead_letters, ROOMY)
    assert (ledger.totals.foreign_events, ledger.files()[0].offset) == (2, 2)
    assert dead(tmp_path / "all") == b"1\n2\n"
    ledger.close()


def test_what_is_synced_stays_in_a_power_cut(tmp_path, monkeypatch):
    cuts = PowerCuts(monkeypatch, tmp_path / "all", tmp_path)
    ledger = Ledger(tmp_path / "all" / "state", tmp_path / "all" / "dead", ROOMY)
    ledger.record(Entry([], totals(1, filtered=1), b"1\n"))
    ledger.file.sync()
    left = cuts.cut()
    ledger.close()
    ledger = Ledger(left / "state", left / "dead", ROOMY)
    assert (ledger.totals.foreign_events, dead(left)) == (1, b"1\n")
    ledger.close()


def test_dead_letters_older_than_the_ledger_are_kept(opened, tmp_path):
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "foreign-000004.jsonl").write_bytes(b"old\nto")
    opened().record(Entry([], totals(1, filtered=1), b"new\n"))
    assert dead(tmp_path) == b"old\nnew\n"


def test_dead_letters_that_someone_took_away_do_not_stop_it(opened, tmp_path):
    opened().record(Entry([], totals(1, filtered=1), b"taken\n"))
    ledger = opened()
    (tmp_path / "dead" / "foreign-000000.jsonl").unlink()
    ledger = opened()
    ledger.record(Entry([], totals(1, filtered=1), b"next\n"))
    assert dead(tmp_path) == b"next\n"


def test_a_full_map_keeps_what_was_recorded_and_goes_on_with_more_room(opened, tmp_path):
    ledger = opened(1 << 20)
    big = waiting(100)
    big["retries"] = [value + b"x" * 20_000 for value in big["retries"]]
    entry = Entry([], totals(101, filtered=1), b"letter\n", **big)
    for _ in range(2):
        with pytest.raises(DiskFullError, match=r"dispatcher\.state_bytes_max"):
            ledger.record(entry)
    ledger.record(Entry([], totals(1, filtered=1), b"small\n"))
    assert (ledger.totals.foreign_events, dead(tmp_path)) == (1, b"small\n")
    ledger = opened(1 << 26)
    ledger.record(entry)
    assert (ledger.pending, dead(tmp_path)) == (100, b"small\nletter\n")


def test_a_full_disk_keeps_what_was_recorded_and_goes_on_when_there_is_space(opened, tmp_path):
    ledger = opened()
    ledger.record(Entry([], totals(1, joined=1)))
    entry = Entry([], totals(2000), **waiting(2000))
    size = os.stat(tmp_path / "state" / "ledger" / "data.mdb").st_size
    with full_beyond(size + 8192):
        for _ in range(3):
            with pytest.raises(StorageError, match=r"no space left|disk is full"):
                ledger.record(entry)
    assert ledger.totals.foreign_events == 1
    ledger.record(entry)
    assert (ledger.pending, len(everything(ledger))) == (2000, 2000)
    assert opened().pending == 2000


def test_dead_letters_that_cannot_be_written_leave_nothing_counted(opened, tmp_path):
    ledger = opened()
    ledger.record(Entry([], totals(1, filtered=1), b"first\n"))
    with full_beyond(10), pytest.raises(StorageError):
        ledger.record(Entry([], totals(1, filtered=1), b"second\n"))
    assert (ledger.totals.foreign_events, dead(tmp_path)) == (1, b"first\n")
    ledger.record(Entry([], totals(1, filtered=1), b"second\n"))
    assert dead(tmp_path) == b"first\nsecond\n"


def test_a_directory_belongs_to_one_process(tmp_path, opened):
    opened()
    other = "import sys; from pathlib import Path; from dispatcher.ledger import Ledger\n"
    other += "Ledger(Path(sys.argv[1]), Path(sys.argv[2]), 1 << 30)"
    with pytest.raises(LockedError, match="another process"):
        Ledger(tmp_path / "state", tmp_path / "dead", ROOMY)
    done = subprocess.run(
        [sys.executable, "-c", other, tmp_path / "state", tmp_path / "dead"], capture_output=True, text=True
    )
    assert "LockedError" in done.stderr


def test_a_damaged_state_is_told_with_what_to_do(tmp_path):
    Ledger(tmp_path / "state", tmp_path / "dead", ROOMY).close()
    data = tmp_path / "state" / "ledger" / "data.mdb"
    whole = data.read_bytes()
    every_seventh = bytes(byte ^ 0x55 if at % 7 == 0 else byte for at, byte in enumerate(whole))
    for damaged in (b"\x55" * len(whole), every_seventh):
        data.write_bytes(damaged)
        with pytest.raises(CorruptStateError, match="restore it, or delete the directory"):
            Ledger(tmp_path / "state", tmp_path / "dead", ROOMY)


READER = """
import sys, time
from pathlib import Path
from dispatcher.ledger import LedgerFile
with LedgerFile(Path(sys.argv[1]), 1 << 26).read() as rows:
    rows.state()
    print("reads", flush=True)
    time.sleep(60)
"""


@pytest.mark.cluster
def test_who_starts_lets_go_of_what_its_killed_predecessor_was_reading(opened, tmp_path):
    """Else the pages that it read could not be used again."""
    opened().close()
    command = [sys.executable, "-c", READER, str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"reads\n"
        child.kill()
    assert str(child.pid) not in opened().file._environment.readers()


@pytest.mark.parametrize("committed", [False, True])
def test_after_a_panic_of_the_disk_only_what_was_committed_counts(opened, monkeypatch, committed):
    ledger = opened()
    real = ledger.file.write

    @contextmanager
    def write():
        with real() as rows:
            yield rows
            if not committed:
                raise StorageError("no") from lmdb.PanicError("no")
        raise StorageError("no") from lmdb.PanicError("no")

    with monkeypatch.context() as broken:
        broken.setattr(ledger.file, "write", write)
        if committed:
            assert ledger.record(Entry([], totals(1, joined=1))) == []
        else:
            with pytest.raises(StorageError, match="no"):
                ledger.record(Entry([], totals(1, joined=1)))
    assert ledger.totals.foreign_events == committed
    ledger.record(Entry([], totals(1, joined=1)))
    assert opened().totals.foreign_events == 1 + committed
