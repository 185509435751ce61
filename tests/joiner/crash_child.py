"""A joiner that kills itself between two IO steps; a process of tests/joiner/test_crashes.py.

Arguments: directory, checkpoint to die at (or "never"), how many times to pass it before. Sends batches as a
dispatcher would: those whose answer it has not noted are sent again. The registry outlives it in a file.
"""

import os
import signal
import sys
import time
from pathlib import Path

from joiner.worker import Worker
from tests.joiner.fakes import FakeEventStore, FakeRegistry, batch_of, make_worker, settings

BATCHES = [[f"b{batch}-{row}" for row in range(3)] for batch in range(4)]
BATCHES[2].append("b0-0")
TORN = "registered, and half written"


def main(root: Path, die_at: str, passes: int) -> None:
    left = passes

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
        FakeEventStore(),
        settings=settings(output_file_bytes_max=200),
        checkpoint=checkpoint,
    )
    worker.start()
    wait_until_resolved(worker)
    noted = root / "answered"
    with noted.open("a") as answered:
        for number in range(len(noted.read_text().split()), len(BATCHES)):
            worker.join(batch_of(BATCHES[number]))
            answered.write(f"{number}\n")
            answered.flush()
    if not worker.stop(1):
        sys.exit("unresolved batches are left")


def wait_until_resolved(worker: Worker) -> None:
    deadline = time.monotonic() + 20
    while worker.status()["unresolved"] and time.monotonic() < deadline:
        time.sleep(0.005)


def tear(root: Path) -> None:
    """As a kill within a write leaves it: a whole line of the batch and half of the next."""
    log = max((root / "out" / "joined" / "east").iterdir())
    journal = max((root / "state" / "intents").iterdir()).read_bytes()
    lines = journal[journal.rindex(b"\xffPI1") :].split(b'{"id"', 1)[1]
    with log.open("ab") as file:
        file.write((b'{"id"' + lines)[: len(lines) // 2])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
