"""A request to the joiner and its answer, in packed columns."""

from dataclasses import dataclass
from typing import Final

from photon.core.columns import count_lines
from photon.core.errors import UsageError
from photon.core.ids import ID_BYTES

_WIDTHS: Final = {"primary_ids": ID_BYTES, "times": 8, "tries": 4, "first_seen": 8}


@dataclass(frozen=True, slots=True)
class ForeignColumns:
    """N foreign events."""

    ids: bytes
    """16 x N."""
    primary_ids: bytes
    """16 x N."""
    times: bytes
    """8 x N, int64 us: event times."""
    events: bytes
    """N lines, each a JSON object without space around it, closed by a newline."""
    tries: bytes
    """4 x N, uint32: tries before this one."""
    first_seen: bytes
    """8 x N, int64 us: when the dispatcher first read the event."""

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES

    def check(self) -> None:
        """UsageError if the columns are not of one length."""
        count = len(self)
        wrong = [name for name, width in _WIDTHS.items() if len(getattr(self, name)) != width * count]
        if len(self.ids) % ID_BYTES:
            wrong.append("ids")
        if count_lines(self.events) != count or not (self.events.endswith(b"\n") or not self.events):
            wrong.append("events")
        if wrong:
            raise UsageError(
                f"columns of {count} events: {', '.join(wrong)} of another length; send all N rows"
            )


@dataclass(frozen=True, slots=True)
class JoinOutcomes:
    """What became of N foreign events: 1 x N core.fates.Joined; by row, the reasons of those that end."""

    outcomes: bytes
    reasons: dict[int, str]
