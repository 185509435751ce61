"""What to generate, checked once."""

import math
from dataclasses import dataclass, fields
from typing import Final

from photon.core.errors import UsageError

EVENTS_MAX: Final = 1_000_000_000
FILES_MAX: Final = 50_000
RATE_MAX: Final = 200_000.0


@dataclass(frozen=True, slots=True)
class Mix:
    """What both ways of generating share. Shares are parts of one: 0.01 is one in a hundred.

    `early`, `orphans`: of the clicks; `duplicates`, `malformed`: lines more, as a share of the clicks;
    `duplicate_queries`, `malformed_queries`: the same of the queries. `files`: server processes a side.
    """

    seed: int = 1
    files: int = 8
    file_bytes_max: int = 64 << 20
    opaque_ids: bool = False
    duplicates: float = 0.0
    early: float = 0.0
    orphans: float = 0.0
    malformed: float = 0.0
    duplicate_queries: float = 0.0
    malformed_queries: float = 0.0

    def __post_init__(self) -> None:
        _within("seed", self.seed, 0, 2**63 - 1)
        _within("files", self.files, 1, FILES_MAX)
        _within("rotate-bytes", self.file_bytes_max, 1024, 1 << 40)
        for field in fields(self):
            if field.type is float:
                _within(field.name.replace("_", "-"), getattr(self, field.name), 0.0, 1.0)
        if self.early + self.orphans > 1.0:
            raise UsageError("--early and --orphans are shares of the same clicks: together at most 1")


@dataclass(frozen=True, slots=True)
class AtOnce:
    """So many events, as fast as can be; queries spread over `span_s` seconds from `start_us` on."""

    queries: int = 100_000
    clicks: int = 20_000
    start_us: int = 1_700_000_000_000_000
    span_s: float = 3_600.0

    def __post_init__(self) -> None:
        _within("queries", self.queries, 1, EVENTS_MAX)
        _within("clicks", self.clicks, 0, EVENTS_MAX)
        _within("start-us", self.start_us, 0, 10**17)
        _within("span", self.span_s, 1.0, 1e9)


@dataclass(frozen=True, slots=True)
class Stream:
    """So many events a second, in real time, for so many seconds."""

    rate: float
    click_rate: float
    duration_s: float = 60.0

    def __post_init__(self) -> None:
        _within("rate", self.rate, 0.001, RATE_MAX)
        _within("click-rate", self.click_rate, 0.0, RATE_MAX)
        _within("duration", self.duration_s, 0.01, 1e9)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isnan(value):
        raise UsageError(f"--{name} must be from {low} to {high}, not {value}")
