"""Which groups a replica hosts, as its directory changes and as it starts again (paper 2.2.2)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from idregistry.client import check_registry
from idregistry.coordinator import Hosting, read_table
from idregistry.rules.commands import (
    Adopt,
    Cancel,
    DirectoryCommand,
    Found,
    Gone,
    Propose,
    Replace,
    Trim,
)
from idregistry.rules.directory import DirectoryState, View
from idregistry.shard import Shard
from photon.core.clock import ManualClock
from photon.core.errors import CorruptStateError, UsageError
from photon.core.settings import Registry
from tests.idregistry.fake_log import FakeLog
from tests.idregistry.kit import NOW_US, ROWS, directory, row

T2_US, T3_US = NOW_US + 10_000_000, NOW_US + 20_000_000


class Disk:
    """In the host's place: the groups a replica has, whoever runs it, and how each of them came to be."""

    def __init__(self) -> None:
        self.groups: dict[int, Sequence[str] | None] = {}
        self.open: set[int] = set()
        self.peers: set[str] = set()

    def groups_on_disk(self) -> list[int]:
        return sorted(self.groups)

    def add_group(self, group: int, machine: Any, on_tick: Any, founders: Sequence[str] | None) -> FakeLog:
        self.open.add(group)
        self.groups.setdefault(group, founders)
        return FakeLog(machine)

    def remove_group(self, group: int) -> None:
        self.open.discard(group)
        self.groups.pop(group)

    def wake(self) -> None: ...

    def set_peers(self, addresses: dict[str, tuple[str, int]]) -> None:
        self.peers = set(addresses)


class Replica:
    """r1 of three, started from what is in `path` and on `disk`."""

    def __init__(self, path: Path, disk: Disk) -> None:
        disk.open.clear()
        self._disk: Any = disk
        state = DirectoryState()

        def make(group: int) -> Shard:
            return Shard(group, Registry(), ManualClock(NOW_US), lambda: None, state, lambda: None)

        self.hosting = Hosting("r1", {one.name: one for one in ROWS}, path, make)
        self.hosting.open_groups(self._disk)

    def follow(self, *views: View) -> None:
        for view in views:
            while self.hosting.follow(view):
                pass


def test_one_group_comes_or_goes_a_turn(tmp_path: Path) -> None:
    """Each costs a dozen syncs, and meanwhile no group's heartbeat leaves."""
    disk = Disk()
    replica, seen = Replica(tmp_path, disk), [0]
    for view in resharded():
        while replica.hosting.follow(view):
            assert abs(len(disk.open) - seen[-1]) <= 1
            seen.append(len(disk.open))
    assert max(seen) == 6 and seen[-1] < 6


def history(*commands: DirectoryCommand) -> list[View]:
    """What the directory said after each command."""
    return [directory(*commands[: end + 1]).view for end in range(len(commands))]


def resharded() -> list[View]:
    """2 -> 6 -> 3 shards; then shards 3 to 5 retire, and shard 3 comes again."""
    views = history(
        Found(NOW_US, 2, ROWS, bytes(16)),
        Propose(NOW_US, 6, T2_US, 0),
        Adopt(NOW_US, 2),
        Propose(NOW_US, 3, T3_US, 0),
        Adopt(NOW_US, 3),
        Trim(NOW_US, 3, T3_US),
        Propose(NOW_US, 4, T3_US + 1, 0),
        Adopt(NOW_US, 5),
    )
    assert sorted(views[-1].founders) == [0, 1, 2, 3]
    return views


def test_groups_come_and_go_as_the_directory_says(tmp_path: Path) -> None:
    disk, views = Disk(), resharded()
    replica = Replica(tmp_path, disk)
    hosted = []
    for view in views:
        replica.follow(view)
        hosted.append(sorted(disk.open))
    reborn = views[-1].group(3)
    assert hosted == [[1, 2], [1, 2], *[[1, 2, 3, 4, 5, 6]] * 3, [1, 2, 3], [1, 2, 3], [1, 2, 3, reborn]]
    assert replica.hosting.shards[3].group == reborn > 6


def test_a_replica_that_starts_again_founds_no_shard_that_has_retired(tmp_path: Path) -> None:
    """It reads its log from an old snapshot on; a majority of such would make the shard's group, empty."""
    disk, views = Disk(), resharded()
    Replica(tmp_path, disk).follow(*views)
    before = dict(disk.groups)
    again = Replica(tmp_path, disk)
    assert sorted(again.hosting.shards) == [0, 1, 2, 3], "what is on disk is served at once"
    for view in resharded():
        again.follow(view)
        assert disk.groups == before
    assert again.hosting.shards[3].group == views[-1].group(3)


def test_of_a_shard_that_came_again_the_newer_group_is_served_though_the_older_is_still_on_disk(
    tmp_path: Path,
) -> None:
    disk, views = Disk(), resharded()
    Replica(tmp_path, disk).follow(*views)
    disk.groups[4] = None  # it crashed before it was deleted
    again = Replica(tmp_path, disk)
    assert again.hosting.shards[3].group == views[-1].group(3)
    again.follow(*views)
    assert 4 not in disk.groups


def test_who_was_replaced_is_not_spoken_to_again_while_the_log_is_read(tmp_path: Path) -> None:
    new = row("r3")
    commands = (
        Found(NOW_US, 2, ROWS, bytes(16)),
        Replace(NOW_US, "r0", new),
        Gone(NOW_US, "r0"),
    )
    disk = Disk()
    Replica(tmp_path, disk).follow(*history(*commands))
    assert disk.peers == {"r1", "r2", "r3"}
    again = Replica(tmp_path, disk)
    for view in history(*commands):
        again.follow(view)
        assert "r0" not in {*again.hosting.rows, *disk.peers}


def test_who_was_replaced_itself_ends(tmp_path: Path) -> None:
    replica = Replica(tmp_path, Disk())
    with pytest.raises(UsageError, match="has been replaced"):
        replica.follow(
            *history(
                Found(NOW_US, 2, ROWS, bytes(16)),
                Replace(NOW_US, "r1", row("r3")),
                Gone(NOW_US, "r1"),
            )
        )


def test_who_was_to_be_replaced_stays_and_the_new_one_is_spoken_to_until_it_is_gone(tmp_path: Path) -> None:
    commands = (
        Found(NOW_US, 2, ROWS, bytes(16)),
        Replace(NOW_US, "r1", row("r3")),
        Cancel(NOW_US, "r3"),
        Gone(NOW_US, "r3"),
    )
    disk = Disk()
    replica = Replica(tmp_path, disk)
    spoken_to = []
    for view in history(*commands):
        replica.follow(view)
        spoken_to.append("r3" in disk.peers)
    assert spoken_to == [False, True, True, False]
    again = Replica(tmp_path, disk)
    for view in history(*commands):
        again.follow(view)
        assert "r3" not in {*again.hosting.rows, *disk.peers}
    assert disk.peers == {"r0", "r1", "r2"}


@pytest.mark.parametrize("content", [b"{", b'{"removed": ["r\xb1"]}', b"[]"])
def test_a_damaged_table_is_called_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "replicas.json").write_bytes(content)
    with pytest.raises(CorruptStateError, match=r"replicas\.json: cannot be read"):
        read_table(tmp_path / "replicas.json")


@pytest.mark.parametrize("content", [b"", b"0" * 31, b"0" * 31 + b"\xb1", b"0" * 31 + b"q"])
def test_a_damaged_note_of_the_registry_is_not_taken_for_another_registry(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "registry").write_bytes(content)
    with pytest.raises(CorruptStateError, match="registry: it is damaged"):
        check_registry(tmp_path, "0" * 32)


def test_of_two_registries_the_line_shows_in_what_they_differ(tmp_path: Path) -> None:
    check_registry(tmp_path, "0" * 32)
    check_registry(tmp_path, "0" * 32)
    with pytest.raises(
        CorruptStateError, match=f"registry {'0' * 32}, and this is {'0' * 31}1, .* founded anew"
    ):
        check_registry(tmp_path, "0" * 31 + "1")
