"""Loading a built log file map in bulk. The built maps are written here by hand, without Spark."""

import errno
import gzip
import os
import random

import msgspec
import numpy as np
import pytest

from eventstore.built_map import (
    FORMAT,
    BuiltFile,
    Generation,
    Manifest,
    Part,
    Span,
    identity_digest,
    known_states,
    load,
    read_manifest,
    write_manifest,
)
from eventstore.rules.entries import entries_of
from eventstore.segments import Writer
from eventstore.server import EventStoreServer
from photon.core.clock import SystemClock
from photon.core.columns import hash_ids
from photon.core.disk import DirectoryLock
from photon.core.errors import CorruptStateError, DiskFullError, LockedError, UsageError
from photon.core.fates import Found
from photon.core.settings import EventStore, Ids, Settings
from photon.logs.files import digest
from photon.logs.packed import Spool
from tests.eventstore.kit import append, killed_at, line, make_format, pack
from tests.waiting import wait_until

SETTINGS = Settings(eventstore=EventStore(map_bytes_max=1 << 26))


class BuiltMap:
    """A built map of whole logs; each `add` is a generation that reads what is new in them."""

    def __init__(self, directory, settings=SETTINGS):
        self.directory = directory
        directory.mkdir()
        self.manifest = Manifest(FORMAT, identity_digest(settings))

    def add(self, *paths):
        name = f"generation-{len(self.manifest.generations):06d}"
        (self.directory / name).mkdir()
        known = {file.name: file for file in self.manifest.files}
        ids, files, starts, lengths, letters = b"", [], [], [], []
        for path in paths:
            file = known.get(str(path)) or BuiltFile(len(known), str(path))
            data = path.read_bytes()
            batch = make_format().parse_primary(data[file.offset :])
            ids += batch.ids
            files += [file.number] * len(batch.lines)
            starts += [file.offset + start for start in batch.starts.tolist()]
            lengths += map(len, batch.lines)
            letters.append((file.number, letter(path) * len(batch.malformed)))
            known[file.name] = msgspec.structs.replace(
                built_file(file.number, path),
                events=file.events + len(batch.lines),
                malformed=file.malformed + len(batch.malformed),
            )
        columns = [np.array(column, np.int64) for column in (files, starts, lengths)]
        generation = Generation(
            name,
            self._segments(name, ids, *columns),
            self._letters(name, letters),
        )
        self.manifest = msgspec.structs.replace(
            self.manifest,
            next_number=len(known),
            files=list(known.values()),
            generations=[*self.manifest.generations, generation],
        )
        write_manifest(self.directory, self.manifest)

    def _segments(self, name, ids, files, starts, lengths):
        entries, _ = entries_of(hash_ids(ids), files, starts, lengths)
        parts = []
        middle = len(entries) // 2
        while 0 < middle < len(entries) and entries.hashes[middle] == entries.hashes[middle - 1]:
            middle += 1
        for number, part in enumerate((slice(middle), slice(middle, None))):
            part = entries.take(part)
            writer = Writer(self.directory / name / f"segment-{number}", len(part))
            writer.append(part)
            writer.close()
            parts.append(Part(f"segment-{number}", len(part)))
        return parts

    def _letters(self, name, letters):
        letters = sorted(letters)
        data = b"".join(lines for _, lines in letters)
        if not data:
            return []
        (self.directory / name / "malformed.jsonl").write_bytes(data)
        spans = [Span(number, len(lines)) for number, lines in letters if lines]
        return [Part("malformed.jsonl", data.count(b"\n"), spans=spans)]


def letter(path):
    """What the built map holds of each malformed line of a log."""
    return b'{"fate":"malformed","file":"%s"}\n' % path.name.encode()


IDS = [
    *[f"10.0.0.{n % 3}:7:{1_700_000_000_000_000 + 700 * n}" for n in range(200)],
    *[f"q{n}" for n in range(200)],
]
random.Random(1).shuffle(IDS)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "logs" / "a.jsonl"
    path.parent.mkdir()
    append(path, *map(line, IDS), b"no json")
    return path


@pytest.fixture
def built(tmp_path, log):
    built = BuiltMap(tmp_path / "built")
    built.add(log)
    return built


def serve(tmp_path, settings=SETTINGS):
    return EventStoreServer(
        settings,
        "127.0.0.1:0",
        tmp_path / "work" / "eventstore",
        [str(tmp_path / "logs")],
        tmp_path / "dead-letters",
        SystemClock(),
    )


def into(tmp_path):
    return tmp_path / "work" / "eventstore" / "map"


def check_serves(tmp_path, idents=IDS):
    """An event store started there finds every event, before its reader has looked at any log."""
    server = serve(tmp_path)
    found, lines = server.lookup(b"".join(map(pack, idents)))
    assert set(found) == {Found.FOUND.value}
    assert lines == list(map(line, idents))
    return server


def test_an_event_store_serves_a_loaded_map_at_once_and_reads_only_what_comes_after(tmp_path, log, built):
    loaded = load(built.directory, into(tmp_path), SETTINGS)
    assert (loaded.files, loaded.events, loaded.entries) == (1, 400, 400)
    server = check_serves(tmp_path)
    append(log, line("new"))
    server.start()
    wait_until(lambda: server.status()["primary_events"] == 401)
    assert server.lookup(pack("new"))[1] == [line("new")]
    wait_until(lambda: server.status()["map_entries"] == 401)  # a moment after the event is counted
    server.stop()


def test_generations_come_together_and_the_earlier_place_counts(tmp_path, log, built):
    more = log.with_name("b.jsonl")
    append(more, line("q1", "again"), line("only here"))
    append(log, line("q2", "again"), line("late"), line(IDS[0], "again"))
    built.add(log, more)
    append(more, line("q1", "and again"), line("later"))
    built.add(more)
    loaded = load(built.directory, into(tmp_path), SETTINGS)
    assert loaded.entries == 407
    check_serves(tmp_path, [*IDS, "late", "only here", "later"]).stop()


def test_a_log_that_is_no_more_is_left_out_and_its_events_are_found_where_they_stand_too(
    tmp_path, log, built
):
    more = log.with_name("b.jsonl")
    append(more, line("q1"), line("only here"))
    built.add(more)
    log.unlink()
    loaded = load(built.directory, into(tmp_path), SETTINGS)
    assert loaded.missing == [str(log)]
    assert loaded.events == 2
    server = check_serves(tmp_path, ["q1", "only here"])
    assert server.lookup(pack("q5"))[1] == [b""]
    server.stop()


def test_a_log_that_was_overwritten_since_is_refused_and_nothing_is_loaded(tmp_path, log, built):
    data = log.read_bytes()
    for other in (data[:-9], b"x" + data[1:], data[:-2] + b"x\n"):
        log.write_bytes(other)
        with pytest.raises(UsageError, match="logmap build"):
            load(built.directory, into(tmp_path), SETTINGS)
    assert not (into(tmp_path) / "manifest").exists()


def test_a_map_that_is_there_is_never_replaced_and_what_a_killed_load_has_left_is_removed(tmp_path, built):
    load(built.directory, into(tmp_path), SETTINGS)
    with pytest.raises(UsageError, match="holds a log file map already"):
        load(built.directory, into(tmp_path), SETTINGS)
    check_serves(tmp_path).stop()
    (into(tmp_path) / "manifest").unlink()
    (into(tmp_path) / "segment-00000077").write_bytes(b"left")
    load(built.directory, into(tmp_path), SETTINGS)
    check_serves(tmp_path).stop()
    assert not (into(tmp_path) / "segment-00000077").exists()


def test_a_loaded_map_needs_no_copy_and_the_built_one_stays_whole(tmp_path, log, built):
    load(built.directory, into(tmp_path), SETTINGS)
    linked = built.directory / "generation-000000" / "segment-0"
    assert linked.samefile(into(tmp_path) / "segment-00000000")
    server = check_serves(tmp_path)
    server.start()
    log.unlink()
    wait_until(lambda: server.status()["map_entries"] == 0)
    server.stop()
    assert linked.exists()


def test_a_map_on_another_disk_is_copied(tmp_path, built, monkeypatch):
    def other_disk(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("eventstore.built_map.os.link", other_disk)
    load(built.directory, into(tmp_path), SETTINGS)
    check_serves(tmp_path).stop()


def test_a_map_is_not_loaded_under_a_running_event_store(tmp_path, built):
    with DirectoryLock(into(tmp_path)), pytest.raises(LockedError):
        load(built.directory, into(tmp_path), SETTINGS)


def test_a_map_that_is_too_large_is_refused(tmp_path, log):
    append(log, *[line(f"more-{n}") for n in range(50_000)])
    built = BuiltMap(tmp_path / "built")
    built.add(log)
    with pytest.raises(DiskFullError, match="map_bytes_max"):
        load(built.directory, into(tmp_path), Settings(eventstore=EventStore(map_bytes_max=1 << 20)))
    assert not (into(tmp_path) / "manifest").exists()


def test_a_map_of_other_ids_or_damaged_is_refused(tmp_path, built):
    with pytest.raises(UsageError, match="other ids"):
        load(built.directory, into(tmp_path), Settings(ids=Ids(key="other")))
    with pytest.raises(UsageError, match="no built log file map"):
        load(tmp_path / "logs", into(tmp_path), SETTINGS)
    for part in ("malformed.jsonl", "segment-1"):
        path = built.directory / "generation-000000" / part
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(CorruptStateError, match="build the map anew"):
            load(built.directory, into(tmp_path), SETTINGS, tmp_path / "dead-letters")
    (built.directory / "files.json").write_bytes(b"{")
    with pytest.raises(CorruptStateError, match="not a built log file map"):
        read_manifest(built.directory)


def test_malformed_lines_become_dead_letters_in_the_place_of_those_of_an_earlier_map(tmp_path, log, built):
    letters = tmp_path / "dead-letters"
    letters.mkdir()
    (letters / "primary-000000.jsonl").write_bytes(b"old\n")
    (letters / "primary-000001.jsonl").write_bytes(b"old\n")
    (letters / "foreign-000000.jsonl").write_bytes(b"kept\n")
    load(built.directory, into(tmp_path), SETTINGS, letters)
    check_serves(tmp_path).stop()
    assert {path.name: path.read_bytes() for path in letters.iterdir()} == {
        "primary-000000.jsonl": letter(log),
        "foreign-000000.jsonl": b"kept\n",
    }


def letters_of(tmp_path):
    return (tmp_path / "dead-letters" / "primary-000000.jsonl").read_bytes()


def test_only_the_letters_that_are_counted_are_written(tmp_path, log, built):
    """Three builds; then one log is gone from the map, and another from the disk."""
    second, third = log.with_name("b.jsonl"), log.with_name("c.jsonl")
    append(second, line("in b"), b"bad", b"bad")
    append(third, line("in c"), b"bad", b"bad", b"bad")
    built.add(log, second, third)
    append(log, b"bad", line("late"))
    append(second, b"bad")
    append(third, b"bad")
    built.add(second, third, log)
    files = built.manifest.files
    files[1] = msgspec.structs.replace(files[1], gone=True)
    write_manifest(built.directory, built.manifest)
    third.unlink()
    loaded = load(built.directory, into(tmp_path), SETTINGS, tmp_path / "dead-letters")
    assert letters_of(tmp_path) == letter(log) * 2
    assert (loaded.malformed, loaded.missing) == (2, [str(third)])


def test_renamed_logs_are_known_again_and_their_malformed_lines_have_one_letter(tmp_path, log, built):
    """a.jsonl -> a.jsonl.1 -> a.jsonl.2; a new one begins under the first name."""
    first, second = (log.with_name(f"a.jsonl.{n}") for n in (1, 2))
    append(first, line("older"), b"bad")
    built.add(first)
    first.rename(second)
    log.rename(first)
    append(log, line("newest"), b"bad")
    loaded = load(built.directory, into(tmp_path), SETTINGS, tmp_path / "dead-letters")
    assert (loaded.files, loaded.events, loaded.malformed, loaded.missing) == (2, 401, 2, [])
    server = check_serves(tmp_path, [*IDS, "older"])
    server.start()
    wait_until(lambda: server.status()["primary_events"] == 402)
    assert server.status()["malformed"] == 3
    server.stop()
    assert len(letters_of(tmp_path).splitlines()) == 3


def test_a_log_that_is_no_more_is_not_taken_for_its_copy_which_is_a_log_of_its_own(tmp_path, log, built):
    copy = log.with_name("copy.jsonl")
    copy.write_bytes(log.read_bytes())
    log.with_name("link.jsonl").symlink_to(copy)
    built.add(copy)
    log.unlink()
    loaded = load(built.directory, into(tmp_path), SETTINGS)
    assert (loaded.files, loaded.missing) == (1, [str(log)])
    check_serves(tmp_path).stop()


@pytest.mark.parametrize("step", range(14))
def test_a_load_killed_at_any_step_is_done_anew_and_an_event_store_never_sees_half_of_it(
    tmp_path, log, built, step
):
    """The child is killed before the n-th of the calls that change the disk."""
    killed = _load_killed_at(built.directory, into(tmp_path), tmp_path / "dead-letters", step)
    if not (into(tmp_path) / "manifest").exists():
        assert killed
        load(built.directory, into(tmp_path), SETTINGS, tmp_path / "dead-letters")
    assert (tmp_path / "dead-letters" / "primary-000000.jsonl").read_bytes() == letter(log)
    check_serves(tmp_path).stop()


def test_an_event_store_started_after_a_killed_load_begins_anew(tmp_path, built):
    assert _load_killed_at(built.directory, into(tmp_path), None, 5)
    assert list(into(tmp_path).glob("segment-*"))
    temporary = tmp_path / "dead-letters" / "primary-000000.jsonl.loading"
    temporary.parent.mkdir()
    temporary.write_bytes(b"left")
    server = serve(tmp_path)
    assert not list(into(tmp_path).glob("segment-*"))
    assert not temporary.exists()
    server.start()
    wait_until(lambda: server.status()["primary_events"] == len(IDS))
    assert server.lookup(b"".join(map(pack, IDS)))[1] == list(map(line, IDS))
    server.stop()


def _load_killed_at(built, target, letters, step):
    def work(counted):
        import eventstore.built_map as loading
        import eventstore.segments as segments

        for module, name in (
            (loading, "replace"),
            (loading, "make_directory"),
            (segments, "pack_file_state"),
            (os, "link"),
            (os, "rename"),
            (os, "fsync"),
        ):
            setattr(module, name, counted(getattr(module, name)))
        load(built, target, SETTINGS, letters)

    return killed_at(step, work)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool", 1 << 20)


def built_file(number, path):
    """As a build knows a log that it has read."""
    packed = path.name.endswith(".gz")
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    status = path.stat()
    archive = (status.st_size, status.st_mtime_ns) if packed else None
    head, tail = digest(data[:1024]).hex(), digest(data[-1024:]).hex()
    return BuiltFile(number, str(path), len(data), min(1024, len(data)), head, tail, archive=archive)


def names(states):
    return {state.number: state.name for state in states}


def test_renamed_archives_and_logs_are_known_by_what_they_hold(tmp_path, spool):
    (tmp_path / "a.jsonl").write_bytes(b'{"id":"a"}\n' * 300)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"id":"b"}\n'))
    (tmp_path / "c.jsonl").write_bytes(b'{"id":"c"}\n')
    files = [built_file(n, tmp_path / name) for n, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl"))]
    for file in files:
        (tmp_path / file.name).rename(tmp_path / f"was-{file.name.rpartition('/')[2]}")
    with (tmp_path / "was-c.jsonl").open("ab") as log:
        log.write(b'{"id":"more"}\n')
    states, missing = known_states(files, spool)
    there = {
        n: str(tmp_path / name) for n, name in enumerate(("was-a.jsonl", "was-b.jsonl.gz", "was-c.jsonl"))
    }
    assert (names(states), missing) == (there, [])
    assert [state.offset for state in states] == [3300, 11, 11]
    assert states[1].path != states[1].name


def test_logs_of_one_content_are_found_once_each(tmp_path, spool):
    files = []
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(b'{"id":"same"}\n')
        files.append(built_file(number, path))
    (tmp_path / "0.jsonl").rename(tmp_path / "4.jsonl")
    (tmp_path / "1.jsonl").unlink()
    states, missing = known_states(files, spool)
    assert names(states) == {0: str(tmp_path / "4.jsonl"), 2: str(tmp_path / "2.jsonl")}
    assert missing == [str(tmp_path / "1.jsonl")]


def test_a_log_that_has_grown_differently_or_is_only_linked_to_is_not_it(tmp_path, spool):
    log = tmp_path / "logs" / "a.jsonl"
    log.parent.mkdir()
    log.write_bytes(b'{"id":"a"}\n' * 300)
    file = built_file(0, log)
    log.rename(tmp_path / "elsewhere.jsonl")
    (log.parent / "link.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (log.parent / "alike.jsonl").write_bytes(b'{"id":"a"}\n' * 299 + b'{"id":"b"}\n' * 9)
    assert known_states([file], spool) == ([], [str(log)])
    log.write_bytes(b"another\n")
    with pytest.raises(UsageError, match="overwritten or cut"):
        known_states([file], spool)


def test_a_log_of_which_nothing_is_known_but_its_name_is_looked_for_by_that(tmp_path, spool):
    log = tmp_path / "a.jsonl"
    log.write_bytes(b'{"begun')
    files = [BuiltFile(0, str(log)), BuiltFile(1, str(tmp_path / "b.jsonl"))]
    states, missing = known_states(files, spool)
    assert (names(states), missing) == ({0: str(log)}, [str(tmp_path / "b.jsonl")])
