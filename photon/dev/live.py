"""Whether what is joined so far is right, checked again and again while a run goes on."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from photon.core.errors import PhotonError
from photon.dev.pairs import PairsReport, check_pairs

EVERY_S: Final = 3.0
SHARE: Final = 0.1
"""Of a core at most."""
LINES_MAX: Final = 2_000_000
"""With more only the check at the end is made."""


class LiveCheck:
    """From `start` to `stop`. A joiner that starts again may write a line anew while the logs are read: what
    is wrong is told when it is found a second time."""

    def __init__(self, joined: Path, check: Callable[[Path], PairsReport] = check_pairs) -> None:
        self._joined, self._check = joined, check
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-check", daemon=True)
        self._wrong = ""
        self._told: dict[str, Any] = {"ok": None, "text": "nothing is joined yet"}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def told(self) -> list[dict[str, Any]]:
        """[{ok: None where it is not known, text}]. Any thread."""
        return [self._told]

    def step(self) -> int:
        """One look; how many lines there are."""
        report = self._check(self._joined)
        found = {
            "join an event again": report.repeated,
            "hold another primary event than the one they name": report.mismatched,
        }
        wrong = ", ".join(f"{count:,} lines {what}" for what, count in found.items() if count)
        if wrong and wrong == self._wrong:
            self._told = {"ok": False, "text": wrong}
        elif not wrong and report.lines:
            text = f"{report.lines:,} joined lines, each event once, each with its own primary"
            self._told = {"ok": True, "text": text}
        self._wrong = wrong
        return report.lines

    def _run(self) -> None:
        wait_s = EVERY_S
        while not self._stopping.wait(wait_s):
            began, lines = time.monotonic(), 0
            try:
                lines = self.step()
            except (PhotonError, OSError) as error:  # a file that was made Parquet meanwhile
                self._told = {"ok": None, "text": str(error)}
            if lines > LINES_MAX:
                text = f"more than {LINES_MAX:,} joined lines: they are checked at the end"
                self._told = {"ok": None, "text": text}
                return
            wait_s = max(EVERY_S, (time.monotonic() - began) / SHARE)
