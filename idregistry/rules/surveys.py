"""What a shard tells of all its ids: pieces of a scan (paper 3.3.3), what each life of a joiner holds. Pure.

Drawn at one moment, told while the state goes on changing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AnySet
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import (
    BUCKET_US,
    NO_BOUNDARY,
    SUBS,
    is_guard,
    joiners_among,
    split_key,
    token_of_holder,
    unhash_ids,
    with_time,
)
from idregistry.rules.segments import Cut, Rows, Stamps, together
from photon.core.accounts import HOURS_A_DAY, NOTHING, Sum, Tally, plus
from photon.core.columns import pack_times
from photon.core.ids import MARK_ADDRESSES

SCAN_IDS_MAX: Final = 1 << 14
"""Ids in a piece: 0.6 MB."""

GONE_JOINERS_MAX: Final = 20
"""Told of at a time."""


@dataclass(frozen=True)
class Scanned:
    """N ids (16 x N bytes), the start of each one's bucket (8 x N bytes; photon ids carry their own time),
    and who holds them. The first piece of a scan has no ids.

    A token is told as its holder, packed like a token of time 0, and its time: each id's row in `holders`,
    and N times (us). `guards`: whose ids, a flag a holder, are only guarded here; but for those whose holder
    got no further, another shard has them too. Of events before `boundary_us` some or all ids are missing.
    """

    ids: bytes
    times: bytes
    holders: list[bytes]
    holder_of: npt.NDArray[np.uint32]
    token_times: npt.NDArray[np.int64]
    guards: list[bool]
    boundary_us: int = NO_BOUNDARY

    @property
    def guarded(self) -> npt.NDArray[np.bool_]:
        """N flags."""
        return np.array(self.guards, np.bool_)[self.holder_of]

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


def scan(cut: Cut, holders: Mapping[int, bytes], boundary_us: int) -> Iterator[Scanned]:
    """What is in the cut (for the offline jobs, 3.3.3), drawn while the state may go on changing.

    `holders`: Holders.names when the cut was made.
    """
    yield _scanned_rows(together([]), holders, boundary_us)
    waiting: list[Rows] = []
    for number in range(SUBS):
        drawn = cut.draw(number)
        if len(drawn):
            waiting.append(drawn)
        if sum(map(len, waiting)) >= SCAN_IDS_MAX:
            rows = together(waiting)
            whole = len(rows) // SCAN_IDS_MAX * SCAN_IDS_MAX
            for start in range(0, whole, SCAN_IDS_MAX):
                yield _scanned_rows(rows.part(start, start + SCAN_IDS_MAX), holders, boundary_us)
            waiting = [rows.part(whole, len(rows))]
    rows = together(waiting)
    if len(rows):
        yield _scanned_rows(rows, holders, boundary_us)


def _scanned_rows(rows: Rows, holders: Mapping[int, bytes], boundary_us: int) -> Scanned:
    return scanned(unhash_ids(rows.hashes, rows.tails), rows.stamps, holders, boundary_us)


def scanned(ids: bytes, stamps: Stamps, holders: Mapping[int, bytes], boundary_us: int) -> Scanned:
    """16 x N bytes and N stamps as a piece."""
    numbers, holder_of = np.unique(stamps["holder"], return_inverse=True)
    names = [holders[number] for number in numbers.tolist()]
    return Scanned(
        ids,
        pack_times(stamps["bucket"].astype(np.int64) * BUCKET_US),
        [token_of_holder(name, 0) for name in names],
        holder_of.astype(np.uint32),
        stamps["time_us"].copy(),
        list(map(is_guard, names)),
        boundary_us,
    )


@dataclass(frozen=True, slots=True)
class Account:
    """What incarnations hold of the ids of each day: all that they ever won, less what was released.

    `days`: (incarnation, day of event time) ->. Of days before `first_day` some or all is forgotten; what was
    registered by tokens of windows from `since` on can be told apart.
    """

    days: Mapping[tuple[int, int], Sum]
    first_day: int
    since: int


def account_of(
    tally: Tally[int],
    names: Mapping[int, bytes],
    live: int,
    incarnations: AnySet[int],
    address: str,
    window: int,
) -> Account:
    """As of `joiners_among`, without what tokens of `window` and later ones hold.

    `tally` and `names` are of Counts and Holders at one moment; `live`: the first bucket that is kept.
    """
    mine = joiners_among(names, incarnations, address)
    days: dict[tuple[int, int], Sum] = {}
    for key, sum_ in tally.before(window).items():
        bucket, number = split_key(key)
        if number in mine and bucket >= live:
            place = mine[number], bucket // HOURS_A_DAY
            days[place] = plus(days.get(place, NOTHING), sum_)
    return Account(days, -(-live // HOURS_A_DAY), tally.since)


def gone_joiners(
    vanished: Mapping[int, str], leased: AnySet[str], held: Mapping[int, int]
) -> list[dict[str, object]]:
    """The joiners that are gone and hold events, those with the most first: `address` and `events` of each.

    `vanished`: DirectoryState's, incarnation -> address; `leased`: the addresses that have a lease. A joiner
    that is back at its address compares what its former lives hold itself (joiner.accounts). `held`:
    incarnation -> events.
    """
    events = Counter[str]()
    for incarnation, address in vanished.items():
        if address not in leased and address not in MARK_ADDRESSES:
            events[address] += held.get(incarnation, 0)
    most = events.most_common(GONE_JOINERS_MAX)
    return [{"address": address, "events": count} for address, count in most if count > 0]
