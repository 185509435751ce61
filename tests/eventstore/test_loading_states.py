"""Which file each log of a built map is by now."""

import gzip

import pytest

from eventstore.built_map import BuiltFile
from eventstore.loading import known_states
from photon.core.errors import UsageError
from photon.logs.files import digest
from photon.logs.packed import Spool


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool", 1 << 20)


def built(number, path):
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
    files = [built(n, tmp_path / name) for n, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.jsonl"))]
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
        files.append(built(number, path))
    (tmp_path / "0.jsonl").rename(tmp_path / "4.jsonl")
    (tmp_path / "1.jsonl").unlink()
    states, missing = known_states(files, spool)
    assert names(states) == {0: str(tmp_path / "4.jsonl"), 2: str(tmp_path / "2.jsonl")}
    assert missing == [str(tmp_path / "1.jsonl")]


def test_a_log_that_has_grown_differently_or_is_only_linked_to_is_not_it(tmp_path, spool):
    log = tmp_path / "logs" / "a.jsonl"
    log.parent.mkdir()
    log.write_bytes(b'{"id":"a"}\n' * 300)
    file = built(0, log)
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
