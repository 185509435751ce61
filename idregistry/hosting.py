"""The groups that this replica hosts, and its peers, as the directory says (paper 2.2.2).

The directory's table is in the log, but the log is read only with the help of the peers. So the table is also
kept in a small file beside it, which says too how far the directory was followed. An address in the settings
goes before one in the table: a run on one machine gets new ports each time, and the settings of a machine
that moved say where it is now.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from idregistry.rules.commands import Row
from idregistry.rules.directory import DIRECTORY_GROUP, View, shard_of_group
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.shard import Shard
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import CorruptStateError, UsageError
from photon.raft.host import RaftHost


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
        self._groups: dict[int, Shard] = {}
        self._seen: View | None = None
        # Before the log is read, those of both, since the table may be old; who was removed is not.
        known = {row.name: row for row in self._table.replicas} | dict(settings)
        self.rows: Mapping[str, Row] = {n: r for n, r in known.items() if n not in self._table.removed}
        """Name -> where each replica is now, this one too."""
        self.shards: Mapping[int, Shard] = {}

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
        return max((one.state.boundary_us for one in self.shards.values()), default=NO_BOUNDARY)

    def close(self) -> None:
        """Send who waits elsewhere. Any thread."""
        for shard in self.shards.values():
            shard.close()

    def _step(self, host: RaftHost, view: View) -> bool:
        """Let go of one group, or open one; False where all is as the view says."""
        retired = next(filter(view.is_retired, self._groups), None)
        if retired is not None:
            self._groups.pop(retired).close()
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
        shard.log = host.add_group(group, shard.state, shard.on_tick, founders)
        self._groups[group] = shard
        self._publish()

    def _publish(self) -> None:
        # Of a shard that was retired and came again, the newest life.
        newest = {shard_of_group(group)[0]: group for group in sorted(self._groups)}
        self.shards = {shard: self._groups[group] for shard, group in sorted(newest.items())}
