"""What recovery is told of lost events (paper 3.3.3). Plain values; no Spark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from photon.core.columns import split_ids

BACKFILL: Final = "backfill/"
"""What the addresses in the tokens of `photon backfill` begin with."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One incarnation's events that are registered and in no joined log.

    `young` ones: their line may be on its way. `doubtful`, of the lost and the young: they may stand in a
    complete file that was moved away. `oldest_us`: the first one's token.
    """

    address: str
    incarnation: int
    lost: int
    young: int
    doubtful: int
    oldest_us: int

    @property
    def is_backfill(self) -> bool:
        return self.address.startswith(BACKFILL)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a reading of registry and joined logs found: `registered` ids in all; `untold` joined lines, which
    don't tell their event; `damaged` ones, no JSON objects; about how many ids are `joined`, and `known` to
    the registry."""

    registered: int
    untold: int
    damaged: int
    losses: Sequence[Loss]
    joined: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True)
class LostEvents:
    """Events to release and inject: N ids (16 x N bytes), N exact event times (8 x N bytes), and tokens:
    `tokens[i]` is of the next `counts[i]` ids. `lines`, with their newlines; an id may have several."""

    ids: bytes
    times: bytes
    tokens: list[bytes]
    counts: list[int]
    lines: bytes

    @property
    def count(self) -> int:
        """How many events: an id whose lines tell several times stands there with each of them."""
        return len({*split_ids(self.ids)})
