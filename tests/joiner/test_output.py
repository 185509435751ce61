"""The joined log stands in all roots or in none, and lines that were written as a lease ran out in none."""

import contextlib
import os
import threading

import pytest

from joiner.intents import Left, Range
from joiner.output import JoinedLog
from joiner.output_files import open_roots
from photon.core.clock import ManualClock
from photon.core.columns import split_lines
from photon.core.errors import DiskFullError, OverloadedError, StorageError
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


def test_a_batch_that_is_intended_while_lines_stand_that_are_taken_back_comes_to_stand_after_them(opened):
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


def test_a_sync_that_was_under_way_during_a_take_back_vouches_for_no_later_line(opened, monkeypatch):
    log = opened(fsync=True)
    log.append(b"first\n", free)
    real, syncs, started, go = os.fdatasync, [], threading.Event(), threading.Event()

    def fdatasync(fd):
        syncs.append(fd)
        if len(syncs) == 1:
            started.set()
            assert go.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    looks = []

    def check():
        looks.append(1)
        if len(looks) == 2:
            other.start()
            assert started.wait(60)
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


@pytest.mark.parametrize("cut", [(0, 5), (0, 7), (0, 0), (1, 0), (1, 2), (0, 99)])
@pytest.mark.parametrize(
    "left",
    [
        [b"done\nx\ny\n", b"z\n"],
        [b"done\nx\ny"],
        [b"done\n", b""],
        [],
    ],
    ids=["a batch", "half a line", "nothing", "no file"],
)
def test_a_start_cuts_what_was_left_off_every_root_and_gives_no_place_out_again(opened, tmp_path, cut, left):
    """Whatever stands there, in one root or the other; what stands before is never touched."""
    for name, files in (("a", left), ("b", [b"done\nx\ny\n"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "j.manifest").touch()
        for number, data in enumerate(files):
            (tmp_path / name / f"j-{number:06}.jsonl").write_bytes(data)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "roots").write_text(f'["{tmp_path / "b"}"]')
    before = {name: contents(tmp_path / name) for name in "ab"}
    log = opened("a", "b", begin=False)
    log.begin(Left(LogPosition(*cut), LogPosition(3, 1)))
    assert log.position == LogPosition(4, 0)
    log.append(b"new\n", free)
    for name in "ab":
        now = contents(tmp_path / name)
        assert now.pop("j-000004.jsonl") == b"new\n"
        for number, (file, data) in enumerate(sorted(before[name].items())):
            kept = data[: max(0, cut[1] if number == cut[0] else len(data) * (number < cut[0]))]
            whole = kept if kept != data else data[: data.rfind(b"\n") + 1]
            assert now.pop(file) == whole
        assert not any(now.values())


def test_a_root_is_cut_durably_before_anything_is_written(opened, tmp_path, monkeypatch):
    """Else a power cut would bring back what has been written elsewhere since."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "j-000000.jsonl").write_bytes(b"done\nx\n")
    log = opened("a", begin=False)
    real, synced = os.fsync, []

    def fsync(fd):
        real(fd)
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    log.begin(Left(LogPosition(0, 5), LogPosition(0, 5)))
    assert synced[0] == ("j-000000.jsonl", 5)


@pytest.mark.parametrize("ends", [False, True], ids=["a batch", "the log"])
def test_lines_are_made_durable_in_every_root(opened, monkeypatch, ends):
    log = opened("a", "b", fsync=not ends)
    synced, real = [], os.fdatasync
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: (real(fd), synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    )
    place = log.append(b"line\n", free)
    if ends:
        log.end()
    else:
        log.sync(place)
    assert [os.path.basename(os.path.dirname(path)) for path in synced] == ["a", "b"]


def test_no_place_behind_lines_is_given_out_before_they_are_noted(opened):
    log, noted = opened("a"), []
    log.append(b"line\n", free, lambda place: noted.append((place.end, log.position)))
    assert noted == [(5, LogPosition(0, 0))]
    assert log.position == LogPosition(0, 5)


def test_a_new_root_begins_behind_every_place_that_was_given_out(opened):
    log = opened("a", begin=False)
    log.begin(Left(None, LogPosition(3, 50)))
    assert log.position == LogPosition(4, 0)


def test_behind_lines_that_could_not_be_taken_back_nothing_is_written(opened, monkeypatch, tmp_path):
    log = opened("a")

    def refuse(*_):
        raise StorageError("no")

    with monkeypatch.context() as broken:
        broken.setattr(RotatingLog, "truncate", refuse)
        with pytest.raises(StorageError, match="no"):
            log.append(b"stays\n", lost_at(1))
    assert log.broken
    with pytest.raises(StorageError, match="no"):
        log.append(b"behind it\n", free)
    assert text(tmp_path / "a") == b"stays\n"
