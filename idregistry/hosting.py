"""The groups that this replica hosts, and its peers, as the directory says (paper 2.2.2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from idregistry.directory_commands import Row
from idregistry.peers import Table, read_table, rows_at_start, rows_now, table_of, write_table
from idregistry.pending import Pending
from idregistry.shard import Shard
from idregistry.view import DIRECTORY_GROUP, View, shard_of_group
from photon.core.errors import UsageError
from photon.raft.host import RaftHost
from photon.raft.port import ReplicatedLog

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
        """`settings`: where the replicas are, this one too, as far as the settings say. CorruptStateError."""
        self._node = node
        self._settings = settings
        self._path = directory / TABLE_FILE
        self._make_shard = make_shard
        self._table = read_table(self._path)
        self._groups: dict[int, Hosted] = {}
        self._seen: View | None = None
        self.rows: Mapping[str, Row] = rows_at_start(settings, self._table)
        """Name -> where each replica is now."""
        self.shards: Mapping[int, Hosted] = {}

    def open_groups(self, host: RaftHost) -> None:
        """What is on disk already, before the host starts. CorruptStateError, LockedError, StorageError."""
        for group in sorted(host.groups_on_disk()):
            if group != DIRECTORY_GROUP:
                self._add(host, group, None)

    def follow(self, host: RaftHost, view: View) -> bool:
        """Do as the directory says; whether there was anything new. Raft thread.

        Never as it said before what was followed already: a replica that starts again may read its log from
        long ago, and would found a shard anew, empty, that has been retired since.
        """
        if view is self._seen or view.configuration is None:
            return False
        self._seen = view
        table = table_of(view)
        if table.age < self._table.age:
            return False
        if self._node in view.removed:
            raise UsageError(
                f"registry replica {self._node} has been replaced: it may never come back. Take it out of "
                "the settings; a new replica gets a new name"
            )
        self._follow_table(host, table)
        for group in [group for group in self._groups if view.is_retired(group)]:
            self._groups.pop(group).shard.close()
            self._publish()
            host.remove_group(group)
        for shard, founders in view.founders.items():
            group = view.group(shard)
            if group not in self._groups:
                self._add(host, group, founders if self._node in founders else None)
        return True

    def close(self) -> None:
        """Send who waits elsewhere. Any thread."""
        for hosted in self.shards.values():
            hosted.shard.close()

    def _follow_table(self, host: RaftHost, table: Table) -> None:
        if table != self._table:
            write_table(self._path, table)
            self._table = table
        self.rows = rows_now(self._settings, table)
        host.set_peers({name: (row.raft_host, row.raft_port) for name, row in self.rows.items()})

    def _add(self, host: RaftHost, group: int, founders: tuple[str, ...] | None) -> None:
        shard = self._make_shard(shard_of_group(group)[0])
        log = host.add_group(group, shard.state, shard.on_tick, founders)
        self._groups[group] = Hosted(group, shard, log)
        self._publish()

    def _publish(self) -> None:
        # Of a shard that was retired and came again, the newest life.
        newest = {shard_of_group(group)[0]: group for group in sorted(self._groups)}
        self.shards = {shard: self._groups[group] for shard, group in sorted(newest.items())}
