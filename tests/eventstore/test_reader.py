"""The reader: nothing skipped, nothing counted twice, whatever happens to logs and disk (paper 3.4.1)."""

import errno
import gzip
import json
import os

import pytest

from eventstore.lookup import LogsEventStore
from eventstore.reader import KEPT_EVERY_S, LOOKS_S_MAX
from eventstore.segments import read_manifest
from photon.core.clock import ManualClock
from photon.core.errors import DiskFullError, StorageError
from photon.core.fates import Found
from photon.core.settings import Logs
from photon.logs.text import ALL_READ
from tests.eventstore.kit import Parts, append, line, make_format, pack
from tests.waiting import wait_until

IDS = ["10.0.0.1:1:5", "opaque-a"]


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def outcomes(parts, *idents):
    column, lines = parts.lookup.look_up(b"".join(pack(i) for i in idents))
    return [Found(byte) for byte in column], lines


def test_an_event_is_found_in_the_cache_and_after_a_restart_in_the_logs(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS))
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, *IDS) == ([Found.FOUND] * 2, [line(i) for i in IDS])
    assert (parts.cache.hits, parts.logs.hits) == (2, 0)
    parts.close()
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, *IDS) == ([Found.FOUND] * 2, [line(i) for i in IDS])
    assert (parts.cache.hits, parts.logs.hits) == (0, 2)
    assert outcomes(parts, *IDS)[0] == [Found.FOUND] * 2
    assert (parts.cache.hits, parts.logs.hits) == (2, 2)
    assert parts.map.counts.primary_events == 2


def test_an_event_that_is_not_there_is_absent_only_when_all_is_read(logs, tmp_path):
    append(logs / "a.jsonl", line("here"))
    parts = Parts(tmp_path)
    assert outcomes(parts, "here", "not")[0] == [Found.BEHIND, Found.BEHIND]
    parts.read_all()
    assert outcomes(parts, "here", "not", "10.0.0.1:1:5") == (
        [Found.FOUND, Found.ABSENT, Found.ABSENT],
        [line("here"), b"", b""],
    )
    append(logs / "a.jsonl", line("not"))
    parts.reader.follower.poll()
    parts.reader.caught_up = parts.reader.follower.caught_up
    assert outcomes(parts, "not")[0] == [Found.BEHIND]


def test_what_one_that_has_not_looked_lately_does_not_have_may_have_been_written_meanwhile(logs, tmp_path):
    """As after SIGSTOP and SIGCONT, when lookups may come before the reader's next turn."""
    append(logs / "a.jsonl", line("here"))
    parts = Parts(tmp_path).read_all()
    parts.reader.clock = clock = ManualClock()
    parts.reader.step()
    clock.advance(LOOKS_S_MAX)
    assert outcomes(parts, "here", "not")[0] == [Found.FOUND, Found.ABSENT]
    clock.advance(1.0)
    assert outcomes(parts, "here", "not")[0] == [Found.FOUND, Found.BEHIND]
    parts.reader.step()
    assert outcomes(parts, "here", "not")[0] == [Found.FOUND, Found.ABSENT]


def test_a_drain_without_a_primary_log_in_sight_calls_nothing_absent(logs, tmp_path):
    parts = Parts(tmp_path, drain=True)
    while parts.reader.step() or not parts.reader.follower.caught_up:
        pass
    assert outcomes(parts, "here", "not")[0] == [Found.BEHIND, Found.BEHIND]
    assert "no primary log is in sight" in parts.notices.lines()[0]
    append(logs / "a.jsonl", line("here"))
    parts.read_all()
    assert outcomes(parts, "here", "not")[0] == [Found.FOUND, Found.ABSENT]
    (logs / "a.jsonl").unlink()
    wait_until(lambda: not parts.reader.step() and not parts.reader.positions)
    assert outcomes(parts, "not")[0] == [Found.BEHIND]


def test_an_id_that_stands_several_times_in_a_batch_is_looked_for_once(logs, tmp_path):
    append(logs / "a.jsonl", line("x"))
    Parts(tmp_path).read_all().close()
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, "x", "y", "x", "y") == (
        [Found.FOUND, Found.ABSENT, Found.FOUND, Found.ABSENT],
        [line("x"), b"", line("x"), b""],
    )
    assert (parts.logs.hits, parts.logs.misses) == (1, 1)


def test_an_answer_too_great_for_a_message_is_cut_short_and_goes_on_when_asked_again(
    logs, tmp_path, monkeypatch
):
    monkeypatch.setattr("eventstore.lookup.ANSWER_BYTES_MAX", 2500)
    idents = [f"id-{n}" for n in range(5)]
    append(logs / "a.jsonl", *[line(i, "x" * 1000) for i in idents])
    parts = Parts(tmp_path).read_all()
    column, lines = outcomes(parts, *idents)
    assert column == [Found.FOUND] * 2 + [Found.BEHIND] * 3
    assert lines[2:] == [b""] * 3
    assert outcomes(parts, *idents[2:])[0][0] is Found.FOUND


def test_malformed_and_oversized_lines_become_dead_letters_and_the_rest_goes_on(logs, tmp_path):
    bad = [b"no json", b'{"ts_us":5}', b'{"id":"\xff"}', b'["id"]', b'{"id":{}}', b'{"id":null}']
    long = b'{"id":"long","payload":"' + b"x" * 5000 + b'"}'
    append(logs / "a.jsonl", line("one"), *bad, long, line("two"))
    settings = Logs(scan_interval_s=0.01, line_bytes_max=4096)
    parts = Parts(tmp_path, logs_settings=settings).read_all()
    assert parts.in_logs("one", "two") == [line("one"), line("two")]
    counts = parts.map.counts
    assert (counts.primary_events, counts.malformed) == (2, 7)
    letters = [json.loads(letter) for letter in parts.letters()]
    assert [letter["fate"] for letter in letters] == ["malformed"] * 7
    assert [letter["event"] for letter in letters[:2]] == ["no json", '{"ts_us":5}']
    assert "line_bytes_max" in letters[6]["reason"]
    assert letters[6]["event"] == long[:1024].decode()
    data = (logs / "a.jsonl").read_bytes()
    for letter, text in zip(letters, [*bad, long]):
        assert letter["file"] == str(logs / "a.jsonl")
        assert data[letter["offset"] :].startswith(text)


def test_dead_letters_beyond_what_the_map_knows_are_cut_at_start(logs, tmp_path):
    append(logs / "a.jsonl", b"bad one")
    parts = Parts(tmp_path).read_all()
    parts.dead_letters.append(b"written before a crash, its transaction was not\n")
    parts.close()
    append(logs / "a.jsonl", b"bad two")
    parts = Parts(tmp_path)
    assert len(parts.letters()) == 1
    parts.read_all()
    assert [json.loads(letter)["event"] for letter in parts.letters()] == ["bad one", "bad two"]


def test_what_was_counted_of_a_log_that_is_gone_outlives_a_kill(logs, tmp_path):
    parts, durable = Parts(tmp_path, clock=ManualClock()), []
    for name in ("a.jsonl", "b.jsonl"):
        append(logs / name, line(name), b"bad", b'{"id":', end=b"")
        parts.read_all().delete(name)
        durable.append(read_manifest(tmp_path / "map").counts)
    parts.reader.clock.advance(KEPT_EVERY_S)
    parts.read_all()
    durable.append(read_manifest(tmp_path / "map").counts)
    counts = [(one.primary_events, one.malformed, one.lost_bytes) for one in durable]
    assert counts == [(1, 1, 6), (1, 1, 6), (2, 2, 12)]
    assert durable[-1].dead_letters == parts.map.counts.dead_letters


def test_a_removed_map_is_rebuilt_from_the_logs_with_its_dead_letters(logs, tmp_path):
    append(logs / "a.jsonl", b"bad", *map(line, IDS))
    Parts(tmp_path).read_all().close()
    for file in (tmp_path / "map").iterdir():
        file.unlink()
    parts = Parts(tmp_path).read_all()
    assert parts.in_logs(*IDS) == [line(i) for i in IDS]
    assert len(parts.letters()) == parts.map.counts.malformed == 1


def test_a_full_disk_loses_and_doubles_nothing(logs, tmp_path, monkeypatch):
    append(logs / "a.jsonl", b"bad", *map(line, IDS))
    parts = Parts(tmp_path)
    real = os.write

    def full(fd, data):
        real(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        with pytest.raises(DiskFullError):
            parts.reader.step()
        assert outcomes(parts, *IDS)[0] == [Found.BEHIND] * 2
    monkeypatch.setattr(os, "write", real)
    parts.read_all()
    counts = parts.map.counts
    assert (counts.primary_events, counts.malformed, len(parts.letters())) == (2, 1, 1)
    assert outcomes(parts, *IDS)[0] == [Found.FOUND] * 2


def test_a_storage_error_is_told_and_tried_again_by_the_thread(logs, tmp_path, monkeypatch):
    append(logs / "a.jsonl", *map(line, IDS))
    parts = Parts(tmp_path)
    real = parts.map.write

    def broken(*_):
        raise StorageError("the disk is not there")

    monkeypatch.setattr(parts.map, "write", broken)
    parts.reader.start()
    wait_until(lambda: parts.reader.storage_error is not None)
    assert not parts.reader.caught_up
    monkeypatch.setattr(parts.map, "write", real)
    wait_until(lambda: parts.reader.caught_up)
    parts.reader.stop()
    assert parts.reader.storage_error is None
    assert parts.notices.lines() == ["the disk is not there; tried again until it works"]
    assert outcomes(parts, *IDS)[0] == [Found.FOUND] * 2


@pytest.mark.parametrize("error", [StorageError, TypeError])
def test_what_no_retry_mends_is_told(logs, tmp_path, monkeypatch, error):
    """Dead letters of which only a restart can tell what is on disk; a bug."""
    append(logs / "a.jsonl", b"bad", line("event"))
    monkeypatch.setattr("eventstore.log_file_map.FLUSH_ENTRIES", 1)
    parts = Parts(tmp_path)
    told = []
    monkeypatch.setattr(parts.reader, "on_failure", told.append)

    def lost(_fd):
        raise OSError(errno.EIO, "Input/output error")

    if error is TypeError:
        monkeypatch.setattr(parts.reader, "_take", None)
    else:
        monkeypatch.setattr("photon.logs.writer.os.fdatasync", lost)
    parts.reader.start()
    wait_until(lambda: told)
    parts.reader.stop()
    assert isinstance(told[0], error)
    assert not parts.reader.caught_up


def test_a_partly_written_last_line_is_found_when_it_is_whole(logs, tmp_path):
    whole = line("10.0.0.1:1:6")
    append(logs / "a.jsonl", line("10.0.0.1:1:5"), whole[:20], end=b"")
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, "10.0.0.1:1:6")[0] == [Found.ABSENT]
    assert parts.reader.unended == {str(logs / "a.jsonl"): 20}
    append(logs / "a.jsonl", whole[20:])
    parts.read_all()
    assert outcomes(parts, "10.0.0.1:1:6")[1] == [whole]
    assert parts.map.counts.malformed == 0


def test_drain_finds_a_last_line_without_newline_once(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS), end=b"")
    for _ in range(2):
        parts = Parts(tmp_path, drain=True).read_all()
        assert parts.in_logs(*IDS) == [line(i) for i in IDS]
        assert parts.map.counts.primary_events == 2
        parts.close()


def test_events_stay_found_when_their_file_is_renamed(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS))
    parts = Parts(tmp_path, logs / "*.jsonl").read_all()
    (logs / "a.jsonl").rename(logs / "a.jsonl.1")
    append(logs / "a.jsonl", line("new"))
    parts.read_all()
    parts.logs._logs.keep(())
    assert parts.in_logs(*IDS, "new") == [line(i) for i in [*IDS, "new"]]
    assert parts.map.counts.primary_events == 3


def test_what_stood_in_a_deleted_file_is_absent(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS))
    Parts(tmp_path).read_all().close()
    parts = Parts(tmp_path)
    (logs / "a.jsonl").unlink()
    parts.read_all()
    assert outcomes(parts, *IDS, "never")[0] == [Found.ABSENT] * 3
    assert not parts.reader.follower.knows(0)


def test_a_replaced_file_is_read_again_and_its_events_are_found_where_they_are_now(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS), line("only-before"))
    Parts(tmp_path).read_all().close()
    (logs / "a.jsonl").unlink()
    append(logs / "b.jsonl", line("before", "x" * 99))
    append(logs / "a.jsonl", line("before", "x" * 99), *map(line, IDS))
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, *IDS) == ([Found.FOUND] * 2, [line(i) for i in IDS])
    Parts.close(parts)
    parts = Parts(tmp_path).read_all()
    assert parts.in_logs(*IDS) == [line(i) for i in IDS]
    assert outcomes(parts, "only-before")[0] == [Found.ABSENT]


def test_a_truncated_file_that_grows_again_is_read_from_its_start(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS), line("last"))
    parts = Parts(tmp_path).read_all()
    os.truncate(logs / "a.jsonl", 0)
    parts.read_all()
    append(logs / "a.jsonl", line("last"), line("new"))
    parts.read_all()
    parts.close()
    parts = Parts(tmp_path).read_all()
    assert parts.in_logs("last", "new") == [line("last"), line("new")]


def test_a_log_overwritten_under_a_lookup_never_gives_a_wrong_line(logs, tmp_path):
    append(logs / "a.jsonl", *map(line, IDS))
    Parts(tmp_path).read_all().close()
    parts = Parts(tmp_path)
    size = (logs / "a.jsonl").stat().st_size
    (logs / "a.jsonl").write_bytes((line("10.0.0.9:9:9") + b"\n" + b"x" * size)[:size])
    lines, doubtful = parts.logs.get_many([pack(i) for i in IDS])
    assert lines == [None, None]
    assert doubtful[1]


@pytest.mark.parametrize("what", ["renamed", "truncated"])
def test_before_the_reader_knows_what_became_of_a_log_its_events_are_unreadable(logs, tmp_path, what):
    append(logs / "a.jsonl", *map(line, IDS), line("10.0.0.1:1:6"))
    Parts(tmp_path).read_all().close()
    parts = Parts(tmp_path)
    if what == "renamed":
        (logs / "a.jsonl").rename(logs / "b.jsonl")
        append(logs / "a.jsonl", *[line(f"10.0.0.2:2:{n}") for n in range(10)])
    else:
        os.truncate(logs / "a.jsonl", 5)
    assert parts.logs.get_many([pack(i) for i in IDS]) == ([None, None], [True, True])
    assert parts.notices.lines() == [], "the map is not damaged"


def test_gz_files_empty_files_and_files_without_events_are_fine(logs, tmp_path):
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(line(i) + b"\n" for i in IDS)))
    (logs / "b.jsonl").touch()
    (logs / "c.jsonl").write_bytes(b"\n \n\r\n")
    parts = Parts(tmp_path).read_all()
    assert parts.in_logs(*IDS) == [line(i) for i in IDS]
    assert (parts.map.counts.primary_events, parts.map.counts.malformed) == (2, 0)


def test_while_a_log_cannot_be_read_nothing_is_called_absent(logs, tmp_path):
    (logs / "a.jsonl.gz").write_bytes(b"no gzip")
    append(logs / "b.jsonl", line("here"))
    parts = Parts(tmp_path).read_all()
    assert outcomes(parts, "here", "not")[0] == [Found.FOUND, Found.UNREADABLE]


def test_what_is_read_while_the_map_is_searched_is_not_called_absent(logs, tmp_path, monkeypatch):
    """Absent is for ever (a drained run gives the event up), so all was read before the map was asked."""
    parts = Parts(tmp_path)
    search = parts.logs.get_many

    def search_then_read(keys):
        found = search(keys)
        append(logs / "late.jsonl", line("late"))
        parts.read_all()
        return found

    monkeypatch.setattr(parts.logs, "get_many", search_then_read)
    assert outcomes(parts, "late")[0] == [Found.BEHIND]


@pytest.mark.parametrize("ids", ["photon", "opaque"])
def test_logs_of_many_servers_advance_together_by_event_time(logs, tmp_path, ids):
    """A log of few events covers as much time as one of many: neither is read far ahead of the other."""
    for name, count in (("busy", 4000), ("quiet", 400), ("also-busy", 2000)):
        step = 4_000_000_000 // count
        append(
            logs / f"{name}.jsonl",
            *[
                b'{"id":"%s","ts_us":%d,"payload":"%s"}'
                % ((b"10.0.0.1:1:%d" if ids == "photon" else b"q-%d") % (n * step), n * step, b"x" * 50)
                for n in range(count)
            ],
        )
    parts = Parts(tmp_path, logs_settings=Logs(scan_interval_s=0.01, chunk_bytes=4096))
    sizes = {path.name: path.stat().st_size for path in logs.iterdir()}
    read, apart, real = dict.fromkeys(sizes, 0.0), [], parts.reader._take

    def taken(chunks, oversized):
        for file, chunk in chunks:
            name = file.name.rpartition("/")[2]
            read[name] = chunk.end / sizes[name]
            apart.append(max(read.values()) - min(read.values()))
        return real(chunks, oversized)

    parts.reader._take = taken
    parts.read_all()
    one_chunk_of_the_quiet = 4096 / sizes["quiet.jsonl"]
    assert max(apart) <= 1.5 * one_chunk_of_the_quiet


def test_it_tells_how_far_all_logs_are_read(logs, tmp_path):
    for name in ("a", "b"):
        append(
            logs / f"{name}.jsonl",
            *[b'{"id":"%s%d","ts_us":%d}' % (name.encode(), n, n) for n in range(1, 301)],
        )
    append(logs / "timeless.jsonl", *map(line, (f"opaque-{n}" for n in range(300))))
    told = []
    parts = Parts(tmp_path, logs_settings=Logs(scan_interval_s=0.01, chunk_bytes=4096, line_bytes_max=4096))
    reader = parts.reader
    reader.on_read = told.append
    reader._stopping.is_set = lambda: bool(reader._group.bytes)  # a step is one text
    parts.read_all()
    assert told == sorted(told) and told[0] == 0 and told[-1] == ALL_READ
    assert {*range(1, 300)}.intersection(told)


def test_many_small_files_go_into_few_transactions(logs, tmp_path):
    for n in range(300):
        append(logs / f"{n:03d}.jsonl", line(f"10.0.0.1:{n}:5"), line(f"opaque-{n}"))
    parts = Parts(tmp_path)
    parts.reader.step()
    assert parts.map.counts.primary_events == 600
    parts.read_all()
    assert None not in parts.in_logs(*[f"opaque-{n}" for n in range(300)])
    assert None not in parts.in_logs(*[f"10.0.0.1:{n}:5" for n in range(300)])


def test_a_map_that_contradicts_a_log_is_told_with_the_mend(logs, tmp_path):
    append(logs / "a.jsonl", line("one"), line("two"))
    parts = Parts(tmp_path).read_all()
    told = []
    store = LogsEventStore(parts.map, make_format, notice=told.append)
    data = (logs / "a.jsonl").read_bytes()
    with open(logs / "a.jsonl", "r+b") as file:
        file.write(data.replace(b"one", b"uno"))
    assert store.get_many([pack("one")]) == ([None], [True])
    assert "a.jsonl does not hold what the log file map says" in told[0]
    assert str(tmp_path / "map") in told[0]
