"""Standard input is copied into a log file of its run, the last line too if it has no end."""

import os
from functools import partial

import pytest

from photon.connect import importer
from photon.connect.importer import copy_stdin, follow_stdin, stdin_pattern
from photon.core.errors import DiskFullError
from photon.logs.files import matching_files
from photon.logs.writer import RotatingLog
from tests.waiting import wait_until


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


def test_a_run_that_is_told_to_stop_waits_for_no_end(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b'{"a":1}\n{"b"')
    path = tmp_path / "stdin-foreign-000000.jsonl"
    copied = lambda: path.exists() and path.read_bytes() == b'{"a":1}\n'  # noqa: E731
    copy_stdin(tmp_path, "foreign", 1 << 20, reading, is_over=copied)
    assert copied()


def test_a_full_disk_is_waited_for_as_what_was_read_cannot_be_asked_for_again(tmp_path, monkeypatch):
    """It was read no more, for ever, by a run that went on when there was room."""
    notices, full, append = [], [DiskFullError("full"), DiskFullError("full")], RotatingLog.append

    def appended(log, *given):
        if full:
            raise full.pop()
        return append(log, *given)

    monkeypatch.setattr(RotatingLog, "append", appended)
    copy = partial(copy_stdin, fd=pipe_of(b'{"a":1}\n{"b":2}'))
    monkeypatch.setattr(importer, "copy_stdin", copy)
    follow_stdin(tmp_path, "foreign", 1 << 20, notices.append)
    wait_until(lambda: len(notices) == 2, 30, "standard input to end")
    assert notices == ["standard input waits: full", "standard input has ended"]
    [path] = matching_files(stdin_pattern(tmp_path, "foreign"))
    assert open(path, "rb").read() == b'{"a":1}\n{"b":2}\n'  # noqa: SIM115
