"""The registry replicas of a work directory: who they are by now, and a new one for each that lost its disk.

A host's identity is made once, with its directory, and its peers remember it: a replica whose identity is not
the remembered one has forgotten what it acknowledged, even where it holds groups again, so the others refuse
it. In a run on one machine it is replaced by an empty one with a new name, by itself, while the run goes on.
"""

import contextlib
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from photon.cluster.topology import Topology
from photon.core.disk import DirectoryLock, storage_errors, sync_directory
from photon.core.errors import CorruptStateError, LockedError, StorageError, UnavailableError, UsageError
from photon.raft.store import HardState, read_groups, read_identity, read_peers

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


TIMEOUT_S: Final = 5.0
ENDING_S: Final = 5.0
"""For how long the replicas of a run that was killed may still be about to end."""
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Members:
    """`names` run; those `joining` wait for their place; `lost`: (who lost its disk, who takes its place)."""

    names: list[str]
    joining: frozenset[str]
    lost: list[tuple[str, str]]
    forgot: list[str]
    """Everyone who lost its disk. Of those, nobody runs, but where they are in the majority."""
    mostly_lost: bool
    """There is nothing to go on from: it is founded now, or refused."""


def members_of(work: Path, count: int) -> Members:
    """As the replicas themselves noted it down; r0, r1, ... in a work directory without a registry.

    CorruptStateError where such a note can't be read.
    """
    home = work / "registry"
    if not home.exists():
        fresh = [f"r{number}" for number in range(count)]
        return Members(fresh, frozenset(), [], forgot=fresh, mostly_lost=True)
    from idregistry.coordinator import TABLE_FILE, Table, read_table

    tables = map(read_table, home.glob(f"*/{TABLE_FILE}"))
    table = max(tables, key=lambda one: one.age, default=Table())
    names = sorted(row.name for row in table.replicas) or [f"r{number}" for number in range(count)]
    # Whoever is taking a place has lost nothing, and founds nothing, however far it has come.
    joining = frozenset(() if table.leaving is None else table.leaving[1:])
    standing = [name for name in names if name not in joining]
    met = remembered_by(home, names)
    others = with_other_disks(home, standing, met)
    forgot = [name for name in standing if name in others or is_blank(home / name)]
    if len(forgot) > len(standing) // 2:
        return Members(names, joining, [], forgot, mostly_lost=True)
    lost = []
    if table.leaving is None:  # one replacement at a time: the next run sees to the others
        used = {*names, *met, *table.removed, *(path.name for path in home.glob("*"))}
        free = next(name for number in range(len(used) + 1) if (name := f"r{number}") not in used)
        lost = [(old, free) for old in forgot[:1]]
    new = dict(lost)
    running = [new.get(name, name) for name in names if name in new or name not in forgot]
    return Members(running, joining | {*new.values()}, lost, forgot, mostly_lost=False)


def clear_unfounded(work: Path, count: int) -> None:
    """Take away what a run left that was killed before its registry was founded: it is founded from nothing.

    Else it may never be: founders wait until they have all met, and what one of them has begun with others
    (those of a replacement, say) does not fit. Nothing is decided before, so nothing is lost; what may have
    decided anything is left as it is. Call before `members_of`, and hold the lock of `work`.
    LockedError, StorageError.
    """
    home, gone = work / "registry", work / "registry.unfounded"
    with storage_errors(home):
        if gone.exists():
            shutil.rmtree(gone)
        if not _is_unfounded(home, count):
            return
        with contextlib.ExitStack() as held:
            for path in _replicas_in(home):
                held.enter_context(_ended(path))
            if not _is_unfounded(home, count):
                return
            home.rename(gone)  # whole: of half of them the other half would say that they lost their disks
            sync_directory(work)
        shutil.rmtree(gone)


def _is_unfounded(home: Path, count: int) -> bool:
    """Whether there are directories of replicas, and nothing was ever decided by them."""
    from idregistry.coordinator import TABLE_FILE

    paths = _replicas_in(home)
    if not paths or any((path / TABLE_FILE).exists() for path in paths):
        return False
    try:
        return never_founded({path.name: trace_of(path) for path in paths}, count)
    except CorruptStateError:
        return False  # whose it is says so itself when it starts


def _replicas_in(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("*") if path.is_dir())


def _ended(replica: Path) -> DirectoryLock:
    deadline = time.monotonic() + ENDING_S
    while True:
        try:
            return DirectoryLock(replica)
        except LockedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_S)


@contextlib.contextmanager
def replacing(
    topology: Topology, lost: list[tuple[str, str]], notice: Callable[[str], None]
) -> Iterator[None]:
    """Within the block a thread tells the registry who takes whose place."""
    for old, new in lost:
        notice(f"registry replica {old} has lost its disk: {new} takes its place")
    stop = threading.Event()
    if lost:
        arguments = (topology, lost, notice, stop.is_set)
        threading.Thread(target=_replace_all, args=arguments, name="replacing", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def _replace_all(
    topology: Topology,
    lost: list[tuple[str, str]],
    notice: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    from idregistry.client import RegistryAt

    replicas = tuple(replica.grpc for replica in topology.replicas if not replica.joining)
    with RegistryAt(replicas, topology.network("")).client(TIMEOUT_S) as client:
        for old, new in lost:
            row = topology.replica(new)
            while not stopped():
                try:
                    client.replace(old, new, row.raft, row.grpc)
                    break
                except UnavailableError:
                    continue  # it is starting; it has waited for its answer
                except UsageError as error:
                    notice(f"registry replica {old} can't be replaced by {new}: {error}")
                    break
