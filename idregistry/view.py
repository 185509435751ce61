"""What the directory says, at one moment. Pure.

A shard's group number is never used twice: a shard that was retired and comes again is a new group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from idregistry.configuration import SHARDS_MAX, Configuration
from idregistry.directory_commands import Row

DIRECTORY_GROUP: Final = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A resharding under way: `version` is what the configuration's will be, however it ends."""

    version: int
    start_us: int
    shards: int


@dataclass(frozen=True, slots=True)
class Lease:
    """`grant`: the number of its last renewal, among those of all leases; never used twice. When it ends is
    for the leader to judge, by its monotonic clock.
    """

    address: str
    lease_us: int
    grant: int


@dataclass(frozen=True, slots=True)
class View:
    """All but leases and fences, at one moment. Never changed: any thread may keep it."""

    configuration: Configuration | None = None
    identity: bytes = b""
    """The registry's: random, and the same for its whole life. Empty for a moment after it is founded."""
    proposal: Proposal | None = None
    abandoned: tuple[int, str] = (0, "")
    """Version and reason of the last proposal that came to nothing."""
    replicas: Mapping[str, Row] = field(default_factory=dict)
    leaving: tuple[str, str] | None = None
    """(old, new): who is being replaced by whom."""
    cancelled: str = ""
    """Who was the new one of the last replacement that was cancelled: it goes, or is gone."""
    removed: tuple[str, ...] = ()
    founders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Shard -> the replicas that found its group. Its keys are the shards there are."""
    retired: Mapping[int, int] = field(default_factory=dict)
    """Shard number -> how often it was retired."""

    @property
    def version(self) -> int:
        """The configuration's; 0 before there is one."""
        return 0 if self.configuration is None else self.configuration.version

    @property
    def staying(self) -> tuple[str, ...]:
        """The names of the replicas, without who is leaving; sorted."""
        old = self.leaving[0] if self.leaving is not None else None
        return tuple(sorted(name for name in self.replicas if name != old))

    def group(self, shard: int) -> int:
        """The group number of a shard that there is."""
        return group_of(shard, self.retired.get(shard, 0))

    def is_retired(self, group: int) -> bool:
        """Whether the group certainly is of the past. What is not known yet is not."""
        shard, life = shard_of_group(group)
        return life < self.retired.get(shard, 0)


def group_of(shard: int, life: int) -> int:
    """Shard n is group n + 1 in its first life."""
    return life * SHARDS_MAX + shard + 1


def shard_of_group(group: int) -> tuple[int, int]:
    """The reverse: (shard, life)."""
    life, shard = divmod(group - 1, SHARDS_MAX)
    return shard, life
