"""The end of a run: files of the joined logs that the joiners have still to complete (docs/output.md)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from joiner.output_files import LINES, PARQUET, complete_files
from photon.cluster.topology import JOINER_FILES, Topology

STILL_S_MAX: Final = 60.0
"""Without progress for so long, the rest is left to the joiners' end."""
GRACE_S: Final = 10.0
GRACE_S_MAX: Final = 600.0
BYTES_PER_S_MIN: Final = 4 << 20
"""So much is completed in a second at the very least: about a tenth of what a core makes Parquet."""


class Backlog:
    """Whether the joiners get on with the files that are closed and not listed."""

    def __init__(self) -> None:
        self.files = 0
        """That are worked on."""
        self._seen: list[tuple[int, int]] = []
        self._moved_s = float("-inf")

    def goes_on(self, outputs: Sequence[Mapping[str, Any]], silent: int, now_s: float) -> bool:
        """`outputs`: what the joiners say of theirs; `silent`: so many say nothing, being restarted perhaps.

        A joiner that is in trouble (a full disk) is not waited for.
        """
        at_work = [output for output in outputs if output["waiting"] and output["trouble"] is None]
        seen = [(output["waiting"], output["progress"]) for output in at_work]
        if self._moved_s == float("-inf") or seen != self._seen:
            self._seen, self._moved_s = seen, now_s
        self.files = sum(output["waiting"] for output in at_work)
        return (self.files > 0 or silent > 0) and now_s - self._moved_s <= STILL_S_MAX


def unlisted_files(topology: Topology) -> list[Path]:
    """Files of joiners with joined events that no manifest lists, in all output roots, growing ones included.

    CorruptStateError, StorageError.
    """
    roots = [topology.output, *topology.settings.joiner.output_roots]
    places = [Path(root) / "joined" / p.datacenter for root in roots for p in topology.pipelines]
    return sorted(path for place in places for path in _unlisted_in(place))


def _unlisted_in(directory: Path) -> Iterator[Path]:
    listed = complete_files(directory)
    for path in directory.glob(f"{JOINER_FILES}*"):
        if path.suffix not in (LINES, PARQUET):
            continue
        if path.with_suffix(LINES).name in listed or path.with_suffix(PARQUET).name in listed:
            continue
        half_made = path.suffix == PARQUET and path.with_suffix(LINES).exists()
        if not half_made and _size(path):
            yield path


def grace_s(unlisted: Sequence[Path]) -> float:
    """How long joiners may take to end: they complete these files first."""
    return min(GRACE_S_MAX, GRACE_S + sum(map(_size, unlisted)) / BYTES_PER_S_MIN)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # it was made Parquet meanwhile
        return path.stat().st_size
    return 0
