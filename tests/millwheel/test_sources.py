"""The bound of an injector: what it promises not to bring any more (paper 4.5, 5.2)."""

import gzip
import json

import pytest

from millwheel import Input, JoinedLogs, Logs
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lateness import Lateness, Stragglers
from millwheel.engine.store import POSITION, lateness_row
from millwheel.engine.wheel import Lines
from millwheel.sinks import SinkFiles, begin
from millwheel.sources import LogSource, _position
from millwheel.topology import LogSink
from photon.core.clock import ManualClock
from photon.logs.files import unpack_file_state
from photon.logs.shares import slot_of
from photon.logs.watch import Finder

SECOND = 1_000_000


class Read:
    """A source in a directory of its own, whose clock stands."""

    def __init__(self, directory, drain=False, **how):
        self.directory, self._drain = directory, drain
        self._injector = Logs(**{"paths": f"{directory}/*.jsonl", "time": "ts", **how})
        self.clock = ManualClock()
        self._rows = {}
        self.mine = lambda _: True
        self.source = self._opened(self._injector)

    def _opened(self, injector, lateness=None, first=1):
        rows = [(row, packed) for row, packed in self._rows.items() if packed and row.startswith(POSITION)]
        return LogSource(
            "e", 0, injector, {0: Input("e", key="k", value=None)}, rows, self.mine, first,
            self._drain, self.directory / "spool", self.clock, lambda: None, lambda _: None, lateness,
        )  # fmt: skip

    def write(self, name, *seconds):
        """Lines of so many seconds after now."""
        with (self.directory / name).open("a") as file:
            for second in seconds:
                file.write(json.dumps({"k": "k", "ts": self.now + round(second * SECOND)}) + "\n")

    def names(self):
        return [unpack_file_state(_position(packed)[1]).name for packed in self._rows.values() if packed]

    @property
    def now(self):
        return self.clock.now_us()

    def read(self):
        """All there is; the bound then, in seconds after now."""
        records = 0
        for _ in range(20):
            self.clock.advance(1.0)
            self._rows |= self.source.look()
            while (found := self.source.read()) is not None:
                records += sum(map(len, found.records.values()))
                self._rows |= found.positions
        return records

    @property
    def bound(self):
        bound = self.source.bound()
        return NEVER if bound == NEVER else BEFORE if bound <= BEFORE else (bound - self.now) / SECOND


def test_logs_that_were_read_to_their_end_are_as_far_as_the_last_look(tmp_path):
    read = Read(tmp_path, lateness_s=5)
    read.write("a.jsonl", -100, -90)
    assert read.read() == 2
    assert read.bound == -5


def test_a_file_that_is_not_read_to_its_end_holds_the_bound(tmp_path):
    read = Read(tmp_path, lateness_s=5)
    read.write("a.jsonl", -100)
    read.write("b.jsonl", -50)
    assert read.read() == 2
    read.clock.advance(1)
    before = read.now
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write((json.dumps({"k": "k", "ts": before}) + "\n") * 40_000)
    read.clock.advance(1)
    read.source.look()
    assert read.source.read() is not None
    assert read.source.bound() == before - 5 * SECOND
    assert "a.jsonl" in read.source.why()["least_far"][0]


def test_a_new_file_holds_the_bound_until_it_is_found_and_read(tmp_path):
    read = Read(tmp_path)
    read.write("a.jsonl", -100)
    read.read()
    read.write("b.jsonl", 0)
    read.source.look()
    assert read.source.read() is not None
    assert read.bound == 0
    began = read.now
    read.write("c.jsonl", 0.001)  # right after a listing
    for _ in range(4):
        read.clock.advance(0.02)
        read.source.look()
        assert read.source.read() is None
        assert read.source.bound() == began
    read.clock.advance(0.1)
    read.source.look()
    assert read.source.bound() == BEFORE
    assert read.source.read() is not None
    assert read.bound == 0


def test_where_nothing_tells_of_files_the_bound_is_of_the_last_listing(tmp_path, monkeypatch):
    monkeypatch.setattr(Finder, "_make_watch", lambda *_: None)
    read = Read(tmp_path)
    read.write("a.jsonl", -100)
    read.read()
    assert read.bound == 0
    read.clock.advance(0.9)
    read.source.look()
    assert read.bound == -0.9
    read.clock.advance(0.1)
    read.source.look()
    assert read.bound == 0


def test_a_silent_writer_holds_the_bound_where_it_is_told_to(tmp_path):
    read = Read(tmp_path, silent="hold")
    read.write("a.jsonl", -100)
    read.write("b.jsonl", -50)
    read.read()
    assert read.bound == -100 - 20
    assert "a.jsonl" in read.source.why()["quiet"][0]
    read.write("a.jsonl", -3)
    read.read()
    assert read.bound == -50 - 40


@pytest.mark.parametrize("away", ["a.jsonl.1", "a.jsonl-20260101", "a.jsonl.1.gz"])
def test_a_log_goes_on_where_its_rotated_file_ended(tmp_path, away):
    """Not at the last line of the file that was rotated away, for as long as that is kept."""
    read = Read(tmp_path, paths=f"{tmp_path}/a.jsonl*", silent="hold")
    read.write("a.jsonl", -100, -90)
    read.read()
    if away.endswith(".gz"):
        (tmp_path / away).write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
        (tmp_path / "a.jsonl").unlink()
    else:
        (tmp_path / "a.jsonl").rename(tmp_path / away)
    (tmp_path / "a.jsonl").touch()
    read.read()
    assert read.bound == -90 - 40  # the log has said nothing more
    read.write("a.jsonl", -30)
    read.read()
    assert read.bound == -30 - 20
    assert read.source.why()["quiet"] == [f"{tmp_path}/a.jsonl"]
    read.source.close()
    read.source = read._opened(read._injector)
    read.read()
    assert read.bound == -30 - 40


def test_what_was_rotated_away_does_not_hold_a_log_that_is_read_on(tmp_path):
    read = Read(tmp_path, paths=f"{tmp_path}/a.jsonl*", silent="hold")
    read.write("a.jsonl", -100)
    read.read()
    (tmp_path / "a.jsonl").rename(tmp_path / "a.jsonl.1")
    (tmp_path / "a.jsonl").write_text((json.dumps({"k": "k", "ts": read.now}) + "\n") * 40_000)
    now = read.now
    read.clock.advance(20)
    read.source.look()
    assert read.source.read() is not None
    assert read.source.read() is not None
    assert read.source.why()["unread_bytes"] > 0
    assert read.source.bound() == now


def test_a_datacenter_holds_as_a_whole_with_its_files_in_one_worker(tmp_path):
    """Its newest line counts, whichever file has it; one that was killed has its last say."""
    logs = JoinedLogs(str(tmp_path), "ts", lateness_s=1, silent="hold")
    read = Read(tmp_path, paths=logs.paths, silent=logs.silent, log=logs.log, lateness_s=1)
    for datacenter, lines in {"east": (-100, -50, -40), "west": (-90, -80)}.items():
        (tmp_path / "joined" / datacenter).mkdir(parents=True)
        for number, line in enumerate(lines):
            read.write(f"joined/{datacenter}/joined-{number:06}.jsonl", line)
    assert read.read() == 5
    assert read.bound == -80 - 1 - 20
    read.write("joined/west/joined-000002.jsonl", -2)
    read.read()
    assert read.bound == -40 - 1 - 40
    assert read.source.why()["quiet"] == [f"{tmp_path}/joined/{name}" for name in ("east", "west")]
    workers = [Read(tmp_path, paths=logs.paths, silent=logs.silent, log=logs.log) for _ in range(2)]
    for worker, reading in enumerate(workers):
        reading.mine = lambda slot, worker=worker: slot % 2 == worker
        reading.source = reading._opened(reading._injector)
        reading.read()
    slots = {directory: slot_of(f"{tmp_path}/joined/{directory}") % 2 for directory in ("east", "west")}
    for worker, reading in enumerate(workers):
        read_here = {shown.rpartition("/")[0].rpartition("/")[2] for shown in reading.names()}
        assert read_here == {directory for directory, slot in slots.items() if slot == worker}
    assert JoinedLogs("out").log == "file"


@pytest.mark.parametrize("respelled", [False, True])
def test_files_that_other_workers_find_by_new_names_are_read_on_there(tmp_path, respelled):
    """Renamed while nobody looked, or matched by a pattern that is spelled otherwise."""
    read = Read(tmp_path)

    def read_by_each(injector, round_):
        total = 0
        for worker in range(2):
            read.mine = lambda slot, worker=worker: slot % 2 == worker
            read.source = read._opened(injector, first=(2 * round_ + worker) << 8)
            total += read.read()
        return total

    for name in range(16):
        read.write(f"{name}.jsonl", -100, -90)
    assert read_by_each(Logs(f"{tmp_path}/*.jsonl", time="ts"), 1) == 32
    for name in range(16):
        read.write(f"{name}.jsonl", -80)
        if not respelled:
            (tmp_path / f"{name}.jsonl").rename(tmp_path / f"other-{name}.jsonl")
    spelled = f"{tmp_path}/./*.jsonl" if respelled else f"{tmp_path}/*.jsonl"
    assert read_by_each(Logs(spelled, time="ts"), 2) == 16
    assert read_by_each(Logs(spelled, time="ts"), 3) == 0


def test_a_file_whose_name_only_looks_rotated_holds(tmp_path):
    """Nothing says that the log goes on elsewhere: these may be files of two writers."""
    read = Read(tmp_path, paths=f"{tmp_path}/web.*", silent="hold")
    read.write("web.1", -100)
    read.write("web.2", -50)
    read.read()
    assert read.bound == -100 - 20


def test_an_archive_that_was_read_holds_nothing(tmp_path):
    read = Read(tmp_path, paths=f"{tmp_path}/*", silent="hold")
    read.write("monday.jsonl", -100)
    monday = tmp_path / "monday.jsonl"
    (tmp_path / "monday.jsonl.gz").write_bytes(gzip.compress(monday.read_bytes()))
    monday.unlink()
    read.write("tuesday.jsonl", -50)
    assert read.read() == 2
    assert read.bound == -50 - 20


def test_a_line_from_the_future_moves_no_bound(tmp_path):
    for how in ({"silent": "hold"}, {"drain": True}):
        read = Read(tmp_path / how.get("silent", "drain"), **how)
        read.directory.mkdir()
        read.write("a.jsonl", -100, 40 * 365 * 86_400, -90)
        with (read.directory / "a.jsonl").open("a") as file:
            file.write(json.dumps({"k": "x" * 600_000, "ts": read.now}) + "\n")  # in the next chunk
        read.clock.advance(1)
        read.source.look()
        assert read.source.read() is not None
        assert read.bound == -90 - 1
        read.read()


def test_a_line_that_is_too_long_or_none_is_told_with_its_place_and_what_follows_is_read(tmp_path):
    read = Read(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + b"x" * (5 << 20) + b"\nno line\n")
    read.write("a.jsonl", -10)
    read.clock.advance(1.0)
    read.source.look()
    found = []
    while (one := read.source.read()) is not None:
        found.append(one)
    letters = [letter for one in found for letter in one.letters]
    place = {"injector": "e", "file": str(tmp_path / "a.jsonl")}
    assert [letter.pop("offset") for letter in letters] == [0, 3, (5 << 20) + 4]
    assert letters[1] == {**place, "reason": "the line is longer than 4 MiB"}
    assert [letter.get("line") for letter in letters] == ["{}", None, "no line"]
    assert sum(len(one.records[0]) for one in found) == 1
    assert read.bound == 0


def test_logs_that_grow_no_more_end(tmp_path):
    read = Read(tmp_path, drain=True, lateness_s=5)
    read.write("a.jsonl", -100)
    assert read.bound == BEFORE
    read.read()
    assert read.bound == NEVER


@pytest.mark.parametrize("expected", ["b*.jsonl", "b1.jsonl"])
def test_a_file_that_is_expected_is_waited_for(tmp_path, expected):
    read = Read(tmp_path, expected=(f"{tmp_path}/{expected}",))
    read.write("a.jsonl", -100)
    read.read()
    assert read.bound == BEFORE
    assert read.source.why()["expected"] == [f"{tmp_path}/{expected}"]
    read.write("b1.jsonl", -3)
    read.read()
    assert read.bound == 0


@pytest.mark.parametrize("drain", [False, True])
def test_only_files_that_a_manifest_lists_are_read_where_it_is_asked_for(tmp_path, drain):
    def listing(*names):
        entries = [{"file": name, "bytes": 1, "lines": 1, "crc32": "0"} for name in names]
        (tmp_path / "j-0.manifest").write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    read = Read(tmp_path, drain, listed=True)
    read.write("j-0-000000.jsonl", -100)
    read.write("j-0-000001.jsonl", -90, -80)
    read.write("other-000000.jsonl", -70)
    listing("j-0-000000.jsonl")
    assert read.read() == 1
    if not drain:
        listing("j-0-000000.jsonl", "j-0-000001.jsonl")
        assert read.read() == 2
        assert read.read() == 0


@pytest.mark.parametrize("drain", [False, True])
def test_a_restart_goes_on_where_it_was_and_knows_how_far_that_is(tmp_path, drain):
    read = Read(tmp_path, drain, silent="hold", lateness_s=5)
    read.write("a.jsonl", -100)
    read.read()
    read.source.close()
    read.source = read._opened(read._injector)
    assert read.read() == 0
    assert read.bound == (NEVER if drain else -105 - 40)


def test_what_was_pushed_and_read_is_spent_once_its_file_is_complete(tmp_path):
    sink = LogSink(str(tmp_path / "x"), file_bytes_max=100)
    place = begin(sink, "pushed", 0)
    files = SinkFiles(sink, "pushed", 0, place, [])
    read = Read(tmp_path)
    read.source = read._opened(Logs((), "ts", listen="127.0.0.1:1").within(tmp_path / "x"))
    for number in range(3):
        files.append(Lines("pushed", number, b'{"k": "%060d", "ts": 1}\n' % number))
    assert read.read() == 3
    assert read.source.spent() == []
    place = files.sync(files.begin_sync()[1])
    assert read.source.spent() == []
    files.noted(place)
    read.clock.advance(2)
    assert [path.name for path in read.source.spent()] == ["pushed-0-000000.jsonl", "pushed-0-000001.jsonl"]
    files.close()


def percentile_of(read):
    """As the authority has it of this worker alone."""
    made = Stragglers({"e": read._injector})
    made.report(0, {"e": read.source.late()})
    read.source.allow(made.lateness_us["e"])
    return made.lateness_us["e"] / SECOND


def counting(read):
    row = lateness_row(0, 0)
    read.source.close()
    read.source = read._opened(read._injector, (row, Lateness(99.0, read._rows.get(row))))


def test_a_line_that_was_written_late_is_late_by_the_clock(tmp_path):
    """A writer that flushes in order, 30 s after the lines' times: an idle file's bound covers that."""
    read = Read(tmp_path, lateness_s=600, percentile=99)
    counting(read)
    read.write("a.jsonl", -500)
    read.read()
    assert percentile_of(read) == 600
    assert read.bound == -600
    for _ in range(1_100):
        read.write("a.jsonl", -30)
        read.clock.advance(1.0)
        read._rows |= read.source.look()
        while (found := read.source.read()) is not None:
            read._rows |= found.positions
        read.source.bound()
    assert 29 <= percentile_of(read) <= 36
    assert -36 <= read.source.bound() / SECOND - read.now / SECOND <= -29
    assert read.source.why()["percentile"] == 99
    counting(read)
    assert 29 <= percentile_of(read) <= 36


def test_logs_in_order_that_are_there_at_the_start_are_not_late(tmp_path):
    for how in ({}, {"silent": "hold"}, {"drain": True}):
        read = Read(tmp_path / "-".join(how), lateness_s=600, percentile=99, **how)
        read.directory.mkdir(exist_ok=True)
        counting(read)
        read.write("a.jsonl", *range(-5_000, -3_000))
        read.write("b.jsonl", *range(-3_000, -1_000))
        assert read.read() == 4_000
        assert percentile_of(read) == 0
