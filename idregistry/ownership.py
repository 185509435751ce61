"""Which ids a shard may decide on, by the sharding configuration in its log (paper 2.2.2). Pure."""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from idregistry.configuration import HORIZON, Configuration
from idregistry.encoding import Encoded
from photon.core.columns import unpack_times


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that may come: until then no id from `start_us` on is registered. `fits`: none was."""

    version: int
    start_us: int
    fits: bool


class Ownership:
    """What shard `shard` owns. Without a configuration, nothing."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._starts: list[int] = []
        self.configuration: Configuration | None = None
        self.prepared: Prepared | None = None

    def prepare(self, version: int, start_us: int, fits: bool) -> None:
        """Take no ids from `start_us` on until a configuration of this version or a newer one is here.

        Ignored but for the version that follows the configuration here: one before it, still to come, would
        open again what is closed.
        """
        known = 0 if self.configuration is None else self.configuration.version
        if version == known + 1 and self.prepared is None:
            self.prepared = Prepared(version, start_us, fits)

    def configure(self, configuration: Configuration) -> None:
        """Take a newer configuration."""
        if self.configuration is not None and configuration.version <= self.configuration.version:
            return
        self.configuration = configuration
        self._starts = [interval.start_us for interval in configuration.intervals]
        if self.prepared is not None and configuration.version >= self.prepared.version:
            self.prepared = None

    def owns_all(self, batch: Encoded, low_us: int, high_us: int) -> bool:
        """Whether all of a batch, with times of `low_us` to `high_us`, are owned; False if hard to say."""
        if self.configuration is None or high_us >= HORIZON:
            return False
        if self.prepared is not None and high_us >= self.prepared.start_us:
            return False
        at = bisect_right(self._starts, low_us) - 1
        if at != bisect_right(self._starts, high_us) - 1:
            return False
        shards = self.configuration.intervals[at].shards
        if shards == 1:
            return self._shard == 0
        return bool((batch.hashes % np.uint64(shards) == self._shard).all())

    def owned(self, ids: bytes, times: bytes) -> npt.NDArray[np.bool_]:
        """16 x N, 8 x N bytes -> N flags."""
        times_us = unpack_times(times)
        if self.configuration is None:
            return np.zeros(len(times_us), np.bool_)
        owned: npt.NDArray[np.bool_] = self.configuration.shard_of(ids, times) == self._shard
        if self.prepared is not None:
            owned &= (times_us < self.prepared.start_us) | (times_us >= HORIZON)
        return owned
