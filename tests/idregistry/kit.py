"""Small parts that several tests of the registry use."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import grpc

from idregistry.rules.commands import Commit, Configure, DirectoryCommand, Merge, Row, Seal, encode
from idregistry.rules.directory import DirectoryState
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Interval, Route
from idregistry.rules.state import ShardState
from idregistry.rules.surveys import Scanned
from idregistry.segment_file import SegmentFile, SegmentFiles
from photon.core.columns import pack_times, split_ids
from photon.core.fates import Committed
from photon.core.ids import Token

NOW_US = 1_700_000_000_000_000
OWN = Route(HORIZON, False)
"""How one asks who knows all intervals, of what is the shard's own."""
LATEST = 1 << 60
"""A window of accounts after all tokens."""
WON, DUPLICATE, EXPIRED, FENCED, MISROUTED = bytes(Committed)


class RpcFailed(grpc.RpcError):
    """As a client of gRPC hears of it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


def token(name: str) -> bytes:
    """A joiner's token, another for each name."""
    return Token(name, 1, 0).pack()


def event_id(number: int) -> bytes:
    """A 16-byte id, the same for the same number."""
    return hashlib.md5(str(number).encode()).digest()


def opaque_id(number: int) -> bytes:
    """One whose kind says that it carries no time."""
    first, *rest = event_id(number)
    return bytes([0xE0 | first & 15, *rest])


def event_ids(*numbers: int) -> bytes:
    return b"".join(map(event_id, numbers))


def same_times(count: int, time_us: int = NOW_US) -> bytes:
    return pack_times([time_us] * count)


def commit_command(*segments: tuple[bytes, Iterable[int]], time_us: int = NOW_US) -> bytes:
    """(token, id numbers) a segment, all events at one time."""
    numbers = [list(of_segment) for _, of_segment in segments]
    ids = event_ids(*(n for of_segment in numbers for n in of_segment))
    return encode(
        Commit(
            NOW_US,
            [token for token, _ in segments],
            list(map(len, numbers)),
            ids,
            same_times(len(ids) // 16, time_us),
            [OWN] * len(segments),
        )
    )


def one_shard(shards: int = 1, version: int = 1) -> Configuration:
    """The same number of shards at all times."""
    return Configuration(version, (Interval(BEGINNING, tuple(range(shards))),))


def row(name: str) -> Row:
    return Row(name, "h", 1, f"{name}:1")


ROWS = tuple(map(row, ("r0", "r1", "r2")))


def directory(*commands: DirectoryCommand) -> DirectoryState:
    """That was told this."""
    state = DirectoryState()
    for command in commands:
        assert state.apply(encode(command)) is not False
    return state


def new_state(shard: int = 0, shards: int = 1) -> ShardState:
    """Of a shard that has its configuration."""
    state = ShardState(shard)
    state.apply(encode(Configure(NOW_US, one_shard(shards))))
    return state


def told(pieces: Iterable[Scanned]) -> dict[bytes, bytes]:
    """id -> token of all that a scan tells."""
    held: dict[bytes, bytes] = {}
    for piece in pieces:
        for key, token in zip(split_ids(piece.ids), piece.tokens, strict=True):
            assert key not in held, "an id stands twice"
            held[key] = token
    return held


def contents(state: ShardState) -> dict[bytes, bytes]:
    """id -> token of all that is registered."""
    return told(state.scan())


def filed_state(directory: Path, configuration: Configuration | None = None) -> ShardState:
    """Of shard 0, by default the only one, with its configuration; it keeps segments in files there."""
    state = ShardState(0)
    keep_files(state, directory)
    state.apply(encode(Configure(NOW_US, configuration or one_shard())))
    return state


def keep_files(state: ShardState, directory: Path) -> None:
    """From now on it keeps segments in files there."""
    directory.mkdir(exist_ok=True)
    state._files_in = SegmentFiles
    state.open_in(directory)


def write_files(state: ShardState, steps: int = 1 << 30) -> None:
    """So many pieces of its background work."""
    for _ in range(steps):
        work = state.work()
        if work is None:
            return
        work()
        state.worked()


def seal(state: ShardState) -> None:
    """What is in dicts becomes a segment."""
    state.apply(encode(Seal(NOW_US, state._facts.table.next_number)))


def merge(state: ShardState, *numbers: int) -> None:
    """These segments become one; without any all do."""
    table = state._facts.table
    inputs = numbers or tuple(segment.number for segment in table.segments)
    state.apply(encode(Merge(NOW_US, table.next_number, inputs)))


def file_all(state: ShardState) -> None:
    """All that is due, as a leader would have it done."""
    write_files(state)
    while (command := state.filing_due()) is not None:
        state.apply(encode(command))
        write_files(state)


def sealed(state: ShardState) -> tuple[int, int, int]:
    """How many ids are in segments, the dead among them; how many segments there are, and the bytes of their
    filters."""
    sources = [segment.source for segment in state._facts.table.segments]
    filters = sum(one.filter.bytes for one in sources if isinstance(one, SegmentFile))
    return sum(one.ids for one in sources), len(sources), filters
