"""The outage that `photon dev --kill-datacenter` plays. Pure: it is told the time, and what to do with it."""

from collections.abc import Callable
from dataclasses import dataclass


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
        self.killed = False

    def step(self, seconds: float) -> str | None:
        """Do what is due so long after the start; what to tell of it, if anything."""
        if not self._acts or seconds < self._acts[0][0]:
            return None
        _, what, act = self._acts.pop(0)
        act(self._outage.datacenter)
        self.killed = what == "is killed"
        return f"datacenter {self._outage.datacenter} {what} after {seconds:.1f} s"
