"""What is kept of a share says as much as its ledger."""

import gzip
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.checkpoint import Book, _cut, _parsed, differing, restore, unpack_rows
from dispatcher.ledger import Entry, Ledger
from dispatcher.rules.events import pack_values
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.errors import CorruptStateError
from photon.core.fates import Fate
from photon.core.settings import Settings
from photon.logs.files import HEAD_BYTES, FileState, digest, find
from photon.logs.formats import json_lines
from photon.logs.packed import Spool
from tests.dispatcher.fakes import clicks

BYTES_MAX = 1 << 26


@pytest.fixture
def new_ledger(tmp_path):
    made = []

    def new(name):
        made.append(Ledger(tmp_path / name, tmp_path / f"letters-{name}", BYTES_MAX))
        return made[-1]

    yield new
    for ledger in made:
        ledger.close()


def places(*pairs):
    return np.array([f for f, _ in pairs], np.uint32), np.array([o for _, o in pairs], np.int64)


pairs = st.tuples(st.integers(1, 3), st.integers(0, 30))


class FakeLedger:
    totals, letters = NOTHING, None

    def files(self):
        return []

    def waiting_values(self):
        return iter(())


@given(st.lists(st.tuples(st.sets(pairs), st.sets(st.integers(0, 50)), st.booleans()), max_size=20))
@settings(max_examples=150, deadline=None)
def test_rows_say_which_events_wait_however_they_come_and_go(script):
    book, waiting, ever, kept = Book(FakeLedger()), set(), set(), {}
    for come, go, look in script:
        opened = come - ever
        ended = {pair for n, pair in enumerate(sorted(waiting)) if n in go}
        book.note([], places(*opened), places(*ended))
        waiting, ever = (waiting | opened) - ended, ever | opened
        if look:
            changed, removed = differing(book.rows()[0], kept)
            kept = {key: value for key, value in kept.items() if key not in removed} | changed
    changed, removed = differing(book.rows()[0], kept)
    kept = {key: value for key, value in kept.items() if key not in removed} | changed
    found = unpack_rows(kept)
    assert {(f, int(o)) for f, offsets in found.open.items() for o in offsets} == waiting


def state_of(path, number=1, offset=None):
    data = path.read_bytes()
    at = min(HEAD_BYTES, len(data))
    [seen] = find([str(path)])
    return FileState(
        number,
        str(path),
        str(path),
        seen.device,
        seen.inode,
        offset=len(data) if offset is None else offset,
        head_bytes=at,
        head=digest(data[:at]),
        source=seen.source,
    )


def rows_of(new_ledger, state, offsets, totals):
    """Of a ledger that has read a file; events at these offsets wait."""
    data = clicks(0, 20)
    lines = {offset: data[offset:].partition(b"\n")[0] for offset in offsets}
    events = _parsed(state.number, state.name, lines, json_lines(Settings()), 5)
    ledger = new_ledger("before")
    ledger.record(Entry([state], totals, due_us=np.full(len(offsets), 7), retries=pack_values(events)))
    return Book(ledger).rows()[0]


TOTALS = Totals(20, {Fate.JOINED: 16}, 3, NOTHING.latencies, 5)


def starts(data):
    found = [0]
    for line in data.splitlines(keepends=True):
        found.append(found[-1] + len(line))
    return found[:-1]


@pytest.mark.parametrize("how", ["as it was", "renamed", "on another device", "packed", "appended to"])
def test_a_ledger_is_made_anew_from_what_is_kept(tmp_path, new_ledger, how):
    log = tmp_path / "logs" / "c.jsonl"
    log.parent.mkdir()
    log.write_bytes(clicks(0, 20))
    offsets = [starts(clicks(0, 20))[n] for n in (0, 3, 11, 19)]
    state = state_of(log)
    if how == "packed":
        packed = log.with_name("c.jsonl.gz")
        packed.write_bytes(gzip.compress(log.read_bytes()))
        log.unlink()
        [archive] = find([str(packed)])
        version = Spool(tmp_path / "spool", BYTES_MAX).version(archive)
        state = FileState(
            1,
            "/lost/with/its/machine",
            str(packed),
            1,
            1,
            state.offset,
            source=archive.source,
            version=version,
        )
    elif how == "on another device":
        state = FileState(**{name: getattr(state, name) for name in state.__slots__} | {"device": 999})
    rows = rows_of(new_ledger, state, offsets, TOTALS)
    if how == "renamed":
        log.rename(log.with_name("c.jsonl.1"))
    elif how == "appended to":
        with log.open("ab") as file:
            file.write(clicks(20, 30))
    ledger = new_ledger("after")
    assert restore(ledger, rows, [str(log.parent)], json_lines(Settings()), 99) == 0
    assert ledger.totals == TOTALS.plus(NOTHING)
    assert ledger.pending == 4
    waiting = [value for part in ledger.waiting_values() for value in part]
    events = ledger.unpack(waiting)
    lines = clicks(0, 20).splitlines()
    assert sorted(events.lines) == sorted(lines[n] for n in (0, 3, 11, 19))
    assert sorted(events.offsets.tolist()) == offsets
    [found] = ledger.files()
    assert (found.number, found.offset) == (1, state.offset)
    if how == "renamed":
        assert found.path.endswith("c.jsonl.1")
    if how == "on another device":
        assert found.device == os.stat(log).st_dev
    assert Book(ledger).rows()[0].keys() == rows.keys()


def test_events_whose_log_is_gone_are_lost_told_and_not_counted(tmp_path, new_ledger):
    log = tmp_path / "c.jsonl"
    log.write_bytes(clicks(0, 20))
    offsets = [starts(clicks(0, 20))[n] for n in (2, 5)]
    rows = rows_of(new_ledger, state_of(log), offsets, Totals(20, {Fate.JOINED: 18}, 0, NOTHING.latencies))
    log.unlink()
    ledger = new_ledger("after")
    assert restore(ledger, rows, [str(tmp_path / "*.jsonl")], json_lines(Settings()), 99) == 2
    assert (ledger.totals.foreign_events, ledger.pending, ledger.totals.lost_bytes) == (18, 0, 2)


def test_rows_that_are_none_are_told():
    for rows in ({b"s": b"?"}, {b"f" + bytes(8): b"?"}, {b"o" + bytes(8): b"?"}):
        with pytest.raises(CorruptStateError, match="can't be read"):
            unpack_rows(rows)


@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_lines_are_cut_out_of_pieces_wherever_these_end(lines, data):
    text = b"".join(line + b"\n" for line in lines)
    at = starts(text)
    wanted = sorted(data.draw(st.sets(st.sampled_from(at)))) if at else []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[low:high] for low, high in zip([0, *cuts], [*cuts, len(text)])]
    assert _cut(pieces, wanted) == {offset: text[offset:].partition(b"\n")[0] for offset in wanted}
