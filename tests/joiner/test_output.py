"""The joined log stands in all roots or in none, and lines that were written as a lease ran out in none."""

import contextlib
import os
import threading

import pytest

from joiner.intents import Range
from joiner.output import JoinedLog, Left
from joiner.output_files import open_roots
from photon.core.clock import ManualClock
from photon.core.columns import split_lines
from photon.core.errors import CorruptStateError, DiskFullError, OverloadedError
from photon.logs.writer import LogPosition, RotatingLog
from tests.joiner.fakes import FailingWrites, joined_line


@pytest.fixture
def opened(tmp_path):
    logs = []

    def build(*names, file_bytes_max=1 << 20, fsync=False, begin=True, checkpoint=lambda _: None, **options):
        directories = [tmp_path / name for name in names or ("a",)]
        for directory in [tmp_path / "state", *directories]:
            directory.mkdir(exist_ok=True)
        roots = open_roots(tmp_path / "state", directories, "j")
        log = JoinedLog(roots, file_bytes_max, fsync, options.get("clock", ManualClock()), checkpoint)
        logs.append(log)
        if begin:
            log.begin()
        return log

    yield build
    for log in logs:
        log.close()


def free():
    """The lease holds."""


def lost_at(look):
    """A lease that is lost at the n-th look."""
    looks = iter([*[None] * look, OverloadedError("lost")])

    def check():
        if (error := next(looks)) is not None:
            raise error

    return check


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.jsonl"))}


def text(directory):
    return b"".join(contents(directory).values())


def test_a_batch_that_is_intended_while_lines_stand_that_are_taken_back_is_found_by_the_next_start(opened):
    """Its place in the log is no later than where its lines come to stand."""
    log = opened()
    places = []

    def check():
        places.append(log.position)
        if len(places) == 2:
            raise OverloadedError("lost")

    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", check)
    places.append(log.position)
    written = log.append(b"later\n", free)
    assert LogPosition(written.file, written.start) >= max(places)
    assert log.count({b"later"}, max(places), []) == {b"later": 1}


def test_a_sync_that_was_under_way_during_a_take_back_vouches_for_no_later_line(opened, monkeypatch):
    log = opened(fsync=True)
    log.append(b"first\n", free)
    real, syncs, started, go = os.fdatasync, [], threading.Event(), threading.Event()

    def fdatasync(fd):
        syncs.append(fd)
        if len(syncs) == 1:
            started.set()
            assert go.wait(20)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    looks = []

    def check():
        looks.append(1)
        if len(looks) == 2:
            other.start()
            assert started.wait(20)
            raise OverloadedError("lost")

    other = threading.Thread(target=lambda: log.sync(Range(0, 0, 6)))
    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", check)
    go.set()
    other.join()
    before = len(syncs)
    log.sync(log.append(b"other\n", free))
    assert len(syncs) > before


@pytest.mark.parametrize("names", ["a", "ab"], ids=["one root", "two roots"])
def test_the_take_back_leaves_what_other_batches_wrote(opened, tmp_path, names):
    log = opened(*names, fsync=True)
    first = log.append(joined_line("a", "q") + b"\n", free)
    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", lost_at(1))
    second = log.append(b"b\n", free)
    log.sync(first)
    log.sync(second)
    for name in names:
        assert split_lines(text(tmp_path / name)) == [joined_line("a", "q"), b"b"]


def test_every_root_holds_the_same_bytes_in_the_same_files(opened, tmp_path):
    log = opened("a", "b", "c", file_bytes_max=30, fsync=True)
    for number in range(20):
        with contextlib.suppress(OverloadedError):
            log.sync(log.append(b"line %d\n" % number, lost_at(1) if number % 5 == 4 else free))
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert len(contents(tmp_path / "a")) > 5
    assert text(tmp_path / "a").count(b"\n") == 16


def test_what_one_full_root_refuses_stands_in_none_and_comes_to_stand_in_all(opened, monkeypatch, tmp_path):
    log = opened("a", "b", "c", fsync=True)
    log.append(b"one\n", free)
    full = FailingWrites(monkeypatch, str(tmp_path / "b"))
    for _ in range(5):
        with pytest.raises(DiskFullError, match="no space left"):
            log.append(b"two\n", free)
        assert text(tmp_path / "a") == text(tmp_path / "b") == text(tmp_path / "c") == b"one\n"
    assert full.refused == 5
    assert len(contents(tmp_path / "a")) == 2, "taken back once; then the full root was asked first"
    assert not log.broken
    full.full = False
    log.sync(log.append(b"two\n", free))
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert text(tmp_path / "a") == b"one\ntwo\n"


def test_a_lease_that_runs_out_between_two_roots_takes_the_lines_back_from_both(opened, tmp_path):
    running, watched = [True], []

    def stand_still(step):
        if step == "one root appended" and watched:
            assert text(tmp_path / "a") == b"one\ntwo\n"
            assert text(tmp_path / "b") == b"one\n"
            running.clear()

    def check():
        if not running:
            raise OverloadedError("lost")

    log = opened("a", "b", fsync=True, checkpoint=stand_still)
    log.append(b"one\n", free)
    watched.append(True)
    with pytest.raises(OverloadedError):
        log.append(b"two\n", check)
    assert text(tmp_path / "a") == text(tmp_path / "b") == b"one\n"


def test_a_rotation_that_fails_in_one_root_is_made_up_for_before_the_next_line(opened, monkeypatch, tmp_path):
    log = opened("a", "b", file_bytes_max=5)
    log.append(b"one\n", free)
    with monkeypatch.context() as broken:
        real = RotatingLog._open

        def fail(self, file):
            if "b" in self.directory.name:
                raise DiskFullError("no space")
            return real(self, file)

        broken.setattr(RotatingLog, "_open", fail)
        with pytest.raises(DiskFullError):
            log.append(b"two\n", free)
        assert log.position == LogPosition(0, 4), "no place is given out that a root has not"
    assert log.append(b"two\n", free) == Range(1, 0, 4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_an_idle_file_is_left_when_its_first_line_is_old_and_an_empty_one_never(opened, tmp_path):
    clock = ManualClock()
    log = opened(clock=clock)
    clock.advance(1_000)
    log.rotate_if_older(60)
    assert log.position == LogPosition(0, 0)
    log.append(b"one\n", free)
    clock.advance(59)
    log.append(b"two\n", free)
    log.rotate_if_older(60)
    assert log.position.file == 0
    clock.advance(1)
    log.rotate_if_older(60)
    assert log.position == LogPosition(1, 0)
    opened_us, closed_us = log.times[0]
    assert closed_us - opened_us == 60_000_000


def leave(tmp_path, a, b):
    """What a crash left in the two roots' only file."""
    for name, data in (("a", a), ("b", b)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "j-000000.jsonl").write_bytes(data)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "roots").write_text(f'{{"{tmp_path / "b"}":0}}')


DONE = [Range(0, 0, 5)]


@pytest.mark.parametrize(
    ("a", "b", "kept"),
    [
        (b"done\nx\ny\n", b"done\n", b"done\n"),
        (b"done\n", b"done\nx\ny\n", b"done\n"),
        (b"done\nx\ny\n", b"done\nx\n", b"done\nx\n"),
        (b"done\nx\ny\n", b"done\nx\ny", b"done\nx\n"),
        (b"done\nx\ny\n", b"done\nx\ny\n", b"done\nx\ny\n"),
        (b"done\n", b"done\n", b"done\n"),
    ],
)
def test_a_start_takes_back_what_a_crash_left_in_one_root_only(opened, tmp_path, a, b, kept):
    leave(tmp_path, a, b)
    log = opened("a", "b", begin=False)
    log.begin(Left(LogPosition(0, 0), LogPosition(0, 5), DONE))
    assert text(tmp_path / "a") == text(tmp_path / "b") == kept
    assert log.position == LogPosition(1, 0)


def test_a_start_never_takes_back_what_is_done(opened, tmp_path):
    """A root that lost what was done (a power cut without fsync) takes nothing from the others."""
    leave(tmp_path, b"done\nx\n", b"do")
    log = opened("a", "b", begin=False)
    log.begin(Left(LogPosition(0, 0), LogPosition(0, 0), DONE))
    assert text(tmp_path / "a") == b"done\nx\n"
    log.append(b"y\n", free)
    assert text(tmp_path / "b") == b"y\n"


def test_a_long_tail_is_compared_to_the_byte(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("joiner.output._READ_BYTES", 7)
    lines = b"".join(b"line %d\n" % n for n in range(50))
    leave(tmp_path, lines, lines[:200])
    log = opened("a", "b", begin=False)
    cut = log.begin(Left(LogPosition(0, 10), LogPosition(0, 20), []))
    kept = lines[: lines.rindex(b"\n", 0, 200) + 1]
    assert text(tmp_path / "a") == text(tmp_path / "b") == kept
    assert cut == len(lines) - len(kept)


def test_later_files_that_only_one_root_has_are_emptied(opened, tmp_path):
    leave(tmp_path, b"done\n", b"done\n")
    (tmp_path / "a" / "j-000001.jsonl").write_bytes(b"x\n")
    (tmp_path / "b" / "j-000001.jsonl").write_bytes(b"")
    log = opened("a", "b", begin=False)
    log.begin(Left(LogPosition(0, 0), LogPosition(0, 5), [Range(0, 0, 5)]))
    assert text(tmp_path / "a") == text(tmp_path / "b") == b"done\n"
    assert log.position.file == 2


def test_a_file_that_is_missing_in_any_root_stops_a_start_that_may_need_it(opened, tmp_path):
    leave(tmp_path, b"done\nx\n", b"")
    (tmp_path / "b" / "j-000000.jsonl").rename(tmp_path / "b" / "j-000001.jsonl")
    log = opened("a", "b", begin=False)
    with pytest.raises(CorruptStateError, match=r"b/j-000000\.jsonl is missing"):
        log.begin(Left(LogPosition(0, 0), LogPosition(0, 5), []))
