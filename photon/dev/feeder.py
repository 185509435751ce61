"""The feeder of `photon dev` as its parent sees it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from photon.cluster.supervisor import child_environment, last_message
from photon.core.errors import PhotonError
from photon.dev.generated_live import ERROR_MARK, Feed, last_life

COMMAND: Final = (sys.executable, "-m", "photon.dev.generated_live")
END_S_MAX: Final = 10.0
COPY_DELAY_S_MAX: Final = 0.5
EARLY: Final = 0.01
"""Of the clicks: logged before their query."""
REPEATED: Final = 0.001
"""Of the clicks: logged twice, byte for byte."""


class FeederEndedError(PhotonError):
    """It has ended before it was told to, or without its last events."""


class Feeder:
    """Starts it; it dies with this process."""

    def __init__(
        self, directories: Sequence[Path], queries_per_s: float, clicks_per_s: float, seed: int, log: Path
    ) -> None:
        plan = Feed(
            [str(path) for path in directories],
            queries_per_s,
            clicks_per_s,
            seed,
            copy_delay_s_max=COPY_DELAY_S_MAX,
            early=EARLY,
            repeated=REPEATED,
        )
        self._directories, self._life_before = plan.directories, max(map(last_life, plan.directories))
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*COMMAND, json.dumps(asdict(plan))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                env=child_environment(),
                start_new_session=True,
            )
        assert self._process.stdout is not None, "a pipe"
        self._told = self._process.stdout
        os.set_blocking(self._told.fileno(), False)
        self._rest, self._error = b"", ""
        self.notices: list[str] = []
        """What it has to say for a person; the caller takes them after `check`."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_begun(self) -> bool:
        """Whether its files are there: its time counts from then on."""
        return all(last_life(directory) > self._life_before for directory in self._directories)

    def check(self) -> None:
        """FeederEndedError if it has ended by itself."""
        status = self._process.poll()
        self._listen(ended=status is not None)
        if status is not None:
            raise FeederEndedError(self._why(status))

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
        self._listen(ended=True)
        if status not in (0, -signal.SIGTERM):  # by the signal: told before it had begun
            raise FeederEndedError(self._why(status))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listen(ended=True)

    def _listen(self, ended: bool) -> None:
        if self._told.closed:
            return
        *lines, self._rest = (self._rest + (self._told.read() or b"")).split(b"\n")
        for line in (line.decode("utf-8", "replace") for line in lines):
            if line.startswith(ERROR_MARK):
                self._error = line.removeprefix(ERROR_MARK)
            else:
                self.notices.append(f"the feeder: {line}")
        if ended:
            self._told.close()

    def _why(self, status: int) -> str:
        if status < 0:
            return f"the feeder was killed by signal {-status}"
        return f"the feeder (exit status {status}): {self._error or last_message(self._log, self._log_start)}"
