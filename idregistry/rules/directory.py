"""The directory (group 0): sharding configuration, replicas, leases, fences, placement. Pure, deterministic.

Resharding goes in two phases (paper 2.2.2, made safe against late commits): Propose; every shard prepares,
which closes it for events from the new start on, and says whether it holds none from there; then Adopt, or
Abandon. So when the table changes, no id of the new interval is registered anywhere. A shard's group number
is never used twice: a shard that was retired and comes again is a new group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from idregistry.rules import commands
from idregistry.rules.commands import CommandError, Mismatched, Rejected, Row, Written, decode_directory
from idregistry.rules.names import iso_utc
from idregistry.rules.sharding import (
    BEGINNING,
    HORIZON,
    INTERVALS_MAX,
    LISTED_MAX,
    SHARDS_MAX,
    Configuration,
    Interval,
    spread,
)
from photon.core.errors import CorruptStateError
from photon.core.protocol import OLDEST, is_read, not_read
from photon.core.settings import MAIN_SET
from photon.raft.rules import placement
from photon.raft.rules.members import MEMBERS_MAX
from photon.raft.rules.placement import SHARES_MAX, Group

DIRECTORY_GROUP: Final = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A resharding under way: `version` is what the configuration's will be, however it ends."""

    version: int
    start_us: int
    homes: Mapping[int, str]
    """Shard -> its set, of all that are to be."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`grant`: the number of its last renewal, among those of all leases; never used twice. When it ends is
    for the leader to judge, by its monotonic clock.
    """

    address: str
    lease_us: int
    grant: int
    dismissed: bool = False
    """Since then it is known that nothing of the incarnation is lost."""


@dataclass(frozen=True, slots=True)
class View:
    """All but leases and fences, at one moment. Never changed: any thread may keep it."""

    configuration: Configuration | None = None
    identity: bytes = b""
    """The registry's: random, and the same for its whole life. Empty before it is founded."""
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
    homes: Mapping[int, str] = field(default_factory=dict)
    """Shard -> its set, of the same shards."""
    retiring: tuple[str, ...] = ()
    """Sets that get no new shards."""
    protocol: int = OLDEST
    """The version in force (photon.core.protocol)."""
    retired: Mapping[int, int] = field(default_factory=dict)
    """Shard number -> how often it was retired."""

    @property
    def version(self) -> int:
        """The configuration's; 0 before there is one."""
        return 0 if self.configuration is None else self.configuration.version

    def home(self, shard: int | None) -> str:
        """The set of a shard, or, of None, the directory's."""
        return MAIN_SET if shard is None else self.homes[shard]

    def staying(self, name: str) -> tuple[str, ...]:
        """The replicas of a set, without who is leaving; sorted."""
        old = self.leaving[0] if self.leaving is not None else None
        return tuple(sorted(n for n, row in self.replicas.items() if n != old and row.set == name))

    @property
    def following(self) -> tuple[str, ...]:
        """The replicas of other sets than the directory's, without who is leaving; sorted."""
        others = sorted({row.set for row in self.replicas.values()} - {MAIN_SET})
        return tuple(sorted(replica for name in others for replica in self.staying(name)))

    @property
    def open_sets(self) -> tuple[str, ...]:
        """Those that get new shards; sorted."""
        return tuple(sorted({row.set for row in self.replicas.values()} - {*self.retiring}))

    def hosts(self, replica: str, shard: int) -> bool:
        """Whether the replica is one of the shard's set."""
        row = self.replicas.get(replica)
        return row is not None and row.set == self.homes[shard]

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


LEASES_MAX: Final = 10_000
"""At a time: those that ran out go soon (idregistry.coordinator)."""
HOLDS_MAX: Final = 10_000
GROUPS_MAX: Final = 1024
ROWS_BYTES_MAX: Final = 1 << 20
"""Kept of a share; so all of it fits into a command."""
_PIECE_BYTES: Final = 8
"""What a key or a value takes beside its own bytes, at most."""


def size_of(pieces: Iterable[bytes]) -> int:
    """Bytes of keys and values in a command: many that are empty take room, too."""
    return sum(len(piece) + _PIECE_BYTES for piece in pieces)


_CHUNK_BYTES: Final = 1 << 20


class _Kept(msgspec.Struct, array_like=True, forbid_unknown_fields=True, eq=False):
    """What the log has made true, and a snapshot holds."""

    view: View = msgspec.field(default_factory=View)
    leases: dict[int, Lease] = {}
    settings: bytes = b""
    """Digest of what makes an event's identity, by the first joiner that said it; never changed."""
    grants: int = 0
    fences: list[int] = []
    """In order; never changed but at its end. Raft thread only."""
    time_us: int = BEGINNING
    vanished: dict[int, str] = {}
    """Incarnation -> address, where the lease ran out long ago and nobody has dismissed or fenced it."""
    holds: dict[str, int] = {}
    """Dispatcher -> the event time that the boundary must not pass for it."""
    groups: dict[str, Group] = {}
    """Who does which part of what. Replaced, not changed: other threads read it."""
    rows: dict[str, dict[bytes, bytes]] = {}
    """What is kept of each share, by group and number; each replaced, not changed."""


class DirectoryState(_Kept, dict=True, eq=False):
    """Driven by the log (photon.raft.port.StateMachine), in the raft thread; `view` is for any thread."""

    def __post_init__(self) -> None:
        self.renewed: set[int] = set()
        """Incarnations whose lease was taken or renewed since this was last cleared; no part of the state."""
        self._fenced: set[int] = set()
        self.held_us: int | None = None
        """The least of the holds."""
        self._rules: dict[type, Callable[[Any], object]] = {
            commands.Found: self._found,
            commands.Propose: self._propose,
            commands.Adopt: self._adopt,
            commands.Abandon: self._abandon,
            commands.Trim: self._trim,
            commands.Replace: self._replace,
            commands.Cancel: self._cancel,
            commands.Gone: self._gone,
            commands.KeepAlive: self._keep_alive,
            commands.Fence: self._fence,
            commands.EndLease: self._end_lease,
            commands.Dismiss: self._dismiss,
            commands.Hold: self._hold,
            commands.AddSet: self._add_set,
            commands.RetireSet: self._retire_set,
            commands.DropSet: self._drop_set,
            commands.Raise: self._raise,
            commands.Enter: self._enter,
            commands.Leave: self._leave,
            commands.Drain: self._drain,
            commands.Move: self._move,
            commands.Write: self._write,
        }

    def apply(self, command: bytes) -> object:
        """What the command's class says. CommandError (fatal) for bytes that are no command."""
        decoded = decode_directory(command)
        self.time_us = max(self.time_us, decoded.time_us)
        return self._rules[type(decoded)](decoded)

    def _found(self, command: commands.Found) -> bool:
        if self.view.configuration is not None:
            return False
        view = View(identity=command.identity, replicas={row.name: row for row in command.replicas})
        homes = spread(command.shards, view.open_sets, {})
        self.view = replace(
            view,
            configuration=Configuration(1, (Interval(BEGINNING, tuple(homes)),), command.spread_us),
            founders={shard: view.staying(name) for shard, name in homes.items()},
            homes=homes,
        )
        return True

    def _propose(self, command: commands.Propose) -> Proposal | Rejected:
        configuration = self.view.configuration
        busy = _busy(self.view)
        if busy is not None or configuration is None:
            return busy or _UNFOUNDED
        if not 1 <= command.shards <= SHARDS_MAX:
            return Rejected(f"{command.shards} shards; give 1 to {SHARDS_MAX}")
        homes = spread(command.shards, self.view.open_sets, self.view.homes)
        if (why := _no_resharding(configuration, command, homes)) is not None:
            return Rejected(why)
        proposal = Proposal(configuration.version + 1, command.start_us, homes)
        self.view = replace(self.view, proposal=proposal)
        return proposal

    def _adopt(self, command: commands.Adopt) -> bool:
        view, configuration, proposal = self.view, self.view.configuration, self.view.proposal
        if configuration is None or proposal is None or proposal.version != command.version:
            return False
        intervals = (*configuration.intervals, Interval(proposal.start_us, tuple(proposal.homes)))
        new = {shard: home for shard, home in proposal.homes.items() if shard not in view.founders}
        self.view = replace(
            view,
            configuration=Configuration(command.version, intervals, configuration.spread_us),
            proposal=None,
            founders={**view.founders, **{shard: view.staying(home) for shard, home in new.items()}},
            homes={**view.homes, **new},
        )
        return True

    def _abandon(self, command: commands.Abandon) -> bool:
        view, configuration, proposal = self.view, self.view.configuration, self.view.proposal
        if configuration is None or proposal is None or proposal.version != command.version:
            return False
        # The version grows, so that every shard is told that what it prepared for will not be.
        self.view = replace(
            view,
            configuration=msgspec.structs.replace(configuration, version=command.version),
            proposal=None,
            abandoned=(command.version, command.why),
        )
        return True

    def _trim(self, command: commands.Trim) -> bool:
        view, configuration = self.view, self.view.configuration
        if configuration is None or view.proposal is not None or configuration.version != command.version:
            return False
        left = list(configuration.intervals)
        while len(left) > 1 and left[1].start_us <= configuration.needed_from(command.boundary_us):
            left.pop(0)
        if len(left) == len(configuration.intervals):
            return False
        left[0] = Interval(BEGINNING, left[0].shards)
        trimmed = Configuration(configuration.version + 1, tuple(left), configuration.spread_us)
        over = {*view.founders} - {*trimmed.shards}
        self.view = replace(
            view,
            configuration=trimmed,
            founders={n: names for n, names in view.founders.items() if n not in over},
            homes={n: home for n, home in view.homes.items() if n not in over},
            retired={**view.retired, **{shard: view.retired.get(shard, 0) + 1 for shard in sorted(over)}},
        )
        return True

    def _replace(self, command: commands.Replace) -> bool | Rejected:
        view, old, row = self.view, command.old, command.row
        if (former := view.replicas.get(old)) is not None:
            row = msgspec.structs.replace(row, set=former.set)
        elif (present := view.replicas.get(row.name)) is not None:
            row = msgspec.structs.replace(row, set=present.set)
        if view.leaving == (old, row.name) and view.replicas[row.name] == row:
            return True
        if old in view.removed and view.replicas.get(row.name) == row:
            return True
        busy = _busy(view)
        if busy is not None:
            return busy
        if old not in view.replicas:
            return Rejected(f"there is no replica '{old}'; there are: {', '.join(sorted(view.replicas))}")
        if row.name in view.replicas or row.name in view.removed:
            return Rejected(
                f"'{row.name}' is or was a replica's name: give the new one a name never used before"
            )
        self.view = replace(view, replicas={**view.replicas, row.name: row}, leaving=(old, row.name))
        return True

    def _cancel(self, command: commands.Cancel) -> bool | Rejected:
        """Turned round, not dropped: until no group has it any more, `new` may be needed for a majority."""
        view, new = self.view, command.new
        if view.leaving is not None and view.leaving[1] == new:
            self.view = replace(view, leaving=(new, view.leaving[0]), cancelled=new)
            return True
        if new and new == view.cancelled:  # asked for once more
            return True
        there_is = "none at all" if view.leaving is None else " by ".join(view.leaving)
        return Rejected(f"no replacement by a replica '{new}' is under way ({there_is})")

    def _gone(self, command: commands.Gone) -> bool:
        view, old = self.view, command.old
        if view.leaving is None or view.leaving[0] != old:
            return False
        self.view = replace(
            view,
            replicas={name: row for name, row in view.replicas.items() if name != old},
            leaving=None,
            removed=(*view.removed, old),
        )
        return True

    def _add_set(self, command: commands.AddSet) -> bool | Rejected:
        view, rows = self.view, command.rows
        if rows and all(view.replicas.get(row.name) == row for row in rows):
            return True
        busy = _busy(view)
        if busy is not None:
            return busy
        if (why := _no_set(view, rows)) is not None:
            return Rejected(why)
        self.view = replace(view, replicas={**view.replicas, **{row.name: row for row in rows}})
        return True

    def _retire_set(self, command: commands.RetireSet) -> bool | Rejected:
        view, name = self.view, command.name
        sets = sorted({row.set for row in view.replicas.values()})
        if name == MAIN_SET or name not in sets:
            others = ", ".join(one for one in sets if one != MAIN_SET) or "none"
            return Rejected(f"no set '{name}' that can be retired; there are: {others}")
        if name not in view.retiring:
            self.view = replace(view, retiring=(*view.retiring, name))
        return True

    def _drop_set(self, command: commands.DropSet) -> bool:
        view, name = self.view, command.name
        if name not in view.retiring or name in view.homes.values() or _busy(view) is not None:
            return False
        gone = tuple(sorted(n for n, row in view.replicas.items() if row.set == name))
        self.view = replace(
            view,
            replicas={n: row for n, row in view.replicas.items() if n not in gone},
            removed=(*view.removed, *gone),
            retiring=tuple(one for one in view.retiring if one != name),
        )
        return True

    def _keep_alive(self, command: commands.KeepAlive) -> bool | Mismatched | Rejected:
        incarnation, settings = command.incarnation, command.settings
        if incarnation in self._fenced:
            return False
        if settings and self.settings and settings != self.settings:
            return Mismatched()
        if incarnation not in self.leases and len(self.leases) >= LEASES_MAX:
            return Rejected(f"{LEASES_MAX} joiners hold leases; wait until some have run out", busy=True)
        self.settings = self.settings or settings
        self.grants += 1
        self.leases[incarnation] = Lease(command.address, command.lease_us, self.grants)
        self.vanished.pop(incarnation, None)
        self.renewed.add(incarnation)
        return True

    def _fence(self, command: commands.Fence) -> bool:
        incarnation = command.incarnation
        if incarnation in self._fenced:
            return True
        lease = self.leases.get(incarnation)
        if (0 if lease is None else lease.grant) != command.grant:
            return False
        self.fences.append(incarnation)
        self._fenced.add(incarnation)
        self.leases.pop(incarnation, None)
        self.vanished.pop(incarnation, None)
        return True

    def _end_lease(self, command: commands.EndLease) -> bool:
        lease = self.leases.get(command.incarnation)
        if lease is not None and lease.grant == command.grant:
            del self.leases[command.incarnation]
            if not lease.dismissed:
                self.vanished[command.incarnation] = lease.address
                if len(self.vanished) > LEASES_MAX:
                    del self.vanished[next(iter(self.vanished))]
        return command.incarnation not in self.leases

    def _dismiss(self, command: commands.Dismiss) -> bool:
        """A lease is not ended: its joiner may count on it."""
        for incarnation in command.incarnations:
            self.vanished.pop(incarnation, None)
            if (lease := self.leases.get(incarnation)) is not None:
                self.leases[incarnation] = replace(lease, dismissed=True)
        return True

    def _raise(self, command: commands.Raise) -> bool:
        if not is_read(command.version):
            raise CommandError(f"the registry went on to {not_read(command.version)}")
        if command.version <= self.view.protocol:
            return False
        self.view = replace(self.view, protocol=command.version)
        return True

    def _enter(self, command: commands.Enter) -> Group | Rejected:
        present = self.groups.get(command.group)
        if present is None and len(self.groups) >= GROUPS_MAX:
            return Rejected(f"there are {GROUPS_MAX} groups")
        if not 1 <= command.shares <= SHARES_MAX:
            return Rejected(f"{command.shares} shares; a group has 1 to {SHARES_MAX}")
        group = placement.entered(
            present or placement.founded(command.shares), command.name, command.life, command.address
        )
        if group is None:
            return Rejected(
                f"a later life of {command.name} is there, or {command.group} has too many members: is it "
                "started twice?"
            )
        return self._put_group(command.group, group)

    def _leave(self, command: commands.Leave) -> Group | Rejected:
        if (group := self.groups.get(command.group)) is None:
            return Rejected(f"there is no group {command.group}")
        return self._put_group(
            command.group, placement.left(group, placement.Leave(command.name, command.life))
        )

    def _drain(self, command: commands.Drain) -> Group | Rejected:
        group = self.groups.get(command.group)
        drained = None if group is None else placement.drained(group, command.name)
        if drained is None:
            names = ", ".join(sorted(group.members)) if group else "no such group"
            return Rejected(f"{command.group} has no member {command.name} ({names})")
        return self._put_group(command.group, drained)

    def _move(self, command: commands.Move) -> bool:
        group = self.groups.get(command.group)
        if group is None:
            return False
        after = placement.moved(group, placement.Move(command.share, command.sequencer, command.to))
        self._put_group(command.group, after)
        return after is not group

    def _write(self, command: commands.Write) -> Written | Rejected:
        group, number = self.groups.get(command.group), command.share
        if group is None or not group.stands(number, command.sequencer):
            return Written(False, {}, 0)
        key, before = f"{command.group}/{number}", group.shares[number].written
        rows = self.rows.get(key, {})
        if command.rows or command.removed:
            rows = {k: v for k, v in rows.items() if k not in command.removed} | command.rows
            if size_of([*rows, *rows.values()]) > ROWS_BYTES_MAX:
                return Rejected(f"more than {ROWS_BYTES_MAX} bytes are to be kept of share {key}")
            self.rows = self.rows | {key: rows}
            group = placement.written(group, number)
        if command.release:
            group = placement.released(group, number)
        self._put_group(command.group, group)
        return Written(True, rows, before)

    def _put_group(self, name: str, group: Group) -> Group:
        if self.groups.get(name) is not group:
            self.groups = self.groups | {name: group}
        return group

    def _hold(self, command: commands.Hold) -> bool | Rejected:
        holds, name = dict(self.holds), command.name
        if command.oldest_us is None:
            holds.pop(name, None)
        elif name not in holds and len(holds) >= HOLDS_MAX:
            return Rejected(
                f"{HOLDS_MAX} dispatchers hold the boundary; drop those that never come back: "
                "`photon registry release-hold NAME`"
            )
        else:
            holds[name] = command.oldest_us
        self._set_holds(holds)
        return True

    def _set_holds(self, holds: dict[str, int]) -> None:
        """Replaced, not changed: other threads read them."""
        self.holds, self.held_us = holds, min(holds.values(), default=None)

    def is_fenced(self, incarnation: int) -> bool:
        return incarnation in self._fenced

    def freeze(self) -> Iterator[bytes]:
        """Few and small: encoded here and now."""
        data = bytes((self.view.protocol,)) + msgspec.msgpack.encode(self)
        return iter([data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)])

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        """Read a snapshot; what is returned replaces everything by it. CorruptStateError if it is none."""
        data = b"".join(chunks)
        try:
            if not is_read(data[0] if data else 0):
                raise ValueError(f"it is of {not_read(data[0] if data else 0)}")
            held = msgspec.msgpack.decode(data[1:], type=_Kept)
        except (msgspec.DecodeError, ValueError) as error:
            raise CorruptStateError(
                f"a snapshot of the registry's directory can't be used ({error}); replace this replica"
            ) from error

        def put() -> None:
            for name in _Kept.__struct_fields__:
                setattr(self, name, getattr(held, name))
            self._fenced = set(held.fences)
            self.renewed = set(held.leases)
            self._set_holds(held.holds)

        return put


_UNFOUNDED: Final = Rejected("the registry has no sharding configuration yet; try again", busy=True)


def _busy(view: View) -> Rejected | None:
    """Reshardings and replacements go one at a time: each may then rest on who and what there is."""
    if view.configuration is None:
        return _UNFOUNDED
    if view.proposal is not None:
        return Rejected(
            f"a resharding to {len(view.proposal.homes)} shards is under way; wait for it", busy=True
        )
    if view.leaving is not None:
        old, new = view.leaving
        return Rejected(
            f"replica {old} is being replaced by {new}; wait for it, or cancel it with "
            f"`photon registry replace --cancel {new}`",
            busy=True,
        )
    return None


def _no_resharding(
    configuration: Configuration, command: commands.Propose, homes: Mapping[int, str]
) -> str | None:
    """Why an interval with these shards can't follow, or None."""
    intervals, listed = len(configuration.intervals), configuration.listed
    if intervals >= INTERVALS_MAX or listed + len(homes) > LISTED_MAX or max(homes) >= SHARDS_MAX:
        return (
            f"the configuration has {intervals} intervals with {listed} shards, and room for no more; wait "
            "until old ids are collected"
        )
    last = configuration.intervals[-1]
    if tuple(homes) == last.shards:
        return f"there are {len(homes)} shards already"
    earliest_us = max(command.earliest_us, last.start_us + 1)
    if not earliest_us <= command.start_us < HORIZON:
        return (
            f"{iso_utc(command.start_us)} is not from {iso_utc(earliest_us)} to {iso_utc(HORIZON)}: "
            "the new number must begin in the future, by more than registry.clock_skew_s, and after the "
            "last interval's start, or ids that are registered would change their shard"
        )
    return None


def _no_set(view: View, rows: Sequence[Row]) -> str | None:
    """Why these can't be a new set, or None."""
    names = {row.set for row in rows}
    if len(names) != 1 or len(rows) % 2 == 0 or len({row.name for row in rows}) < len(rows):
        return "a set is an odd number of replicas, which name one set, each once"
    if any(row.set in names for row in view.replicas.values()):
        return f"there is a set '{min(names)}' already, of other replicas"
    if len(view.replicas) + len(rows) > MEMBERS_MAX:
        return f"there are {len(view.replicas)} replicas; all sets may have {MEMBERS_MAX}"
    used = sorted(row.name for row in rows if row.name in view.replicas or row.name in view.removed)
    return f"'{used[0]}' is or was a replica's name: give names never used before" if used else None
