"""All ids of a shard, as a stream (for the offline jobs, paper 3.3.3). Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from idregistry.buckets import BUCKET_US
from idregistry.cuts import Cut, Rows
from idregistry.encoding import SUBS, decode
from idregistry.holders import Holders
from idregistry.recent import STAMP
from photon.core.columns import pack_times

SCAN_IDS_MAX: Final = 1 << 14
"""Ids in a piece: with tokens of 100 bytes, 2 MB."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """N ids (16 x N bytes), the start of each one's bucket (8 x N bytes; photon ids carry their own time) and
    their packed tokens, b"" where they are cleared.
    """

    ids: bytes
    times: bytes
    tokens: list[bytes]


def scan(cut: Cut, holders: Holders) -> Iterator[Scanned]:
    """What is in the cut, drawn one by one while the state may go on changing."""
    for number in range(SUBS):
        rows = cut.draw(number)
        for start in range(0, len(rows), SCAN_IDS_MAX):
            part = slice(start, start + SCAN_IDS_MAX)
            yield _scanned(Rows(rows.hashes[part], rows.tails[part], rows.stamps[part]), holders)


def _scanned(rows: Rows, holders: Holders) -> Scanned:
    packed = rows.stamps.tobytes()
    buckets = rows.stamps["bucket"].astype(np.int64)
    tokens = [packed[at : at + STAMP.size] for at in range(0, len(packed), STAMP.size)]
    known = {stamp: holders.token(*STAMP.unpack(stamp)[:2]) for stamp in set(tokens)}
    return Scanned(
        decode(rows.hashes, rows.tails),
        pack_times(buckets * BUCKET_US),
        list(map(known.__getitem__, tokens)),
    )
