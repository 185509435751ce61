"""The commands in the directory's log (group 0), and what each is answered. Pure.

A version byte, then MessagePack of a tagged array. Decoding is strict: what is not exactly a command is a
CommandError, which stops the replica.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from photon.core.errors import CorruptStateError

VERSION: Final = 1
IDENTITY_BYTES: Final = 16


class DirectoryCommandError(CorruptStateError):
    """Bytes in the directory's log that are no command of this version: the replica stops."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A replica: where it is reached by the other replicas (Raft) and by clients (gRPC, `host:port`)."""

    name: str
    raft_host: str
    raft_port: int
    grpc: str


class _Command(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    time_us: int
    """The leader's clock."""


class Found(_Command, frozen=True):
    """The very first: `shards` shards, these replicas. Answer: True, or False where it is founded already."""

    shards: int
    replicas: tuple[Row, ...]


class Identify(_Command, frozen=True):
    """The registry's identity for ever: by it one registry is told from another. Answer: True, or False where
    it has one already (or is not founded).
    """

    identity: bytes


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
    settings: bytes = b""  # commands of before have none


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


Command = (
    Found
    | Identify
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
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """It can't be. `busy`: only now; try again later."""

    why: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The registry was founded by joiners that make other ids of the same events: no lease, ever."""


_decoder: Final = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """A command -> its bytes."""
    return bytes((VERSION,)) + msgspec.msgpack.encode(command)


def decode(data: bytes) -> Command:
    """The reverse of encode. DirectoryCommandError on anything else."""
    if data[:1] != bytes((VERSION,)):
        raise DirectoryCommandError(
            f"a directory command of version {data[0] if data else 'none'} in the log, this program knows "
            f"{VERSION}: run the program that wrote it"
        )
    try:
        command: Command = _decoder.decode(data[1:])
    except msgspec.DecodeError as error:
        raise DirectoryCommandError(f"no directory command in the log: {error}") from error
    return command


# --- What replicas may be called, and how times are told. Pure.

NAME_CHARS_MAX: Final = 64

_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
"""A name is a directory's too: none is `..`, and none begins as an option does."""
_SHOWN_CHARS_MAX: Final = 300
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def name_mistake(name: str) -> str | None:
    """What is wrong with the name of a replica, or None."""
    if _NAME.fullmatch(name):
        return None
    return (
        f"{_shown(name)} is no name for a replica: give 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or "
        "'-', the first a letter or digit"
    )


def _shown(text: str) -> str:
    """A stranger's may be of any length."""
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}...")


def iso_utc(time_us: int) -> str:
    """us since 1970 -> ISO 8601 in UTC. The same on every machine, for any number."""
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat()
    except OverflowError:
        return f"{time_us} us since 1970"
