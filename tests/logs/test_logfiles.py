"""Which log files there are, which of them is which, and their whole lines (paper 3.2)."""

import dataclasses
import errno
import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from photon.cluster.preflight import check_not_matched
from photon.core.errors import UsageError
from photon.logs.files import (
    Chunk,
    FileState,
    check_patterns,
    digest,
    find,
    matching_files,
    may_match,
    named_files,
    pack_file_state,
    read_at,
    read_chunk,
    same_content,
    unpack_file_state,
    whole_lines,
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
    assert names(find(patterns)) == ["a.jsonl", "b.jsonl", "c.txt", "d.jsonl"]


def test_a_directory_with_wildcard_characters_in_its_name_is_a_directory(tmp_path):
    directory = tmp_path / "logs[1]"
    directory.mkdir()
    (directory / "a.jsonl").write_bytes(b"{}\n")
    assert names(find([str(directory)])) == ["a.jsonl"]


def test_a_file_with_two_names_counts_once(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(b"{}\n")
    os.link(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "b.jsonl")
    assert names(find([f"{tmp_path}/*"])) == ["a.jsonl"]


@pytest.mark.parametrize(
    "pattern", ["**", "**/*", "**/*.x", "d*/**/*.x", "**/e/**", "**/.h/*", ".h/**", "**/e/*.x"]
)
def test_any_depth_finds_what_glob_finds(tmp_path, pattern):
    for name in ("a.x", "d/b.x", "d/e/c.x", "d/e/f/g.y", ".h/i.x", "d/.h/j.x", "d/.k.x", "e/l.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    whole = f"{tmp_path}/{pattern}"
    expected = sorted(name for name in glob.glob(whole, recursive=True) if os.path.isfile(name))
    assert [seen.name for seen in find([whole])] == expected


def test_links_that_lead_in_circles_are_not_followed_round(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.x").touch()
    for name in ("p", "q", "d/r", "d/s"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "d" / "itself.x").symlink_to("itself.x")
    unreadable: list[str] = []
    seen = find([f"{tmp_path}/**/*.x"], lambda name, _: unreadable.append(name))
    assert [file.name for file in seen] == [f"{tmp_path}/d/a.x"]
    assert unreadable == [f"{tmp_path}/d/itself.x"]


AS_ANYBODY = """
import json, os, sys
from photon.logs.files import find
if not os.geteuid():
    os.setgroups([])
    os.setresgid(*[65534] * 3)
    os.setresuid(*[65534] * 3)
told = {}
seen = find(sys.argv[1:], told.__setitem__)
print(json.dumps([[file.name for file in seen], told]))
"""


@pytest.mark.parametrize(
    ("pattern", "seen", "closed"),
    [
        ("*/a.x", ["open/a.x"], ["closed", "half", "link"]),
        ("*/*", ["open/a.x"], ["closed", "half", "half/sub", "link"]),
        ("**", ["./open/a.x"], ["./closed", "./half", "./link"]),
        ("half/**/a.x", [], ["half"]),
        ("closed", [], ["closed"]),
        ("closed/a.x", [], ["closed"]),
        ("closed/in/*.x", [], ["closed/in"]),
        ("link/*.x", [], ["link"]),
        ("open/*", ["open/a.x"], []),
    ],
)
def test_a_directory_that_can_not_be_looked_into_is_told_of(tmp_path, pattern, seen, closed):
    """By who is not root: that one may list `half`, and enter nothing in it."""
    for name in ("open", "closed/in", "half/sub", "lost+found"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.x").touch()
    (tmp_path / "link").symlink_to("closed/in")
    for name, of_root, of_user in (("closed", 0o700, 0), ("half", 0o744, 0o400), ("lost+found", 0o700, 0)):
        (tmp_path / name).chmod(of_user if os.geteuid() else of_root)
    tmp_path.chmod(0o755)
    command = [sys.executable, "-c", AS_ANYBODY, pattern]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    found, told = json.loads(said)
    assert (found, sorted(told)) == (seen, closed)
    assert all(f"{name} cannot be read (Permission denied)" in why for name, why in told.items())


def test_a_glob_may_match_nothing_but_its_directory_must_be_there(tmp_path):
    assert find([f"{tmp_path}/*.jsonl"]) == []
    check_patterns([f"{tmp_path}/*.jsonl"])
    with pytest.raises(UsageError, match=r"no such directory.*missing"):
        check_patterns([f"{tmp_path}/missing/*.jsonl"])
    with pytest.raises(UsageError, match=r"standard input \(-\) is read by photon join alone.*name that"):
        check_patterns(["-"])
    with pytest.raises(UsageError, match="a pattern is empty"):
        check_patterns([f"{tmp_path}/*.jsonl", ""])
    with pytest.raises(UsageError, match="no such file or directory"):
        check_patterns([f"{tmp_path}/missing.jsonl"])


def test_a_partly_written_line_is_left_until_it_is_whole(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    assert read_chunk(str(path), 0, BIG, BIG) == Chunk(0, 4, b"one\n")
    assert read_chunk(str(path), 4, BIG, BIG) is None
    assert read_at(str(path), 4, BIG) == b"tw"
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
    assert read_chunk(str(path), 6, chunk_bytes, 101) == Chunk(
        6, 107, b"x" * 100 + b"\n", more=chunk_bytes == BIG
    )
    assert read_chunk(str(path), 6, chunk_bytes, 100) == Chunk(6, 107, b"", oversized=True)


@pytest.mark.parametrize("hole", [33, 64, 1000])
def test_behind_a_hole_longer_than_the_bound_the_next_line_is_whole(tmp_path, hole):
    """As a cut leaves it under a writer that goes on where it was."""
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + bytes(hole) + b"two\nthree\n")
    at = 4 + hole
    assert read_chunk(str(path), 4, 16, 32) == Chunk(at, at + 4, b"two\n")
    path.write_bytes(b"one\n" + bytes(hole))
    assert read_chunk(str(path), 4, 16, 32) is None
    path.write_bytes(b"one\n" + bytes(hole) + b"x" * 40 + b"\n")
    assert read_chunk(str(path), 4, 16, 32) == Chunk(at, at + 41, b"", oversized=True)


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
        lambda: read_at(str(path), 0, BIG, (status.st_dev, status.st_ino)),
    ):
        with pytest.raises(OSError) as raised:
            read()
        assert raised.value.errno == errno.ESTALE


@pytest.mark.parametrize("content", [b"on", b"two\nand more\n"], ids=["cut", "overwritten"])
def test_a_file_that_is_not_what_was_read_any_more_is_not_read_on(tmp_path, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(OSError) as raised:
        read_chunk(str(path), 4, BIG, BIG, head=(2, digest(b"on")))
    assert raised.value.errno == errno.ESTALE


def test_files_that_end_alike_are_not_one(tmp_path):
    (tmp_path / "log").write_bytes(b"two\n" + b"x" * 2000)
    (seen,) = find([f"{tmp_path}/log"])
    state = FileState(0, "", "", 0, 0, 2004, 4, digest(b"one\n"), tail_at=2004, tail=digest(b"x" * 1024))
    assert not same_content(seen, state)
    assert same_content(seen, dataclasses.replace(state, head=digest(b"two\n")))


def test_another_file_with_the_same_head_is_another_file_unless_what_was_read_last_agrees(tmp_path):
    head, path = b"x" * 2000, tmp_path / "log"
    path.write_bytes(head + b"one\n")
    (seen,) = find([str(path)])
    state = FileState(0, seen.path, seen.name, seen.device, seen.inode, 2004, 1024, digest(head[:1024]))
    assert not same_content(seen, state)  # nothing is known of its end
    state = dataclasses.replace(state, tail_at=2004, tail=digest(path.read_bytes()[980:2004]))
    for rest, same in ((b"one\nmore\n", True), (b"one\n", True), (b"two\n", False), (b"one", False)):
        (tmp_path / "other").write_bytes(head + rest)
        (other,) = find([f"{tmp_path}/other"])
        assert same_content(other, state) is same


def test_a_state_comes_back_from_the_disk_as_it_was(tmp_path):
    state = FileState(7, "/a/\udcff", "/b", 1, 2, 3, 4, b"h", True, (5, 6), 7, b"t", "version", 8)
    assert unpack_file_state(pack_file_state(state)) == state


def test_the_directories_in_which_files_may_appear_are_named(tmp_path):
    for name in ("a/x/1.log", "a/y/2.log", "b/3.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    directories: set[str] = set()
    patterns = [f"{tmp_path}/a/*/*.log", f"{tmp_path}/**/*.no", f"{tmp_path}/c/*.log", f"{tmp_path}/b/3.log"]
    assert names(find(patterns, directories=directories)) == ["1.log", "2.log", "3.log"]
    below = ("", "/a", "/a/x", "/a/y", "/b", "/c")
    assert directories == {f"{tmp_path}{name}" for name in below}
    assert may_match(patterns, "new.log") and not may_match(patterns, "new.tmp")


def test_what_is_there_by_a_name_with_brackets_is_meant_and_no_glob(tmp_path):
    """As browsers and archives name copies: `events[1].jsonl`."""
    for name in ("logs[2]/a[1].jsonl", "logs[2]/a1.jsonl", "logs2/a[1].jsonl", "b1.jsonl", "*[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for pattern, wanted in (
        ("logs[2]/a[1].jsonl", ["logs[2]/a[1].jsonl"]),
        ("logs[2]/*", ["logs[2]/a1.jsonl", "logs[2]/a[1].jsonl"]),
        ("logs[2]", ["logs[2]/a1.jsonl", "logs[2]/a[1].jsonl"]),
        ("logs[2]/**/a1*", ["logs[2]/a1.jsonl"]),
        ("logs[2]/a[[]1].jsonl", ["logs[2]/a[1].jsonl"]),
        ("b[1].jsonl", ["b1.jsonl"]),
        ("*[1].jsonl", ["b1.jsonl"]),
    ):
        found = [os.path.relpath(file.name, tmp_path) for file in named_files([str(tmp_path / pattern)])]
        assert found == wanted, pattern
    exact = [str(tmp_path / "logs[2]" / "a[1].jsonl")]
    assert may_match(exact, "a[1].jsonl") and not may_match(exact, "a1.jsonl")
    with pytest.raises(UsageError, match="matches what the run writes"):
        check_not_matched(exact, [Path(exact[0])], "the run")


def test_a_link_to_a_directory_above_the_pattern_is_not_followed(tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "a.jsonl").touch()
    (tmp_path / "run" / "out.jsonl").touch()
    (logs / "up").symlink_to(tmp_path / "run")
    (logs / "top").symlink_to("/")
    assert list(matching_files(str(logs / "**" / "*.jsonl"))) == [str(logs / "a.jsonl")]


def test_named_files_are_regular_files_each_once_under_its_first_name(tmp_path):
    logs = tmp_path / "logs"
    (logs / "inner").mkdir(parents=True)
    (logs / "b.jsonl").touch()
    (logs / "inner" / "c.jsonl").touch()
    os.link(logs / "b.jsonl", logs / "a.jsonl")
    (logs / "inner" / "up").symlink_to(logs)
    found = named_files([str(logs), str(logs / "**" / "*.jsonl")])
    assert [file.name for file in found] == [str(logs / "a.jsonl"), str(logs / "inner" / "c.jsonl")]
    with pytest.raises(UsageError):
        named_files([str(tmp_path / "none" / "*")])


def test_lines_are_whole_up_to_the_last_newline():
    assert [whole_lines(data) for data in (b"", b"a", b"a\nb\nc", b"a\n")] == [0, 0, 4, 2]
