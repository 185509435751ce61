"""The state machine of a shard: which ids are registered, by which token; the boundary (paper 2.1-2.3). Pure.

Deterministic: it reads no clock, and nothing hangs on hash randomisation (dicts keep the order of insertion).
Where an id physically is (table) is each replica's own matter and changes no answer. An id is
registered while it has a stamp whose bucket is not wholly before the boundary: raising the boundary takes out
what is expired at once, on all replicas; it leaves memory and disk with the segments that it is in.

One thread changes it, the raft thread. `lookup` and `scan` may be called from any thread meanwhile. What they
see may be old: an "absent" costs at most a wasted join, and a "present" is final, because only expiry and
recovery take an id out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AnySet
from functools import partial
from itertools import chain, compress, repeat
from operator import is_
from pathlib import Path

import numpy as np
import numpy.typing as npt

from idregistry.rules.commands import (
    Boundary,
    Command,
    Commit,
    Configure,
    Fences,
    Merge,
    Prepare,
    Release,
    Seal,
    decode,
    version_of,
)
from idregistry.rules.packing import (
    BUCKET_US,
    FEW,
    NO_BOUNDARY,
    NOBODY,
    Counts,
    Encoded,
    Holders,
    bucket_of,
    first_live,
    incarnation_of,
    is_guard,
    joiners_among,
    pack_incarnation,
    span,
)
from idregistry.rules.segments import (
    GONE,
    STAMP,
    STAMP_DTYPE,
    Segment,
    Source,
    Stamps,
    new_stamps,
)
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Ownership, Prepared
from idregistry.rules.snapshots import Head, pack, place_of, released_of, unpack
from idregistry.rules.surveys import Account, Scanned, account_of, scan, scanned
from idregistry.rules.table import IdTable, SegmentFiles, Writing, files_of
from photon.core.accounts import window_of
from photon.core.columns import take_ids, unpack_times
from photon.core.errors import CorruptStateError
from photon.core.fates import Committed, Registered, Released
from photon.core.protocol import OLDEST
from photon.raft.port import FileId


class Facts:
    """All that the log of a shard has made true: the ids and what is to know about them. Changed by one
    thread.
    """

    def __init__(self, shard: int, table: IdTable, holders: Holders) -> None:
        self.table = table
        self.holders = holders
        self.ownership = Ownership(shard)
        self.counts = Counts()
        self.boundary_us = NO_BOUNDARY
        """Events before it are expired."""
        self.live = first_live(NO_BOUNDARY)
        """The first bucket whose ids are kept."""
        self.time_us = NO_BOUNDARY
        """The latest time a leader stamped into a command."""
        self.latest_us = BEGINNING
        """The latest event time below HORIZON that was ever registered."""
        self.protocol = OLDEST
        """The newest version of a command that was applied (photon.core.protocol)."""
        self.fences: list[int] = []
        """The directory's fences that are here: its list, from the first on."""
        self._fenced: set[bytes] = set()

    def raise_boundary(self, boundary_us: int) -> None:
        """Leaders' clocks differ: whoever leads, the boundary never goes back (paper 2.3)."""
        if boundary_us > self.boundary_us:
            # Readers take the boundary first: in between they say "expired" of more, not "absent" of more.
            self.boundary_us = boundary_us
            self.live = self.live_at(boundary_us)
            self.ownership.forget_before(self.live * BUCKET_US)
            self.counts.drop_before(self.live)
            self.holders.forget_but(self.counts.holders())

    def live_at(self, boundary_us: int) -> int:
        """The first bucket whose ids are kept where events before the boundary are expired: an event that is
        not may be a copy of one that is, as far back as the spread.
        """
        return first_live(boundary_us - self.ownership.spread_us)

    def fence(self, first: int, incarnations: Iterable[int]) -> None:
        """The directory's fences from number `first` on.

        Those that are here already, and those whose forerunners are not, are passed over.
        """
        for number, incarnation in enumerate(incarnations, first):
            if number == len(self.fences):
                self.fences.append(incarnation)
                self._fenced.add(pack_incarnation(incarnation))

    def is_fenced(self, token: bytes) -> bool:
        """Whether the token's incarnation is fenced."""
        return incarnation_of(token) in self._fenced

    def none_expired(self, low_us: int, high_us: int) -> bool:
        """Whether no event of these times is too old, or of a time that can't be."""
        return self.boundary_us == NO_BOUNDARY or (low_us >= self.boundary_us and high_us < HORIZON)

    def expired(self, times: bytes) -> npt.NDArray[np.bool_]:
        """8 x N bytes -> N flags."""
        times_us = unpack_times(times)
        if self.boundary_us == NO_BOUNDARY:
            return np.zeros(len(times_us), np.bool_)
        expired: npt.NDArray[np.bool_] = (times_us < self.boundary_us) | (times_us >= HORIZON)
        return expired


Sealed = dict[int, tuple[Segment, bytes]]
"""Place in a batch -> segment and stamp."""


def commit(facts: Facts, command: Commit) -> bytes:
    """Insert the absent ids (2.1, 2.2.1, 3.3.2): the outcome of each id (core.fates.Committed, 1 x N bytes).

    It is asked of each, in this order: is it this shard's; is its token fenced; is it the holder's retry,
    which keeps what it won; is it expired; is it registered. Where none of the first questions can hit, all
    go in by one C-level pass. No Python work for each id but those released or expired that come again.
    """
    if not command.ids:
        return b""
    batch = Encoded(command.ids)
    low_us, high_us = span(command.times)
    fenced = list(map(facts.is_fenced, command.tokens))
    # Also where nothing is won: numbers hang on the log alone. What is fenced stamps nothing.
    holders = [
        (NOBODY, 0) if barred else facts.holders.intern(token, route.guard)
        for token, route, barred in zip(command.tokens, command.routes, fenced, strict=True)
    ]
    stamps = new_stamps(holders, command.counts, command.times, low_us, high_us)
    plain = (
        not any(fenced)
        and facts.none_expired(low_us, high_us)
        and _owns_all(facts, command, batch, low_us, high_us)
        and batch.distinct
        and not facts.table.any_sealed(batch, facts.live)
    )
    if not plain:
        return _commit_columns(facts, command, batch, stamps, fenced)
    held = facts.table.insert(batch, stamps)
    if all(map(is_, held, stamps)):
        _count_all(facts, command, batch, stamps, holders, low_us, high_us)
        return bytes(batch.count)  # Committed.WON is 0
    return _commit_rest(facts, command, batch, stamps, held)


def _owns_all(facts: Facts, command: Commit, batch: Encoded, low_us: int, high_us: int) -> bool:
    known_us = min(route.known_us for route in command.routes)
    if not any(route.guard for route in command.routes):
        if facts.ownership.owns_all(batch, low_us, high_us, known_us):
            return True
        if batch.count <= FEW:
            return False
    return bool(_owned(facts, command).all())


def _owned(facts: Facts, command: Commit | Release) -> npt.NDArray[np.bool_]:
    return facts.ownership.owned(command.ids, command.times, command.counts, command.routes)


def _commit_rest(
    facts: Facts, command: Commit, batch: Encoded, stamps: list[bytes], held: list[bytes]
) -> bytes:
    """Some ids had a stamp already: retries, duplicates, and what is released or expired."""
    before, wanted = _columns_of(held), _columns_of(stamps)
    new = np.fromiter(map(is_, held, stamps), np.bool_, batch.count)
    dead = before["bucket"] < facts.live
    facts.table.put_each(batch, stamps, dead)
    _count(facts, command, batch, stamps, new | dead)
    won = dead | _same_tokens(before, wanted)
    return np.where(won, np.uint8(Committed.WON), np.uint8(Committed.DUPLICATE)).tobytes()


def _commit_columns(
    facts: Facts, command: Commit, batch: Encoded, stamps: list[bytes], fenced: list[bool]
) -> bytes:
    """Every question is asked of every id.

    Copies of an id are asked in their order: the first that may take it does, and the others find it taken.
    """
    rows = np.arange(batch.count)
    segments = np.repeat(np.arange(len(fenced)), command.counts)
    held, wanted = facts.table.held(batch, facts.live), _columns_of(stamps)
    owned = _owned(facts, command)
    barred = np.array(fenced, np.bool_)[segments]
    expired = facts.expired(command.times)
    taken = held["bucket"] >= facts.live
    first = rows if batch.distinct else batch.first_copies()
    may_take = np.flatnonzero(owned & ~barred & ~expired & ~taken)[::-1]
    taker = np.full(batch.count, batch.count)
    taker[first[may_take]] = may_take  # of several the last one written stays: the first in order
    taker = taker[first]
    new, found = taker == rows, taker <= rows
    held[found] = wanted[taker[found]]
    # It keeps what it won, whatever the boundary is by now; but for what it may have won by half.
    won = owned & ~barred & (taken | found) & _same_tokens(held, wanted)
    if facts.ownership.former and (expired & won).any():
        half = expired & won & facts.ownership.unguarded(command.ids, command.times)
        won &= ~half
        _give_up(facts, batch, np.flatnonzero(half & taken & ~np.isin(first, first[won])), wanted)
    outcomes = np.where(expired & ~won, np.uint8(Committed.EXPIRED), np.uint8(Committed.DUPLICATE))
    if (won & (first < rows)).any():
        # In one segment an id wins once, also when the segment is a retry.
        places = np.flatnonzero(won)
        _, once = np.unique(segments[places] * batch.count + first[places], return_index=True)
        won = np.isin(rows, places[once])
    outcomes[won] = Committed.WON
    outcomes[barred] = Committed.FENCED
    outcomes[~owned] = Committed.MISROUTED
    facts.table.put_each(batch, stamps, new)
    _count(facts, command, batch, stamps, new)
    return outcomes.tobytes()


def _give_up(facts: Facts, batch: Encoded, rows: npt.NDArray[np.intp], wanted: Stamps) -> None:
    """Take out what its holder is told that it is expired: nobody joins it."""
    sealed = facts.table.sealed(batch, facts.live) if len(rows) else {}
    for row in rows.tolist():
        holder, token_us, _ = wanted[row].item()
        _release_one(facts, batch, row, sealed, (holder, token_us))


def _columns_of(stamps: list[bytes]) -> Stamps:
    return np.frombuffer(b"".join(stamps), STAMP_DTYPE)


def _same_tokens(stamps: Stamps, others: Stamps) -> npt.NDArray[np.bool_]:
    same: npt.NDArray[np.bool_] = (stamps["holder"] == others["holder"]) & (
        stamps["time_us"] == others["time_us"]
    )
    return same


def _count_all(
    facts: Facts,
    command: Commit,
    batch: Encoded,
    stamps: Sequence[bytes],
    holders: Sequence[tuple[int, int]],
    low_us: int,
    high_us: int,
) -> None:
    """All ids of a batch are new. `holders`: of each of its segments, the number and its token's time."""
    bucket = bucket_of(low_us)
    if bucket == bucket_of(high_us) and high_us < HORIZON:
        filled = [(*holder, ids) for holder, ids in zip(holders, command.counts, strict=True) if ids]
        starts = np.cumsum([0, *(ids for *_, ids in filled[:-1])])
        sums = np.add.reduceat(batch.hashes, starts).tolist()
        for (holder, token_us, ids), total in zip(filled, sums, strict=True):
            facts.counts.add(bucket, holder, token_us, (ids, total))
        facts.latest_us = max(facts.latest_us, high_us)
    else:
        _count(facts, command, batch, stamps, np.ones(batch.count, np.bool_))


def _count(
    facts: Facts, command: Commit, batch: Encoded, stamps: Sequence[bytes], new: npt.NDArray[np.bool_]
) -> None:
    """The ids of the flagged rows are new."""
    if not new.any():
        return
    stamped = np.frombuffer(b"".join(compress(stamps, new.tolist())), STAMP_DTYPE)
    facts.counts.add_each(stamped["bucket"], stamped["holder"], stamped["time_us"], batch.hashes[new])
    times_us = unpack_times(command.times)[new]
    facts.latest_us = max(facts.latest_us, int(times_us[times_us < HORIZON].max(initial=BEGINNING)))


def release(facts: Facts, command: Release) -> bytes:
    """Take out ids, compare and delete: the outcomes (core.fates.Released, 1 x N bytes)."""
    if not command.ids:
        return b""
    batch = Encoded(command.ids)
    outcomes = bytearray(batch.count)
    owned = _owned(facts, command).tolist()
    sealed = facts.table.sealed(batch, facts.live)
    free = [command.given_back or facts.is_fenced(token) for token in command.tokens]
    holders = [
        facts.holders.find(token, route.guard)
        for token, route in zip(command.tokens, command.routes, strict=True)
    ]
    segments = chain.from_iterable(map(repeat, range(len(holders)), command.counts))
    for row, segment in enumerate(segments):
        if not owned[row]:
            outcomes[row] = Released.MISROUTED
        elif not free[segment]:
            outcomes[row] = Released.NOT_FENCED
        else:
            outcomes[row] = _release_one(facts, batch, row, sealed, holders[segment])
    return bytes(outcomes)


def _release_one(
    facts: Facts, batch: Encoded, row: int, sealed: Sealed, wanted: tuple[int | None, int]
) -> Released:
    """`wanted`: as of Holders.find, whose id it must be to go."""
    table, number, key = facts.table, batch.subs[row], batch.keys[row]
    segment = None
    holder, token_us, bucket = STAMP.unpack(table.stamp(number, key))
    if bucket < facts.live:
        if row not in sealed:
            return Released.ABSENT
        segment, stamp = sealed[row]
        if batch.id(row) in segment.released:  # by an earlier row of this command
            return Released.ABSENT
        holder, token_us, bucket = STAMP.unpack(stamp)
    if (holder, token_us) != wanted:
        return Released.OTHER
    if segment is None:
        table.put(number, key, GONE)
    else:
        segment.released[batch.id(row)] = None
    facts.counts.add(bucket, holder, token_us, (-1, -int(batch.hashes[row])))
    return Released.RELEASED


class ShardState:
    """Ids -> token. An id alone is identity: it is the same event whatever time comes with it.

    The log's side (photon.raft.port: StateMachine, Filing) and `filing_due` are the raft thread's,
    the rest any thread's.
    """

    def __init__(self, shard: int, files_in: Callable[[Path], SegmentFiles] | None = None) -> None:
        """`files_in`: keeps segments in files of a directory; without it they stay in memory."""
        self._shard = shard
        self._facts = Facts(shard, IdTable(), Holders())
        self._files_in = files_in
        self._files: SegmentFiles | None = None
        self._writings: dict[int, Writing] = {}
        """By the numbers of their segments."""
        self._at_work: Writing | None = None

    def apply(self, command: bytes) -> object:
        """Apply one command; CommandError (fatal) for what is none. What its proposer is told:

        Commit, Release -> their outcome column (core.fates, 1 x N bytes); Boundary -> the boundary
        now, us; Fences -> how many fences are here now; Prepare -> what is prepared now; Configure -> the
        version now; Seal, Merge -> the number of the next segment.
        """
        facts = self._facts
        decoded = decode(command)
        facts.protocol = max(facts.protocol, version_of(command))
        facts.time_us = max(facts.time_us, decoded.time_us)
        facts.counts.tally.move_on(window_of(facts.time_us))
        told: object
        match decoded:
            case Commit():
                told = commit(facts, decoded)
            case Release():
                told = release(facts, decoded)
            case Boundary(_, boundary_us):
                facts.raise_boundary(boundary_us)
                told = facts.boundary_us
            case Fences(_, first, incarnations):
                facts.fence(first, incarnations)
                told = len(facts.fences)
            case Prepare(_, version, start_us):
                facts.ownership.prepare(version, start_us, fits=facts.latest_us < start_us)
                told = facts.ownership.prepared
            case Configure(_, configuration):
                facts.ownership.configure(configuration)
                told = self.version
            case Seal(_, number):
                told = facts.table.seal(number, facts.live)
            case Merge(_, number, inputs):
                told = facts.table.merge(number, inputs, facts.live)
        return told

    def freeze(self) -> Iterator[bytes]:
        """The chunks of a snapshot of this moment; draw them at leisure, in another thread if you like."""
        facts = self._facts
        segments = facts.table.segments
        fences, holders = list(facts.fences), list(facts.holders.names.items())
        tally, released = facts.counts.tally.rows(), released_of(segments)
        head = Head(
            facts.boundary_us,
            facts.time_us,
            facts.latest_us,
            facts.counts.total,
            facts.ownership.configuration,
            facts.ownership.prepared,
            facts.ownership.former,
            len(fences),
            len(holders),
            len(tally),
            len(released),
            facts.holders.last,
            facts.table.next_number,
            tuple(map(place_of, segments)),
            facts.protocol,
        )
        return pack(head, (fences, holders, tally, released), facts.table.exact_cut(facts.live))

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        """Read a snapshot beside the present state, in any thread; what is returned puts it in place.
        CorruptStateError if it can't be read."""
        head, names, fences, table, counts = unpack(chunks, self._open)
        facts = Facts(self._shard, table, Holders(names, head.last_holder))
        facts.counts = counts
        facts.time_us, facts.latest_us, facts.protocol = head.time_us, head.latest_us, head.protocol
        if head.configuration is not None:
            facts.ownership.configure(head.configuration)
        facts.ownership.former = head.former
        # Not raised: holders are forgotten by the command alone, on all replicas at once.
        facts.boundary_us, facts.live = head.boundary_us, facts.live_at(head.boundary_us)
        if head.prepared is not None:
            facts.ownership.prepare(head.prepared.version, head.prepared.start_us, head.prepared.fits)
        facts.fence(0, fences)

        def put() -> None:
            self._facts = facts

        return put

    # -- its files ---------------------------------------------------------------------------------------

    def open_in(self, directory: Path) -> None:
        self._files = None if self._files_in is None else self._files_in(directory)

    def work(self) -> Callable[[], None] | None:
        segment = self._facts.table.unwritten()
        if segment is None or self._files is None:
            return None
        writing = self._writings.get(segment.number)
        if writing is None or writing.segment is not segment:
            if writing is not None:  # a snapshot has taken the place of the state that it was of
                writing.drop()
            writing = self._writings[segment.number] = Writing(segment, self._files)
        self._at_work = writing
        return writing.step

    def pressure(self) -> float:
        return self._facts.table.pressure()

    def worked(self) -> None:
        writing = self._at_work
        if writing is None or not writing.done:
            return
        del self._writings[writing.segment.number]
        if self._facts.table.has(writing.segment):
            writing.put()
        else:
            writing.drop()

    def gave_up(self) -> None:
        if self._at_work is not None:
            self._at_work.drop()
            del self._writings[self._at_work.segment.number]

    def files(self) -> Sequence[FileId] | None:
        written = files_of(self._facts.table.segments)
        if not written:
            return written if written is None else []
        assert self._files is not None
        return self._files.ids_of(written)

    def verify(self, path: Path, file: FileId) -> bool:
        return self._files is not None and self._files.verify(path, file)

    def _open(self, number: int) -> Source:
        if self._files is None:
            raise CorruptStateError("a registry snapshot names files, and there is no directory for them")
        return self._files.open(number)

    def filed(self) -> tuple[int, int]:
        """How many segments there are, and the bytes of their files. Any thread."""
        segments = self._facts.table.segments
        written = files_of(segments) or []
        files = self._files.ids_of(written) if self._files is not None else []
        return len(segments), sum(file.size for file in files)

    def filing_due(self) -> Command | None:
        """What a leader is to propose now, so that memory does not grow."""
        facts = self._facts
        if self._files is None:
            return None
        due = facts.table.due(facts.time_us, facts.live)
        if due is None:
            return None
        number = facts.table.next_number
        return Merge(facts.time_us, number, due) if due else Seal(facts.time_us, number)

    def lookup(self, ids: bytes, times: bytes) -> bytes:
        """16 x N, 8 x N bytes -> outcome column (core.fates.Registered), of what this replica knows now."""
        if not ids:
            return b""
        facts = self._facts
        boundary_us = facts.boundary_us
        live = facts.live_at(boundary_us)
        present = facts.table.held(Encoded(ids), live)["bucket"] >= live
        if boundary_us == NO_BOUNDARY:
            return present.tobytes()
        return np.where(facts.expired(times), np.uint8(Registered.EXPIRED), present).tobytes()

    def scan(self) -> Iterator[Scanned]:
        """All ids that are there now, piece by piece. What is released meanwhile may show."""
        facts = self._facts
        boundary_us = facts.boundary_us
        names = facts.holders.names  # before the cut: of what it has, none is forgotten here
        return scan(facts.table.cut(facts.live_at(boundary_us)), names, boundary_us)

    def find(self, ids: bytes) -> Scanned:
        """Those of 16 x N bytes that are there now, as a piece of a scan. Any thread."""
        facts = self._facts
        boundary_us = facts.boundary_us
        live, names = facts.live_at(boundary_us), facts.holders.names
        stamps = facts.table.held(Encoded(ids), live)
        alive = stamps["bucket"] >= live
        return scanned(take_ids(ids, alive), stamps[alive], names, boundary_us)

    def accounts(self) -> Callable[[AnySet[int], str, int], Account]:
        """What incarnations, an address and a window are asked of, as of now: any thread may ask. To be
        called in the raft thread."""
        facts = self._facts
        return partial(account_of, facts.counts.tally.copy(), facts.holders.names, facts.live)

    def held_by(self, incarnations: AnySet[int]) -> Counter[int]:
        """How many ids each of these has, as of `joiners_among`. Any thread."""
        facts = self._facts
        mine = joiners_among(facts.holders.names, incarnations)
        found = Counter[int]()
        for number, ids in facts.counts.of(mine.keys()).items():
            found[mine[number]] += ids
        return found

    @property
    def ids(self) -> int:
        """How many are registered here; those that are only guarded are counted by another shard."""
        facts = self._facts
        guards = {number for number, name in list(facts.holders.names.items()) if is_guard(name)}
        return facts.counts.total - (facts.counts.of(guards).total() if guards else 0)

    @property
    def boundary_us(self) -> int:
        return self._facts.boundary_us

    @property
    def latest_us(self) -> int:
        return self._facts.latest_us

    @property
    def configuration(self) -> Configuration | None:
        return self._facts.ownership.configuration

    @property
    def version(self) -> int:
        """Of the sharding configuration; 0 before there is one."""
        return 0 if self.configuration is None else self.configuration.version

    @property
    def prepared(self) -> Prepared | None:
        return self._facts.ownership.prepared

    @property
    def fences(self) -> int:
        """How many of the directory's fences are here."""
        return len(self._facts.fences)
