"""A nursery (photon.cluster.nursery) some of whose processes crash at marked points, to launch roles with.

`CrashingNursery.arm("joiner-east", [Crash("registered"), Crash("done", 2)])`: its next life ends at the first
point, the one after that at the second; later ones end as they like.
"""

import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from photon.cli import main as cli
from photon.cluster import nursery
from photon.cluster.nursery import Nursery
from photon.cluster.supervisor import Process, die_with_parent
from photon.cluster.topology import process_name
from tests.faults.kit import crashing
from tests.faults.kit.crashing import Crash


class CrashingNursery(Nursery):
    """`reached`: a file in which each process says at which point it ends."""

    _module = "tests.faults.kit.crashing_nursery"

    def __init__(self, reached: Path) -> None:
        self._reached = reached
        self._crashes: dict[str, deque[Crash]] = {}
        super().__init__()

    def arm(self, process: str, crashes: Iterable[Crash]) -> None:
        """What becomes of its next lives, one after the other."""
        self._crashes.setdefault(process, deque()).extend(crashes)

    def disarm(self) -> None:
        """Lives to come end as they like; those that run do what they were told."""
        self._crashes.clear()

    def reached(self) -> Counter[str]:
        """`joiner-east: registered` -> how often."""
        if not self._reached.exists():
            return Counter()
        return Counter(self._reached.read_text().splitlines())

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        process = process_name(arguments[0], arguments[arguments.index("--name") + 1])
        if self._crashes.get(process):
            crash = self._crashes[process].popleft()
            arguments = [*crash.arguments(self._reached), *arguments]
        return super().launch(arguments, log)


def main(descriptor: int) -> None:
    die_with_parent(os.environ)
    cli.__dict__["main"] = lambda: crashing.main(sys.argv[1:])  # which every fork asks for
    with suppress(OSError):
        nursery.serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
