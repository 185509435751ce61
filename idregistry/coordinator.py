"""What a replica does as the directory says, and what the directory's leader decides (paper 2.2.2, 3.3.3).

Every replica opens and closes its groups, and speaks with its peers, as the table says (`Hosting`). The
leader decides reshardings, trims the table and judges leases (`Coordinator`).

The directory's table is in the log, but the log is read only with the help of the peers. So the table is also
kept in a small file beside it, which says too how far the directory was followed. An address in the settings
goes before one in the table: a run on one machine gets new ports each time, and the settings of a machine
that moved say where it is now.

A lease's end is judged by this replica's monotonic clock, from the moment it saw the renewal applied: later
than the joiner asked, so it ends there first, whatever any wall clock says. A new leader, or one restarted,
takes what it does not know for renewed just now.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from idregistry.peers import TELLS_S_MAX, Fact, Peers, fact_of, newest
from idregistry.rules import commands
from idregistry.rules.commands import DirectoryCommand, Rejected, Row, Standing, encode
from idregistry.rules.directory import (
    DIRECTORY_GROUP,
    DirectoryState,
    Lease,
    Proposal,
    View,
    shard_of_group,
)
from idregistry.rules.names import iso_utc
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.rules.sharding import BEGINNING, SHARDS_MAX, Configuration
from idregistry.rules.steward import DAY_US, Steward, hold_due, in_turn, is_replaced
from idregistry.shard import Ask, Line, Settled, Shard, answer_to
from photon.core.clock import Clock
from photon.core.disk import make_directory, storage_errors, write_json
from photon.core.errors import CorruptStateError, UsageError
from photon.core.protocol import NEWEST
from photon.core.settings import Registry
from photon.raft.host import RaftHost
from photon.raft.port import Members, Outcome, ReplicatedLog
from photon.raft.rules import placement
from photon.raft.rules.placement import MEMBER_LEASE_S, Group


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
    def age(self) -> tuple[int, int, int]:
        """Never less after a change, and greater after each but one: a replacement that is turned round
        changes neither who there is nor who is gone.
        """
        return self.version, len(self.replicas) + len(self.removed), len(self.removed)


def read_table(path: Path) -> Table:
    """CorruptStateError where the file is none; an empty table where there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except FileNotFoundError:
        return Table()
    except (OSError, ValueError) as error:  # UnicodeDecodeError too
        raise CorruptStateError(
            f"{path}: cannot be read ({error}); remove the file if the settings name all replicas, else "
            "replace this replica"
        ) from error


TABLE_FILE: Final = "replicas.json"


class Hosting:
    """`shards` and `rows` are for any thread: replaced as a whole, never changed."""

    def __init__(
        self,
        node: str,
        settings: Mapping[str, Row],
        directory: Path,
        make_shard: Callable[[int], Shard],
        leaders: Sequence[str] = (),
    ) -> None:
        """`make_shard`: of a group. `settings`: where the replicas are, this one too, as far as the
        settings say. `leaders`: over whom leadership is spread, () for all. CorruptStateError."""
        self._leaders = leaders
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
        self._host = host
        for group in sorted(host.groups_on_disk()):
            if group != DIRECTORY_GROUP:
                self._add(group, None)

    def follow(self, view: View) -> bool:
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
                f"registry replica {self._node} has been replaced, or its set retired: it may never come "
                "back. Take it out of the settings; a new replica gets a new name"
            )
        self._follow_table(table)
        if not self._step(view):
            self._seen = view
        self._host.wake()  # every shard has something to look at
        return True

    def known_to_all(self) -> int:
        """The newest protocol version that every replica knows; 0 while one of them is away. Raft thread."""
        versions = self._host.versions | {self._node: NEWEST}
        return min((versions.get(name, 0) for name in self.rows), default=0)

    def furthest_us(self) -> int:
        """The boundary of the shard that has come furthest; NO_BOUNDARY where none has one. Any thread."""
        return max((one.state.boundary_us for one in self.shards.values()), default=NO_BOUNDARY)

    def _step(self, view: View) -> bool:
        """Let go of one group, or open one; False where all is as the view says."""
        retired = next(filter(view.is_retired, self._groups), None)
        if retired is not None:
            self._groups.pop(retired).queue.close()
            self._publish()
            self._host.remove_group(retired)
            return True
        for shard, founders in view.founders.items():
            group = view.group(shard)
            if group not in self._groups and view.hosts(self._node, shard):
                order = in_turn(shard, founders, self._leaders)
                self._add(group, order if self._node in founders else None)
                return True
        return False

    def _follow_table(self, table: Table) -> None:
        if table != self._table:
            with storage_errors(self._path):
                make_directory(self._path.parent)
            write_json(self._path, table)
            self._table = table
        self.rows = {row.name: self._settings.get(row.name, row) for row in table.replicas}
        self._host.set_peers({name: (row.raft_host, row.raft_port) for name, row in self.rows.items()})

    def _add(self, group: int, founders: Sequence[str] | None) -> None:
        shard = self._make_shard(group)
        shard.log = self._host.add_group(group, shard.state, shard.on_tick, founders)
        self._groups[group] = shard
        self._publish()

    def _publish(self) -> None:
        # Of a shard that was retired and came again, the newest life.
        newest = {shard_of_group(group)[0]: group for group in sorted(self._groups)}
        self.shards = {shard: self._groups[group] for shard, group in sorted(newest.items())}


ASKS_WAITING_MAX: Final = 256
HOLDING_SHOWN: Final = 10
_IN_FLIGHT_MAX: Final = 16
_START_AHEAD_DAYS_MAX: Final = 366
START_AHEAD_MAX_US: Final = _START_AHEAD_DAYS_MAX * 86_400 * 1_000_000
"""An interval is only ever appended: a start in the far future, a typo, would block each later change."""
_LEASE_DRIFT: Final = 1.02
"""Monotonic clocks of two machines differ by less over a lease."""
_FORGET_AFTER_S: Final = 1000.0
"""A lease that ran out so long ago is forgotten, however long it was: there is room for the living only."""


@dataclass(frozen=True, slots=True)
class Look:
    """How do these incarnations stand? No command: the leader answers from what it knows, a Standing each."""

    incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A dispatcher says how old the oldest event is that it has yet to end; as of steward.hold_due."""

    name: str
    oldest_us: int | None


@dataclass(frozen=True, slots=True)
class Beat:
    """A member of a group is there; what it says stands in the log only if it is new. Answer: the Group."""

    group: str
    name: str
    life: int
    address: str
    shares: int


Wanted = DirectoryCommand | Look | Report | Beat


class Coordinator:
    """On every replica; it decides where the directory is led. `asks` (for any thread) has what waits for it.
    `hosting`: which shards are open here.

    `founding`: the first command, where the registry is new; `reached_us`: as of steward.reached_us, for
    any thread; `shards_max`: as many as a replica can have open.
    """

    def __init__(
        self,
        state: DirectoryState,
        founding: commands.Found,
        settings: Registry,
        clock: Clock,
        wake: Callable[[], None],
        hosting: Hosting,
        reached_us: Callable[[], int | None],
        shards_max: int = SHARDS_MAX,
        peers: Peers | None = None,
    ) -> None:
        """`peers`: None where all shards are hosted here."""
        self._state = state
        self._founding = founding
        self._settings = settings
        self._shards_max = shards_max
        self._clock = clock
        self._hosting = hosting
        self._peers = peers
        self.reached_us = reached_us
        self._steward = Steward(None, settings.leaders, clock)
        self.asks: Line[Wanted] = Line(
            ASKS_WAITING_MAX,
            wake,
            f"{ASKS_WAITING_MAX} requests wait for the directory; back off and retry",
            "the deadline passed while the request waited",
        )
        self._housekeeping = False
        self._leaving: tuple[str, str] | None = None
        self._leaving_at = clock.monotonic()
        """When this replica first saw that replacement, or that there is none."""
        self._seen: dict[int, float] = {}
        """Incarnation -> when its last renewal was seen, monotonic seconds."""
        self._heard: dict[tuple[str, str], float] = {}
        """Group and member -> when it was heard last; while the directory is led here."""

    def holders(self) -> list[str]:
        """Addresses of those whose leases run, as this replica has seen them renewed. Any thread."""
        leases = dict(self._state.leases)
        return sorted({one.address for key, one in leases.items() if self._left_s(key, one) > 0})

    def close(self) -> None:
        """Send all who wait elsewhere, for the shards too, and take no more. Any thread."""
        self.asks.close()
        for shard in self._hosting.shards.values():
            shard.queue.close()

    def on_tick(self, log: ReplicatedLog) -> None:
        """Host what the directory says; propose what was asked for, then what is due."""
        self._hosting.follow(self._state.view)
        if self._hosting.behind:
            return
        self._note_renewals()
        may_propose = self._steward.on_tick(log, self._state.view)
        if not log.is_leader:
            self.asks.send_elsewhere(log.leader)
            self._heard.clear()
            return
        if not may_propose:
            return
        while self.asks and log.in_flight < _IN_FLIGHT_MAX:
            for ask in self.asks.take(self._clock.monotonic()):
                self._propose(log, ask)
        if not self._housekeeping:
            command = self._due(log)
            if command is not None:
                self._housekeeping = True
                log.propose(encode(command, self._state.view.protocol), self._housekeeping_done)

    def _note_renewals(self) -> None:
        if not self._state.renewed:
            return
        now = self._clock.monotonic()
        self._seen |= dict.fromkeys(self._state.renewed, now)
        self._state.renewed.clear()
        if len(self._seen) > len(self._state.leases):
            self._seen = {i: at for i, at in self._seen.items() if i in self._state.leases}

    def _propose(self, log: ReplicatedLog, ask: Ask[Wanted]) -> None:
        command: DirectoryCommand | Standing | Rejected | Group | list[Standing] | None
        match ask.what:
            case Look(incarnations):
                command = list(map(self._standing, incarnations))
            case Beat() as beat:
                command = self._hear(beat)
            case Report() as report:
                command = self._hold(report)
            case what:
                command = self._complete(what)
        if isinstance(command, DirectoryCommand):
            version = self._state.view.protocol
            log.propose(encode(command, version), lambda outcome: ask.answer(answer_to(outcome)))
        else:  # the answer
            ask.answer(Settled(command))

    def _hear(self, beat: Beat) -> commands.Enter | Group:
        self._heard[beat.group, beat.name] = self._clock.monotonic()
        group = self._state.groups.get(beat.group)
        if group is not None and beat.name in group.members and group.members[beat.name].life == beat.life:
            return group
        now_us = self._clock.now_us()
        return commands.Enter(now_us, beat.group, beat.name, beat.life, beat.address, beat.shares)

    def _placement_due(self, now_us: int) -> commands.Leave | commands.Move | None:
        """Who is not known to have been heard has been just now: the leader is new."""
        now = self._clock.monotonic()
        for name, group in self._state.groups.items():
            heard = {one: self._heard.setdefault((name, one), now) for one in group.members}
            live = {one for one, at in heard.items() if now - at <= MEMBER_LEASE_S * _LEASE_DRIFT}
            step = placement.due(group, live)
            if isinstance(step, placement.Leave):
                return commands.Leave(now_us, name, step.name, step.life)
            if step is not None:
                return commands.Move(now_us, name, step.share, step.sequencer, step.to)
        return None

    def _hold(self, report: Report) -> commands.Hold | None:
        present_us = self._state.holds.get(report.name)
        days = self._settings.retention_days
        due_us = hold_due(present_us, report.oldest_us, self.boundary_us(), self.reached_us(), days)
        return None if due_us is None else commands.Hold(self._clock.now_us(), report.name, due_us)

    def boundary_us(self) -> int:
        """What every shard has forgotten, as this replica knows. Any thread."""
        return min((fact.boundary_us for fact in self.facts().values()), default=NO_BOUNDARY)

    def facts(self, members_from: float = 0.0) -> dict[int, Fact]:
        """Shard -> what is known of it, of those that there are. Any thread. `members_from`: as of
        Peers.facts."""
        view = self._state.view
        hosted = {one.group: fact_of(one) for one in self._hosting.shards.values()}
        of_groups = newest(() if self._peers is None else self._peers.facts(members_from)) | hosted
        groups = {shard: view.group(shard) for shard in view.founders}
        return {shard: of_groups[group] for shard, group in groups.items() if group in of_groups}

    def of_all(self, members_from: float = 0.0) -> dict[int, Fact] | None:
        """The same, of all shards; None where one is not known, and then it soon is. Any thread."""
        facts = self.facts(members_from)
        if facts.keys() == self._state.view.founders.keys():
            return facts
        self.hurry()
        return None

    def hurry(self) -> None:
        """Somebody waits for what is known of the shards that others host. Any thread."""
        if self._peers is not None and self._state.view.following:
            self._peers.hurry()

    def holding(self) -> dict[str, float]:
        """Dispatchers that keep the boundary back most -> by how many seconds. Any thread."""
        reached_us = self.reached_us() if self._state.holds else None
        if reached_us is None:
            return {}
        wanted_us = reached_us - round(self._settings.retention_days * DAY_US)
        least = heapq.nsmallest(HOLDING_SHOWN, self._state.holds.items(), key=itemgetter(1))
        return {name: round((wanted_us - us) / 1e6, 1) for name, us in least if us < wanted_us}

    def _complete(self, what: DirectoryCommand) -> DirectoryCommand | Standing | Rejected:
        """With what only the leader knows: its clock, and how a lease stands."""
        now_us = self._clock.now_us()
        match what:
            case commands.Propose(shards=shards, start_us=start_us):
                return self._complete_proposal(now_us, shards, start_us)
            case commands.Fence(incarnation=incarnation):
                left_s = self._lease_left_s(incarnation)
                if left_s > 0:
                    return Standing(False, left_s)
                lease = self._state.leases.get(incarnation)
                return commands.Fence(now_us, incarnation, 0 if lease is None else lease.grant)
            case commands.Drain(group=name, name=member) if self._is_needed(name, member):
                return Rejected(
                    f"no other member of {name} is there to take the shares of {member}; start one"
                )
            case _:
                return replace(what, time_us=now_us)

    def _is_needed(self, name: str, member: str) -> bool:
        """Whether nobody else in the group takes shares."""
        group = self._state.groups.get(name)
        if group is None or member not in group.members:
            return False
        return all(other.leaves for one, other in group.members.items() if one != member)

    def _complete_proposal(self, now_us: int, shards: int, start_us: int) -> commands.Propose | Rejected:
        """`start_us`: 0 for as soon as may be."""
        if shards > self._shards_max * len(self._state.view.open_sets):
            return Rejected(
                f"{shards} shards: a replica can have {self._shards_max} open; raise its limit of open files "
                "(ulimit -n) on every machine, add a set, or take fewer"
            )
        if start_us > now_us + START_AHEAD_MAX_US:
            return Rejected(
                f"{iso_utc(start_us)} is more than {_START_AHEAD_DAYS_MAX} days ahead: until then no other "
                "number of shards could begin; choose an earlier time"
            )
        skew_us = round(self._settings.clock_skew_s * 1e6)
        # Twice: the shards have the second one to prepare in.
        soon_us = now_us + 2 * skew_us + 1_000_000
        return commands.Propose(now_us, shards, start_us or soon_us, now_us + skew_us)

    def _standing(self, incarnation: int) -> Standing:
        return Standing(self._state.is_fenced(incarnation), max(0.0, self._lease_left_s(incarnation)))

    def _lease_left_s(self, incarnation: int) -> float:
        lease = self._state.leases.get(incarnation)
        return 0.0 if lease is None else self._left_s(incarnation, lease)

    def _left_s(self, incarnation: int, lease: Lease) -> float:
        now = self._clock.monotonic()
        return self._seen.get(incarnation, now) + lease.lease_us / 1e6 * _LEASE_DRIFT - now

    def _housekeeping_done(self, _outcome: Outcome) -> None:
        self._housekeeping = False

    def _due(self, log: ReplicatedLog) -> DirectoryCommand | None:
        view, now_us = self._state.view, self._clock.now_us()
        if view.configuration is None:
            return replace(self._founding, time_us=now_us)
        if view.protocol < NEWEST and (version := self._hosting.known_to_all()) > view.protocol:
            return commands.Raise(now_us, version)
        for name in view.retiring:
            if name not in view.homes.values() and view.proposal is None and view.leaving is None:
                return commands.DropSet(now_us, name)
        if view.proposal is not None:
            self.hurry()
            return _decide(view.proposal, [*view.founders], self.facts(), now_us)
        if view.leaving != self._leaving:
            self._leaving, self._leaving_at = view.leaving, self._clock.monotonic()
        if view.leaving is not None:
            self.hurry()
        if view.leaving is not None or self._may_trim(view.configuration):
            facts = self.of_all(self._leaving_at + TELLS_S_MAX)
            command = facts and _due_of_shards(log, view, view.configuration, facts, now_us)
            if command:
                return command
        return self._placement_due(now_us) or self._lease_to_forget(now_us)

    def _may_trim(self, configuration: Configuration) -> bool:
        """By the shards that are hosted here; the others are asked about where these do not hinder it."""
        if len(configuration.intervals) == 1:
            return False
        boundary_us = min(
            (one.state.boundary_us for one in self._hosting.shards.values()), default=NO_BOUNDARY
        )
        return configuration.intervals[1].start_us <= configuration.needed_from(boundary_us)

    def _lease_to_forget(self, now_us: int) -> commands.EndLease | None:
        now = self._clock.monotonic()
        for incarnation, seen in self._seen.items():
            lease = self._state.leases.get(incarnation)
            if lease is not None and now - seen > lease.lease_us / 1e6 + _FORGET_AFTER_S:
                return commands.EndLease(now_us, incarnation, lease.grant)
        return None


def _due_of_shards(
    log: ReplicatedLog, view: View, configuration: Configuration, facts: Mapping[int, Fact], now_us: int
) -> DirectoryCommand | None:
    """What is due by what is known of all shards."""
    if len(configuration.intervals) > 1:
        boundary_us = min(one.boundary_us for one in facts.values())
        if configuration.intervals[1].start_us <= configuration.needed_from(boundary_us):
            return commands.Trim(now_us, view.version, boundary_us)
    if view.leaving is not None:
        home = view.replicas[view.leaving[0]].set
        members = [fact.members or Members() for shard, fact in facts.items() if view.homes[shard] == home]
        if is_replaced(members, log.committed_members, view.leaving, home):
            return commands.Gone(now_us, view.leaving[0])
    return None


def _decide(
    proposal: Proposal, shards: Sequence[int], facts: Mapping[int, Fact], now_us: int
) -> DirectoryCommand | None:
    """Whether a proposal holds, once every shard has prepared for it, or its time is up: also where nobody
    tells of a shard, for those that have prepared are closed."""
    late = []
    for number in shards:
        fact = facts.get(number)
        prepared = None if fact is None else fact.prepared
        if fact is None or prepared is None or prepared.version != proposal.version:
            late.append(number)
        elif not prepared.fits:
            return commands.Abandon(
                now_us,
                proposal.version,
                f"shard {number} holds an event of {_told(fact.latest_us)}, which is not before the new "
                f"start, {iso_utc(proposal.start_us)}. While such an event is kept, no number of shards "
                "can begin before its time: choose a start after it",
            )
    if not late:
        return commands.Adopt(now_us, proposal.version)
    if now_us >= proposal.start_us:
        names = ", ".join(map(str, late[:5]))
        return commands.Abandon(
            now_us, proposal.version, f"shard {names} did not prepare in time: is there a majority of it?"
        )
    return None


def _told(time_us: int) -> str:
    return "no time" if time_us == BEGINNING else iso_utc(time_us)
