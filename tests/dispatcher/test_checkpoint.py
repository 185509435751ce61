"""What is kept of a share says as much as its ledger."""

import gzip
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.checkpoint import Book, Lost, _cut, _parsed, cut_letters, differing, restore, unpack_rows
from dispatcher.ledger import Entry, Ledger
from dispatcher.rules.events import pack_values
from dispatcher.rules.letters import PLACES_BYTES_MAX, LetterPlace, unpack_letters, with_more
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.errors import CorruptStateError
from photon.core.fates import Fate
from photon.core.settings import Settings
from photon.logs.files import HEAD_BYTES, FileState, digest, find
from photon.logs.formats import json_lines
from photon.logs.packed import Spool
from photon.logs.writer import DeadLetter, LogPosition, dead_letter_lines
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
    totals, letters, placed, process = NOTHING, LogPosition(0, 0), {}, 0

    def files(self):
        return []

    def waiting(self):
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


def restored(ledger, rows, logs, letters=None):
    letters = letters or ledger.file.path.parent.with_name("letters-after")
    return restore(ledger, unpack_rows(rows), [str(logs)], letters, json_lines(Settings()), 99)


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
    assert restored(ledger, rows, log.parent) == Lost(0, 0)
    assert ledger.totals == TOTALS.plus(NOTHING)
    assert ledger.pending == 4
    waiting = [value for _, value in ledger.waiting()]
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
    assert restored(ledger, rows, tmp_path / "*.jsonl") == Lost(2, 0)
    assert (ledger.totals.foreign_events, ledger.pending, ledger.totals.lost_bytes) == (18, 0, 2)


def test_files_that_come_after_those_that_are_gone_get_numbers_of_their_own(tmp_path, new_ledger):
    """Else events that wait of both would be taken for one another."""
    log = tmp_path / "c.jsonl"
    log.write_bytes(clicks(0, 20))
    ledger = new_ledger("here")
    lines = {offset: clicks(0, 20)[offset:].partition(b"\n")[0] for offset in starts(clicks(0, 20))[:2]}
    state = FileState(**{name: getattr(state_of(log), name) for name in FileState.__slots__} | {"number": 7})
    events = _parsed(7, state.name, lines, json_lines(Settings()), 5)
    totals = Totals(2, {}, 0, NOTHING.latencies)
    ledger.record(Entry([state], totals, due_us=np.full(2, 7), retries=pack_values(events)))
    ledger.record(
        Entry([FileState(**{n: getattr(state, n) for n in state.__slots__} | {"gone": True})], NOTHING)
    )
    assert ledger.files() == []
    assert Book(ledger).next_number == 8


def test_lines_of_another_log_that_has_the_name_by_now_are_not_taken_for_those_that_waited(
    tmp_path, new_ledger
):
    log = tmp_path / "c.jsonl"
    log.write_bytes(clicks(0, 20))
    rows = rows_of(new_ledger, state_of(log), [0], Totals(20, {Fate.JOINED: 19}, 0, NOTHING.latencies))
    log.rename(tmp_path / "gone")
    log.write_bytes(clicks(50, 90))
    (tmp_path / "gone").unlink()
    ledger = new_ledger("after")
    assert restored(ledger, rows, tmp_path / "*.jsonl") == Lost(1, 0)
    assert ledger.pending == 0


def test_dead_letters_keep_the_number_of_their_file_too(tmp_path, new_ledger, log):
    ledger = new_ledger("here")
    state = state_of(log)
    state = FileState(**{name: getattr(state, name) for name in FileState.__slots__} | {"number": 7})
    ledger.record(told(letters_of(log, 7), state))
    assert Book(ledger).next_number == 8


def test_what_is_made_anew_adds_up_whatever_is_kept(tmp_path, new_ledger):
    log = tmp_path / "c.jsonl"
    log.write_bytes(clicks(0, 20))
    offsets = [starts(clicks(0, 20))[n] for n in (2, 5)]
    rows = rows_of(new_ledger, state_of(log), offsets, Totals(20, {Fate.JOINED: 18}, 0, NOTHING.latencies))
    rows = {key: value for key, value in rows.items() if key[:1] != b"o"}
    ledger = new_ledger("after")
    assert restored(ledger, rows, tmp_path / "*.jsonl") == Lost(2, 0)
    assert (ledger.totals.foreign_events, ledger.pending) == (18, 0)


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


LINES = [
    b'{"id": "c1", "note": "paid"}',
    b"no event \xff",
    b'{"id": "c2"}',
    b"x" * 5_000,
    b'{"id": "c3", "note": "a longer line than the others, with \xc3\xa4"}',
]


def letters_of(log, number=1):
    at = starts(b"".join(line + b"\n" for line in LINES))
    kinds = [
        (Fate.FILTERED, "not paid", LINES[0]),
        (Fate.MALFORMED, "no JSON", LINES[1]),
        (Fate.MALFORMED, "too long; here are its first bytes", LINES[3][:1_000]),
        (Fate.UNJOINABLE, "no primary event", LINES[4]),
    ]
    rows = [at[0], at[1], at[3], at[4]]
    return [DeadLetter(*kind, str(log), offset, number) for kind, offset in zip(kinds, rows, strict=True)]


def told(letters, state):
    """A ledger that has written these dead letters of one log."""
    counts = dict.fromkeys([letter.fate for letter in letters], 0)
    for letter in letters:
        counts[letter.fate] += 1
    added = Totals(len(letters), counts, 0, NOTHING.latencies)
    return Entry([state], added, dead_letter_lines(letters), placed=letters)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "logs" / "c.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"".join(line + b"\n" for line in LINES))
    return path


def standing(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


@pytest.mark.parametrize("packed", [False, True])
def test_dead_letters_on_a_lost_disk_are_written_again(tmp_path, new_ledger, log, packed):
    state = state_of(log)
    if packed:
        archive = log.with_name("c.jsonl.gz")
        archive.write_bytes(gzip.compress(log.read_bytes()))
        log.unlink()
        [seen] = find([str(archive)])
        version = Spool(tmp_path / "spool", BYTES_MAX).version(seen)
        state = FileState(1, "/lost", str(archive), 1, 1, state.offset, source=seen.source, version=version)
    before, letters = new_ledger("before"), letters_of(archive if packed else log)
    before.record(told(letters[:2], state))
    before.record(told(letters[2:], state))
    rows = Book(before).rows()[0]
    after = new_ledger("after")
    assert restored(after, rows, log.parent) == Lost(0, 0)
    assert standing(tmp_path / "letters-after") == standing(tmp_path / "letters-before") != b""
    assert {key for key in Book(after).rows()[0] if key[:1] == b"l"}, "whoever comes next can, too"


def test_dead_letters_that_can_be_seen_are_not_written_again(tmp_path, new_ledger, log):
    before, letters = new_ledger("before"), letters_of(log)
    before.record(told(letters, state_of(log)))
    rows = Book(before).rows()[0]
    before.record(told(letters[:1], state_of(log)))  # after the checkpoint: it is decided again
    here = tmp_path / "letters-before"
    end = unpack_rows(rows).end
    cut_letters(here, 0, end.process, end.position)
    log.rename(log.with_name("c.jsonl.1"))
    after = Ledger(tmp_path / "after", here, BYTES_MAX, 0, 7)
    assert restored(after, rows, log.parent, here) == Lost(0, 0)
    after.record(told(letters[:1], state_of(log.with_name("c.jsonl.1"))))
    after.close()
    assert standing(here) == dead_letter_lines([*letters, letters[0]])


def test_dead_letters_whose_log_is_gone_are_told_where_they_cannot_be_seen(tmp_path, new_ledger, log):
    before = new_ledger("before")
    before.record(told(letters_of(log), state_of(log)))
    rows = Book(before).rows()[0]
    log.unlink()
    assert restored(new_ledger("after"), rows, log.parent) == Lost(0, 4)
    seen = Ledger(tmp_path / "seen", tmp_path / "letters-before", BYTES_MAX, 0, 7)
    assert restored(seen, rows, log.parent, tmp_path / "letters-before") == Lost(0, 0)
    seen.close()
    assert standing(tmp_path / "letters-after") == b""


def test_places_of_dead_letters_outlast_a_restart(tmp_path, log):
    for letter in letters_of(log):
        with_ledger = Ledger(tmp_path / "one", tmp_path / "letters", BYTES_MAX)
        with_ledger.record(told([letter], state_of(log)))
        with_ledger.close()
    again = Ledger(tmp_path / "one", tmp_path / "letters", BYTES_MAX)
    assert unpack_letters(again.placed.values()) == [LetterPlace.of(letter) for letter in letters_of(log)]
    again.close()


letter_places = st.builds(
    LetterPlace,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**50),
    st.integers(0, 2**20),
    st.sampled_from(["malformed", "filtered"]),
    st.text(max_size=8),
)


@given(st.lists(st.lists(letter_places, max_size=1500), max_size=5))
@settings(max_examples=40, deadline=None)
def test_places_of_dead_letters_are_unpacked_as_they_were(groups):
    rows = {}
    for group in groups:
        rows = with_more(rows, group)
    assert unpack_letters(rows.values()) == [place for group in groups for place in group]
    assert len(rows) <= 1 + sum(map(len, groups)) // 1024, "rows are filled"


def test_of_very_many_dead_letters_the_newest_are_kept():
    rows = {}
    for group in range(40):
        rows = with_more(
            rows,
            [
                LetterPlace(1, 977 * n * n, n % 900, "malformed", f"reason {n}")
                for n in range(4096 * group, 4096 * (group + 1))
            ],
        )
    assert PLACES_BYTES_MAX - 16_384 < sum(map(len, rows.values())) <= PLACES_BYTES_MAX
    kept = unpack_letters(rows[number] for number in sorted(rows))
    last = 4096 * 40
    assert [place.reason for place in kept] == [f"reason {n}" for n in range(last - len(kept), last)]
