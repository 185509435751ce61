"""COMMIT inserts absent ids (paper 2.1, 2.2.1, 3.3.2), RELEASE takes lost ones out (3.3.3). Pure.

COMMIT asks of each id, in this order: is it this shard's; is its token fenced; is it the holder's retry,
which keeps what it won; is it expired; is it registered. Where none of the first questions can hit, all go in
by one C-level pass, and only those that were there already are looked at one by one.
"""

from itertools import chain, compress, islice, repeat
from operator import is_, is_not

import numpy as np
import numpy.typing as npt

from idregistry.buckets import DEAD, bucket_of, buckets_of, span
from idregistry.commands import Commit, Release
from idregistry.configuration import BEGINNING, HORIZON
from idregistry.encoding import Encoded
from idregistry.facts import Facts
from idregistry.holders import NOBODY
from idregistry.messages import TIME_BYTES
from idregistry.recent import GONE, STAMP, bucket_in, new_stamps, token_of
from idregistry.segments import Segment
from photon.core.columns import split_ids, unpack_times
from photon.core.fates import Committed, Released

Frozen = dict[int, tuple[Segment, int]]


def commit(facts: Facts, command: Commit) -> bytes:
    """The outcome of each id (core.fates.Committed, 1 x N bytes)."""
    if not command.ids:
        return b""
    batch = Encoded(command.ids)
    low_us, high_us = span(command.times)
    fenced = list(map(facts.is_fenced, command.tokens))
    # Also where nothing is won: numbers hang on the log alone. What is fenced stamps nothing.
    holders = [
        (NOBODY, 0) if barred else facts.holders.intern(token)
        for token, barred in zip(command.tokens, fenced, strict=True)
    ]
    stamps = new_stamps(holders, command.counts, command.times, low_us, high_us)
    plain = (
        not any(fenced)
        and facts.none_expired(low_us, high_us)
        and facts.ownership.owns_all(batch, low_us, high_us)
        and len(set(batch.keys)) == batch.count
        and not facts.table.any_frozen(batch, facts.live)
    )
    if not plain:
        return _commit_each(facts, command, batch, stamps, fenced)
    held = facts.table.insert(batch, stamps)
    if all(map(is_, held, stamps)):
        _count_all(facts, command.times, low_us, high_us)
        return bytes(batch.count)  # Committed.WON is 0
    return _commit_rest(facts, command, batch, stamps, held)


def _commit_rest(
    facts: Facts, command: Commit, batch: Encoded, stamps: list[bytes], held: list[bytes]
) -> bytes:
    """Some ids had a stamp already: retries, duplicates, and what is released or expired."""
    outcomes = bytearray(batch.count)
    new = np.fromiter(map(is_, held, stamps), np.bool_, batch.count)
    for row in compress(range(batch.count), map(is_not, held, stamps)):
        old, stamp = held[row], stamps[row]
        if bucket_in(old) < facts.live:
            facts.table.put(batch.subs[row], batch.keys[row], stamp)
            new[row] = True
        elif token_of(old) != token_of(stamp):
            outcomes[row] = Committed.DUPLICATE
    _count(facts, command.times, new)
    return bytes(outcomes)


def _commit_each(
    facts: Facts, command: Commit, batch: Encoded, stamps: list[bytes], fenced: list[bool]
) -> bytes:
    """Id by id, with every question asked."""
    table, live = facts.table, facts.live
    outcomes = bytearray(batch.count)
    new = np.zeros(batch.count, np.bool_)
    frozen = table.frozen_stamps(batch, live)
    owned = facts.ownership.owned(command.ids, command.times).tolist()
    expired = facts.expired(command.times).tolist()
    ids = split_ids(command.ids)
    rows = iter(range(batch.count))
    for count, barred in zip(command.counts, fenced, strict=True):
        # In one segment an id wins once, also when the segment is a retry.
        won: set[bytes] = set()
        for row in islice(rows, count):
            old = table.stamp(batch.subs[row], batch.keys[row])
            if bucket_in(old) < live:
                old = frozen.get(row, b"")
            if not owned[row]:
                outcomes[row] = Committed.MISROUTED
            elif barred:
                outcomes[row] = Committed.FENCED
            elif ids[row] in won:
                outcomes[row] = Committed.DUPLICATE
            elif token_of(old) == token_of(stamps[row]):
                won.add(ids[row])  # it keeps what it won, whatever the boundary is by now
            elif expired[row]:
                outcomes[row] = Committed.EXPIRED
            elif old:
                outcomes[row] = Committed.DUPLICATE
            else:
                table.put(batch.subs[row], batch.keys[row], stamps[row])
                won.add(ids[row])
                new[row] = True
    _count(facts, command.times, new)
    return bytes(outcomes)


def _count_all(facts: Facts, times: bytes, low_us: int, high_us: int) -> None:
    """All ids of a batch are new."""
    bucket = bucket_of(low_us)
    if bucket == bucket_of(high_us) and high_us < HORIZON:
        facts.counts.add(bucket, len(times) // TIME_BYTES)
        facts.latest_us = max(facts.latest_us, high_us)
    else:
        _count(facts, times, np.ones(len(times) // TIME_BYTES, np.bool_))


def _count(facts: Facts, times: bytes, new: npt.NDArray[np.bool_]) -> None:
    """The ids of the flagged rows are new."""
    if not new.any():
        return
    times_us = unpack_times(times)[new]
    facts.counts.add_each(buckets_of(times_us))
    possible = times_us[times_us < HORIZON]
    facts.latest_us = max(facts.latest_us, int(possible.max(initial=BEGINNING)))


def release(facts: Facts, command: Release) -> bytes:
    """Compare and delete. The outcome of each id (core.fates.Released, 1 x N bytes)."""
    if not command.ids:
        return b""
    batch = Encoded(command.ids)
    outcomes = bytearray(batch.count)
    owned = facts.ownership.owned(command.ids, command.times).tolist()
    frozen = facts.table.frozen(batch, facts.live)
    fenced = list(map(facts.is_fenced, command.tokens))
    tokens = [_token_of(facts, token) for token in command.tokens]
    segments = chain.from_iterable(map(repeat, range(len(tokens)), command.counts))
    for row, segment in enumerate(segments):
        if not owned[row]:
            outcomes[row] = Released.MISROUTED
        elif not fenced[segment]:
            outcomes[row] = Released.NOT_FENCED
        else:
            outcomes[row] = _release_one(facts, batch, row, frozen, tokens[segment])
    return bytes(outcomes)


def _release_one(facts: Facts, batch: Encoded, row: int, frozen: Frozen, token: bytes | None) -> Released:
    table, number, key = facts.table, batch.subs[row], batch.keys[row]
    stamp, place = table.stamp(number, key), None
    if bucket_in(stamp) < facts.live:
        place = frozen.get(row)
        if place is None:
            return Released.ABSENT
        stamp = place[0].columns.stamp(place[1])
        if bucket_in(stamp) < facts.live:  # released by an earlier row of this command
            return Released.ABSENT
    if token_of(stamp) != token:
        return Released.OTHER
    if place is None:
        table.put(number, key, GONE)
    else:
        table.release_frozen(number, *place)
    facts.counts.add(bucket_in(stamp), -1)
    return Released.RELEASED


def _token_of(facts: Facts, token: bytes) -> bytes | None:
    """As it stands in stamps; None if it never held anything."""
    holder, time_us = facts.holders.find(token)
    return None if holder is None else token_of(STAMP.pack(holder, time_us, DEAD))
