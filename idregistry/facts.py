"""All that the log of a shard has made true, in one place. Pure."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from idregistry.buckets import NO_BOUNDARY, BucketCounts, first_live
from idregistry.configuration import BEGINNING, HORIZON
from idregistry.holders import Holders, incarnation_of, pack_incarnation
from idregistry.idtable import IdTable
from idregistry.ownership import Ownership
from photon.core.columns import unpack_times


class Facts:
    """The ids and what is to know about them. Changed by one thread."""

    def __init__(self, shard: int, table: IdTable, holders: Holders) -> None:
        self.table = table
        self.holders = holders
        self.ownership = Ownership(shard)
        self.counts = BucketCounts()
        self.boundary_us = NO_BOUNDARY
        self.live = first_live(NO_BOUNDARY)
        """The first bucket that is not wholly before the boundary."""
        self.time_us = NO_BOUNDARY
        """The latest time a leader stamped into a command."""
        self.latest_us = BEGINNING
        """The latest event time below HORIZON that was ever registered."""
        self.fences: list[int] = []
        """The directory's fences that are here: its list, from the first on."""
        self._fenced: set[bytes] = set()

    def raise_boundary(self, boundary_us: int) -> None:
        """Leaders' clocks differ: whoever leads, the boundary never goes back (paper 2.3)."""
        if boundary_us > self.boundary_us:
            # Readers take the boundary first: in between they say "expired" of more, not "absent" of more.
            self.boundary_us = boundary_us
            self.live = first_live(boundary_us)
            self.counts.drop_before(self.live)

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
