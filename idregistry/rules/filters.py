"""A filter in memory that tells of most ids that a segment lacks that it does: two bytes an id (Bloom). Pure.

Ids come in order of their hashes, and so does the filter: it is made of regions, one for each part of the
range of hashes, so that it is built in the processor's cache whatever its size. Of an id PROBES bits are set
in its region. One that the segment lacks is passed on in 0.06 % of cases; most are told by a probe or two.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.rules.packing import FEW, Encoded, Hashes, probe_of, probes_of

BITS_AN_ID: Final = 16
PROBES: Final = 8
REGION_IDS: Final = 1 << 15
"""About so many ids to a region: 64 KiB."""
_WORD_BITS: Final = 64
_LOW_BITS: Final = 0xFFFF_FFFF
_LOW: Final = np.uint64(_LOW_BITS)
_THIRTY_TWO: Final = np.uint64(32)
_SIX: Final = np.uint64(6)
_SIXTY_THREE: Final = np.uint64(63)
_ONE: Final = np.uint64(1)
_SINGLY: Final = 3
_LATER: Final = np.arange(1, PROBES - _SINGLY + 1, dtype=np.uint64)[:, None]


class Filter:
    """Of up to `ids` ids. `bits`: all of it, of any two that hold the same ids alike."""

    def __init__(self, ids: int) -> None:
        self.region_bits = max(0, (ids // REGION_IDS).bit_length() - 1)
        """Of a hash, so many choose the region."""
        a_region = -(-max(1, ids) * BITS_AN_ID >> self.region_bits)
        self._size = np.uint64(-(-a_region // _WORD_BITS) * _WORD_BITS)
        self.bytes = (int(self._size) << self.region_bits) // 8
        self.bits = np.zeros(self.bytes, np.uint8)
        self._words = self.bits.view("<u8")

    def maybe(self, batch: Encoded) -> npt.NDArray[np.intp]:
        """The places of those that may be there."""
        if batch.count <= FEW:
            return np.array(self._maybe_few(batch.hashes.tolist()), np.intp)
        at, step = batch.probes
        base = self._bases(batch.hashes)
        places = np.flatnonzero(self._at(base, at))
        base, at, step = base.take(places), at.take(places), step.take(places)
        for _ in range(1, _SINGLY):
            at += step
            at &= _LOW
            left = np.flatnonzero(self._at(base, at))
            places = places.take(left)
            base, at, step = base.take(left), at.take(left), step.take(left)
        # A few are left: all other probes at once.
        later = step * _LATER
        later += at
        later &= _LOW
        return places.compress(np.bitwise_and.reduce(self._at(base, later)))

    def _maybe_few(self, hashes: list[int]) -> list[int]:
        size, view, found = int(self._size), self.bits.data, []
        for place, hash_ in enumerate(hashes):
            base = (hash_ >> 64 - self.region_bits) * size
            at, step = probe_of(hash_)
            for _ in range(PROBES):
                bit = base + (at * size >> 32)
                if not view[bit >> 3] >> (bit & 7) & 1:
                    break
                at = at + step & _LOW_BITS
            else:
                found.append(place)
        return found

    def _at(self, base: Hashes, at: Hashes) -> Hashes:
        """The bits at these places of their regions, 0 or 1."""
        bit = at * self._size
        bit >>= _THIRTY_TWO
        bit += base
        word = self._words.take((bit >> _SIX).view(np.int64))
        bit &= _SIXTY_THREE
        word >>= bit
        word &= _ONE
        return word

    def _bases(self, hashes: Hashes) -> Hashes:
        """The first bit of each one's region."""
        if not self.region_bits:
            return np.zeros(len(hashes), np.uint64)
        base: Hashes = hashes >> np.uint64(64 - self.region_bits)
        base *= self._size
        return base

    def add(self, hashes: Hashes) -> None:
        """Ids in order of their hashes."""
        if not len(hashes):
            return
        regions = (hashes >> np.uint64(64 - self.region_bits)).astype(np.intp) if self.region_bits else None
        if regions is None or regions[0] == regions[-1]:
            self._add(0 if regions is None else int(regions[0]), hashes)
            return
        starts = np.flatnonzero(np.diff(regions, prepend=regions[0] - 1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(hashes)], strict=True):
            self._add(int(regions[start]), hashes[start:end])

    def _add(self, region: int, hashes: Hashes) -> None:
        at, step = probes_of(hashes)
        flags = np.zeros(int(self._size), np.bool_)
        for _ in range(PROBES):
            flags[at * self._size >> _THIRTY_TWO] = True
            at = at + step & _LOW
        start = region * int(self._size) // 8
        self.bits[start : start + int(self._size) // 8] |= np.packbits(flags, bitorder="little")
