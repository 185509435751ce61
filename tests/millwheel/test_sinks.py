"""Files of a sink: each line once, whatever a crash left, and nothing taken back that a reader saw."""

import json
import random

import pytest

from millwheel import sinks
from millwheel.engine.wheel import Lines
from millwheel.sinks import SinkFiles, begin
from millwheel.topology import LogSink
from photon.core.errors import DiskFullError, UsageError
from tests.full import full_after
from tests.seeds import seeds


class Store:
    """What a worker's store keeps for the files of one sink."""

    def __init__(self, directory, file_bytes_max=100, publish=()):
        self._sink = LogSink(str(directory), file_bytes_max=file_bytes_max, publish=publish)
        self.directory = directory
        self.place = begin(self._sink, "x", 0)
        self.left = {}
        self.all = b""
        self.files = self.opened()

    def opened(self):
        return SinkFiles(self._sink, "x", 0, self.place, self.left.items())

    def append(self, lines):
        number = len(self.all)
        self.left[number] = lines
        self.all += lines
        self.files.append(Lines("x", number, lines))

    def sync(self, end=False):
        numbers, position = self.files.begin_sync(end)
        place = self.files.sync(position)
        for number in numbers:
            del self.left[number]
        self.place = place
        self.files.noted(place)

    def paths(self):
        return sorted(self.directory.glob("x-0-*.jsonl"))

    def written(self):
        return b"".join(path.read_bytes() for path in self.paths())


def lines_of(dice):
    return b"".join(
        b"%d\n" % dice.randrange(10 ** dice.randrange(1, 40)) for _ in range(dice.randrange(1, 5))
    )


@pytest.mark.parametrize("room", range(9))
def test_what_a_reader_saw_before_the_disk_was_full_stays_and_comes_once(tmp_path, monkeypatch, room):
    store = Store(tmp_path)
    store.append(b"1\n")
    seen = []
    with monkeypatch.context() as full:
        full_after(full, room, lambda: seen.append(store.written()))
        with pytest.raises(DiskFullError):
            store.append(b"22\n333\n4\n")
    at_once = store.written()
    store.files.close()
    store.files = store.opened()
    assert at_once.startswith(seen[0])
    assert store.written() == store.all


@seeds(8, 60, 2_000)
def test_a_crash_at_any_byte_leaves_each_line_once(tmp_path, seed):
    dice = random.Random(seed)
    store = Store(tmp_path)
    for _ in range(8):
        for _ in range(dice.randrange(12)):
            store.append(lines_of(dice))
            if dice.random() < 0.3:
                store.sync(end=dice.random() < 0.3)
        store.files.close()
        synced = store.all[: len(store.all) - sum(map(len, store.left.values()))]
        # A power cut: what was not synced is there up to some byte, or is something else.
        torn = dice.choice(["nothing", "cut", "zeroed"])
        last = store.paths()[-1]
        unsynced = min(len(store.written()) - len(synced), last.stat().st_size)
        if torn != "nothing" and unsynced:
            keep = last.stat().st_size - dice.randrange(unsynced + 1)
            whole = last.read_bytes()
            last.write_bytes(whole[:keep] + (b"\0" * (len(whole) - keep) if torn == "zeroed" else b""))
        store.files = store.opened()
        assert store.written() == store.all
    store.sync(end=True)
    listed = [json.loads(line) for line in (tmp_path / "x-0.manifest").read_bytes().splitlines()]
    sizes = {path.name: (path.stat().st_size, path.read_bytes().count(b"\n")) for path in store.paths()[:-1]}
    assert {entry["file"]: (entry["bytes"], entry["lines"]) for entry in listed} == sizes


def test_what_a_reader_may_have_seen_is_not_cut_after_a_kill(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.append(b"synced\n")
    store.sync()
    store.append(b"first\n" * 10)
    store.append(b"second\n" * 10)  # in the next file
    store.files.close()
    store.paths()[-1].write_bytes(b"second\nsec")  # killed in the middle of a write
    inodes = [path.stat().st_ino for path in store.paths()]
    monkeypatch.setattr("os.ftruncate", lambda *_: pytest.fail("a file is cut"))
    store.files = store.opened()
    assert store.written() == store.all
    assert [path.stat().st_ino for path in store.paths()] == inodes


def test_a_line_whose_commit_never_was_is_taken_back(tmp_path):
    """A weak production's, which a file gets before its commit."""
    store = Store(tmp_path)
    store.append(b"1\n")
    store.files.append(Lines("x", 99, b"2\n"))
    assert store.written() == b"1\n2\n"
    store.files = store.opened()
    assert store.written() == b"1\n"


def test_a_complete_file_is_counted_once(tmp_path, monkeypatch):
    counted = []
    real = sinks.complete
    monkeypatch.setattr(sinks, "complete", lambda path: counted.append(path.name) or real(path))
    store = Store(tmp_path)
    for n in range(10):
        store.append(b"%070d\n" % n)
        store.sync()
    store.files.close()
    store.files = store.opened()
    store.append(b"%070d\n" % 10)
    store.sync()
    assert counted == [path.name for path in store.paths()[:10]]


def test_a_file_that_was_taken_away_leaves_the_manifest(tmp_path):
    store = Store(tmp_path)
    for n in range(4):
        store.append(b"%070d\n" % n)
        store.sync()
    store.paths()[1].unlink()
    store.append(b"%070d\n" % 4)
    store.sync()
    listed = [json.loads(line)["file"] for line in (tmp_path / "x-0.manifest").read_bytes().splitlines()]
    assert listed == [f"x-0-{n:06d}.jsonl" for n in (0, 2, 3)]


def test_files_of_another_run_are_not_touched(tmp_path):
    (tmp_path / "x-0-000000.jsonl").write_text("theirs\n")
    with pytest.raises(UsageError, match="another run"):
        Store(tmp_path)
    assert (tmp_path / "x-0-000000.jsonl").read_text() == "theirs\n"


def test_a_sink_whose_name_begins_with_that_of_another_may_share_its_directory(tmp_path):
    (tmp_path / "x-0-0-000000.jsonl").write_text("of the sink x-0\n")
    store = Store(tmp_path)
    store.append(b"line\n")
    assert store.sync() is None
    assert (tmp_path / "x-0-0-000000.jsonl").read_text() == "of the sink x-0\n"
