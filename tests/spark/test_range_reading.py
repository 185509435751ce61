"""What a task reads of a file is what was listed of it, or an error."""

import os

import pytest

from photon.core.errors import StorageError
from photon.core.settings import Settings
from spark.reading.lines import Range, chunks_of, local_file


def lines_of(file):
    found = chunks_of(Range(file, 0, file.size), Settings().logs, unended=False)
    return sum(chunk.data.count(b"\n") for _, chunk in found)


def test_a_file_that_is_shorter_where_it_is_read_than_where_it_was_listed_is_an_error(tmp_path):
    """Cut meanwhile, or an old state of it on another machine: its missing lines would seem lost."""
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'{"id":"a"}\n' * 100)
    listed = local_file(str(path))
    assert lines_of(listed) == 100
    os.truncate(path, 11 * 40)
    with pytest.raises(StorageError, match="holds 440 bytes where 1100 were listed"):
        lines_of(listed)


def test_of_a_file_that_grows_what_was_listed_is_read(tmp_path):
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'{"id":"a"}\n' * 100)
    listed = local_file(str(path))
    with path.open("ab") as file:
        file.write(b'{"id":"b"}\n')
    assert lines_of(listed) == 100
