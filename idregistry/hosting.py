"""The groups that this replica hosts, and its peers, as the directory says (paper 2.2.2).

The directory's table is in the log, but the log is read only with the help of the peers. So the table is also
kept in a small file beside it, which says too how far the directory was followed. An address in the settings
goes before one in the table: a run on one machine gets new ports each time, and the settings of a machine
that moved say where it is now.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from idregistry.rules.commands import CommandError, Commit, Row, decode
from idregistry.rules.directory import DIRECTORY_GROUP, View, shard_of_group
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.shard import Shard
from photon.core.columns import split_ids
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import CorruptStateError, UsageError
from photon.core.fates import Registered
from photon.raft.host import RaftHost
from photon.raft.port import ReplicatedLog

_NONE: frozenset[bytes] = frozenset()


class Pending:
    """Ids whose commit is under way, as a replica that does not lead sees it, too. For many threads at once.

    A commit takes a round trip or two between datacenters, and a follower has it in its log long before it
    applies it. A client that looks an id up meanwhile may wait for the outcome, instead of a wasted join
    (paper 4.4). It is a hint: an entry in a log may never be committed, and a commit may find the id taken,
    or another shard's. Each command of a log is read once.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], frozenset[bytes]] = {}  # (index, term) ->; replaced as a whole
        self._lock = threading.Lock()

    def mark(self, outcomes: bytes, ids: bytes, under_way: Sequence[tuple[int, int, memoryview]]) -> bytes:
        """N core.fates.Registered of 16 x N ids: PENDING in place of ABSENT where the id is `under_way`
        (photon.raft.port.ReplicatedLog.unapplied)."""
        if not under_way:
            self._ids = {}  # what was under way last is held no longer
            return outcomes
        if outcomes.find(Registered.ABSENT) < 0:
            return outcomes
        keys = split_ids(ids)
        wanted = frozenset(keys)
        found = _NONE.union(*(wanted & one for one in self._read(under_way)))
        if not found:
            return outcomes
        column = np.frombuffer(outcomes, np.uint8).copy()
        is_pending = np.fromiter(map(found.__contains__, keys), np.bool_, len(keys))
        column[is_pending & (column == Registered.ABSENT)] = Registered.PENDING
        return column.tobytes()

    def _read(self, under_way: Sequence[tuple[int, int, memoryview]]) -> list[frozenset[bytes]]:
        with self._lock:
            known = self._ids
            self._ids = {
                (index, term): known[index, term] if (index, term) in known else _ids_of(command)
                for index, term, command in under_way
            }
            return list(self._ids.values())


def _ids_of(command: memoryview) -> frozenset[bytes]:
    try:
        decoded = decode(bytes(command))
    except CommandError:  # whoever applies it will say so
        return _NONE
    return frozenset(split_ids(decoded.ids)) if isinstance(decoded, Commit) else _NONE


@dataclass(frozen=True, slots=True)
class Table:
    """As the directory last had it. Empty before it was founded."""

    replicas: tuple[Row, ...] = ()
    removed: tuple[str, ...] = ()
    leaving: tuple[str, str] | None = None
    """(old, new)"""
    version: int = 0
    """Of the sharding configuration."""

    @property
    def age(self) -> tuple[int, int]:
        """Never less after a change, and greater after each but one: a replacement that is turned round
        changes neither who there is nor who is gone.
        """
        return self.version, 2 * len(self.removed) + (self.leaving is not None)


def read_table(path: Path) -> Table:
    """CorruptStateError where the file is none; an empty table where there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return Table()
    except (OSError, msgspec.DecodeError) as error:
        raise CorruptStateError(
            f"{path}: cannot be read ({error}); remove the file if the settings name all replicas, else "
            "replace this replica"
        ) from error


def write_table(path: Path, table: Table) -> None:
    """Durably. StorageError."""
    with storage_errors(path):
        make_directory(path.parent)
        write_file(path, msgspec.json.encode(table))


TABLE_FILE: Final = "replicas.json"


@dataclass(frozen=True, slots=True)
class Hosted:
    """One shard's replica here."""

    group: int
    shard: Shard
    log: ReplicatedLog
    pending: Pending = field(default_factory=Pending)


class Hosting:
    """`shards` and `rows` are for any thread: replaced as a whole, never changed."""

    def __init__(
        self,
        node: str,
        settings: Mapping[str, Row],
        directory: Path,
        make_shard: Callable[[int], Shard],
    ) -> None:
        """`make_shard`: of a group. `settings`: where the replicas are, this one too, as far as the
        settings say. CorruptStateError."""
        self._node = node
        self._settings = settings
        self._path = directory / TABLE_FILE
        self._make_shard = make_shard
        self.behind = False
        """The directory here says less than what was followed already: it reads its log from long ago."""
        self._table = read_table(self._path)
        self._groups: dict[int, Hosted] = {}
        self._seen: View | None = None
        # Before the log is read, those of both, since the table may be old; who was removed is not.
        known = {row.name: row for row in self._table.replicas} | dict(settings)
        self.rows: Mapping[str, Row] = {n: r for n, r in known.items() if n not in self._table.removed}
        """Name -> where each replica is now, this one too."""
        self.shards: Mapping[int, Hosted] = {}

    def open_groups(self, host: RaftHost) -> None:
        """What is on disk already, before the host starts. CorruptStateError, LockedError, StorageError."""
        for group in sorted(host.groups_on_disk()):
            if group != DIRECTORY_GROUP:
                self._add(host, group, None)

    def follow(self, host: RaftHost, view: View) -> bool:
        """Do as the directory says, one step at a time; whether there was anything to do. Raft thread.

        A group costs a dozen syncs, and a resharding may bring or take hundreds: all at once they would hold
        every group's heartbeats up. Never as it said before what was followed already: a replica that starts
        again may read its log from long ago, and would found a shard anew that has been retired since.
        """
        if view is self._seen or view.configuration is None:
            return False
        table = Table(tuple(view.replicas.values()), view.removed, view.leaving, view.version)
        self.behind = table.age < self._table.age
        if self.behind:
            self._seen = view
            return False
        if self._node in view.removed:
            raise UsageError(
                f"registry replica {self._node} has been replaced: it may never come back. Take it out of "
                "the settings; a new replica gets a new name"
            )
        self._follow_table(host, table)
        if not self._step(host, view):
            self._seen = view
        return True

    def furthest_us(self) -> int:
        """The boundary of the shard that has come furthest; NO_BOUNDARY where none has one. Any thread."""
        return max((one.shard.state.boundary_us for one in self.shards.values()), default=NO_BOUNDARY)

    def close(self) -> None:
        """Send who waits elsewhere. Any thread."""
        for hosted in self.shards.values():
            hosted.shard.close()

    def _step(self, host: RaftHost, view: View) -> bool:
        """Let go of one group, or open one; False where all is as the view says."""
        retired = next(filter(view.is_retired, self._groups), None)
        if retired is not None:
            self._groups.pop(retired).shard.close()
            self._publish()
            host.remove_group(retired)
            return True
        for shard, founders in view.founders.items():
            group = view.group(shard)
            if group not in self._groups:
                self._add(host, group, founders if self._node in founders else None)
                return True
        return False

    def _follow_table(self, host: RaftHost, table: Table) -> None:
        if table != self._table:
            write_table(self._path, table)
            self._table = table
        self.rows = {row.name: self._settings.get(row.name, row) for row in table.replicas}
        host.set_peers({name: (row.raft_host, row.raft_port) for name, row in self.rows.items()})

    def _add(self, host: RaftHost, group: int, founders: tuple[str, ...] | None) -> None:
        shard = self._make_shard(group)
        log = host.add_group(group, shard.state, shard.on_tick, founders)
        self._groups[group] = Hosted(group, shard, log)
        self._publish()

    def _publish(self) -> None:
        # Of a shard that was retired and came again, the newest life.
        newest = {shard_of_group(group)[0]: group for group in sorted(self._groups)}
        self.shards = {shard: self._groups[group] for shard, group in sorted(newest.items())}
