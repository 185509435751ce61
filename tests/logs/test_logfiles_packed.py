"""Compressed logs and their unpacked copies (paper 3.2)."""

import gzip
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from photon.core.errors import StorageError
from photon.logs import packed
from photon.logs.files import find
from photon.logs.packed import Spool, TruncatedError, is_packed

ZSTD = zstandard.ZstdCompressor()
PACKERS = {"gz": gzip.compress, "zst": ZSTD.compress}
BIG = 1 << 30


@pytest.fixture(params=sorted(PACKERS))
def kind(request):
    return request.param


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool", BIG)


def archive(path, content):
    path.write_bytes(content)
    (seen,) = find([str(path)])
    return seen


def copies(tmp_path):
    return sorted(path.name for path in (tmp_path / "spool").iterdir())


def test_an_archive_is_unpacked_once_and_known_under_its_name_and_source(tmp_path, spool, kind):
    seen = archive(tmp_path / f"a.jsonl.{kind}", PACKERS[kind](b'{"id":"x"}\n'))
    assert is_packed(seen.name)
    assert spool.copy(seen) is None
    first = spool.unpack(seen)
    assert (first.name, first.source) == (seen.name, (seen.device, seen.inode))
    assert Path(first.path).read_bytes() == b'{"id":"x"}\n'
    os.rename(seen.path, tmp_path / f"b.jsonl.{kind}")
    (renamed,) = find([f"{tmp_path}/*.{kind}"])
    second = spool.unpack(renamed)
    assert (second.path, second.inode, second.name) == (first.path, first.inode, renamed.name)


def test_all_members_of_an_archive_are_unpacked(tmp_path, spool, kind):
    parts = [b"one\n" * 50_000, b"", b"two\n" * 100_000, b"three\n"]
    seen = archive(tmp_path / f"a.{kind}", b"".join(map(PACKERS[kind], parts)))
    assert Path(spool.unpack(seen).path).read_bytes() == b"".join(parts)


def test_a_truncated_archive_is_told_from_a_damaged_one_and_both_are_tried_once(
    tmp_path, spool, kind, monkeypatch
):
    whole = PACKERS[kind](os.urandom(5000)) + PACKERS[kind](b"x" * 1000)
    for content, error in ((whole[:-9], TruncatedError), (b"no archive at all" * 9, StorageError)):
        seen = archive(tmp_path / f"a.{kind}", content)
        with pytest.raises(StorageError, match=r"not a whole .* file.*replace it or leave it out") as raised:
            spool.unpack(seen)
        assert type(raised.value) is error
        with monkeypatch.context() as patch:
            patch.setattr(packed, "unpacked", None)  # would fail in another way if it were called
            with pytest.raises(error):
                spool.unpack(seen)
    assert not list((tmp_path / "spool").glob("*.partial"))
    assert Path(spool.unpack(archive(tmp_path / f"a.{kind}", whole)).path).stat().st_size == 6000


def test_what_would_not_fit_into_the_spool_is_refused_until_there_is_room(tmp_path, kind):
    spool = Spool(tmp_path / "spool", 1000)
    small = archive(tmp_path / f"small.{kind}", PACKERS[kind](b"s" * 600))
    large = archive(tmp_path / f"large.{kind}", PACKERS[kind](b"l" * 700))
    kept = spool.unpack(small)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"'logs.spool_bytes_max' \(1000\)"):
            spool.unpack(large)
        assert copies(tmp_path) == [Path(kept.path).name]
    spool.remove(kept.path)
    assert spool.unpack(large).size == 700


def test_a_bomb_is_stopped_at_the_bound(tmp_path, kind):
    spool = Spool(tmp_path / "spool", 1 << 20)
    with pytest.raises(StorageError, match="spool_bytes_max"):
        spool.unpack(archive(tmp_path / f"a.{kind}", PACKERS[kind](b"\0" * (64 << 20))))
    assert copies(tmp_path) == []


def test_a_killed_unpacking_leaves_nothing_under_the_final_name_and_is_swept_away(
    tmp_path, spool, monkeypatch
):
    seen = archive(tmp_path / "a.gz", gzip.compress(b"{}\n"))
    synced = []

    def killed(fd):
        synced.append((os.fstat(fd).st_size, list((tmp_path / "spool").glob("*.log"))))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr("photon.logs.packed.os.fsync", killed)
        spool.unpack(seen)
    assert synced == [(3, [])]  # all of it is on disk before it has its name
    assert len(copies(tmp_path)) == 1
    copy = spool.unpack(seen)
    spool.sweep({spool.version(seen)}, set())
    assert copies(tmp_path) == [Path(copy.path).name]


def test_several_processes_that_unpack_at_once_read_the_same_copy(tmp_path, monkeypatch):
    seen = archive(tmp_path / "a.gz", gzip.compress(b"x" * 100_000))
    both, found = threading.Barrier(2), []
    real = os.link

    def link(*paths):
        both.wait(20)
        real(*paths)

    monkeypatch.setattr("photon.logs.packed.os.link", link)
    spools = [Spool(tmp_path / "spool", BIG) for _ in range(2)]
    threads = [threading.Thread(target=lambda s=s: found.append(s.unpack(seen))) for s in spools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The other's link to the copy changes that time alone.
    assert replace(found[0], changed_ns=0) == replace(found[1], changed_ns=0)
    assert len(copies(tmp_path)) == 1


def test_copies_of_archives_that_are_gone_are_swept_away_unless_they_are_held(tmp_path, spool):
    paths = [
        spool.unpack(archive(tmp_path / f"{name}.gz", gzip.compress(name.encode()))).path for name in "abc"
    ]
    (present,) = find([f"{tmp_path}/a.gz"])
    spool.sweep({spool.version(present)}, {paths[1]})
    assert [os.path.exists(path) for path in paths] == [True, True, False]
