"""Photon whose raft thread tells of its long turns: `python -m benchmarks.registry_turns registry serve ...`.

A turn is what the thread does from one wait for sockets to the next. Each that takes LONG_S or more is a line
on standard error: `turn`, the moment it ended (monotonic, s), and its length in ms.
"""

import sys
import time
from pathlib import Path
from typing import Any, Final

from photon.raft.transport import Transport

LONG_S: Final = 0.001


def told(log: Path, begin: float, end: float) -> list[float]:
    """Lengths, in ms, of the long turns that ended in this time."""
    lines = [line.split() for line in log.read_text("utf-8").splitlines() if line.startswith("turn ")]
    return [float(ms) for _, at, ms in lines if begin <= float(at) < end]


class _Poller:
    """A `select.poll` that looks at the clock before and after it waits."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller
        self._since = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)

    def poll(self, timeout_ms: float) -> Any:
        at = time.monotonic()
        if at - self._since >= LONG_S:
            print(f"turn {at:.6f} {(at - self._since) * 1e3:.3f}", file=sys.stderr, flush=True)
        found = self._poller.poll(timeout_ms)
        self._since = time.monotonic()
        return found


def main(arguments: list[str]) -> None:
    from photon.cli import main as cli

    made = Transport.__init__

    def make(self: Transport, *given: Any) -> None:
        made(self, *given)
        self._poller = _Poller(self._poller)  # type: ignore[assignment]

    Transport.__init__ = make  # type: ignore[method-assign,assignment]
    cli.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
