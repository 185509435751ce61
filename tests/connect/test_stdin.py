"""Standard input is copied into a log file of its run, the last line too if it has no end."""

import os

import pytest

from photon.connect.importer import copy_stdin, stdin_pattern
from photon.logs.files import matching_files


def pipe_of(data):
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


@pytest.mark.parametrize("data", [b"", b'{"a":1}', b'{"a":1}\n', b'{"a":1}\n\n{"b":2}\n{"c":3}'])
def test_all_lines_are_copied(tmp_path, data):
    for _ in range(2):  # each run has a file of its own
        copy_stdin(tmp_path, "foreign", 1 << 20, pipe_of(data))
    files = sorted(matching_files(stdin_pattern(tmp_path, "foreign")))
    ended = data if not data or data.endswith(b"\n") else data + b"\n"
    assert [open(path, "rb").read() for path in files] == ([ended] * 2 if data else [b""])  # noqa: SIM115
