"""The state machine of a shard: which ids are registered, by which token; the boundary (paper 2.1-2.3). Pure.

Deterministic: it reads no clock, and nothing hangs on hash randomisation (dicts keep the order of insertion).
Where an id physically is (idregistry.idtable) is each replica's own matter and changes no answer. An id is
registered while it has a stamp whose bucket is not wholly before the boundary: raising the boundary takes out
what is expired at once, on all replicas; `tidy` takes it out of memory later.

One thread changes it, the raft thread. `lookup` and `scan` may be called from any thread meanwhile. What they
see may be old: an "absent" costs at most a wasted join, and a "present" is final, because only expiry and
recovery take an id out.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from idregistry import snapshot
from idregistry.buckets import NO_BOUNDARY, first_live
from idregistry.commands import Boundary, Commit, Configure, Fence, Prepare, Release, decode
from idregistry.committing import commit, release
from idregistry.configuration import Configuration
from idregistry.encoding import Encoded
from idregistry.facts import Facts
from idregistry.holders import Holders
from idregistry.idtable import IdTable
from idregistry.ownership import Prepared
from idregistry.scanning import Scanned, scan
from photon.core.fates import Registered

__all__ = ["NO_BOUNDARY", "Prepared", "Scanned", "ShardState"]


class ShardState:
    """Ids -> token. An id alone is identity: it is the same event whatever time comes with it."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._facts = Facts(shard, IdTable(), Holders())

    # --- the log's side (photon.raft.port.StateMachine), raft thread only

    def apply(self, command: bytes) -> object:
        """Apply one command; CommandError (fatal) for what is none. What its proposer is told:

        Commit, Release -> their outcome column (core.fates, 1 x N bytes); Boundary -> the boundary
        now, us; Fence -> how many fences are here now; Prepare -> what is prepared now; Configure -> the
        version now.
        """
        facts = self._facts
        decoded = decode(command)
        facts.time_us = max(facts.time_us, decoded.time_us)
        match decoded:
            case Commit():
                return commit(facts, decoded)
            case Release():
                return release(facts, decoded)
            case _:
                return _apply_rare(facts, decoded)

    def freeze(self) -> Iterator[bytes]:
        """The chunks of a snapshot of this moment; draw them at leisure, in another thread if you like."""
        facts = self._facts
        head = snapshot.Head(
            facts.boundary_us,
            facts.time_us,
            facts.latest_us,
            facts.counts.total,
            facts.ownership.configuration,
            facts.ownership.prepared,
            list(facts.fences),
            facts.holders.names[1:],
        )
        return snapshot.pack(head, facts.table.exact_cut(facts.live))

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Replace everything by a snapshot. CorruptStateError (and nothing changed) if it can't be read."""
        self.prepare(chunks)()

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        """Read a snapshot beside the present state, in any thread; what is returned puts it in place."""
        head, parts = snapshot.unpack(chunks)
        columns, counts = snapshot.gather(head, parts)
        facts = Facts(self._shard, IdTable(columns), Holders(head.holders))
        facts.counts = counts
        facts.raise_boundary(head.boundary_us)
        facts.time_us, facts.latest_us = head.time_us, head.latest_us
        if head.configuration is not None:
            facts.ownership.configure(head.configuration)
        if head.prepared is not None:
            facts.ownership.prepare(head.prepared.version, head.prepared.start_us, head.prepared.fits)
        facts.fence(0, head.fences)

        def put() -> None:
            self._facts = facts

        return put

    def tidy(self) -> bool:
        """One step of local housekeeping, some milliseconds; whether more is to be done. Raft thread only."""
        return self._facts.table.tidy(self._facts.time_us, self._facts.live)

    # --- the readers' side, any thread

    def lookup(self, ids: bytes, times: bytes) -> bytes:
        """16 x N, 8 x N bytes -> outcome column (core.fates.Registered), of what this replica knows now."""
        if not ids:
            return b""
        facts = self._facts
        boundary_us = facts.boundary_us
        present = facts.table.present(Encoded(ids), first_live(boundary_us))
        if boundary_us == NO_BOUNDARY:
            return present.tobytes()
        return np.where(facts.expired(times), np.uint8(Registered.EXPIRED), present).tobytes()

    def scan(self) -> Iterator[Scanned]:
        """All ids that are there now, piece by piece. What is released meanwhile may show."""
        facts = self._facts
        boundary_us = facts.boundary_us
        return scan(facts.table.cut(first_live(boundary_us)), facts.holders, boundary_us)

    def memory(self) -> dict[str, int]:
        """Bytes as reckoned and ids, in dicts and in segments, the dead among them; what else grows."""
        facts = self._facts
        others = {
            "holders": len(facts.holders.names),
            "buckets": len(facts.counts),
            "fences": len(facts.fences),
        }
        return facts.table.memory() | others

    @property
    def ids(self) -> int:
        """How many are registered."""
        return self._facts.counts.total

    @property
    def boundary_us(self) -> int:
        """Events before it are expired; NO_BOUNDARY while none is."""
        return self._facts.boundary_us

    @property
    def time_us(self) -> int:
        """The latest time a leader stamped into a command."""
        return self._facts.time_us

    @property
    def latest_us(self) -> int:
        """The latest event time below HORIZON ever registered; BEGINNING if none."""
        return self._facts.latest_us

    @property
    def configuration(self) -> Configuration | None:
        """The sharding configuration; without one, no id is taken."""
        return self._facts.ownership.configuration

    @property
    def prepared(self) -> Prepared | None:
        """The configuration that may come."""
        return self._facts.ownership.prepared

    @property
    def fences(self) -> int:
        """How many of the directory's fences are here."""
        return len(self._facts.fences)


def _apply_rare(facts: Facts, command: Boundary | Fence | Prepare | Configure) -> object:
    match command:
        case Boundary(_, boundary_us):
            facts.raise_boundary(boundary_us)
            return facts.boundary_us
        case Fence(_, first, incarnations):
            facts.fence(first, incarnations)
            return len(facts.fences)
        case Prepare(_, version, start_us):
            facts.ownership.prepare(version, start_us, fits=facts.latest_us < start_us)
            return facts.ownership.prepared
        case Configure(_, configuration):
            facts.ownership.configure(configuration)
            known = facts.ownership.configuration
            return None if known is None else known.version
