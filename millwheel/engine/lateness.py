"""How late lines are (paper 4.5, 7.2): what lets an injector's low watermark leave stragglers behind.

    lateness of a line = how far it is behind what its file had promised: the newest line before it, and the
                         last look at which the file was read to its end
    an injector stays behind by the percentile of all workers' lines, lateness_s at most

Each worker counts its lines by lateness, and keeps the counts with its positions. The authority adds them up,
so that a worker with few lines or none goes by what the others saw.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.computation import BEFORE, NEVER, Times
from millwheel.topology import Logs

_EDGES: Final = np.unique(np.append(0, np.ceil(2.0 ** (np.arange(200) / 4)))).astype(np.int64)
"""Up to so many microseconds: four steps to a doubling, up to 30 years."""
_STRAGGLERS_MIN: Final = 10
"""Lines beyond the percentile that must have been possible before it is believed."""
_STRAGGLERS_MAX: Final = 100
"""Of what a worker remembers: then all counts are halved."""
_COUNT_MIN: Final = 0.01
_encode: Final = msgspec.msgpack.encode
_counts: Final = msgspec.msgpack.Decoder(dict[int, float]).decode
_Counts = npt.NDArray[np.float64]


class Lateness:
    """Lines of an injector that one worker read lately, counted by lateness."""

    def __init__(self, percentile: float, packed: bytes | None = None) -> None:
        self._lines_max = _STRAGGLERS_MAX / (1 - percentile / 100)
        self._counts = _unpacked(packed)

    def saw(self, times: Times, promised: int, credible: int) -> None:
        """Lines of a file in order. `promised`: before them. Times beyond `credible` promise nothing."""
        times = np.clip(times, BEFORE, NEVER)
        newest = np.maximum.accumulate(np.where(times <= credible, times, promised))
        late = np.maximum(newest, promised) - times
        places = np.minimum(np.searchsorted(_EDGES, late), len(_EDGES) - 1)
        self._counts += np.bincount(places, minlength=len(_EDGES))
        while self._counts.sum() > self._lines_max:
            self._counts /= 2
            self._counts[self._counts < _COUNT_MIN] = 0

    def packed(self) -> bytes:
        places = np.flatnonzero(self._counts)
        return _encode(dict(zip(places.tolist(), self._counts[places].tolist(), strict=True)))


class Stragglers:
    """The authority's part: how far each injector that has a percentile stays behind, in microseconds."""

    def __init__(self, injectors: Mapping[str, Logs]) -> None:
        self._injectors = {name: logs for name, logs in injectors.items() if logs.percentile is not None}
        self._seen: dict[str, dict[int, _Counts]] = {name: {} for name in self._injectors}
        self.lateness_us = {name: round(logs.lateness_s * 1e6) for name, logs in self._injectors.items()}

    def report(self, worker: int, packed: Mapping[str, bytes]) -> bool:
        """What a worker has counted, by injector. Whether anything changed."""
        before = dict(self.lateness_us)
        for name in self._injectors.keys() & packed:
            self._seen[name][worker] = _unpacked(packed[name])
            self.lateness_us[name] = self._of(name)
        return self.lateness_us != before

    def _of(self, name: str) -> int:
        most, percentile = round(self._injectors[name].lateness_s * 1e6), self._injectors[name].percentile
        assert percentile is not None
        lines = np.cumsum(np.sum(list(self._seen[name].values()), axis=0))
        if lines[-1] * (1 - percentile / 100) < _STRAGGLERS_MIN:
            return most
        return min(most, int(_EDGES[np.searchsorted(lines, lines[-1] * percentile / 100)]))


def _unpacked(packed: bytes | None) -> _Counts:
    counts = np.zeros(len(_EDGES))
    for place, count in (_counts(packed) if packed else {}).items():
        counts[place] = count
    return counts
