"""What the other replicas know: their clocks, and the shards that they host.

The boundary goes by the clocks of a majority (paper 2.3), and the directory's leader decides what concerns
all shards, though it hosts those of its own set only. One thread asks, every few seconds, and often while
somebody waits for what the others know.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc

from idregistry.rules.commands import Row
from idregistry.rules.sharding import Prepared
from idregistry.rules.steward import majority_time_us
from idregistry.shard import Shard
from photon.core.clock import Background, Clock
from photon.raft.port import Members
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryStub
from photon.rpc.network import LOOPBACK, Network

ASK_EVERY_S: Final = 5.0
HURRY_S: Final = 0.2
_HURRIES_S: Final = 2.0
TELLS_S_MAX: Final = 2.0
"""An answer may be so old when it is heard."""
_KEEP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Fact:
    """What a replica has applied of a shard's log: true for ever, but for `members`, which its leader has."""

    group: int
    latest_us: int
    boundary_us: int
    fences: int
    prepared: Prepared | None
    members: Members | None


def fact_of(shard: Shard) -> Fact:
    """Of a shard that is hosted here. Any thread."""
    state = shard.state
    return Fact(
        shard.group,
        state.latest_us,
        state.boundary_us,
        state.fences,
        state.prepared,
        shard.log.committed_members,
    )


def newest(facts: Iterable[Fact]) -> dict[int, Fact]:
    """Group -> all that several replicas know of it."""
    found: dict[int, Fact] = {}
    for fact in facts:
        known = found.get(fact.group, fact)
        found[fact.group] = Fact(
            fact.group,
            max(known.latest_us, fact.latest_us),
            max(known.boundary_us, fact.boundary_us),
            max(known.fences, fact.fences),
            max(known.prepared, fact.prepared, key=lambda one: 0 if one is None else one.version),
            known.members or fact.members,
        )
    return found


def to_wire(now_us: int, hosted: Iterable[Shard]) -> pb.NowResponse:
    """What this replica tells the others."""
    answer = pb.NowResponse(now_us=now_us)
    for shard in hosted:
        fact, leads = fact_of(shard), shard.log.is_leader
        members = fact.members if leads and fact.members is not None else Members()
        row = answer.shards.add(
            group=fact.group,
            latest_us=fact.latest_us,
            boundary_us=fact.boundary_us,
            fences=fact.fences,
            voters=members.voters,
            learners=members.learners,
        )
        if fact.prepared is not None:
            row.prepared_version, row.prepared_start_us = fact.prepared.version, fact.prepared.start_us
            row.prepared_fits = fact.prepared.fits
    return answer


def _from_wire(row: Any) -> Fact:
    prepared = None
    if row.prepared_version:
        prepared = Prepared(row.prepared_version, row.prepared_start_us, row.prepared_fits)
    members = Members(tuple(row.voters), tuple(row.learners)) if row.voters else None
    return Fact(row.group, row.latest_us, row.boundary_us, row.fences, prepared, members)


class Peers:
    """`rows`: name -> where each replica is now, this one too. `needed`: whether to ask at all.

    What another's clock says now is reckoned from its last answer by our MONOTONIC time. Our own wall clock
    has no part in it: a step of it would make the others' clocks seem to jump along, and expire everything.
    """

    def __init__(
        self,
        node: str,
        rows: Callable[[], Mapping[str, Row]],
        clock: Clock,
        network: Network = LOOPBACK,
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._node = node
        self._rows = rows
        self._clock = clock
        self._network = network
        self._needed = needed
        self._answers: dict[str, tuple[pb.NowResponse, tuple[Fact, ...], float]] = {}
        """Name -> what it said, and when that was heard (monotonic s). Replaced as a whole, never changed:
        the raft thread may be reading it."""
        self._hurry_until = 0.0
        self._channels: dict[str, grpc.Channel] = {}
        self._work = Background("peers", self._step)

    def trusted_us(self) -> int | None:
        """The time that a majority's clocks have reached; None where too few are known. Any thread."""
        now = self._clock.monotonic()
        names = self._rows()
        clocks_us = [
            answer.now_us + round((now - at) * 1e6)
            for name, (answer, _, at) in self._answers.items()
            if name in names and now - at < _KEEP_S
        ]
        if self._node in names:
            clocks_us.append(self._clock.now_us())
        return majority_time_us(clocks_us, len(names))

    def facts(self, members_from: float = 0.0) -> list[Fact]:
        """Of the shards that others host, as they last said; members only where that was heard from
        `members_from` on (monotonic s), for of them an old answer may not be true any more. Any thread."""
        return [
            fact if at >= members_from else replace(fact, members=None)
            for _, facts, at in self._answers.values()
            for fact in facts
        ]

    def hurry(self) -> None:
        """Somebody waits for what the others know. Any thread."""
        now, until = self._clock.monotonic(), self._hurry_until
        self._hurry_until = now + _HURRIES_S
        if now >= until:  # else it is in a hurry already, and asks every HURRY_S
            self._work.wake()

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        self._work.stop(2 * TELLS_S_MAX)
        for channel in self._channels.values():
            channel.close()

    def _step(self) -> float:
        if self._needed():
            self._ask()
        # Until a majority is known, no boundary can move.
        hurried = self._clock.monotonic() < self._hurry_until or self.trusted_us() is None
        return HURRY_S if hurried and self._needed() else ASK_EVERY_S

    def _ask(self) -> None:
        """All at once."""
        channels = self._channels
        others = {name: row.grpc for name, row in self._rows().items() if name != self._node}
        for address in {*others.values()} - channels.keys():
            channels[address] = self._network.open(address)
        for address in channels.keys() - {*others.values()}:
            channels.pop(address).close()
        calls = {
            name: IdRegistryStub(channels[address]).Now.future(pb.NowRequest(), timeout=TELLS_S_MAX)  # type: ignore[no-untyped-call]  # generated
            for name, address in others.items()
        }
        answers = {name: answer for name, answer in self._answers.items() if name in others}
        for name, call in calls.items():
            try:
                answer = call.result()
            except (grpc.RpcError, grpc.FutureCancelledError):
                continue
            # Too small by the way back, never too great.
            answers[name] = answer, tuple(map(_from_wire, answer.shards)), self._clock.monotonic()
        self._answers = answers
