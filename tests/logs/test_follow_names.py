"""Names of logs are bytes: one that is no UTF-8 is read like any other, and told as text."""

import gzip
import os

import msgspec
import pytest

from tests.logs.following import Following, append

CUT = gzip.compress(b'{"n":1}\n' * 99)[:-20]


@pytest.fixture
def following(logs, tmp_path):
    return lambda **options: Following(logs / "*", spool=tmp_path / "spool", **options)


def odd(directory, name):
    return os.fsdecode(os.fsencode(directory) + b"/" + name)


@pytest.mark.parametrize("drain", [False, True])
def test_a_name_that_is_no_utf_8_is_told_as_text_that_names_the_file_and_all_others_are_read(
    logs, following, drain
):
    append(logs / "plain.jsonl", b'{"n":0}\n')
    append(odd(logs, b"read\xe9.jsonl"), b'{"n":1}\n{"n":')
    for name in (b"cut\xe9.jsonl.gz", b"cut\xea.jsonl.gz"):
        append(odd(logs, name), CUT)
    loop = odd(logs, b"loop\xe9.jsonl")
    os.symlink(loop, loop)
    for _ in range(2):  # whoever comes after the first goes by what stands in the spool
        it = following(drain=drain)
        assert sorted(it.read().values()) == [b'{"n":0}\n', b'{"n":1}\n']
        told = it.follower.unreadable
        names = [rf"{logs}/{name}" for name in (r"cut\xe9.jsonl.gz", r"cut\xea.jsonl.gz", r"loop\xe9.jsonl")]
        assert sorted(told) == names
        assert told[names[0]].startswith(f"{names[0]}: not a whole gzip file")
        assert told[names[2]].startswith(f"{names[2]} cannot be read")
        assert it.follower.unended() == {rf"{logs}/read\xe9.jsonl": 5}
        assert sum(rf"{logs}/cut\xe9.jsonl.gz" in notice for notice in it.notices) == 1
        msgspec.json.encode([told, it.follower.unended(), it.notices])


def test_an_archive_that_is_left_for_later_is_told_as_text_too(logs, following):
    it = following()
    path = odd(logs, b"new\xe9.jsonl.gz")
    append(path, CUT)
    os.utime(path, (it.clock.now_us() / 1e6,) * 2)
    it.follower.scan_if_due()
    assert it.follower.settling == {rf"{logs}/new\xe9.jsonl.gz"}


def test_a_file_renamed_to_a_name_that_is_no_utf_8_is_read_on(logs, following):
    append(logs / "a.jsonl", b'{"n":0}\n')
    it = following()
    it.read()
    append(logs / "a.jsonl", b'{"n":1}\n')
    os.rename(logs / "a.jsonl", odd(logs, b"a\xe9.jsonl"))
    assert list(it.read().values()) == [b'{"n":1}\n']


def test_of_a_file_that_is_known_by_its_name_nothing_is_told_when_it_is_read_and_gone(logs, following):
    it = following(by_name=lambda path: "/fed-" in path)
    append(logs / "fed-1", b"1\n")
    append(logs / "plain", b"1\n")
    it.read()
    (logs / "fed-1").write_bytes(b"2\n")
    (logs / "fed-1").rename(logs / "fed-2")  # another file has its inode
    assert it.read() == {"fed-2": b"2\n"}
    (logs / "fed-2").unlink()
    it.read()
    assert it.notices == []
    (logs / "plain").unlink()
    it.read(scans=3)
    assert it.notices == [f"{logs}/plain is gone; it was read to its end"]
