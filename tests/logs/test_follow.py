"""Following growing, rotating, vanishing log files (paper 3.2)."""

import dataclasses
import gzip
import os

import pytest

from photon.core.settings import Logs
from photon.logs import files, follow, inventory
from tests.logs.following import Following, append


@pytest.fixture(params=["watched", "polled"])
def following(request, logs, tmp_path):
    def follow(*patterns, settings=Logs(), **options):
        settings = dataclasses.replace(settings, watch=request.param == "watched")
        patterns = patterns or [logs / "*.jsonl"]
        return Following(*patterns, spool=tmp_path / "spool", settings=settings, **options)

    return follow


def test_growth_is_found_by_poll_without_a_scan(logs, following):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    assert it.read() == {"a.jsonl": b"1\n"}
    append(logs / "a.jsonl", b"2\n3")
    assert it.read(scan=False) == {"a.jsonl": b"2\n"}
    append(logs / "a.jsonl", b"3\n")
    assert it.read(scan=False) == {"a.jsonl": b"33\n"}
    assert it.follower.caught_up


def test_a_line_that_ends_while_its_end_is_looked_for_is_read_at_the_next_poll(logs, following, monkeypatch):
    real = follow.read_chunk

    def read_chunk(*arguments):
        chunk = real(*arguments)
        if chunk is None and not late:
            late.append(True)
            append(logs / "a.jsonl", b"\n")
        return chunk

    late = []
    monkeypatch.setattr(follow, "read_chunk", read_chunk)
    append(logs / "a.jsonl", b"1")
    it = following()
    assert it.read(scans=1) == {}
    assert it.read(scan=False) == {"a.jsonl": b"1\n"}


@pytest.mark.parametrize("line_bytes_max", [1 << 20, 1 << 10], ids=["taken", "oversized"])
def test_a_long_line_that_grows_is_read_a_few_times_not_at_each_growth(
    logs, following, monkeypatch, line_bytes_max
):
    real, read = os.pread, []

    def pread(fd, length, offset):
        data = real(fd, length, offset)
        read.append(len(data))
        return data

    settings = Logs(chunk_bytes=1 << 12, line_bytes_max=line_bytes_max)
    append(logs / "a.jsonl", b"0\n")
    it = following(settings=settings)
    it.read()
    monkeypatch.setattr(os, "pread", pread)
    for _ in range(200):
        append(logs / "a.jsonl", b"x" * 1000)
        assert it.read(scan=False) == {}
    append(logs / "a.jsonl", b"\n1\n")
    assert it.read(scan=False)["a.jsonl"][-4:] == (b"1\n" if line_bytes_max < 2000 else b"x\n1\n")
    # Each look also reads the file's head, and the start of the line.
    assert sum(read) < 5 * 200_000 + 200 * 2 * (settings.chunk_bytes + 1024)


def test_what_is_unread_is_asked_of_the_disk_no_more_often_than_scans_do(logs, following, monkeypatch):
    for name in "ab":
        append(logs / f"{name}.jsonl", b"1\n" * 10)
    it = following()
    it.follower.scan_if_due()
    asked = []
    monkeypatch.setattr(follow, "file_size", lambda *file: asked.append(file) or files.file_size(*file))
    assert [it.follower.unread_bytes() for _ in range(100)] == [40] * 100
    assert len(asked) == 2
    assert it.follower.next_chunk() is not None
    assert it.follower.unread_bytes() == 20
    append(logs / "a.jsonl", b"2\n")
    it.clock.advance(Logs().scan_interval_s)
    assert it.follower.unread_bytes() == 22
    it.rest()
    assert it.follower.unread_bytes() == 0


def test_thousands_of_unread_files_are_not_compared_with_each_other(logs, following, monkeypatch):
    """Only so many are held; the rest asked each of those, whether it may go."""
    monkeypatch.setattr(inventory, "HELD_MAX", 20)
    for number in range(60):
        append(logs / f"{number}.jsonl", b"1\n")
    asked = []
    unread = inventory.Followed.unread.fget
    counting = property(lambda file: asked.append(file) or unread(file))
    monkeypatch.setattr(inventory.Followed, "unread", counting)
    it = following()
    it.keep(it.follower.scan_if_due())
    assert len(asked) <= 20
    assert it.rest() == {f"{number}.jsonl": b"1\n" for number in range(60)}
    it.clock.advance(1.0)
    append(logs / "new.jsonl", b"2\n")
    it.keep(it.follower.scan_if_due())
    it.follower.poll()
    (logs / "new.jsonl").unlink()
    assert it.read() == {"new.jsonl": b"2\n"}, "it is held in the place of one that was read"


def test_a_file_that_was_empty_when_found_is_polled_too(logs, following):
    (logs / "a.jsonl").touch()
    it = following()
    assert it.read() == {}
    append(logs / "a.jsonl", b"1\n")
    assert it.read(scan=False) == {"a.jsonl": b"1\n"}


def test_many_silent_files_are_each_polled_in_turn(logs, following):
    for number in range(200):
        append(logs / f"{number}.jsonl", b"1\n")
    it = following()
    it.read()
    it.clock.advance(5.0)
    append(logs / "150.jsonl", b"2\n")
    read = {}
    for _ in range(8):
        read |= it.read(scan=False)
    assert read == {"150.jsonl": b"2\n"}


def test_files_take_turns_chunk_by_chunk(logs, following):
    for name in "ab":
        append(logs / f"{name}.jsonl", (name.encode() * 999 + b"\n") * 50)
    it = following(settings=Logs(chunk_bytes=4096))
    it.follower.scan_if_due()
    turns = [os.path.basename(it.follower.next_chunk()[0].name) for _ in range(6)]
    assert turns == ["a.jsonl", "b.jsonl"] * 3


def test_reading_goes_on_where_it_stopped_and_not_where_it_was(logs, following):
    append(logs / "a.jsonl", b"1\n2\n")
    first = following()
    first.read()
    append(logs / "a.jsonl", b"3\n")
    second = following(states=first.states.values())
    assert second.read() == {"a.jsonl": b"3\n"}


def test_what_was_handed_out_but_not_advanced_is_read_again_after_a_restart(logs, following):
    append(logs / "a.jsonl", b"1\n2\n")
    first = following()
    first.keep(first.follower.scan_if_due())
    assert first.follower.next_chunk() is not None
    assert following(states=first.states.values()).read() == {"a.jsonl": b"1\n2\n"}


def test_a_renamed_file_goes_on_and_its_successor_starts_at_its_beginning(logs, following):
    append(logs / "a.jsonl", b"1\n2\n")
    it = following(logs / "*")
    it.read()
    append(logs / "a.jsonl", b"3\n")
    (logs / "a.jsonl").rename(logs / "a.jsonl.1")
    append(logs / "a.jsonl", b"longer than what was read of the first\n")
    # The name stands for another file before any scan could tell: nothing of it may be taken for the old one.
    assert it.read(scan=False) == {}
    assert not it.follower.caught_up
    assert it.read() == {"a.jsonl.1": b"3\n", "a.jsonl": b"longer than what was read of the first\n"}
    assert it.follower.caught_up
    assert it.notices == []


def test_a_log_that_is_rotated_right_after_it_was_listed_goes_on(logs, following, monkeypatch):
    append(logs / "a.jsonl", b"1\n2\n")
    it = following()
    it.read()
    append(logs / "a.jsonl", b"3\n")
    real = it.follower._finder.find

    def find():
        real()
        (logs / "a.jsonl").rename(logs / "b.jsonl")
        append(logs / "a.jsonl", b"longer than the first\n")

    with monkeypatch.context() as patch:
        patch.setattr(it.follower._finder, "find", find)
        assert it.read(scans=1) == {}
    assert it.read() == {"b.jsonl": b"3\n", "a.jsonl": b"longer than the first\n"}
    assert (it.notices, sorted(it.states)) == ([], [0, 1])


def test_a_file_renamed_out_of_the_pattern_is_read_to_its_end(logs, following):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    append(logs / "a.jsonl", b"2\n")
    (logs / "a.jsonl").rename(logs / "a.log.1")
    append(logs / "a.jsonl", b"new\n")
    assert it.read() == {"a.log.1": b"2\n", "a.jsonl": b"new\n"}
    assert it.states[0].path.endswith("a.log.1")
    assert not it.states[0].gone


def test_a_log_that_was_read_and_whose_inode_a_new_file_got_is_simply_gone(logs, following, monkeypatch):
    monkeypatch.setattr(inventory, "AWAY_S", 0.0)
    append(logs / "a.jsonl", b"1\n2\n")
    first = following()
    first.read()
    (logs / "a.jsonl").rename(logs / "b.jsonl")
    (logs / "b.jsonl").write_bytes(b"3\n")
    it = following(states=first.states.values())
    assert it.read() == {"b.jsonl": b"3\n"}
    assert it.notices == [f"{logs}/a.jsonl is gone; it was read to its end"]
    assert (it.states[0].gone, it.follower.take_lost()) == (True, 0)


def test_a_file_that_shrank_to_between_stored_and_read_is_not_read_on_in_the_middle(logs, following):
    append(logs / "a.jsonl", b"1\n2\n3\n")
    it = following()
    it.follower.scan_if_due()
    it.follower.next_chunk()
    (logs / "a.jsonl").write_bytes(b"44444")
    append(logs / "a.jsonl", b"\n")
    (logs / "a.jsonl").write_bytes(b"444\n")
    assert it.read() == {"a.jsonl": b"444\n"}


def test_a_deleted_file_is_gone_and_told(logs, following):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    (logs / "a.jsonl").unlink()
    assert it.read() == {}
    assert not it.states[0].gone, "an archive of it may turn up"
    assert it.read() == {}
    assert it.states[0].gone
    assert it.notices == [f"{logs}/a.jsonl is gone; it was read to its end"]
    assert it.follower.caught_up


def test_without_drain_a_partly_written_last_line_waits_and_is_told(logs, following):
    append(logs / "a.jsonl", b'1\n{"id":1}')
    it = following()
    assert it.read() == {"a.jsonl": b"1\n"}
    assert it.follower.caught_up
    assert it.follower.unended() == {f"{logs}/a.jsonl": 8}


def test_drain_takes_a_last_line_without_newline_if_it_is_an_object(logs, following):
    append(logs / "a.jsonl", b'1\n{"id":1}')
    append(logs / "b.jsonl", b'1\n{"id":')
    it = following(drain=True)
    assert it.read() == {"a.jsonl": b'1\n{"id":1}\n', "b.jsonl": b"1\n"}
    it.read()
    assert it.follower.caught_up
    assert it.follower.unended() == {f"{logs}/b.jsonl": 6}


def test_drain_ends_though_a_last_line_is_no_event(logs, following):
    append(logs / "a.jsonl", b"[" * 100_000)
    it = following(drain=True)
    it.read()
    assert it.rest() == {}
    it.follower.scan_if_due()
    assert it.follower.caught_up


def test_drain_is_caught_up_only_after_a_scan_that_finds_nothing_new(logs, following):
    append(logs / "a.jsonl", b"1\n")
    it = following(drain=True)
    assert it.read(scans=1) == {"a.jsonl": b"1\n"}
    append(logs / "b.jsonl", b"2\n")
    assert not it.follower.caught_up
    it.follower.scan_if_due()
    assert it.rest() == {"b.jsonl": b"2\n"}
    it.follower.scan_if_due()
    assert it.follower.caught_up


def test_nothing_is_caught_up_before_the_first_scan(logs, following):
    append(logs / "a.jsonl", b"1\n")
    it = following()
    assert it.follower.next_chunk() is None
    assert not it.follower.caught_up


def test_an_unreadable_file_is_told_once_and_does_not_keep_the_rest_from_ending(logs, following):
    (logs / "a.jsonl.gz").write_bytes(b"no gzip at all")
    append(logs / "b.jsonl", b"1\n")
    it = following(logs / "*", drain=True)
    assert it.read() == {"b.jsonl": b"1\n"}
    it.read()
    assert it.follower.caught_up
    assert len(it.notices) == 1
    assert "not a whole gzip file" in it.follower.unreadable[f"{logs}/a.jsonl.gz"]
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(b"2\n"))
    assert it.read() == {"a.jsonl.gz": b"2\n"}
    assert it.follower.unreadable == {}


def test_a_file_that_fails_to_be_read_is_tried_again_at_scans_until_it_works(logs, following, monkeypatch):
    import photon.logs.follow as module

    append(logs / "a.jsonl", b"1\n")
    real, allowed = module.read_chunk, []

    def read_chunk(*arguments):
        if not allowed:
            raise PermissionError(13, "Permission denied")
        return real(*arguments)

    monkeypatch.setattr(module, "read_chunk", read_chunk)
    monkeypatch.setattr(module, "_readable", lambda *_: bool(allowed))
    it = following(drain=True)
    for _ in range(3):
        assert it.read() == {}
    assert it.follower.caught_up
    assert it.follower.unreadable == {f"{logs}/a.jsonl": "Permission denied"}
    assert len(it.notices) == 1
    allowed.append(True)
    assert it.read() == {"a.jsonl": b"1\n"}
    assert it.follower.unreadable == {}


def test_an_unchanged_file_costs_no_reading_of_its_head(logs, following, monkeypatch):
    import photon.logs.inventory as module

    append(logs / "a.jsonl", b"1\n")
    it = following()
    it.read()
    it.read()
    monkeypatch.setattr(module, "goes_on", None)  # would raise if it were called
    assert it.read() == {}


BODY = b"".join(b"%06d %s\n" % (n, b"x" * 40) for n in range(100))


def cut_and_regrown(path):
    """Its head is as it was, and it is longer than before."""
    os.truncate(path, 48 * 40)
    append(path, b"".join(b"new %03d %s\n" % (n, b"y" * 30) for n in range(200)))
    return path.read_bytes()


def test_a_file_that_was_cut_and_has_regrown_while_nobody_read_it_is_read_from_its_start(logs, following):
    path = logs / "a.jsonl"
    append(path, BODY)
    first = following()
    assert first.read() == {"a.jsonl": BODY}
    now = cut_and_regrown(path)
    it = following(states=first.states.values())
    assert it.read() == {"a.jsonl": now}
    assert it.states[0].gone
    assert any("overwritten" in notice for notice in it.notices)


@pytest.mark.parametrize("restarted", [True, False])
def test_a_file_that_begins_and_ends_like_the_one_that_was_read_is_another_if_its_last_line_is(
    logs, following, restarted
):
    def records(numbers):
        """Of one width, behind a header; only the number tells them apart."""
        return b"h" * 1100 + b"\n" + b"".join(b"%08d" % n + b"x" * 3000 + b"\n" for n in numbers)

    path = logs / "a.jsonl"
    path.write_bytes(records(range(3)))
    it = following()
    it.read()
    if restarted:
        it = following(states=it.states.values())
        it.read()
    path.write_bytes(records(range(7, 12)))
    assert it.read() == {"a.jsonl": path.read_bytes()}


def overwritten(path):
    """With as much as there was, and it looks old."""
    path.write_bytes(BODY[::-1].lstrip() + b"\n")
    os.utime(path, (0, 0))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(b"4\n"), "shrank to 2 bytes"),
        (lambda path: path.write_bytes(b"more " + BODY), "overwritten"),
        (overwritten, "overwritten"),
        (cut_and_regrown, "overwritten"),
    ],
    ids=["shrunk", "overwritten by more", "overwritten by as much", "cut and regrown"],
)
def test_a_file_that_holds_something_else_by_now_is_another_and_read_from_its_start(
    logs, following, change, told, scan
):
    path = logs / "a.jsonl"
    append(path, BODY)
    it = following()
    it.read()
    change(path)
    assert scan or it.read(scan=False) == {}
    assert it.read() == {"a.jsonl": path.read_bytes()}
    assert (it.states[0].gone, it.states[1].gone) == (True, False)
    assert any(told in notice for notice in it.notices)


def test_a_file_that_is_renamed_while_its_tail_is_read_is_not_taken_for_another(logs, following, monkeypatch):
    import photon.logs.follow as module

    append(logs / "a.jsonl", BODY)
    first = following(logs / "*")
    first.read()
    it = following(logs / "*", states=first.states.values())
    append(logs / "a.jsonl", b"2\n")

    def renamed(*_):
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_at", renamed)
        assert it.read() == {"a.jsonl": b"2\n"}
    (logs / "a.jsonl").rename(logs / "b.jsonl")
    append(logs / "b.jsonl", b"3\n")
    assert it.read() == {"b.jsonl": b"3\n"}
    assert not it.states[0].gone


GONE = {
    "deleted": lambda log: log.unlink(),
    "moved out of sight": lambda log: log.rename(log.parent.parent / "elsewhere"),
    "linked to another": lambda log: (
        log.parent.with_name("other").write_bytes(b"new\n"),
        log.with_name("link").symlink_to(log.parent.with_name("other")),
        log.with_name("link").rename(log),
    ),
    "replaced": lambda log: (log.with_name("new").write_bytes(b"new\n"), log.with_name("new").rename(log)),
}


@pytest.mark.parametrize("gone", GONE)
def test_a_log_that_goes_while_it_is_read_is_read_to_its_end(logs, following, gone):
    settings = Logs(chunk_bytes=4096, line_bytes_max=4096)
    lines = b"".join(b'{"n": %04d}\n' % n for n in range(1000))
    if gone == "linked to another":
        (logs / "a.log").symlink_to(logs.with_name("first"))
    append(logs / "a.log", lines)
    it = following(logs / "*.log", settings=settings)
    it.keep(it.follower.scan_if_due())
    _, first = it.follower.next_chunk()
    it.keep([it.follower.advanced(0, first.end)])
    with open(logs / "a.log", "ab") as writer:  # it still has it open
        GONE[gone](logs / "a.log")
        read = first.data
        for late in (b"", b'{"late": 1}\n', b'{"later": '):
            writer.write(late)
            writer.flush()
            read += b"".join(it.read(scans=1).values())
        # Where it has a name still, somebody may write on.
        writer.write(b"2}" + b"\n" * (gone in ("moved out of sight", "linked to another")))
    for _ in range(3):
        read += b"".join(it.read().values())
    assert read.replace(b"new\n", b"") == lines + b'{"late": 1}\n{"later": 2}\n'
    assert it.follower.take_lost() == 0


def test_bytes_that_are_gone_before_they_were_read_are_counted(logs, following):
    settings = Logs(chunk_bytes=4096, line_bytes_max=4096)
    append(logs / "a.log", b"x" * 99 + b"\n")
    it = following(logs / "*.log", settings=settings)
    it.read()
    append(logs / "a.log", (b"y" * 99 + b"\n") * 100)
    it.keep(it.follower.scan_if_due())
    it.clock.advance(20.0)
    it.keep(it.follower.scan_if_due())
    (logs / "a.log").write_bytes(b"new\n")  # cut under its reader
    assert it.read() == {"a.log": b"new\n"}
    assert it.follower.take_lost() == 10_000
    assert it.notices[-1].endswith("a.log shrank to 4 bytes before it was read: 10000 bytes of it are lost")


@pytest.mark.parametrize("copy_has_all", [True, False])
def test_what_is_cut_when_its_copy_has_all_of_it_is_not_lost(logs, following, copy_has_all):
    """As `copytruncate` does it."""
    settings = Logs(chunk_bytes=4096, line_bytes_max=4096)
    log, copy = logs / "a.log", logs / "a.log.1"
    append(log, b"x" * 99 + b"\n")
    it = following(logs / "*", settings=settings)
    it.read()
    append(log, (b"y" * 99 + b"\n") * 100)
    copy.write_bytes(log.read_bytes()[: None if copy_has_all else -100])
    for _ in range(2):
        it.clock.advance(20.0)
        it.keep(it.follower.scan_if_due())
    log.write_bytes(b"new\n")
    read = it.read()
    assert read["a.log"] == b"new\n" and read["a.log.1"] == copy.read_bytes()
    assert it.follower.take_lost() == (0 if copy_has_all else 10_000)
    assert any("of it are lost" in told for told in it.notices) is not copy_has_all


def test_what_is_deleted_while_nobody_looks_is_counted_at_the_next_start(logs, following):
    settings = Logs(chunk_bytes=4096, line_bytes_max=4096)
    append(logs / "a.log", (b"y" * 99 + b"\n") * 100)
    it = following(logs / "*.log", settings=settings)
    it.keep(it.follower.scan_if_due())
    _, first = it.follower.next_chunk()
    it.keep([it.follower.advanced(0, first.end)])
    (logs / "a.log").unlink()
    again = following(logs / "*.log", settings=settings, states=it.states.values())
    assert again.read() == {}
    assert again.follower.take_lost() == 10_000 - first.end
    assert "deleted" in again.notices[0]
