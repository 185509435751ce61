"""Ids whose commit is under way, as a replica that does not lead sees it, too.

A commit takes a round trip or two between datacenters, and a follower has it in its log long before it
applies it. Who looks an id up meanwhile may wait for what comes of it, instead of joining in vain (paper
4.4). It is a hint: an entry in a log may never be committed, and a commit may find the id taken, or another
shard's.
"""

import threading
from collections.abc import Sequence

import numpy as np

from idregistry.commands import CommandError, Commit, decode
from photon.core.columns import split_ids
from photon.core.fates import Registered

_NONE: frozenset[bytes] = frozenset()


class Pending:
    """Reads each command of a log once. For many threads at once."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], frozenset[bytes]] = {}  # (index, term) ->; replaced as a whole
        self._lock = threading.Lock()

    def mark(self, outcomes: bytes, ids: bytes, under_way: Sequence[tuple[int, int, memoryview]]) -> bytes:
        """N core.fates.Registered of 16 x N ids: PENDING in place of ABSENT where the id is `under_way`
        (photon.raft.port.ReplicatedLog.unapplied)."""
        if not under_way:
            self._ids = {}  # what was under way last is held no longer
            return outcomes
        if outcomes.find(Registered.ABSENT) < 0:
            return outcomes
        keys = split_ids(ids)
        wanted = frozenset(keys)
        found = _NONE.union(*(wanted & one for one in self._read(under_way)))
        if not found:
            return outcomes
        column = np.frombuffer(outcomes, np.uint8).copy()
        is_pending = np.fromiter(map(found.__contains__, keys), np.bool_, len(keys))
        column[is_pending & (column == Registered.ABSENT)] = Registered.PENDING
        return column.tobytes()

    def _read(self, under_way: Sequence[tuple[int, int, memoryview]]) -> list[frozenset[bytes]]:
        with self._lock:
            known = self._ids
            self._ids = {
                (index, term): known[index, term] if (index, term) in known else _ids_of(command)
                for index, term, command in under_way
            }
            return list(self._ids.values())


def _ids_of(command: memoryview) -> frozenset[bytes]:
    try:
        decoded = decode(bytes(command))
    except CommandError:  # whoever applies it will say so
        return _NONE
    return frozenset(split_ids(decoded.ids)) if isinstance(decoded, Commit) else _NONE
