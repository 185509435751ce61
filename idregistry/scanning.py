"""All ids of a shard, as a stream of packed columns (for the offline jobs, paper 3.3.3). Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.buckets import BUCKET_US, NO_BOUNDARY
from idregistry.encoding import SUBS, decode
from idregistry.holders import Holders, with_time
from idregistry.segments import Cut, Rows, together
from photon.core.columns import pack_times

SCAN_IDS_MAX: Final = 1 << 14
"""Ids in a piece: 0.6 MB."""


@dataclass(frozen=True)
class Scanned:
    """N ids (16 x N bytes), the start of each one's bucket (8 x N bytes; photon ids carry their own time),
    and who holds them. The first piece of a scan has no ids.

    A token is told as its holder, packed like a token of time 0, and its time: each id's row in `holders`,
    and N times (us). Of events before `boundary_us` some or all ids are missing.
    """

    ids: bytes
    times: bytes
    holders: list[bytes]
    holder_of: npt.NDArray[np.uint32]
    token_times: npt.NDArray[np.int64]
    boundary_us: int = NO_BOUNDARY

    @property
    def token_table(self) -> list[bytes]:
        """The distinct packed tokens. Python work for each of them."""
        return self._tokens[0]

    @property
    def token_of(self) -> npt.NDArray[np.uint32]:
        """Each id's row in `token_table`."""
        return self._tokens[1]

    @property
    def tokens(self) -> list[bytes]:
        """Each id's token."""
        return list(map(self.token_table.__getitem__, self.token_of.tolist()))

    @cached_property
    def _tokens(self) -> tuple[list[bytes], npt.NDArray[np.uint32]]:
        order = np.lexsort((self.token_times, self.holder_of))
        holder_of, times = self.holder_of[order], self.token_times[order]
        new = np.ones(len(order), np.bool_)
        new[1:] = (holder_of[1:] != holder_of[:-1]) | (times[1:] != times[:-1])
        token_of = np.empty(len(order), np.uint32)
        token_of[order] = np.cumsum(new, dtype=np.uint32) - np.uint32(1)
        holders = map(self.holders.__getitem__, holder_of[new].tolist())
        return list(map(with_time, holders, times[new].tolist())), token_of


def scan(cut: Cut, holders: Holders, boundary_us: int) -> Iterator[Scanned]:
    """What is in the cut, drawn one by one while the state may go on changing."""
    yield _scanned(together([]), holders, boundary_us)
    waiting: list[Rows] = []
    for number in range(SUBS):
        waiting.append(cut.draw(number))
        if sum(map(len, waiting)) >= SCAN_IDS_MAX:
            rows = together(waiting)
            whole = len(rows) // SCAN_IDS_MAX * SCAN_IDS_MAX
            for start in range(0, whole, SCAN_IDS_MAX):
                yield _scanned(rows.part(start, start + SCAN_IDS_MAX), holders, boundary_us)
            waiting = [rows.part(whole, len(rows))]
    rows = together(waiting)
    if len(rows):
        yield _scanned(rows, holders, boundary_us)


def _scanned(rows: Rows, holders: Holders, boundary_us: int) -> Scanned:
    numbers, holder_of = np.unique(rows.stamps["holder"], return_inverse=True)
    return Scanned(
        decode(rows.hashes, rows.tails),
        pack_times(rows.stamps["bucket"].astype(np.int64) * BUCKET_US),
        list(map(holders.token, numbers.tolist(), repeat(0))),
        holder_of.astype(np.uint32),
        rows.stamps["time_us"].copy(),
        boundary_us,
    )
