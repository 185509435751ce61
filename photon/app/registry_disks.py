"""Which registry replicas of a work directory have lost their disk.

A host's identity is made once, with its directory, and its peers remember it: a replica whose identity is not
the remembered one has forgotten what it acknowledged, even where it holds groups again.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from photon.core.errors import CorruptStateError
from photon.raft.home import read_identity, read_peers

LOOK_S: Final = 2.0


def is_blank(home: Path) -> bool:
    """Whether a replica's directory holds none of its groups."""
    return not any(home.glob("*/*"))


def remembered_by(home: Path, names: Iterable[str]) -> dict[str, set[str]]:
    """Replica -> the identities that others than itself, of those named, have met it with.

    CorruptStateError where such a note can't be read.
    """
    met: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        for peer, identity in read_peers(home / name).items():
            if peer != name:
                met[peer].add(identity)
    return dict(met)


def with_other_disks(home: Path, names: Iterable[str], met: Mapping[str, Collection[str]]) -> list[str]:
    """Of the replicas named, those that are not the ones that were met: one memory of another is enough."""
    return [name for name in names if name in met and {*met[name]} != {read_identity(home / name)}]


class DiskWatch:
    """Tells during a run which replicas have lost their disk. One thread."""

    def __init__(self, home: Path, names: list[str]) -> None:
        self._home = home
        self._names = names
        self._seen: dict[str, str] = {}
        """Also what nobody can have noted down any more, if all lose their disks."""
        self._told: set[str] = set()
        self._look_at = float("-inf")

    def has_lost(self, name: str) -> bool:
        """Whether it must not be started: it would found, or vote, as one that knows of nothing."""
        return name in self._lost()

    def look(self) -> list[str]:
        """What to tell now, if anything. CorruptStateError once most replicas have lost their disks."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        lost = self._lost()
        if len(lost) > len(self._names) // 2:
            raise CorruptStateError(
                f"{', '.join(str(self._home / name) for name in lost)}: lost during the run, and with most "
                "of the registry what has been joined; restore them, or start anew in "
                "an empty --work and --out"
            )
        new = [name for name in lost if name not in self._told]
        self._told.update(new)
        return [
            f"registry replica {name} has lost its disk ({self._home / name}); "
            "run the same command again: it will be replaced"
            for name in new
        ]

    def _lost(self) -> list[str]:
        try:
            # The peers' notes first: an identity is on the disk before anybody meets it.
            met = remembered_by(self._home, self._names)
            for name, identity in self._seen.items():
                met.setdefault(name, set()).add(identity)
            lost = with_other_disks(self._home, self._names, met)
            for name in self._names:
                if name not in self._seen and (identity := read_identity(self._home / name)):
                    self._seen[name] = identity
        except CorruptStateError:
            return []  # whose it is says so itself when it starts
        return lost
