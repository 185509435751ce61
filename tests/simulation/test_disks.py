"""The simulated disks are as bad as Linux makes them, and no worse."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from photon.core.disk import write_again
from tests.simulation.clock import Clock
from tests.simulation.disks import Disks


@contextmanager
def _failing_once(disks: Disks) -> Iterator[None]:
    disks.error_chance = 1.0
    with pytest.raises(OSError, match="played"):
        yield
    disks.error_chance = 0.0


@contextmanager
def _file(root: Path, seed: int) -> Iterator[tuple[Disks, Path, int]]:
    disks = Disks(random.Random(seed), Clock(), root)
    path = disks.add("a") / "file"
    with disks.installed():
        disks.node = "a"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        try:
            yield disks, path, fd
        finally:
            os.close(directory)
            os.close(fd)
            disks.node = None


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("again", [False, True])
def test_what_a_failed_sync_dropped_is_synced_only_where_it_is_written_again(
    seed: int, again: bool, tmp_path: Path
) -> None:
    with _file(tmp_path, seed) as (disks, path, fd):
        os.write(fd, b"kept ")
        os.fdatasync(fd)
        os.write(fd, b"dropped ")
        with _failing_once(disks):
            os.fdatasync(fd)
        if again:
            write_again(path, b"dropped ", len(b"kept "))
        os.write(fd, b"later")
        os.fdatasync(fd)
        disks.node = None
        disks.lose_power("a")
        left = b"dropped " if again else bytes(len(b"dropped "))
        assert path.read_bytes() == b"kept " + left + b"later"


def test_a_write_that_fails_may_leave_a_part(tmp_path: Path) -> None:
    left = set()
    for seed in range(20):
        (tmp_path / str(seed)).mkdir()
        with _file(tmp_path / str(seed), seed) as (disks, path, fd):
            disks.error_chance = 1.0
            try:
                os.write(fd, b"0123456789")
            except OSError:
                left.add("nothing" if path.stat().st_size == 0 else "a part, and an error")
            else:
                left.add("a part")
            with _failing_once(disks), path.open("wb") as file:
                file.write(b"0123456789" * 10_000)
    assert left == {"nothing", "a part, and an error", "a part"}
