"""A joiner that kills itself between two IO steps; a process of tests/joiner/test_crashes.py.

Arguments: directory, checkpoint to die at (or "never"), how many times to pass it before, and what else is
special: `roots` (a second output root), `parquet`, `full` (the second root is full for a while). Sends
batches as a dispatcher would: those whose answer it has not noted are sent again. The registry outlives it in
a file.
"""

import contextlib
import errno
import os
import signal
import sys
import time
from pathlib import Path

from joiner.intents import Kind
from joiner.worker import Worker
from photon.core import disk
from photon.core.errors import StorageError
from photon.core.journal import scan, unpack_header
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import batch_of, make_worker

BATCHES = [[f"b{batch}-{row}" for row in range(3)] for batch in range(4)]
BATCHES[2].append("b0-0")
TORN = "registered, and half written"


def main(root: Path, die_at: str, passes: int, special: list[str]) -> None:
    left = passes
    if "full" in special:
        fill(root / "two", times=2)

    def checkpoint(name: str) -> None:
        nonlocal left
        if name != die_at.partition(",")[0]:
            return
        if left == 0:
            if die_at == TORN:
                tear(root)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    worker = make_worker(
        root,
        FakeRegistry(root / "registry"),
        output_file_bytes_max=200,
        output_roots=(str(root / "two"),) if "roots" in special else (),
        output_format="parquet" if "parquet" in special else "jsonl",
        checkpoint=checkpoint,
    )
    worker.start()
    wait_until_resolved(worker)
    noted = root / "answered"
    with noted.open("a") as answered:
        for number in range(len(noted.read_text().split()), len(BATCHES)):
            with contextlib.suppress(StorageError):  # the resolver's then
                worker.join(batch_of(BATCHES[number]))
            wait_until_resolved(worker)
            worker._completer.step()
            answered.write(f"{number}\n")
            answered.flush()
    if not worker.stop(1):
        sys.exit("unresolved batches are left")


def wait_until_resolved(worker: Worker) -> None:
    deadline = time.monotonic() + 60
    while worker.status()["unresolved"] and time.monotonic() < deadline:
        time.sleep(0.005)


def fill(directory: Path, times: int) -> None:
    """No space for joined lines there, so many times."""
    real, left = os.write, [times]

    def write(fd: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if left[0] and path.startswith(str(directory)) and path.endswith(".jsonl"):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    disk.os.write = write


def tear(root: Path) -> None:
    """As a kill within a write leaves it: a whole line of the batch and half of the next."""
    log = max((root / "out" / "joined" / "east").glob("*.jsonl"))
    journal = max((root / "joiner" / "intents").iterdir()).read_bytes()
    header = unpack_header(journal)
    assert header is not None
    batches = [r.payload for r in scan(journal, header[1]).records if r.kind == Kind.BATCH]
    lines = bytes(batches[-1]).split(b'{"id"', 1)[1]
    with log.open("ab") as file:
        file.write((b'{"id"' + lines)[: len(lines) // 2])
