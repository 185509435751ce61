"""Which log files there are, which of them is which, and their whole lines (paper 3.2)."""

import errno
import glob
import gzip
import os
from pathlib import Path

import pytest

from photon.core.errors import StorageError, UsageError
from photon.core.logfiles import (
    Chunk,
    FileState,
    check_patterns,
    fingerprint,
    read_chunk,
    read_unended_line,
    recognise,
    scan,
)

BIG = 1 << 20


def names(seen):
    return [os.path.basename(file.name) for file in seen]


def test_globs_directories_and_single_files_are_found_once_and_by_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(b"{}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.jsonl").write_bytes(b"{}\n")
    patterns = [f"{tmp_path}/*.jsonl", str(tmp_path), f"{tmp_path}/a.jsonl", f"{tmp_path}/**/*.jsonl"]
    assert names(scan(patterns, tmp_path / "spool")) == ["a.jsonl", "b.jsonl", "c.txt", "d.jsonl"]


def test_a_directory_with_wildcard_characters_in_its_name_is_a_directory(tmp_path):
    directory = tmp_path / "logs[1]"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(b"{}\n")
    assert names(scan([str(directory)], tmp_path / "spool")) == ["a.jsonl"]


def test_a_file_with_two_names_counts_once(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b"{}\n")
    os.link(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "b.jsonl")
    assert names(scan([f"{tmp_path}/*"], tmp_path / "spool")) == ["a.jsonl"]


@pytest.mark.parametrize(
    "pattern", ["**", "**/*", "**/*.x", "d*/**/*.x", "**/e/**", "**/.h/*", ".h/**", "**/e/*.x"]
)
def test_any_depth_finds_what_glob_finds(tmp_path, pattern):
    for name in ("a.x", "d/b.x", "d/e/c.x", "d/e/f/g.y", ".h/i.x", "d/.h/j.x", "d/.k.x", "e/l.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    whole = f"{tmp_path}/{pattern}"
    expected = sorted(name for name in glob.glob(whole, recursive=True) if os.path.isfile(name))
    assert [seen.name for seen in scan([whole], tmp_path / "spool")] == expected


def test_links_that_lead_in_circles_are_not_followed_round(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.x").touch()
    for name in ("p", "q", "d/r", "d/s"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "d" / "itself.x").symlink_to("itself.x")
    unreadable: list[str] = []
    seen = scan([f"{tmp_path}/**/*.x"], tmp_path / "spool", lambda name, _: unreadable.append(name))
    assert [file.name for file in seen] == [f"{tmp_path}/d/a.x"]
    assert unreadable == [f"{tmp_path}/d/itself.x"]


def test_a_glob_may_match_nothing_but_its_directory_must_be_there(tmp_path):
    assert scan([f"{tmp_path}/*.jsonl"], tmp_path / "spool") == []
    check_patterns([f"{tmp_path}/*.jsonl"])
    with pytest.raises(UsageError, match=r"no such directory.*missing"):
        check_patterns([f"{tmp_path}/missing/*.jsonl"])
    with pytest.raises(UsageError, match="no such file or directory"):
        check_patterns([f"{tmp_path}/missing.jsonl"])


def test_a_gz_file_is_unpacked_once_and_known_under_its_name(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(b'{"id":"x"}\n')
    (first,) = scan([f"{tmp_path}/*.gz"], tmp_path / "spool")
    assert first.name.endswith("a.jsonl.gz")
    assert Path(first.path).read_bytes() == b'{"id":"x"}\n'
    (tmp_path / "a.jsonl.gz").rename(tmp_path / "b.jsonl.gz")
    (second,) = scan([f"{tmp_path}/*.gz"], tmp_path / "spool")
    assert (second.path, second.inode) == (first.path, first.inode)


def test_what_a_killed_process_unpacked_in_part_does_not_stay(tmp_path, monkeypatch):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"{}\n"))

    def killed(_packed, plain, _length):
        plain.write(b"{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("photon.core.logfiles.shutil.copyfileobj", killed)
        patch.setattr(os, "getpid", lambda: 7)
        scan([f"{tmp_path}/*.gz"], tmp_path / "spool")
    (seen,) = scan([f"{tmp_path}/*.gz"], tmp_path / "spool")
    assert [str(path) for path in (tmp_path / "spool").iterdir()] == [seen.path]
    assert Path(seen.path).read_bytes() == b"{}\n"


def test_an_unpacked_copy_is_whole_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"{}\n" * 100))
    synced = []
    monkeypatch.setattr(
        "photon.core.logfiles.os.fsync",
        lambda fd: synced.append((os.fstat(fd).st_size, list((tmp_path / "spool").glob("*.log")))),
    )
    scan([f"{tmp_path}/*.gz"], tmp_path / "spool")
    assert synced == [(300, [])]


def test_a_broken_gz_file_is_told_and_the_others_are_found(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    (tmp_path / "b.jsonl").write_bytes(b"{}\n")
    for _ in range(2):
        told = {}
        seen = scan([f"{tmp_path}/*"], tmp_path / "spool", told.__setitem__)
        assert names(seen) == ["b.jsonl"]
        assert "not a whole gzip file" in told[f"{tmp_path}/a.jsonl.gz"]
    with pytest.raises(StorageError, match="replace it or leave it out"):
        scan([f"{tmp_path}/*"], tmp_path / "spool")
    assert not list((tmp_path / "spool").glob("*.partial"))


def test_a_partly_written_line_is_left_until_it_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    assert read_chunk(str(path), 0, BIG, BIG) == Chunk(0, 4, b"one\n")
    assert read_chunk(str(path), 4, BIG, BIG) is None
    assert read_unended_line(str(path), 4, BIG) == b"tw"
    path.write_bytes(b"one\ntwo\n")
    assert read_chunk(str(path), 4, BIG, BIG) == Chunk(4, 8, b"two\n")


@pytest.mark.parametrize("chunk_bytes", [4, 7, 64, BIG])
def test_chunks_are_whole_lines_whatever_the_chunk_size(tmp_path, chunk_bytes):
    lines = [b"x" * n + b"\n" for n in (0, 3, 2, 40, 1, 0, 9, 100)]
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    offset, read = 0, b""
    while (chunk := read_chunk(str(path), offset, chunk_bytes, BIG)) is not None:
        assert chunk.start == offset
        assert chunk.data.endswith(b"\n")
        offset, read = chunk.end, read + chunk.data
    assert read == b"".join(lines)


@pytest.mark.parametrize("chunk_bytes", [8, 64, BIG])
def test_a_line_above_the_bound_comes_as_oversized_whatever_the_chunk_size(tmp_path, chunk_bytes):
    path = tmp_path / "log"
    path.write_bytes(b"short\n" + b"x" * 100 + b"\nnext\n")
    assert read_chunk(str(path), 0, chunk_bytes, 32) == Chunk(0, 6, b"short\n")
    assert read_chunk(str(path), 6, chunk_bytes, 32) == Chunk(6, 107, b"", oversized=True)
    assert read_chunk(str(path), 107, chunk_bytes, 32) == Chunk(107, 112, b"next\n")


def test_an_oversized_line_that_is_not_whole_yet_waits(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)
    assert read_chunk(str(path), 0, 16, 32) is None


def test_another_file_under_the_same_name_is_not_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    status = path.stat()
    path.rename(tmp_path / "log.1")
    path.write_bytes(b"another file\n")
    for read in (
        lambda: read_chunk(str(path), 0, BIG, BIG, (status.st_dev, status.st_ino)),
        lambda: read_unended_line(str(path), 0, BIG, (status.st_dev, status.st_ino)),
        lambda: fingerprint(str(path), 4, (status.st_dev, status.st_ino)),
    ):
        with pytest.raises(OSError) as raised:
            read()
        assert raised.value.errno == errno.ESTALE


def test_a_file_is_recognised_by_inode_and_head_not_by_name(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    (seen,) = scan([str(path)], tmp_path / "spool")
    state = FileState(7, seen.path, seen.name, seen.device, seen.inode, 4, 4, fingerprint(seen.path, 4))
    known = {(seen.device, seen.inode): state}
    path.rename(tmp_path / "log.1")
    (renamed,) = scan([f"{tmp_path}/log.1"], tmp_path / "spool")
    assert recognise(renamed, known) is state
    with open(tmp_path / "log.1", "r+b") as file:
        file.write(b"ONE")
    assert recognise(renamed, known) is None
    os.truncate(tmp_path / "log.1", 2)
    (shrunk,) = scan([f"{tmp_path}/log.1"], tmp_path / "spool")
    assert recognise(shrunk, known) is None
