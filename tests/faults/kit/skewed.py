"""Processes whose wall clock is wrong: `python -m tests.faults.kit.skewed -5.0 -- joiner serve ...`.

Two more numbers, SPEED and SINCE_S (Unix time): it also runs SPEED times as fast since then.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from photon.cluster.supervisor import FreshLauncher, Launcher, Process
from photon.cluster.topology import process_name
from photon.core.clock import SystemClock


class SkewedLauncher:
    """Launches as `launcher` does, but those processes that `is_skewed` names, whose clock is `by_s` off."""

    def __init__(self, launcher: Launcher, is_skewed: Callable[[str], bool], by_s: float) -> None:
        self._launcher = launcher
        self._is_skewed = is_skewed
        self._by_s = by_s
        self.skewed: set[str] = set()
        """Those that were launched so."""

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        process = process_name(arguments[0], arguments[arguments.index("--name") + 1])
        if not self._is_skewed(process):
            return self._launcher.launch(arguments, log)
        self.skewed.add(process)
        wrong = FreshLauncher("tests.faults.kit.skewed", str(self._by_s), "--")
        return wrong.launch(arguments, log)

    def close(self) -> None:
        """The launcher is its maker's."""


def main(arguments: list[str], by_s: float, speed: float = 1.0, since_s: float = 0.0) -> None:
    from photon.cli import main as cli

    right = SystemClock.now_us

    def now_us(self: SystemClock) -> int:
        now = right(self)
        return now + round(by_s * 1e6 + (now - since_s * 1e6) * (speed - 1.0))

    SystemClock.now_us = now_us  # type: ignore[method-assign]
    cli.main(arguments)


if __name__ == "__main__":
    at = sys.argv.index("--")
    main(sys.argv[at + 1 :], *map(float, sys.argv[1:at]))
