"""When `photon dev` kills and restores a datacenter, and when all that was written has its fate. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from photon.dev.view import PipelineFigures

SETTLED_S: Final = 3.0
"""Nothing has changed for so long: the rest waits for what may never come."""
FED_SETTLED_S: Final = 15.0
"""The same of generated events, which all come to an end."""
FINISH_S_MAX: Final = 60.0
"""However it goes on, it is over then. Nothing is lost by that."""


@dataclass(frozen=True, slots=True)
class Outage:
    """`restore_after_s`: after the kill; None: it stays down."""

    datacenter: str
    after_s: float
    restore_after_s: float | None

    @property
    def ends_s(self) -> float:
        """When there is nothing more to do."""
        return self.after_s + (self.restore_after_s or 0.0)


class OutagePlay:
    """Kills and restores when their times have come, once each."""

    def __init__(
        self, outage: Outage, kill: Callable[[str], object], restore: Callable[[str], object]
    ) -> None:
        self._outage = outage
        self._acts: list[tuple[float, str, Callable[[str], object]]] = [(outage.after_s, "is killed", kill)]
        if outage.restore_after_s is not None:
            self._acts.append((outage.ends_s, "is restored", restore))
        self.killed: list[str] = []
        """The datacenter, while it is kept down."""

    def step(self, seconds: float) -> str | None:
        """Do what is due so long after the start; what to tell of it, if anything."""
        if not self._acts or seconds < self._acts[0][0]:
            return None
        _, what, act = self._acts.pop(0)
        act(self._outage.datacenter)
        self.killed = [self._outage.datacenter] if what == "is killed" else []
        return f"datacenter {self._outage.datacenter} {what} after {seconds:.1f} s"


class Finishing:
    """When a run that was told to stop has come to the end of what was written.

    `written`: datacenter -> foreign events in its logs, where that is known. Times are monotonic.
    """

    def __init__(self, written: Mapping[str, int], now_s: float) -> None:
        self._written = written
        self._patience_s = FED_SETTLED_S if written else SETTLED_S
        self._began_s = self._moved_s = now_s
        self._seen: dict[str, tuple[int | None, int | None]] = {}

    def is_over(self, alive: Sequence[PipelineFigures], now_s: float) -> bool:
        """`alive`: the datacenters that are not kept down, as they were just seen."""
        done = all(self._is_done(row) for row in alive)
        now = {row.datacenter: (row.foreign_events, row.pending) for row in alive}
        if now != self._seen or any(row.silent for row in alive):  # who is starting will read
            self._seen, self._moved_s = now, now_s
        settled = now_s - self._moved_s >= self._patience_s
        return done or settled or now_s - self._began_s >= FINISH_S_MAX

    def _is_done(self, row: PipelineFigures) -> bool:
        """Nothing waits or is in hand and all that was written is read; where that is unknown, nothing was
        read lately."""
        if row.pending != 0 or row.in_flight != 0:
            return False
        if row.datacenter in self._written:
            return row.foreign_events == self._written[row.datacenter]
        return self._seen.get(row.datacenter) == (row.foreign_events, row.pending)


def events_seen(row: PipelineFigures) -> int | None:
    """Recorded or in hand, as a datacenter was just seen; at least: a retry is pending and in hand."""
    if row.foreign_events is None or row.pending is None or row.in_flight is None:
        return None
    return row.foreign_events + max(0, row.in_flight - row.pending)
