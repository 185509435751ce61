"""RELEASE and CLEAR: what recovery does with tokens (paper 3.3.3). Pure."""

from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from idregistry.buckets import DEAD, span
from idregistry.commands import Clear, Release
from idregistry.encoding import Encoded
from idregistry.facts import Facts
from idregistry.recent import GONE, STAMP, bucket_in, token_of
from idregistry.segments import Segment
from photon.core.columns import take_ids
from photon.core.fates import Cleared, Released

Frozen = dict[int, tuple[Segment, int]]


def release(facts: Facts, command: Release) -> bytes:
    """Compare and delete. The outcome of each id (core.fates.Released, 1 x N bytes)."""
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


def clear(facts: Facts, command: Clear) -> bytes:
    """Forget tokens, keep ids. The outcome of each id (core.fates.Cleared, 1 x N bytes)."""
    if not command.ids:
        return b""
    batch = Encoded(command.ids)
    if facts.ownership.owns_all(batch, *span(command.times)):
        return _cleared(facts, batch).tobytes()
    owned = facts.ownership.owned(command.ids, command.times)
    outcomes = np.full(len(owned), Cleared.MISROUTED, np.uint8)
    outcomes[owned] = _cleared(facts, Encoded(take_ids(command.ids, owned)))
    return outcomes.tobytes()


def _cleared(facts: Facts, batch: Encoded) -> npt.NDArray[np.uint8]:
    return np.where(facts.table.clear(batch, facts.live), np.uint8(Cleared.CLEARED), np.uint8(Cleared.ABSENT))
