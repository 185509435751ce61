"""An id as the state keeps it: its hash first, so that ids in order are ids spread evenly. Pure.

    id (16) = a (8) | b (8)      <->      h (8, big endian) | b (8)      h = columns.hash_ids(id)

Given b, the hash can be turned back, so nothing is lost. The first byte of h says in which of 256 sub-dicts
an id is, the other 15 bytes are its key there: a bytes object of 15 takes 48 bytes of memory, one of 16 takes
64.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AnySet
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.accounts import WINDOW_US, Sum, Tally, grouped, window_of
from photon.core.columns import hash_ids, split_ids, unpack_times
from photon.core.ids import ID_BYTES, TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, parse_token
from photon.core.settings import BATCH_IDS_MAX

SUBS: Final = 256
KEY_BYTES: Final = ID_BYTES - 1

FEW: Final = 12
"""Up to so many ids plain Python is faster than numpy's overhead for each call."""

Hashes = npt.NDArray[np.uint64]

_MIX: Final = 0x9E3779B97F4A7C15
_UNMIX: Final = pow(_MIX, -1, 1 << 64)
_MASK: Final = (1 << 64) - 1
_HALVES: Final = struct.Struct("<QQ")


# Few: a Struct holds 32 bytes an id, and sizes vary without end; building one again costs 0.02 us an id.
@lru_cache(maxsize=64)
def _keys_struct(count: int) -> struct.Struct:
    return struct.Struct(f"x{KEY_BYTES}s" * count)


class Encoded:
    """A batch of ids: `subs` (1 x N bytes, the number of each one's sub-dict) and `keys` (N of 15 bytes)."""

    __slots__ = ("_distinct", "_hashes", "_ids", "_probes", "count", "keys", "subs")

    def __init__(self, ids: bytes) -> None:
        self._ids = ids
        self._hashes: Hashes | None = None
        self._probes: tuple[Hashes, Hashes] | None = None
        self._distinct: bool | None = None
        self.count = len(ids) // ID_BYTES
        raw = self._encode_few() if self.count <= FEW else self._encode()
        self.subs = raw[::ID_BYTES]
        self.keys: tuple[bytes, ...] = _keys_struct(self.count).unpack(raw)

    @property
    def hashes(self) -> Hashes:
        """N hashes."""
        if self._hashes is None:
            self._hashes = hash_ids(self._ids)
        return self._hashes

    @property
    def tails(self) -> Hashes:
        """N second halves: what tells ids of one hash apart."""
        return np.frombuffer(self._ids, "<u8")[1::2]

    @property
    def probes(self) -> tuple[Hashes, Hashes]:
        """As of `probes_of`."""
        if self._probes is None:
            self._probes = probes_of(self.hashes)
        return self._probes

    def id(self, place: int) -> bytes:
        """One of the ids."""
        return self._ids[place * ID_BYTES : (place + 1) * ID_BYTES]

    @property
    def distinct(self) -> bool:
        """Whether no id stands twice; False if hard to say."""
        if self._distinct is None:
            self._distinct = len(set(self.keys)) == self.count
        return self._distinct

    def first_copies(self) -> npt.NDArray[np.int64]:
        """Of each id the row where it stands first. C-level passes."""
        first: dict[bytes, int] = {}
        rows = map(first.setdefault, split_ids(self._ids), range(self.count))
        return np.fromiter(rows, np.int64, self.count)

    def _encode(self) -> bytes:
        column = np.empty((self.count, 2), np.uint64)
        column[:, 0] = self.hashes.byteswap()
        column[:, 1] = self.tails
        return column.tobytes()

    def _encode_few(self) -> bytes:
        rows = []
        for first, second in _HALVES.iter_unpack(self._ids):
            mixed = (first * _MIX & _MASK) ^ second
            mixed = (mixed ^ mixed >> 32) * _MIX & _MASK
            rows.append((mixed ^ mixed >> 29).to_bytes(8, "big") + second.to_bytes(8, "little"))
        return b"".join(rows)


def probes_of(hashes: Hashes) -> tuple[Hashes, Hashes]:
    """Where a filter looks for N ids first, and by how much further on each time: numbers of 32 bits, of the
    halves of the hash that choose no region."""
    step = (hashes * np.uint64(_MIX)) >> np.uint64(32) | np.uint64(1)
    return hashes & np.uint64(0xFFFF_FFFF), step


def probe_of(hash_: int) -> tuple[int, int]:
    """The same of one."""
    return hash_ & 0xFFFF_FFFF, (hash_ * _MIX & _MASK) >> 32 | 1


def split_keys(sub: int, keys: list[bytes]) -> tuple[Hashes, Hashes]:
    """Keys of one sub-dict -> their hashes and second halves."""
    rows = np.empty((len(keys), ID_BYTES), np.uint8)
    rows[:, 0] = sub
    rows[:, 1:] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    halves = rows.view("<u8")
    return halves[:, 0].byteswap(), halves[:, 1].copy()


def unhash_ids(hashes: Hashes, tails: Hashes) -> bytes:
    """Hashes and second halves -> 16 x N bytes of ids: hash_ids turned back."""
    unmix = np.uint64(_UNMIX)
    mixed = hashes ^ (hashes >> np.uint64(29)) ^ (hashes >> np.uint64(58))
    mixed *= unmix
    mixed ^= mixed >> np.uint64(32)
    mixed ^= tails
    mixed *= unmix
    halves = np.empty((len(hashes), 2), "<u8")
    halves[:, 0] = mixed
    halves[:, 1] = tails
    return halves.tobytes()


# What client and server agree on beyond the .proto.

TIME_BYTES: Final = 8

BATCH_BYTES_MAX: Final = 1_900_000
"""A command's size; holds the largest request and stays under the log's own bound (RaftLimits: 2 MiB)."""

SCAN_S_MAX: Final = 3600.0
"""A scan is given a deadline no further off: until then a client that stalls keeps one of few slots."""

INCARNATIONS_MAX: Final = 4096
"""Incarnations asked about in one request."""

LEADER_DETAILS: Final = "leader="
"""Details of FAILED_PRECONDITION: after it the leader's gRPC address, or nothing where none is known."""


def request_bytes(ids: bytes, *tokens: bytes) -> int:
    """What a request adds to a command: ids, times, tokens and their rows in the segment table."""
    return len(ids) + len(ids) // ID_BYTES * TIME_BYTES + sum(map(len, tokens)) + 20 * len(tokens)


def columns_mistake(ids: bytes, times: bytes) -> str | None:
    """What is wrong with a request's columns, or None."""
    count, rest = divmod(len(ids), ID_BYTES)
    if rest:
        return f"ids has {len(ids)} bytes, no multiple of {ID_BYTES}"
    if len(times) != count * TIME_BYTES:
        return f"times has {len(times)} bytes, expected {count} x {TIME_BYTES}"
    # A larger one could not stay one segment, and within a segment an id wins once.
    if count > BATCH_IDS_MAX:
        return f"{count} ids in one request, at most {BATCH_IDS_MAX} are taken"
    return None


def segments_mistake(ids: bytes, tokens: Sequence[bytes], counts: Sequence[int]) -> str | None:
    """What is wrong with a release's tokens, each for so many ids, or None."""
    if len(tokens) != len(counts) or sum(counts) * ID_BYTES != len(ids) or min(counts, default=1) < 1:
        return f"{len(tokens)} tokens with counts that add up to {sum(counts)} are no token for each id"
    for token in tokens:
        mistake = token_mistake(token)
        if mistake is not None:
            return mistake
    if (size := request_bytes(ids, *tokens)) > BATCH_BYTES_MAX:
        return (
            f"the ids and tokens make {size} bytes, at most {BATCH_BYTES_MAX} are taken: send fewer at a time"
        )
    return None


def token_mistake(token: bytes) -> str | None:
    """What is wrong with a token, or None. Only joiners' tokens are taken: the registry keeps each holder."""
    try:
        parse_token(token)
    except ValueError as error:
        return f"{error}; a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, see photon.core.ids"
    return None


BUCKET_US: Final = 3_600_000_000
"""Event time a bucket spans: all replicas use the same. A bucket that lies wholly before the boundary is
dead, and with it, at once, all ids in it (paper 2.3).
"""

NO_BOUNDARY: Final = -(1 << 63)
"""Below every event time: nothing is expired yet."""

DEAD: Final = -(1 << 31)
"""The bucket of what is released: before every boundary."""

_FIRST: Final = DEAD + 1
_LAST: Final = (1 << 31) - 1


def bucket_of(time_us: int) -> int:
    """The bucket's number. Times that no calendar knows are clipped to the first and the last."""
    return min(max(time_us // BUCKET_US, _FIRST), _LAST)


def buckets_of(times_us: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """N times -> N bucket numbers."""
    return np.clip(times_us // BUCKET_US, _FIRST, _LAST)


def first_live(boundary_us: int) -> int:
    """The first bucket that is not wholly before the boundary."""
    return max(boundary_us // BUCKET_US, _FIRST)


def span(times: bytes) -> tuple[int, int]:
    """8 x N bytes, N > 0 -> the least and the greatest time."""
    count = len(times) // TIME_BYTES
    if count <= FEW:
        few = struct.unpack(f"<{count}q", times)
        return min(few), max(few)
    times_us = unpack_times(times)
    return int(times_us.min()), int(times_us.max())


_HOLDER_BITS: Final = 32  # of STAMP's holder
_HOLDER_MASK: Final = (1 << _HOLDER_BITS) - 1
_FEW_CELLS: Final = 1 << 12  # so few are counted without sorting


class Counts:
    """How many ids each holder has in each bucket, and the sum of their hashes. `total` is how many in all.

    What a holder ever won, less what was released or expired: compared with what its joiner has written.
    """

    def __init__(self) -> None:
        self.tally: Tally[int] = Tally()
        """bucket << 32 | holder ->"""
        self.total = 0

    def add(self, bucket: int, holder: int, token_us: int, sum_: Sum) -> None:
        """So many ids more in one bucket, with their hashes' sum; fewer if negative."""
        self.tally.add(bucket << _HOLDER_BITS | holder, window_of(token_us), sum_)
        self.total += sum_[0]

    def add_each(
        self,
        buckets: npt.NDArray[np.integer],
        holders: npt.NDArray[np.integer],
        times_us: npt.NDArray[np.int64],
        hashes: Hashes,
    ) -> None:
        """One id more for the bucket, holder and token time of each row."""
        windows = np.maximum(times_us // WINDOW_US, self.tally.since - 1)
        low, high = int(windows.min()), int(windows.max())
        if low == high:  # of most batches, and of what snapshots hold
            self._add_each(buckets, holders, low, hashes)
            return
        for window in np.unique(windows).tolist():
            rows = windows == window
            self._add_each(buckets[rows], holders[rows], window, hashes[rows])

    def _add_each(
        self,
        buckets: npt.NDArray[np.integer],
        holders: npt.NDArray[np.integer],
        window: int,
        hashes: Hashes,
    ) -> None:
        bucket, holder = int(buckets.min()), int(holders.min())
        width = int(holders.max()) - holder + 1
        if (int(buckets.max()) - bucket + 1) * width > _FEW_CELLS:
            keys = buckets.astype(np.int64) << _HOLDER_BITS | holders.astype(np.int64)
            numbers, row_of = np.unique(keys, return_inverse=True)
        else:
            cells = (buckets.astype(np.int64) - bucket) * width + (holders - holder)
            known, row_of = np.arange(int(cells.max()) + 1), cells
            numbers = (known // width + bucket) << _HOLDER_BITS | known % width + holder
        for key, sum_ in zip(numbers.tolist(), grouped(row_of, hashes, len(numbers)), strict=True):
            if sum_[0]:
                self.tally.add(key, window, sum_)
        self.total += len(hashes)

    def drop_before(self, live: int) -> None:
        """Forget the buckets before `live`."""
        self.total -= self.tally.forget(lambda key: key >> _HOLDER_BITS < live)

    def of(self, holders: AnySet[int]) -> Counter[int]:
        """How many ids each of them has. Any thread."""
        found = Counter[int]()
        for key, (ids, _) in list(self.tally.sums.items()):
            if (holder := key & _HOLDER_MASK) in holders:
                found[holder] += ids
        return found

    def holders(self) -> set[int]:
        """The numbers of those that hold anything."""
        return {key & _HOLDER_MASK for key in self.tally.sums}


def split_key(key: int) -> tuple[int, int]:
    """A key of Counts.tally -> bucket, holder."""
    return key >> _HOLDER_BITS, key & _HOLDER_MASK


NOBODY: Final = 0
"""The number of no holder."""

_TIME: Final = struct.Struct("<q")
_TIME_AT: Final = 9  # after version (1) and incarnation (8), see photon.core.ids
_JOINER: Final = 1
_OTHER: Final = b"\0"
_GUARD: Final = b"\2"


def incarnation_of(token: bytes) -> bytes | None:
    """The 8 bytes of the token's incarnation; None for what is no joiner's token."""
    if len(token) < TOKEN_BYTES_MIN or token[0] != _JOINER:
        return None
    return token[1:_TIME_AT]


def pack_incarnation(incarnation: int) -> bytes:
    """As it stands in a token."""
    return incarnation.to_bytes(8, "little")


class Holders:
    """Holder <-> number: the incarnations of joiners are few, ids and tokens many.

    A token is its holder (incarnation and address) and a time. What it holds as a guard is another holder's.
    Numbers are given in the order of the log, alike on all replicas, and never again to another. What is no
    joiner's token is a holder by itself, of time 0: it compares as any other, but has no incarnation and so
    can't be fenced. `names` is replaced where one is forgotten, and else only grows: other threads may read
    one that they took.
    """

    def __init__(self, names: Mapping[int, bytes] | None = None, last: int = 0) -> None:
        """`last`: the greatest number that was ever given."""
        self.names: dict[int, bytes] = dict(names or {})
        self.last = last
        self._numbers = {name: number for number, name in self.names.items()}

    def find(self, token: bytes, guard: bool) -> tuple[int | None, int]:
        """The holder's number, None if it holds nothing, and the token's time."""
        name, time_us = _split(token, guard)
        return self._numbers.get(name), time_us

    def intern(self, token: bytes, guard: bool) -> tuple[int, int]:
        """The holder's number, a new one if need be, and the token's time."""
        name, time_us = _split(token, guard)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self.last = self.last + 1
            self.names[number] = name
        return number, time_us

    def forget_but(self, kept: AnySet[int]) -> None:
        """Those that hold nothing any more."""
        if len(kept) < len(self.names):
            self.names = {number: name for number, name in self.names.items() if number in kept}
            self._numbers = {name: number for number, name in self.names.items()}


def is_guard(name: bytes) -> bool:
    """Whether what this holder holds is another shard's to count."""
    return name[:1] == _GUARD


def joiners_among(
    names: Mapping[int, bytes], incarnations: AnySet[int], address: str | None = None
) -> dict[int, int]:
    """Of numbered holders those of these incarnations, and of all at this address: number -> incarnation.
    What is only guarded here another shard counts. Any thread.
    """
    mine: dict[int, int] = {}
    for number, name in list(names.items()):
        if name[0] != _JOINER:
            continue
        incarnation, named = int.from_bytes(name[1:_TIME_AT], "little"), name[_TIME_AT:]
        if incarnation in incarnations or named.decode("utf-8", "replace") == address:
            mine[number] = incarnation
    return mine


def token_of_holder(name: bytes, time_us: int) -> bytes:
    """A holder's packed token."""
    if is_guard(name):
        name = name[1:]
    if name[:1] == _OTHER:
        return name[1:]
    return name[:_TIME_AT] + _TIME.pack(time_us) + name[_TIME_AT:]


def with_time(token: bytes, time_us: int) -> bytes:
    """A holder's token with another time; what is no joiner's token has none, and stays as it is."""
    if incarnation_of(token) is None:
        return token
    return token[:_TIME_AT] + _TIME.pack(time_us) + token[_TIME_AT + _TIME.size :]


def _split(token: bytes, guard: bool) -> tuple[bytes, int]:
    kind = _GUARD if guard else b""
    if incarnation_of(token) is None:
        return kind + _OTHER + token, 0
    time_end = _TIME_AT + _TIME.size
    return kind + token[:_TIME_AT] + token[time_end:], _TIME.unpack_from(token, _TIME_AT)[0]
