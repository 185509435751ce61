"""Lines to the columns that joiners and caches take, by the very rules by which the logs are read. Pure.

The registry's key is an event's id and, with several shards, its time: one that differed from what the log
path makes of the line would be joined twice. So both are made by the same code, from the same bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from joiner.client import ForeignColumns
from photon.core.columns import join_lines
from photon.core.errors import UsageError
from photon.logs.formats import ForeignBatch


def foreign_columns(batch: ForeignBatch) -> ForeignColumns:
    """Sent for the first time: tries and ages are 0."""
    count = len(batch.lines)
    return ForeignColumns(
        ids=batch.ids,
        primary_ids=batch.primary_ids,
        times=batch.times,
        events=join_lines(batch.lines),
        tries=bytes(4 * count),
        ages=bytes(8 * count),
    )


def usable(lines: Iterable[bytes], line_bytes_max: int) -> list[bytes]:
    """The lines that may be one event each, as a reader of the log would find them, without space around.

    A line that the log path takes for malformed (several lines, one that is too long) must not be joined
    here: it would have two fates.
    """
    kept = []
    for line in lines:
        if type(line) is not bytes or len(line) >= line_bytes_max:
            continue
        bare = line.strip()
        if bare and b"\n" not in bare:
            kept.append(bare)
    return kept


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of the fast path in one process, of each of its two sides, primary and foreign."""

    queue_events_max: int = 10_000
    queue_bytes_max: int = 32 << 20
    """Lines beyond are dropped: the log path has them."""
    batch_events_max: int = 1_024
    batch_bytes_max: int = 4 << 20
    linger_s: float = 0.001
    """How long a line waits for others to share its request."""
    requests_in_flight_max: int = 2
    """Joins; puts go one at a time, in their order."""
    timeout_s: float = 2.0
    """Of a request. What was not answered by then is left to the log."""
    primaries_first_s: float = 0.05
    """A foreign event waits so long for primary events that were handed in before it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"fast path: '{name}' must be above 0, not {getattr(self, name)!r}")
