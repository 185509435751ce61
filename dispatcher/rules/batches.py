"""The unit of work: a batch of events on its way, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dispatcher.rules.events import Events
from dispatcher.rules.offsets import Span
from dispatcher.rules.retry_entries import due_us_column
from photon.core.fates import Fate
from photon.logs.writer import DeadLetter


@dataclass(frozen=True, slots=True)
class FreshBatch:
    """Events read for the first time. `spans`: the bytes of the files that they and `malformed` stood in."""

    number: int
    events: Events
    malformed: list[DeadLetter]
    spans: Sequence[Span]

    @property
    def count(self) -> int:
        """Of its events and malformed lines."""
        return len(self.events) + len(self.malformed)

    @property
    def size(self) -> int:
        """Bytes of the files that it covers."""
        return sum(span.end - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class RetryBatch:
    """Events that waited; `keys`: their entries in the ledger, row by row. `early`: not due yet."""

    keys: list[bytes]
    events: Events
    early: bool = False

    @property
    def due_us(self) -> npt.NDArray[np.int64]:
        """When each is due."""
        return due_us_column(self.keys)


Batch = FreshBatch | RetryBatch


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of a batch: each event has a fate or is in `retries`, to be sent again at its `due_us`.

    `fates` counts; `letters` are the events of all fates but joined and duplicate; `latencies` is a histogram
    (latency.BUCKETS,) of the joined ones.
    """

    fates: dict[Fate, int]
    wasted_joins: int
    latencies: npt.NDArray[np.int64]
    letters: list[DeadLetter]
    retries: Events | None
    due_us: npt.NDArray[np.int64]
