"""The state machine of a shard: which ids are registered, by which token; the boundary (paper 2.1-2.3). Pure.

Deterministic: it reads no clock, and nothing hangs on hash randomisation (dicts keep the order of insertion).

One thread changes it, the raft thread. `lookup` may be called from any thread meanwhile: it does only
`dict.__contains__` on bytes keys, one step under the GIL each (hash and comparison of bytes run no Python
code), and never iterates. What it sees may be old: an "absent" costs at most a wasted join, and a "present"
is final, because only garbage collection takes an id out, and an id that old is expired.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Final

import numpy as np

from idregistry import snapshot
from idregistry.buckets import Buckets
from idregistry.commands import Boundary, Collect, Commit, decode
from photon.core.columns import hash_ids, split_ids, take_ids, unpack_times
from photon.core.fates import Committed, Registered

NO_BOUNDARY: Final = -(1 << 63)
"""Below every event time: nothing is expired yet."""

SUB_DICTS: Final = 256
# One dict of millions of ids stops everything while it grows (0.5 s at 5.6 M); 256 of them grow one by one.
# The hash's top byte: its low bits are the shard's, alike in all ids here.
_SUB_DICT_SHIFT: Final = np.uint64(56)

SubDicts = list[dict[bytes, bytes]]


class ShardState:
    """Ids -> token. An id alone is identity: it is the same event whatever time comes with it."""

    def __init__(self) -> None:
        self._subs: SubDicts = _empty()
        self._buckets = Buckets()
        self.ids = 0
        self.boundary_us = NO_BOUNDARY
        self.time_us = NO_BOUNDARY
        """The latest time a leader stamped into a command."""

    # --- the log's side (photon.raft.port.StateMachine), raft thread only

    def apply(self, command: bytes) -> object:
        """Commit -> its outcome column (core.fates.Committed, 1 x N bytes); Boundary -> the boundary now, us;
        Collect -> how many ids were deleted. CommandError (fatal) for anything else.
        """
        match decode(command):
            case Commit() as commit:
                self.time_us = max(self.time_us, commit.time_us)
                return self._commit(commit)
            case Boundary(time_us, boundary_us):
                self.time_us = max(self.time_us, time_us)
                # Leaders' clocks differ: whoever leads, the boundary never goes back (paper 2.3).
                self.boundary_us = max(self.boundary_us, boundary_us)
                return self.boundary_us
            case Collect(ids_max):
                return self._collect(ids_max)

    def freeze(self) -> Iterator[bytes]:
        """The chunks of a snapshot of this moment; draw them at leisure, in another thread if you like."""
        return snapshot.pack(snapshot.Head(self.boundary_us, self.time_us, self.ids), self._buckets.cut())

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Replace everything by a snapshot. CorruptStateError (and nothing changed) if it can't be read."""
        head, parts = snapshot.unpack(chunks)
        subs, buckets = _empty(), Buckets()
        for number, ids, tokens in parts:
            _insert(_subs_of(subs, ids), split_ids(ids), tokens)
            buckets.append(number, ids, tokens)
        # The boundary first: a reader between the two says "expired" or "absent", both true enough.
        self.boundary_us, self.time_us, self.ids = head.boundary_us, head.time_us, head.ids
        self._subs, self._buckets = subs, buckets

    # --- the readers' side, any thread

    def lookup(self, ids: bytes, times: bytes) -> bytes:
        """16 x N, 8 x N bytes -> outcome column (core.fates.Registered), of what this replica knows now."""
        present = bytes(map(dict.__contains__, _subs_of(self._subs, ids), split_ids(ids)))
        boundary_us = self.boundary_us
        if boundary_us == NO_BOUNDARY:
            return present
        old = unpack_times(times) < boundary_us
        return np.where(old, np.uint8(Registered.EXPIRED), np.frombuffer(present, np.uint8)).tobytes()

    def collectable(self) -> bool:
        """Whether a Collect would delete anything. Raft thread only."""
        return self._buckets.collectable(self.boundary_us)

    # --- rules

    def _commit(self, commit: Commit) -> bytes:
        """Insert what is absent; the conflicts inside the batch are resolved here too (paper 2.2.1)."""
        keys = split_ids(commit.ids)
        if not keys:
            return b""
        subs = list(_subs_of(self._subs, commit.ids))
        tokens = list(chain.from_iterable(map(repeat, commit.tokens, commit.counts)))
        times = unpack_times(commit.times)
        known = any(map(dict.__contains__, subs, keys))
        if known or len(set(keys)) < len(keys) or times.min() < self.boundary_us:
            return self._commit_each(commit, keys, subs, tokens)
        _insert(subs, keys, tokens)
        self._buckets.add(commit.ids, times, tokens)
        self.ids += len(keys)
        return bytes(len(keys))  # Committed.WON is 0

    def _commit_each(
        self, commit: Commit, keys: tuple[bytes, ...], subs: SubDicts, tokens: list[bytes]
    ) -> bytes:
        """The same id by id, where some are registered already, twice in the batch, or expired."""
        outcomes = bytearray()
        times = unpack_times(commit.times)
        new: list[int] = []
        rows = zip(range(len(keys)), keys, subs, tokens, times.tolist(), strict=True)
        for count in commit.counts:
            # In one segment an id wins once, also when the segment is a retry.
            won: set[bytes] = set()
            for row, key, sub, token, time_us in islice(rows, count):
                held = sub.get(key)
                if key in won:
                    outcomes.append(Committed.DUPLICATE)
                elif held == token:  # a retry: it keeps what it won, whatever the boundary is by now
                    won.add(key)
                    outcomes.append(Committed.WON)
                elif time_us < self.boundary_us:
                    outcomes.append(Committed.EXPIRED)
                elif held is not None:
                    outcomes.append(Committed.DUPLICATE)
                else:
                    sub[key] = token
                    won.add(key)
                    new.append(row)
                    outcomes.append(Committed.WON)
        chosen = np.array(new, np.intp)
        self._buckets.add(take_ids(commit.ids, chosen), times[chosen], list(map(tokens.__getitem__, new)))
        self.ids += len(new)
        return bytes(outcomes)

    def _collect(self, ids_max: int) -> int:
        ids = self._buckets.collect(self.boundary_us, ids_max)
        keys = split_ids(ids)
        deque(map(dict.__delitem__, _subs_of(self._subs, ids), keys), maxlen=0)
        self.ids -= len(keys)
        return len(keys)


def _empty() -> SubDicts:
    return [{} for _ in range(SUB_DICTS)]


def _subs_of(subs: SubDicts, ids: bytes) -> Iterator[dict[bytes, bytes]]:
    """The sub-dict of each id."""
    column = (hash_ids(ids) >> _SUB_DICT_SHIFT).astype(np.uint8).tobytes()
    return map(subs.__getitem__, column)


def _insert(subs: Iterable[dict[bytes, bytes]], keys: Iterable[bytes], tokens: Iterable[bytes]) -> None:
    """One C-level pass; a statement per id would double the cost."""
    deque(map(dict.__setitem__, subs, keys, tokens), maxlen=0)
