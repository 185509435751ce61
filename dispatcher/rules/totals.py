"""All that a dispatcher counts. Pure."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from photon.core.fates import Fate

COUNTED: Final = tuple(fate for fate in Fate if fate is not Fate.PENDING)


@dataclass(frozen=True, slots=True)
class Totals:
    """All that is counted since the ledger was made. `latencies`: counts by latency.EDGES_US."""

    foreign_events: int
    fates: dict[Fate, int]
    wasted_joins: int
    latencies: list[int]

    @property
    def ended(self) -> int:
        """Events that have their fate."""
        return sum(self.fates.values())

    def plus(self, other: "Totals") -> "Totals":
        return Totals(
            self.foreign_events + other.foreign_events,
            {fate: self.fates.get(fate, 0) + other.fates.get(fate, 0) for fate in COUNTED},
            self.wasted_joins + other.wasted_joins,
            [a + b for a, b in zip_longest(self.latencies, other.latencies, fillvalue=0)],
        )


NOTHING: Final = Totals(0, dict.fromkeys(COUNTED, 0), 0, [])
