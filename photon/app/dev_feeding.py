"""The feeder of `photon dev` as its parent sees it."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from photon.app.dev_feed import Feed, last_life
from photon.app.launching import child_environment
from photon.app.supervisor import last_message
from photon.core.errors import PhotonError

COMMAND: Final = (sys.executable, "-m", "photon.app.dev_feed")
END_S_MAX: Final = 10.0


class FeederEndedError(PhotonError):
    """It can't write the logs."""


class Feeder:
    """Starts it; it dies with this process."""

    def __init__(
        self, directories: Sequence[Path], queries_per_s: float, clicks_per_s: float, seed: int, log: Path
    ) -> None:
        plan = Feed([str(path) for path in directories], queries_per_s, clicks_per_s, seed)
        self._directories, self._life_before = plan.directories, max(map(last_life, plan.directories))
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, json.dumps(asdict(plan))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=child_environment(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_begun(self) -> bool:
        """Whether its files are there: its time counts from then on."""
        return all(last_life(directory) > self._life_before for directory in self._directories)

    def check(self) -> None:
        """FeederEndedError if it has ended by itself."""
        if self._process.poll() is not None:
            raise FeederEndedError(self._why())

    def stop(self) -> None:
        """It writes what it holds back, and ends. FeederEndedError if it had ended already, or could not."""
        self.check()
        self._process.terminate()
        try:
            status = self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise FeederEndedError(
                f"the feeder did not write its last events within {END_S_MAX:.0f} s and was killed; its logs "
                "may lack queries of their clicks"
            ) from None
        if status not in (0, -signal.SIGTERM):  # by the signal: told before it had begun
            raise FeederEndedError(self._why())

    def _why(self) -> str:
        return f"the feeder ended: {last_message(self._log, self._log_start)}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
