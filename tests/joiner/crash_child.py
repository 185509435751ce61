"""A joiner that kills itself between two IO steps; a process of tests/joiner/test_crashes.py.

Arguments: directory, checkpoint to die at (or "never"), and how many times to pass it before. Sends batches
as a dispatcher would: those whose answer it has not noted are sent again. The registry outlives it in a file.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from joiner.intents import Kind
from joiner.worker import Worker
from photon.core.errors import StorageError
from photon.core.journal import scan, unpack_header
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import batch_of, make_worker
from tests.waiting import wait_until

BATCHES = [[f"b{batch}-{row}" for row in range(3)] for batch in range(4)]
BATCHES[2].append("b0-0")
REGISTERED = "registered"
TORN = "registered, and half written"


def main(root: Path, die_at: str, passes: int) -> None:
    left = passes

    def checkpoint(name: str) -> None:
        nonlocal left
        if name != (REGISTERED if die_at == TORN else die_at):
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
    wait_until(lambda: not worker.status()["unresolved"])


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
