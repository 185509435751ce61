"""The joined log takes lines back that were written as a lease ran out (joiner/output.py)."""

import os
import threading

import pytest

from joiner.intent_records import Range
from joiner.output import JoinedLog
from photon.core.columns import split_lines
from photon.core.errors import OverloadedError
from photon.core.logwriter import LogPosition
from tests.joiner.fakes import joined_line


def test_a_batch_that_is_intended_while_lines_stand_that_are_taken_back_is_found_by_the_next_start(tmp_path):
    """Its place in the log is behind the cut; its lines must not come to stand before that place."""
    log = JoinedLog(tmp_path, "j", 1 << 20, fsync=False)
    places = []

    def check():
        places.append(log.position())
        if len(places) == 2:
            raise OverloadedError("lost")

    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", check)
    written = log.append(b"later\n", lambda: None)
    assert LogPosition(written.file, written.start) >= max(places)
    assert log.count({b"later"}, max(places), []) == {b"later": 1}


def test_a_sync_that_was_under_way_during_a_take_back_vouches_for_no_later_line(tmp_path, monkeypatch):
    log = JoinedLog(tmp_path, "j", 1 << 20, fsync=True)
    log.append(b"first\n", lambda: None)
    real, syncs, started, go = os.fdatasync, [], threading.Event(), threading.Event()

    def fdatasync(fd):
        syncs.append(fd)
        if len(syncs) == 1:
            started.set()
            assert go.wait(20)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    looks = []

    def check():
        looks.append(1)
        if len(looks) == 2:
            other.start()
            assert started.wait(20)
            raise OverloadedError("lost")

    other = threading.Thread(target=lambda: log.sync(Range(0, 0, 6)))
    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", check)
    go.set()
    other.join()
    before = len(syncs)
    log.sync(log.append(b"other\n", lambda: None))
    assert len(syncs) > before


def test_the_take_back_leaves_what_other_batches_wrote(tmp_path):
    log = JoinedLog(tmp_path, "j", 1 << 20, fsync=True)
    first = log.append(joined_line("a", "q") + b"\n", lambda: None)
    looks = iter([None, OverloadedError("lost")])

    def check():
        if (error := next(looks)) is not None:
            raise error

    with pytest.raises(OverloadedError):
        log.append(b"taken back\n", check)
    second = log.append(b"b\n", lambda: None)
    log.sync(first)
    log.sync(second)
    written = b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir()))
    assert split_lines(written) == [joined_line("a", "q"), b"b"]
