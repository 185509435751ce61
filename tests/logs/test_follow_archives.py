"""Logs that are compressed, before or while they are followed (paper 3.2)."""

import bz2
import gzip
import lzma
import os
import threading
import time

import pytest
import zstandard

from photon.core.clock import SystemClock
from photon.core.settings import Logs
from photon.logs import inventory, packed
from photon.logs.files import find
from photon.logs.follow import LogFollower
from photon.logs.inventory import read_by_others
from tests.logs.following import Following, append

LINES = [b'{"id":"%d","text":"%s"}\n' % (n, b"x" * (n % 90)) for n in range(200)]
TEXT = b"".join(LINES)
ZSTD = zstandard.ZstdCompressor()


@pytest.fixture(params=[True, False], ids=["copies-kept", "copies-deleted"])
def following(request, logs, tmp_path):
    def follow(pattern="*.jsonl*", **options):
        return Following(logs / pattern, spool=tmp_path / "spool", keep_copies=request.param, **options)

    return follow


def copies(tmp_path):
    return sorted((tmp_path / "spool").glob("*.log"))


def compress(path, old=None):
    """As logrotate does: the archive is there whole before the plain file is deleted."""
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes() if old is None else old))
    os.utime(packed, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    return packed


def test_archives_of_both_kinds_are_read_and_their_last_lines_need_no_newline(logs, following):
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(b"1\n") + gzip.compress(b'{"id":2}'))
    (logs / "b.jsonl.zst").write_bytes(ZSTD.compress(b"3\n") + ZSTD.compress(b"4\n"))
    assert following().read() == {"a.jsonl.gz": b'1\n{"id":2}\n', "b.jsonl.zst": b"3\n4\n"}


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("a.jsonl.xz", lzma.compress(TEXT), "compressed by xz, which Photon does not read"),
        ("a.jsonl.bz2", bz2.compress(TEXT), "compressed by bzip2, which Photon does not read"),
        ("a.jsonl.zip", b"PK\3\4" + TEXT, "compressed by zip, which Photon does not read"),
        ("a.jsonl.lz4", b"\4\x22\x4d\x18" + TEXT, "compressed by lz4, which Photon does not read"),
        ("a.jsonl.GZ", gzip.compress(TEXT), "its name must end in .gz"),
        ("a.jsonl.zstd", ZSTD.compress(TEXT), "its name must end in .zst"),
        ("a.jsonl-parquet", b"PAR1" + TEXT, "by a pattern that ends in .parquet"),
    ],
)
def test_what_is_compressed_otherwise_is_no_text_but_unreadable_and_told_once(
    logs, following, name, data, reason
):
    (logs / name).write_bytes(data)
    append(logs / "b.jsonl")
    it = following(drain=True)
    assert it.read(scans=3) == {"b.jsonl": b"x\n"}
    assert it.follower.caught_up
    assert reason in it.follower.unreadable[f"{logs}/{name}"]
    assert len(it.notices) == 1
    (logs / name).write_bytes(b"1\n")
    assert it.read(scans=3) == {name: b"1\n"}
    assert it.follower.unreadable == {}


@pytest.mark.parametrize("size", [3, 40, len(LINES)])
def test_a_log_that_is_renamed_and_compressed_goes_on_where_it_was(logs, following, size):
    path = logs / "a.jsonl"
    path.write_bytes(b"".join(LINES[:size]))
    it = following()
    assert it.read() == {"a.jsonl": b"".join(LINES[:size])}
    append(path, b"unread\n")
    path.rename(logs / "a.jsonl.1")
    compress(logs / "a.jsonl.1")
    (logs / "a.jsonl.1").unlink()
    append(path, b"new\n")
    assert it.read() == {"a.jsonl.1.gz": b"unread\n", "a.jsonl": b"new\n"}
    assert it.notices == []
    assert sorted(it.states) == [0, 1]
    assert not it.states[0].gone


def test_a_log_that_is_compressed_while_nobody_reads_goes_on_where_it_was(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    first = following()
    first.read()
    append(path, b"unread\n")
    compress(path)
    path.unlink()
    assert following(states=first.states.values()).read() == {"a.jsonl.gz": b"unread\n"}


def test_while_both_are_there_the_archive_is_not_read_and_then_takes_over(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.read()
    compress(path)
    assert it.read() == {}
    assert it.notices == [f"{path}.gz holds what {path} holds and is not read again"]
    path.unlink()
    assert it.read() == {}
    append(path, b"another\n")
    assert it.read() == {"a.jsonl": b"another\n"}
    assert (it.states[0].name, it.states[0].gone) == (f"{path}.gz", False)


@pytest.mark.parametrize("both", [True, False])
def test_a_log_that_is_compressed_before_any_of_it_was_read_is_read_once(logs, following, both):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.keep(it.follower.scan_if_due())
    append(path, b"late\n")
    packed = compress(path)
    if both:
        it.clock.advance(20.0)
        it.keep(it.follower.scan_if_due())
    path.unlink()
    assert it.read(scans=4) == {packed.name: TEXT + b"late\n"}
    assert (it.follower.take_lost(), sorted(it.states)) == (0, [0])


def test_an_archive_with_the_same_head_but_other_lines_is_read_from_its_start(logs, following):
    (logs / "a.jsonl").write_bytes(TEXT)
    it = following()
    it.read()
    (logs / "a.jsonl").unlink()
    other = TEXT[:-20] + b"_" * 19 + b"\n"
    (logs / "b.jsonl.gz").write_bytes(gzip.compress(other))
    assert it.read() == {"b.jsonl.gz": other}
    it.read()
    assert it.states[0].gone


def test_a_log_that_is_copied_and_truncated_is_not_read_again_under_its_copys_name(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.read()
    append(path, b"unread\n")
    (logs / "a.jsonl.1").write_bytes(path.read_bytes())
    path.write_bytes(b"new\n")
    assert it.read() == {"a.jsonl.1": b"unread\n", "a.jsonl": b"new\n"}


def take_away(path):
    """What it held, as an archive that has yet to get its name; another log may get the inode."""
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    return packed


def rewrite(path):
    """The same, of a log whose inode another log has got."""
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(b"new\n")
    return packed


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize(("vanish", "new"), [(take_away, b""), (rewrite, b"new\n")])
def test_an_archive_that_turns_up_after_its_log_was_missed_goes_on_where_that_was(
    logs, following, vanish, new, restarts
):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.read()
    append(path, b'{"id":"unread"}\n{"id":"torn')
    packed = vanish(path)
    it = following(states=it.states.values())  # else the log would be held, and read to its end
    assert b"".join(it.read(scans=1).values()) == new
    if restarts > 1:
        it = following(states=it.states.values())
        assert it.read(scans=1) == {}
    it.clock.advance(-15.0)  # of the twenty seconds to the next scan
    (logs / "a.jsonl.2.gz").write_bytes(packed)
    assert it.read() == {"a.jsonl.2.gz": b'{"id":"unread"}\n'}
    assert (it.follower.take_lost(), it.notices) == (0, [])
    assert (it.states[0].name, it.states[0].gone) == (f"{logs}/a.jsonl.2.gz", False)
    append(path, b"more\n")
    assert it.read() == {"a.jsonl": b"more\n"}


def test_an_archive_of_a_log_that_was_read_to_its_end_after_it_was_deleted_is_not_read_again(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.read()
    append(path, b"late\n")
    packed = take_away(path)
    assert it.read(scans=2) == {"a.jsonl": b"late\n"}
    it.clock.advance(-15.0)
    (logs / "a.jsonl.gz").write_bytes(packed)
    assert it.read() == {}
    assert (it.notices, sorted(it.states)) == ([], [0])


def test_the_last_line_of_a_log_needs_no_newline_once_it_is_in_an_archive(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT + b'{"id":"last"}')
    it = following()
    it.read()
    assert it.follower.unended() == {str(path): 13}
    compress(path)
    path.unlink()
    assert it.read() == {"a.jsonl.gz": b'{"id":"last"}\n'}


def test_logs_of_which_none_was_read_when_they_were_packed_are_not_told_to_be_lost(logs, following):
    """Nor where nobody saw it: what they held can't be compared any more."""
    for name, text in (("a.jsonl", b"0\n"), ("a.jsonl.1", TEXT), ("b.jsonl", b"2\n" + TEXT)):
        (logs / name).write_bytes(text)
    first = following()
    first.keep(first.follower.scan_if_due())
    for name, now in (("a.jsonl.1", "a.jsonl.2.gz"), ("a.jsonl", "a.jsonl.3.gz")):
        (logs / now).write_bytes(gzip.compress((logs / name).read_bytes() + b"late\n"))
        (logs / name).unlink()
    (logs / "b.jsonl").unlink()
    it = following(states=first.states.values())
    assert it.read(scans=4) == {"a.jsonl.2.gz": TEXT + b"late\n", "a.jsonl.3.gz": b"0\nlate\n"}
    assert it.follower.take_lost() == len(TEXT) + 2, "that of the one without an archive"


def test_an_archive_that_others_have_read_is_not_taken_for_the_next_one_of_its_log(logs, following):
    """Of what `photon millwheel history` has read, neither head nor tail is known."""
    path = logs / "a.jsonl.7.gz"
    path.write_bytes(gzip.compress(TEXT[:100]))
    (seen,) = find([str(logs / "*")], lambda *_: None)
    path.rename(logs.parent / "away")
    (logs / "a.jsonl.1.gz").write_bytes(gzip.compress(TEXT))
    it = following(states=[read_by_others(seen, 100, 1)])
    assert it.read(scans=4) == {"a.jsonl.1.gz": TEXT}


def test_an_archive_that_got_the_inode_of_one_that_others_have_read_is_read_from_its_start(logs, following):
    path = logs / "a.jsonl.7.gz"
    path.write_bytes(gzip.compress(TEXT[:100]))
    (seen,) = find([str(logs / "*")], lambda *_: None)
    path.write_bytes(gzip.compress(TEXT))
    it = following(states=[read_by_others(seen, 100, 1)])
    assert it.read(scans=4) == {"a.jsonl.7.gz": TEXT}
    assert it.follower.take_lost() == 0


def test_what_a_log_held_unread_is_lost_when_no_archive_has_turned_up(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    first = following(settings=Logs(chunk_bytes=4096))
    first.keep(first.follower.scan_if_due())
    _, chunk = first.follower.next_chunk()
    first.keep([first.follower.advanced(0, chunk.end)])
    path.unlink()
    it = following(states=first.states.values())
    assert it.read(scans=1) == {}
    assert (it.follower.take_lost(), it.follower.caught_up, it.follower.ends()) == (0, False, None)
    assert [state.number for state in it.follower.behind()] == [0]
    (logs / "b.jsonl.gz").write_bytes(gzip.compress(TEXT[: chunk.end]))  # another, that merely begins alike
    assert it.read(scans=1) == {"b.jsonl.gz": TEXT[: chunk.end]}
    assert it.follower.take_lost() == len(TEXT) - chunk.end
    assert it.follower.caught_up
    assert it.states[0].gone


def test_of_two_logs_that_begin_alike_an_archive_is_the_one_that_it_holds_all_of(logs, following):
    for name, size in ("a", 50), ("b", 200):
        (logs / f"{name}.jsonl").write_bytes(b"".join(LINES[:size]))
    it = following()
    it.read()
    packed = [take_away(logs / f"{name}.jsonl") for name in "ab"]
    it = following(states=it.states.values())
    assert it.read(scans=1) == {}
    it.clock.advance(-15.0)
    (logs / "b.jsonl.gz").write_bytes(packed[1])
    (logs / "c.jsonl.gz").write_bytes(packed[0])
    assert it.read() == {}
    assert [state.name[-10:] for state in it.states.values()] == ["c.jsonl.gz", "b.jsonl.gz"]


def test_logs_that_are_away_are_waited_for_in_bounded_number_the_latest_longest(logs, following, monkeypatch):
    monkeypatch.setattr(inventory, "AWAY_MAX", 2)
    packed = []
    it = following()
    for n in range(4):
        path = logs / f"{n}.jsonl"
        path.write_bytes(b"%d" % n + TEXT)
    it.read()
    for n in range(4):
        packed.append(take_away(logs / f"{n}.jsonl"))
    it = following(states=it.states.values())
    it.read(scans=1)
    assert [state.gone for state in it.states.values()] == [True, True, False, False]
    (logs / "3.jsonl.gz").write_bytes(packed[3])
    it.clock.advance(-15.0)
    assert it.read() == {}


def test_an_archive_that_got_another_member_is_read_on(logs, following, tmp_path):
    path = logs / "a.jsonl.gz"
    path.write_bytes(gzip.compress(TEXT))
    it = following()
    assert it.read() == {"a.jsonl.gz": TEXT}
    append(path, gzip.compress(b"more\n"))
    assert it.read() == {"a.jsonl.gz": b"more\n"}
    assert sorted(it.states) == [0]
    assert len(copies(tmp_path)) <= 1


def test_an_archive_under_another_name_or_after_a_restart_is_not_read_again(logs, following):
    path = logs / "a.jsonl.gz"
    path.write_bytes(gzip.compress(TEXT))
    it = following()
    it.read()
    path.rename(logs / "b.jsonl.gz")
    assert it.read() == {}
    assert it.states[0].name == f"{logs}/b.jsonl.gz"
    assert following(states=it.states.values()).read() == {}
    assert it.notices == []


def test_a_copy_that_is_not_to_be_kept_is_deleted_once_it_is_recorded(logs, tmp_path):
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(TEXT))
    it = Following(logs / "*", spool=tmp_path / "spool", keep_copies=False)
    it.follower.scan_if_due()
    state, chunk = it.follower.next_chunk()
    it.read()
    assert len(copies(tmp_path)) == 1  # nothing of it is recorded
    it.keep([it.follower.advanced(state.number, chunk.end)])
    assert it.read() == {}
    assert copies(tmp_path) == []
    again = Following(logs / "*", spool=tmp_path / "spool", keep_copies=False, states=it.states.values())
    assert again.read() == {}
    assert again.follower.caught_up
    assert copies(tmp_path) == []


def test_an_archive_that_is_deleted_is_read_to_its_end_and_then_its_copy_is_deleted(
    logs, following, tmp_path
):
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(TEXT))
    it = following(settings=Logs(chunk_bytes=1024))
    it.follower.scan_if_due()
    state, chunk = it.follower.next_chunk()
    it.keep([it.follower.advanced(state.number, chunk.end)])
    (logs / "a.jsonl.gz").unlink()
    rest = b"".join(it.rest().values())
    assert chunk.data + rest + b"".join(it.read().values()) == TEXT
    it.read()
    assert it.states[0].gone
    assert copies(tmp_path) == []


def test_a_copy_that_was_taken_away_is_made_again_and_read_on(logs, following, tmp_path):
    (logs / "a.jsonl.gz").write_bytes(gzip.compress(TEXT))
    it = following(settings=Logs(chunk_bytes=1024))
    it.follower.scan_if_due()
    state, chunk = it.follower.next_chunk()
    it.keep([it.follower.advanced(state.number, chunk.end)])
    copies(tmp_path)[0].unlink()
    assert chunk.data + b"".join(it.read().values()) == TEXT
    assert sorted(it.states) == [0]


def test_an_archive_that_is_still_being_written_is_waited_for_without_a_word(logs, tmp_path):
    clock, notices = SystemClock(), []
    whole = gzip.compress(TEXT)
    path = logs / "a.jsonl.gz"
    path.write_bytes(whole[:-9])
    settings = Logs(scan_interval_s=0.001)
    follower = LogFollower([str(logs)], tmp_path / "spool", settings, clock, notice=notices.append)
    follower.scan_if_due()
    assert follower.next_chunk() is None
    assert not follower.caught_up
    assert follower.unreadable == {}
    append(path, whole[-9:])
    deadline = time.monotonic() + 60
    while not follower.caught_up:
        follower.scan_if_due()
        while (found := follower.next_chunk()) is not None:
            assert found[1].data == TEXT
        assert time.monotonic() < deadline
    assert notices == []


def test_a_truncated_archive_that_nobody_writes_is_told(logs, following):
    path = logs / "a.jsonl.gz"
    path.write_bytes(gzip.compress(TEXT)[:-9])
    os.utime(path, (0, 0))
    it = following()
    assert it.read() == {}
    assert "not a whole gzip file" in it.follower.unreadable[str(path)]
    assert len(it.notices) == 1


def test_an_archive_that_is_empty_as_yet_is_no_log_of_its_own(logs, following):
    path = logs / "a.jsonl"
    path.write_bytes(TEXT)
    it = following()
    it.read()
    packed = logs / "a.jsonl.gz"
    packed.touch()
    assert it.read() == {}
    packed.write_bytes(gzip.compress(TEXT))
    path.unlink()
    assert it.read() == {}
    assert sorted(it.states) == [0]


@pytest.mark.parametrize("start", [True, False])
def test_archives_that_are_renamed_right_after_they_were_listed_are_not_taken_for_each_other(
    logs, following, monkeypatch, start
):
    texts = [b"%d\n" % n + TEXT for n in range(2)]
    paths = [logs / f"a.jsonl.{n}.gz" for n in range(3)]
    for path, text in zip(paths, texts, strict=False):
        path.write_bytes(gzip.compress(text))
    it = following()
    if not start:
        assert list(it.read().values()) == texts
    real = it.follower._finder.find

    def find():
        real()
        for n in (1, 0):
            paths[n].rename(paths[n + 1])

    with monkeypatch.context() as patch:
        patch.setattr(it.follower._finder, "find", find)
        read = it.read(scans=1)
    assert sorted((read | it.read()).values()) == (texts if start else [])
    assert (it.notices, len(it.states)) == ([], 2)


def test_an_archive_for_which_there_is_no_room_is_told_and_read_when_there_is(logs, tmp_path):
    for name in "ab":
        (logs / f"{name}.jsonl.gz").write_bytes(gzip.compress(name.encode() * 600 + b"\n"))
    settings = Logs(spool_bytes_max=1 << 20)
    assert settings.spool_bytes_max == 1 << 20
    it = Following(logs / "*", spool=tmp_path / "spool", settings=settings, keep_copies=False)
    it.follower._inventory._spool._bytes_max = 1000  # less than the settings allow
    assert it.read(scans=1) == {"a.jsonl.gz": b"a" * 600 + b"\n"}
    assert "spool_bytes_max" in it.follower.unreadable[f"{logs}/b.jsonl.gz"]
    assert it.read() == {"b.jsonl.gz": b"b" * 600 + b"\n"}
    assert it.follower.unreadable == {}


def read_until_caught_up(follower):
    read, deadline = {}, time.monotonic() + 60
    while True:
        follower.scan_if_due()
        while (found := follower.next_chunk()) is not None:
            name = os.path.basename(found[0].name)
            read[name] = read.get(name, b"") + found[1].data
        if follower.caught_up:
            return read
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("drain", [True, False])
def test_other_logs_are_read_while_a_large_archive_is_unpacked(logs, tmp_path, monkeypatch, drain):
    large = b"".join(os.urandom(512).hex().encode() + b"\n" for _ in range(3000))
    for name in "ab":
        (logs / f"{name}.jsonl.gz").write_bytes(gzip.compress(large))
        os.utime(logs / f"{name}.jsonl.gz", (0, 0))
    append(logs / "c.jsonl", b"1\n")
    go, woken, real = threading.Event(), threading.Event(), packed.unpacked
    monkeypatch.setattr(packed, "unpacked", lambda *archive: go.wait(60) and real(*archive))
    settings = Logs(scan_interval_s=1000)  # no scan but the one that is due to the end of unpacking
    follower = LogFollower(
        [str(logs)], tmp_path / "spool", settings, SystemClock(), drain=drain, wake=woken.set
    )
    follower.scan_if_due()
    assert follower.next_chunk()[1].data == b"1\n"
    assert follower.next_chunk() is None
    assert not follower.caught_up
    assert not woken.is_set()
    go.set()
    assert woken.wait(60)
    assert read_until_caught_up(follower) == {"a.jsonl.gz": large, "b.jsonl.gz": large}


def test_a_large_archive_that_is_damaged_is_told_and_does_not_hold_up_the_end(logs, tmp_path):
    damaged = bytearray(gzip.compress(os.urandom(3 << 20)))
    damaged[1 << 20] ^= 255
    (logs / "a.jsonl.gz").write_bytes(damaged)
    append(logs / "c.jsonl", b"1\n")
    notices: list[str] = []
    follower = LogFollower(
        [str(logs)], tmp_path / "spool", Logs(), SystemClock(), drain=True, notice=notices.append
    )
    assert read_until_caught_up(follower) == {"c.jsonl": b"1\n"}
    assert list(follower.unreadable) == [f"{logs}/a.jsonl.gz"]
    assert len(notices) == 1
