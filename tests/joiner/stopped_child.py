"""A joiner that stops itself (SIGSTOP) at some step; a process of tests/joiner/test_stopped_process.py.

Arguments: directory, where to stop, lease in seconds, more output roots. It joins one batch, and ends when
that is resolved and it has a lease; with status 1 when it is fenced.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from photon.core import disk
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import batch_of, make_worker

NAMES = ["a", "b", "c"]
BEFORE, AFTER = "before the write", "after the write"


def main(root: Path, stop_at: str, lease_s: float, roots: list[str]) -> None:
    left = [stop_at]
    registry = FakeRegistry(root / "registry")

    def reached(step: str) -> None:
        if left == [step]:
            left.clear()
            # To the thread itself: one sent to the process may stop it only after this thread went on a bit.
            # Not in another thread's call: a stopped process would keep the file of the registry locked.
            with registry.between_calls():
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    real = os.write

    def write(fd: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        joined = "/joined/" in path and path.endswith(".jsonl")
        if joined:
            reached(BEFORE)
        written = real(fd, data)
        if joined:
            reached(AFTER)
        return written

    disk.os.write = write
    worker = make_worker(
        root,
        registry,
        fsync=True,
        lease_s=lease_s,
        output_roots=tuple(roots),
        on_fatal=lambda _: os._exit(1),
        checkpoint=reached,
    )
    worker.start()
    answer = worker.join(batch_of(NAMES))
    (root / "answer").write_bytes(answer.outcomes)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = worker.status()
        if not status["unresolved"] and status["lease"]["seconds_left"]:
            break
        time.sleep(0.005)
    sys.exit(0 if worker.stop(1) else 2)
