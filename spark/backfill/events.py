"""The events of a bucket, in columns, as a task holds them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from photon.core.columns import take_ids, take_times


@dataclass(slots=True)
class Foreign:
    """N foreign events. `keys`: their primary ids."""

    keys: list[bytes]
    ids: bytes
    times: bytes
    places: npt.NDArray[np.int64]
    lines: list[bytes]

    def take(self, rows: npt.NDArray[np.intp]) -> "Foreign":
        chosen = rows.tolist()
        return Foreign(
            list(map(self.keys.__getitem__, chosen)),
            take_ids(self.ids, rows),
            take_times(self.times, rows),
            self.places[rows],
            list(map(self.lines.__getitem__, chosen)),
        )


def foreign_events(part: Any) -> Foreign:
    """Rows of spark.backfill.rows of that kind."""
    return Foreign(
        part.column("key").to_pylist(),
        b"".join(part.column("id").to_pylist()),
        part.column("time_us").to_numpy(zero_copy_only=False).astype("<i8").tobytes(),
        part.column("place").to_numpy(),
        part.column("line").to_pylist(),
    )


@dataclass(slots=True)
class Primaries:
    """The primary lines of the bucket by id; of an id that stands twice the first line counts."""

    keys: list[bytes] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    known: dict[bytes, bytes] | None = None

    def by_id(self) -> dict[bytes, bytes]:
        if self.known is None:
            self.known = dict(zip(reversed(self.keys), reversed(self.lines), strict=True))
            self.keys, self.lines = [], []
        return self.known
