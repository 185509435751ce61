"""Lines of growing files as batches: nothing left out, nothing twice, everything traced to its place."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher import reader as reader_module
from dispatcher.reader import LogReader
from photon.core.clock import ManualClock, SteadyClock
from photon.core.fates import Fate
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Logs, Primary
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines
from photon.logs.inventory import AWAY_S
from photon.logs.text import LINGER_S
from tests.dispatcher.fakes import clicks, lines


class Reading:
    def __init__(self, root, batch_events_max=4096, states=(), pattern="*.jsonl", **logs) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.clock = ManualClock()
        self.notices = []
        self.logs = Logs(**logs)
        follower = LogFollower(
            [str(root / pattern)],
            root / "spool",
            self.logs,
            self.clock,
            states,
            notice=self.notices.append,
            keep_copies=False,
        )
        self.reader = LogReader(
            follower,
            JsonLines(Primary(), Foreign(), IdPacker()),
            self.logs,
            batch_events_max,
            SteadyClock(self.clock),
            states,
            self.notices.append,
        )

    def all(self) -> list:
        self.clock.advance(self.logs.scan_interval_s)
        self.reader.look()
        batches = []
        while batch := self.reader.next_batch():
            batches.append(batch)
        return batches


def read_back(batches) -> list[bytes]:
    """The lines that the events' and dead letters' places point to."""
    found = []
    for batch in batches:
        places = [
            (batch.events.name(row), int(batch.events.offsets[row])) for row in range(len(batch.events))
        ]
        for (name, offset), line in zip(places, batch.events.lines, strict=True):
            rest = Path(name).read_bytes()[offset:]
            assert rest.split(b"\n")[0].strip() == line
            found.append(line)
        for letter in batch.malformed:
            rest = Path(letter.name).read_bytes()[letter.offset :]
            assert rest.split(b"\n")[0].strip() == letter.event[: len(rest)]
            found.append(letter.event)
    return found


line_kinds = st.sampled_from(
    [
        b'{"id":"a","primary_id":"b","ts_us":1}',
        b"",
        b"   ",
        b'  {"id":"c","primary_id":"d","ts_us":2} ',
        b"bad",
        b"\xff{",
    ]
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(line_kinds, max_size=12), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(40, 300),
)
def test_every_line_is_in_one_batch_with_its_place_and_offsets_reach_the_ends(
    tmp_path_factory, files, batch_events_max, batch_bytes
):
    root = tmp_path_factory.mktemp("read")
    for number, content in enumerate(files):
        (root / f"{number}.jsonl").write_bytes(b"".join(line + b"\n" for line in content))
    old, reader_module.BATCH_BYTES_MAX = reader_module.BATCH_BYTES_MAX, batch_bytes
    try:
        reading = Reading(root, batch_events_max)
        batches = reading.all()
    finally:
        reader_module.BATCH_BYTES_MAX = old
    assert all(len(batch.events) <= batch_events_max for batch in batches)
    expected = sorted(line.strip() for content in files for line in content if line.strip())
    assert sorted(read_back(batches)) == expected
    for batch in batches:
        reading.reader.finished(batch.number)
    states, _ = reading.reader.states({span.file for batch in batches for span in batch.spans})
    assert {s.name: s.offset for s in states if s.offset} == {
        str(path): path.stat().st_size for path in root.glob("*.jsonl") if path.stat().st_size
    }


def test_a_batch_takes_what_is_waiting_in_many_files(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.jsonl").write_bytes(clicks(number, number + 1))
    batches = Reading(tmp_path).all()
    assert [len(batch.events) for batch in batches] == [50]


def test_a_line_longer_than_the_bound_is_a_dead_letter_with_its_head_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "a.jsonl"
    long = b'{"id":"x","text":"' + b"y" * 20_000 + b'"}\n'
    path.write_bytes(clicks(0, 2) + long + clicks(2, 4))
    reading = Reading(tmp_path, line_bytes_max=8192, chunk_bytes=4096)
    batches = reading.all()
    letters = [letter for batch in batches for letter in batch.malformed]
    assert sum(len(batch.events) for batch in batches) == 4
    assert [(x.fate, x.offset, x.event) for x in letters] == [
        (Fate.MALFORMED, len(clicks(0, 2)), long[:1024])
    ]
    assert "20021 bytes" in letters[0].reason and "'logs.line_bytes_max' (8192)" in letters[0].reason


def test_it_goes_on_where_the_recorded_offset_stands(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(clicks(0, 10))
    reading = Reading(tmp_path, batch_events_max=4)
    batches = reading.all()
    assert [len(batch.events) for batch in batches] == [4, 4, 2]
    assert reading.reader.finished(batches[2].number) == []
    assert reading.reader.finished(batches[0].number) == [batches[0].number]
    states, _ = reading.reader.states([])
    again = Reading(tmp_path, states=states).all()
    assert [json.loads(line)["id"] for line in again[0].events.lines] == [f"click-{n}" for n in range(4, 10)]


@pytest.mark.parametrize("renamed", [True, False])
def test_states_that_changed_come_with_the_offset_that_is_recorded_not_read(tmp_path, renamed):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"id": "a", "primary_id": "b", "ts_us": 1}]))
    reading = Reading(tmp_path)
    (batch,) = reading.all()
    reading.reader.states([])
    if renamed:
        path.rename(tmp_path / "b.jsonl")
        reading.all()
        (state,), _ = reading.reader.states([])
        assert (state.name, state.offset) == (str(tmp_path / "b.jsonl"), 0)
    assert reading.reader.finished(batch.number) == [batch.number]
    (state,), _ = reading.reader.states([batch.spans[0].file])
    assert state.offset == batch.spans[0].end > 0


def test_what_was_lost_of_a_log_is_told_with_the_state_that_says_that_it_is_gone(tmp_path):
    reading = Reading(tmp_path, line_bytes_max=4096, chunk_bytes=4096)
    path = tmp_path / "a.jsonl"
    path.write_bytes(clicks(0, 500))
    reading.reader.look()
    batches = [reading.reader.next_batch()]
    size = path.stat().st_size
    path.write_bytes(b"")
    for _ in range(2):  # the first look finds it short, the second what became of it
        batches += reading.all()
    reading.clock.advance(AWAY_S)
    batches += reading.all()
    states, lost_bytes = reading.reader.states([])
    read = max(span.end for batch in batches for span in batch.spans)
    assert ([state.gone for state in states], lost_bytes) == ([True, False], size - read)
    assert lost_bytes and reading.reader.states([]) == ([], 0)


def test_logs_that_were_rotated_away_are_forgotten_once_that_is_recorded(tmp_path):
    reading = Reading(tmp_path)
    told, finished = [], []
    for day in range(5):
        path = tmp_path / f"{day}.jsonl"
        path.write_bytes(clicks(day, day + 1))
        batches = reading.all()
        path.unlink()
        for _ in range(3):
            reading.clock.advance(AWAY_S)
            reading.all()
        states, _ = reading.reader.states([])  # while its batch is under way
        told += [state.number for state in states if state.gone]
        for batch in batches:
            finished += reading.reader.finished(batch.number)
            assert reading.reader.states([span.file for span in batch.spans]) == ([], 0)
    assert (told, finished) == ([*range(5)], [*range(5)])
    assert not any(map(reading.reader.follower.knows, range(5)))


@pytest.mark.parametrize("hole", [100, 10_000])
def test_a_log_that_was_cut_under_its_writer_loses_no_line_behind_the_hole(tmp_path, hole):
    reading = Reading(tmp_path, line_bytes_max=4096, chunk_bytes=4096)
    path, events = tmp_path / "a.jsonl", clicks(0, 3).splitlines()
    path.write_bytes(events[0] + b"\n")
    reading.all()
    os.truncate(path, 0)
    os.truncate(path, hole)
    with path.open("ab") as log:
        log.write(events[1] + b"\n" + events[2] + b"\n")
    batches = [batch for _ in range(3) for batch in reading.all()]
    assert [line for batch in batches for line in batch.events.lines] == events[1:]
    assert not any(batch.malformed for batch in batches)


def test_a_line_that_comes_alone_is_read_at_once_and_those_that_follow_it_together(tmp_path):
    reading = Reading(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_bytes(clicks(0, 1))
    assert [len(batch.events) for batch in reading.all()] == [1]
    for number in range(1, 4):
        with path.open("ab") as log:
            log.write(clicks(number, number + 1))
        reading.clock.advance(LINGER_S / 4)
        assert not reading.reader.look()
        assert reading.reader.next_batch() is None
    assert [len(batch.events) for batch in reading.all()] == [3]


def test_the_logs_advance_together_by_event_time(tmp_path):
    """A log of few events covers as much time as one of many."""
    for name, count in (("busy", 4_000), ("quiet", 400)):
        step = 4_000_000 // count
        events = [{"id": f"{name}{n}", "primary_id": "q", "ts_us": 1 + n * step} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_bytes(lines(events))
    reading = Reading(tmp_path, chunk_bytes=4096, line_bytes_max=4096)
    times = np.concatenate([np.frombuffer(batch.events.times, "<i8") for batch in reading.all()])
    assert len(times) == 4_400
    chunk_of_the_quiet_us = 1_000_000
    assert (np.maximum.accumulate(times) - times).max() <= chunk_of_the_quiet_us
