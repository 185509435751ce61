"""What a source and a sink are. Columns, not rows: lines go through as one string of bytes.

A source has partitions; a partition has records, each with a number that never changes (Kafka: its offset; a
table: its row). Numbers rise, and may have gaps. A sink takes joined lines with the place that they have in
the joined log, and tells after any crash up to where it has them.

What is made anew under a name (a topic, a file) is another partition, whose numbers mean other records. So a
partition's name may go on behind a NUL, with what tells it from a former one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from photon.logs.writer import LogPosition

Runs = tuple[tuple[int, int], ...]
"""Numbers of records, ascending: (first, how many follow each other)."""


def shown(partition: str) -> str:
    """A partition's name as people know it."""
    return partition.partition("\0")[0]


class State(Enum):
    """ACTIVE: there is more at once. IDLE: there may be more later. FINISHED: there never will be."""

    ACTIVE = "active"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of a partition that follow each other: a JSON object a line, as many lines as `runs` count."""

    partition: str
    lines: bytes
    runs: Runs


@dataclass(frozen=True, slots=True)
class Loss:
    """Records `first` to `first + count - 1` that the source has no more, though they were not read."""

    partition: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Fields:
    """How the events of this side are read: [primary] or [foreign] of the settings."""

    ids: tuple[str, ...]
    """Names of the fields that hold ids."""
    time: str
    time_unit: str


class Source(Protocol):
    """Of one URI. One thread uses it."""

    def open(self, after: Mapping[str, int], drain: bool) -> None:
        """Begin behind the record of each partition that is told; others at their start. Before all else.

        `drain`: what comes later than now need not be read. UnavailableError: open it again, later;
        UsageError: it can't be what is meant.
        """
        ...

    def read(self, wait_s: float) -> Sequence[Batch]:
        """What is there, up to a few MiB; it waits so long for the first record.

        UnavailableError: the source does not answer; go on reading, nothing is left out.
        """
        ...

    def state(self) -> State:
        """After the last `read`."""
        ...

    def losses(self) -> Sequence[Loss]:
        """Since it was last asked."""
        ...

    def behind(self) -> int | None:
        """How many records are known and not read; None where nobody knows."""
        ...

    def known_to(self) -> int:
        """`read` has returned all that the source got before this time, microseconds since 1970, or about so;
        0 where nobody knows. Computations' low watermarks follow it (MillWheel 5.2)."""
        ...

    def kept(self, upto: Mapping[str, int]) -> None:
        """The records of these partitions are durable here, up to the number told. It may tell others."""
        ...

    def close(self) -> None: ...


class Guarantee(Enum):
    """What a sink makes of a batch whose `write` may or may not have happened.

    ATOMIC: lines and place are one, so each line is there once. KEYED: lines may be written again, over
    themselves. NONE: lines may be there twice.
    """

    ATOMIC = "atomic"
    KEYED = "keyed"
    NONE = "none"


class Sink(Protocol):
    """Takes joined lines in their order. One thread uses it, for one writer (a joiner, by its name)."""

    guarantee: Guarantee
    batch_bytes: int
    """About as much a `write` gets at most."""
    linger_s: float
    """Lines wait so long for others, until they are `batch_bytes` or their file is closed."""

    def open(self) -> LogPosition | None:
        """Shut out whoever wrote by this name before; the place before which the sink has all lines of this
        writer, None if it has none. It may be called again.

        UnavailableError: again, later.
        """
        ...

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        """Whole lines, which stand there in the joined log. Durable on return.

        UnavailableError: it is not known whether they are there; `open` tells. So it is after a refusal
        because somebody else of this name has written meanwhile.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Reached(Protocol):
    """A sink that can say whether it is there, and changes nothing by that: nobody is shut out."""

    def reach(self, wait_s: float) -> None:
        """UsageError, with the mend, where it does not answer in that time."""
        ...


@runtime_checkable
class Refusing(Protocol):
    """A sink of which somebody may refuse single lines for good, which are not sent again."""

    refused: Mapping[str, int]
    """Reason -> of how many, since it was made; a few reasons."""
