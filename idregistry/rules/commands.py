"""The commands in the logs of the shards and of the directory (group 0), in bytes. Pure.

MessagePack of (protocol version, command), a command being an array that begins with its class's name. The
columns of all segments of a COMMIT stand together, so that a batch of many small requests is applied as one.
Decoding is strict: what is not exactly a command is a CommandError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from idregistry.rules.packing import TIME_BYTES
from idregistry.rules.sharding import Configuration, Route
from photon.core.errors import CorruptStateError
from photon.core.ids import ID_BYTES
from photon.core.protocol import OLDEST, is_read, not_read
from photon.core.settings import MAIN_SET

IDENTITY_BYTES: Final = 16

_PAIR: Final = b"\x92"  # MessagePack's array of two


class CommandError(CorruptStateError):
    """Bytes in a log that are no command this build reads: the replica stops rather than guess."""


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    time_us: int
    """The leader's clock."""


class _OfIds(_Command, frozen=True):
    """`tokens[i]` is for the next `counts[i]` ids, which came by `routes[i]`; `ids` is 16 x N, `times` 8 x N
    bytes, N the sum of `counts`. ValueError for what is not so.
    """

    tokens: Sequence[bytes]
    counts: Sequence[int]
    ids: bytes
    times: bytes
    routes: Sequence[Route]

    def __post_init__(self) -> None:
        total = sum(self.counts)
        if len(self.ids) != total * ID_BYTES or len(self.times) != total * TIME_BYTES:
            raise ValueError(
                f"counts of {total} ids, {len(self.ids)} bytes of ids, {len(self.times)} of times"
            )
        if not len(self.tokens) == len(self.counts) == len(self.routes):
            raise ValueError("not a token, a count and a route for each segment")
        if not all(self.tokens) or min(self.counts, default=0) < 0:
            raise ValueError("a segment without a token, or of less than no ids")


class Commit(_OfIds, frozen=True):
    """Insert the ids that are absent, segment by segment (paper 2.1)."""


class Release(_OfIds, frozen=True):
    """Take out the ids that a token holds, as they would be absent: a fenced incarnation's (paper 3.3.3), or,
    if it is `given_back`, what its own holder lost in another shard.
    """

    given_back: bool


class Boundary(_Command, frozen=True):
    """Raise the garbage collection boundary to `boundary_us`; it never goes back (paper 2.3)."""

    boundary_us: int


class Fences(_Command, frozen=True):
    """The incarnations that stand at `first` and after it in the directory's list of fences."""

    first: int
    incarnations: tuple[int, ...]


class Prepare(_Command, frozen=True):
    """A configuration of this version may come, with an interval from `start_us`: register nothing there."""

    version: int
    start_us: int


class Configure(_Command, frozen=True):
    """The sharding configuration as the directory has it."""

    configuration: Configuration


class Seal(_Command, frozen=True):
    """The ids in the dicts are segment `number`; nothing is done where that is not the next number."""

    number: int


class Merge(_Command, frozen=True):
    """What is alive of these segments is segment `number`; as of Seal."""

    number: int
    inputs: tuple[int, ...]


Command = Commit | Release | Boundary | Fences | Prepare | Configure | Seal | Merge


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A replica: where it is reached by the other replicas (Raft) and by clients (gRPC, `host:port`), and the
    set whose shards it hosts."""

    name: str
    raft_host: str
    raft_port: int
    grpc: str
    set: str = MAIN_SET


class Found(_Command, frozen=True):
    """The very first: `shards` shards, these replicas, and the `identity` by which this registry is told from
    another for ever. `spread_us`: Configuration's. Answer: True, or False where it is founded already.
    """

    shards: int
    replicas: tuple[Row, ...]
    identity: bytes
    spread_us: int = 0


class Propose(_Command, frozen=True):
    """`shards` shards for events from `start_us` on, which must not lie before `earliest_us` (paper 2.2.2).

    Answer: Proposal or Rejected.
    """

    shards: int
    start_us: int
    earliest_us: int


class Adopt(_Command, frozen=True):
    """All shards have prepared for the proposal of this version: it holds. Answer: bool."""

    version: int


class Abandon(_Command, frozen=True):
    """It does not hold. Answer: bool."""

    version: int
    why: str


class Trim(_Command, frozen=True):
    """Every shard's boundary is at `boundary_us` or past it: intervals that end before it go, and with them
    the shards that no interval uses any more. `version`: of the configuration this was found true for.
    Answer: bool.
    """

    version: int
    boundary_us: int


class Replace(_Command, frozen=True):
    """`row` takes the place of the replica `old`. Answer: True or Rejected."""

    old: str
    row: Row


class Cancel(_Command, frozen=True):
    """The replacement by `new` is turned round: the one it was to replace stays, and `new` goes.

    Answer: True or Rejected.
    """

    new: str


class Gone(_Command, frozen=True):
    """No group has `old` as its member any more. Answer: bool."""

    old: str


class KeepAlive(_Command, frozen=True):
    """An incarnation of a joiner takes or renews its lease. `settings`: the digest of those by which it makes
    ids of events, or empty. Answer: True, False where fenced, Mismatched or Rejected.
    """

    incarnation: int
    address: str
    lease_us: int
    settings: bytes = b""


class Fence(_Command, frozen=True):
    """Fence an incarnation whose lease ran out after the grant of this number (0: it has no lease).

    Answer: True; False where it was renewed since.
    """

    incarnation: int
    grant: int


class EndLease(_Command, frozen=True):
    """Forget a lease that ran out long ago, after that grant. Answer: bool."""

    incarnation: int
    grant: int


class Dismiss(_Command, frozen=True):
    """Nothing of these incarnations is lost: once their leases have run out, they are not missed.

    Answer: True.
    """

    incarnations: tuple[int, ...]


class Hold(_Command, frozen=True):
    """A dispatcher keeps the boundary from passing `oldest_us`, or no longer (None). Answer: True or
    Rejected.
    """

    name: str
    oldest_us: int | None


class AddSet(_Command, frozen=True):
    """These replicas, all of one set that is new, are there from now on. Answer: True or Rejected."""

    rows: tuple[Row, ...]


class RetireSet(_Command, frozen=True):
    """No new shard comes to the set; it goes when it has none. Answer: True or Rejected."""

    name: str


class DropSet(_Command, frozen=True):
    """The set that is retired has no shards any more: its replicas are gone. Answer: bool."""

    name: str


class Raise(_Command, frozen=True):
    """All replicas know this protocol version: it is in force. Answer: bool."""

    version: int


class Enter(_Command, frozen=True):
    """A member of a group is there, or a new life of it; `shares`: how many the group has if it is new.

    Answer: the Group, or Rejected.
    """

    group: str
    name: str
    life: int
    address: str
    shares: int


class Leave(_Command, frozen=True):
    """That life of a member has no shares any more. Answer: the Group, or Rejected."""

    group: str
    name: str
    life: int


class Drain(_Command, frozen=True):
    """A member is to have no shares, until it is started anew. Answer: the Group, or Rejected."""

    group: str
    name: str


class Move(_Command, frozen=True):
    """A share, if it still has that sequencer, is to be that member's. Answer: bool."""

    group: str
    share: int
    sequencer: int
    to: str


class Write(_Command, frozen=True):
    """The owner of a share writes and removes rows of it, and lets go of it if it `release`s. Nothing is done
    where the sequencer is not the present one. Answer: Written, or Rejected.
    """

    group: str
    share: int
    sequencer: int
    rows: dict[bytes, bytes]
    removed: tuple[bytes, ...]
    release: bool


DirectoryCommand = (
    Found
    | Propose
    | Adopt
    | Abandon
    | Trim
    | Replace
    | Cancel
    | Gone
    | KeepAlive
    | Fence
    | EndLease
    | Dismiss
    | Hold
    | AddSet
    | RetireSet
    | DropSet
    | Raise
    | Enter
    | Leave
    | Drain
    | Move
    | Write
)


@dataclass(frozen=True, slots=True)
class Written:
    """`stands`: it was done. `rows`: all that is kept of the share now; `written`: under which sequencer that
    was written before."""

    stands: bool
    rows: Mapping[bytes, bytes]
    written: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """It can't be. `busy`: only now; try again later."""

    why: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The registry was founded by joiners that make other ids of the same events: no lease, ever."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How an incarnation stands. `fenced`: for ever. `expires_in_s`: how long its lease may run yet; 0 where
    it is over or never was.
    """

    fenced: bool
    expires_in_s: float


_of_shards: Final = msgspec.msgpack.Decoder(tuple[int, Command])
_of_directory: Final = msgspec.msgpack.Decoder(tuple[int, DirectoryCommand])


def encode(command: Command | DirectoryCommand, version: int = OLDEST) -> bytes:
    """A command -> its bytes, in this protocol version."""
    return msgspec.msgpack.encode((version, command))


def decode(data: bytes) -> Command:
    """A shard's command from its bytes. CommandError on anything else."""
    command: Command = _decode(data, _of_shards, "registry")
    return command


def decode_directory(data: bytes) -> DirectoryCommand:
    """The directory's command from its bytes. CommandError on anything else."""
    command: DirectoryCommand = _decode(data, _of_directory, "directory")
    return command


def version_of(data: bytes) -> int:
    """The protocol version that a command's bytes are of; 0 where they are none."""
    return data[1] if data[:1] == _PAIR and len(data) > 1 else 0


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any], what: str) -> Any:
    if not is_read(version := version_of(data)):
        raise CommandError(f"a {what} command in the log is of {not_read(version)}")
    try:
        return decoder.decode(data)[1]
    except (msgspec.DecodeError, ValueError) as error:
        raise CommandError(f"a {what} command in the log can't be read ({error})") from error
