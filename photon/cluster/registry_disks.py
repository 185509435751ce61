"""Which registry replicas of a work directory have lost their disk.

A host's identity is made once, with its directory, and its peers remember it: a replica whose identity is not
the remembered one has forgotten what it acknowledged, even where it holds groups again.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from photon.core.errors import CorruptStateError, StorageError
from photon.raft.home import read_groups, read_identity, read_peers
from photon.raft.store import HardState

LOOK_S: Final = 2.0
_GROUP: Final = "group-0000"
"""The directory's: founded before any other."""


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


@dataclass(frozen=True, slots=True)
class Trace:
    """What a replica's directory tells of how far it came."""

    identity: str
    """"" where there is none yet."""
    peers: Mapping[str, str]
    """Who was met -> under which identity."""
    promised: bool
    """Whether it may have voted or acknowledged, ever."""


def trace_of(home: Path) -> Trace:
    """CorruptStateError where it can't be told."""
    return Trace(read_identity(home), read_peers(home), _may_have_promised(home))


def _may_have_promised(home: Path) -> bool:
    """No term, no promise. The hard state is a group's last file at birth; then its host lists the group."""
    groups = {*read_groups(home)}
    if groups - {0} or any(path.name != _GROUP for path in home.glob("group-*")):
        return True
    try:
        state = HardState(home / _GROUP, home.name, 0)
    except StorageError as error:
        raise CorruptStateError(str(error)) from error
    return state.term > 0 if state.exists else bool(groups)


def never_founded(traces: Mapping[str, Trace], count: int) -> bool:
    """Whether the `count` founders can't have decided anything yet. `traces`: of all directories there are.

    A decision takes the promises of a majority. Whoever promised was met by every other founder, so that any
    that is left remembers it: with fewer than a majority lost, one that promised would be left.
    """
    if any(trace.promised for trace in traces.values()):
        return False
    lost = {
        peer
        for trace in traces.values()
        for peer, identity in trace.peers.items()
        if peer not in traces or traces[peer].identity != identity
    }
    return len(lost) <= count // 2


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
