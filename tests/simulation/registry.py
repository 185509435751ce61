"""The registry's shard under the log: its commands and its state are spoken to here and nowhere else in this
package.
"""

import random

from idregistry.rules import commands
from idregistry.rules.commands import Configure
from idregistry.rules.sharding import BEGINNING, Route
from idregistry.rules.state import ShardState
from idregistry.segment_file import SegmentFiles
from photon.core.columns import pack_times
from photon.core.ids import Token
from photon.raft.port import RaftLimits
from tests.idregistry.kit import contents, one_shard
from tests.simulation.history import Act, Commit, Fence, Lookup, Raise, Release

_OWN = Route(BEGINNING, False)
_BASE_US = 1_760_000_400_000_000  # the start of a bucket
_STEP_US = 720_000_000  # between two ids: five a bucket of an hour
_LIMITS = RaftLimits(
    command_bytes_max=1000,
    batch_bytes=2000,
    outgoing_bytes=8000,
    compact_entries=30,
    tail_entries=3,
    segment_bytes=3000,
    snapshot_piece_bytes=700,
    in_flight_max=8,
)


class Registries:
    """`ShardState`, shard 0 of 1."""

    kinds: tuple[type, ...] = (Commit, Raise, Lookup, Fence, Release)
    ids_max = 5
    limits = _LIMITS

    def machine(self) -> ShardState:
        state = ShardState(0, SegmentFiles)
        state.apply(commands.encode(Configure(0, one_shard())))
        return state

    def time_us(self, number: int) -> int:
        return _BASE_US + number * _STEP_US

    def key(self, number: int) -> bytes:
        return b"id%014d" % number

    def token(self, joiner: int, incarnation: int, number: int) -> bytes:
        return Token(f"j{joiner}", incarnation, number).pack()

    def encode(self, acts: list[Act], time_us: int) -> bytes:
        stamp = _BASE_US + time_us
        match acts[0]:
            case Raise(boundary_us):
                return commands.encode(commands.Boundary(stamp, boundary_us))
            case Fence(incarnations):
                return commands.encode(commands.Fences(stamp, 0, incarnations))
            case Release(ids, times, token):
                columns = b"".join(ids), pack_times(times)
                return commands.encode(commands.Release(stamp, [token], [len(ids)], *columns, [_OWN], False))
        wanted = [act for act in acts if isinstance(act, Commit)]
        return commands.encode(
            commands.Commit(
                stamp,
                [act.token for act in wanted],
                [len(act.ids) for act in wanted],
                b"".join(key for act in wanted for key in act.ids),
                b"".join(pack_times(act.times) for act in wanted),
                [_OWN] * len(wanted),
            )
        )

    def outcomes(self, acts: list[Act], result: object) -> list[tuple[int, ...]]:
        if not isinstance(result, bytes):
            return [()]
        told, at = [], 0
        for act in acts:
            assert isinstance(act, Commit | Release)
            told.append(tuple(result[at : at + len(act.ids)]))
            at += len(act.ids)
        return told

    def lookup(self, machine: ShardState, act: Lookup) -> tuple[int, ...]:
        return tuple(machine.lookup(b"".join(act.ids), pack_times(act.times)))

    def held(self, machine: ShardState) -> dict[bytes, bytes]:
        return contents(machine)

    def boundary_us(self, machine: ShardState) -> int:
        return machine.boundary_us

    def filing(self, machine: ShardState, rng: random.Random) -> bytes | None:
        """What a leader may propose at any time, whatever is written yet, and in vain now and then."""
        table = machine._facts.table
        number = table.next_number - rng.choice((0, 0, 0, 1))
        known = [segment.number for segment in table.segments]
        if len(known) > 1 and rng.random() < 0.5:
            inputs = tuple(sorted(rng.sample(known, rng.randrange(1, len(known) + 1))))
            return commands.encode(commands.Merge(0, number, inputs))
        return commands.encode(commands.Seal(0, number))
