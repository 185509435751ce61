"""The only door into the registry for other rooms (paper 2.1, 2.2.2).

Lookups go to the nearest replica that answers, commits to the shard's leader. A commit is tried again with
the same token until the time is up: the registry tells a retry of the winner that it won. Ids are routed by
the newest sharding configuration known; what a shard calls misrouted is routed anew by a newer one.
"""

import contextlib
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from idregistry.rounds import Operation, RefusedAfterUnknownError, Rounds
from idregistry.routes import Part, Routes, segments_of
from idregistry.rules.commands import IDENTITY_BYTES, Row, Standing, Written
from idregistry.rules.names import replica_mistake
from idregistry.rules.packing import (
    INCARNATIONS_MAX,
    SCAN_S_MAX,
    columns_mistake,
    segments_mistake,
    token_mistake,
)
from idregistry.rules.sharding import Configuration
from idregistry.rules.surveys import Account, Scanned
from idregistry.wire import replicas_of
from photon.core.accounts import NOTHING, Sum, plus
from photon.core.addresses import split
from photon.core.clock import Clock, SystemClock
from photon.core.columns import take_ids, take_times
from photon.core.disk import storage_errors, write_file
from photon.core.errors import (
    CorruptStateError,
    FencedError,
    SettingsMismatchError,
    UnavailableError,
    UsageError,
)
from photon.core.fates import Committed, Registered, Released
from photon.raft.rules.placement import BEAT_EVERY_S, Group
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.network import LOOPBACK, Network

_SCAN_TIMEOUT_S: Final = 600.0

# What counts of the answers of several shards about one id, the last most.
_REGISTERED: Final = (Registered.ABSENT, Registered.PENDING, Registered.EXPIRED, Registered.PRESENT)
_RELEASED: Final = (
    Released.ABSENT,
    Released.OTHER,
    Released.RELEASED,
    Released.NOT_FENCED,
    Released.MISROUTED,
)


@dataclass(frozen=True, slots=True)
class Held:
    """`boundary_us`: events before it are expired. `reached_us`: the time by clocks and events; None where it
    is not known now, or nothing expires."""

    boundary_us: int
    reached_us: int | None


@dataclass(frozen=True, slots=True)
class Resharded:
    """What became of a proposal: `adopted` (it holds for events from `start_us` on), or `why` not."""

    version: int
    start_us: int
    adopted: bool
    why: str


class RegistryClient:
    """For many threads at once. `addresses`: gRPC `host:port` of replicas, the nearest first."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        clock: Clock,
        rng: random.Random,
        network: Network = LOOPBACK,
    ) -> None:
        """`timeout_s` bounds every call, with all its tries. The configuration is fetched when needed."""
        if not addresses:
            raise UsageError("the registry client needs at least one replica's address")
        self._timeout_s = timeout_s
        self._known: tuple[Path | None, bytes] = None, b""
        """Where the registry is remembered, if anywhere, and its identity, once that is known."""
        self._routes = Routes(addresses, timeout_s, clock, network)
        self._rounds = Rounds(self._routes, timeout_s, clock, rng)

    def lookup(self, ids: bytes, times: bytes, tell_pending: bool = False) -> bytes:
        """16 x N, 8 x N bytes -> core.fates.Registered column. "Absent" may be stale, "present" is final.

        `tell_pending`: PENDING instead of "absent" where the replica knows of a commit that is under way.
        UnavailableError if no replica answered in time.
        """
        _check(columns_mistake(ids, times))

        def request(part: Part) -> Any:
            return pb.LookupRequest(
                shard=part.shard, ids=part.ids, times=part.times, tell_pending=tell_pending
            )

        return self._rounds.run(Operation("Lookup", False, request, rising=_REGISTERED), ids, times)[0]

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        """16 x N, 8 x N bytes -> core.fates.Committed column. At most BATCH_IDS_MAX ids a call.

        WON is also what a retry with the winner's token is told. An id that stands twice, with one time: the
        first WON, the others DUPLICATE. Raises OverloadedError (nothing was done), NoQuorumError or
        UnavailableError (outcome unknown: call again with the same token), ValueError for columns or a token
        that can't be.
        """
        _check(columns_mistake(ids, times), token_mistake(token))

        def request(part: Part) -> Any:
            return pb.CommitRequest(
                shard=part.shard,
                ids=part.ids,
                times=part.times,
                token=token,
                route=_route(part),
                registry=self._known[1],
            )

        commit = Operation("Commit", True, request, Committed.MISROUTED, won=Committed.WON)
        outcomes, lost = self._rounds.run(commit, ids, times)
        if len(lost):  # before anybody is told, or a copy that comes now would lose to nobody
            back = take_ids(ids, lost), take_times(times, lost)
            self.release(*back, [token], [len(lost)], given_back=True)
        return outcomes

    def release(
        self,
        ids: bytes,
        times: bytes,
        tokens_packed: Sequence[bytes],
        counts: Sequence[int],
        given_back: bool = False,
    ) -> bytes:
        """Compare-and-delete: take an id out if the token given holds it, and its incarnation is fenced or
        its holder itself gives it back.

        `tokens_packed[i]` is for the next `counts[i]` ids. -> core.fates.Released column. Errors as `commit`.
        """
        _check(columns_mistake(ids, times), segments_mistake(ids, tokens_packed, counts))

        def request(part: Part) -> Any:
            tokens, sizes = segments_of(part, tokens_packed, counts)
            return pb.ReleaseRequest(
                shard=part.shard,
                ids=part.ids,
                times=part.times,
                tokens=tokens,
                counts=sizes,
                route=_route(part),
                given_back=given_back,
            )

        release = Operation("Release", True, request, Released.MISROUTED, rising=_RELEASED)
        return self._rounds.run(release, ids, times)[0]

    def scan(
        self,
        shard: int,
        address: str | None = None,
        timeout_s: float = _SCAN_TIMEOUT_S,
        fresh: bool = False,
        ids: bytes = b"",
    ) -> Iterator[Scanned]:
        """All that one replica holds of a shard: the nearest that has it, or the one at `address`. Of `ids`
        (16 x N bytes, at most BATCH_IDS_MAX), those that are there: they are looked up.

        It reads while commits go on: an id registered meanwhile may be missing. `fresh`: the shard's leader
        is asked (another at `address` refuses), and what was acknowledged to anybody before is there. The
        first piece is empty. UnavailableError if it ends early, or is not done within `timeout_s`, what its
        caller does meanwhile included: begin again.
        """
        if not 0 < timeout_s <= SCAN_S_MAX:
            raise UsageError(f"a scan may take up to {SCAN_S_MAX:g} s, not {timeout_s:g} s")
        request = pb.ScanRequest(shard=shard, fresh=fresh, ids=ids)
        for message in self._rounds.stream("Scan", request, address, timeout_s, shard, fresh):
            yield Scanned(
                message.ids,
                message.times,
                list(message.holders),
                np.frombuffer(message.holder_of, "<u4"),
                np.frombuffer(message.token_times, "<i8"),
                list(message.guards),
                message.boundary_us,
            )

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        """Hold the incarnation's lease for `lease_s` from the moment of this call. FencedError: it must end.

        `settings`: core.settings.identity_digest, of whoever makes ids of events. The registry keeps
        the first one that it is told; SettingsMismatchError for another: it gets no lease, ever.
        CorruptStateError where it is not the registry that was recognised. UnavailableError: it may or may
        not have been renewed.
        """
        request = pb.KeepAliveRequest(
            address=token_address, incarnation=incarnation, lease_s=lease_s, settings=settings
        )
        answer = self._rounds.ask_directory("KeepAlive", request)
        home, identity = self._known
        if home is not None and answer.registry not in (b"", identity):
            check_registry(home, answer.registry.hex())
        if answer.mismatched:
            raise SettingsMismatchError(
                "ids.key and all of [foreign] must be the same on all machines of a system, or every event "
                "would be joined twice, and this registry was founded with others than this process has: "
                "give it the same photon.toml as the joiners that work"
            )
        if answer.fenced:
            raise FencedError(f"incarnation {incarnation:016x} of {token_address} is fenced; start a new one")

    def fence(self, incarnation: int) -> Standing:
        """From then on the incarnation gets no lease, and registers nothing; refused while its lease runs."""
        answer = self._rounds.ask_directory("Fence", pb.FenceRequest(incarnation=incarnation))
        return Standing(answer.fenced, answer.expires_in_s)

    def incarnations(self, incarnations: Sequence[int]) -> list[Standing]:
        """How each one stands, as the directory's leader sees it now; nothing is changed. UnavailableError.

        Only `fence` says for sure: a leader that was replaced a moment ago may not know it yet.
        """
        states: list[Standing] = []
        for start in range(0, len(incarnations), INCARNATIONS_MAX):
            request = pb.IncarnationsRequest(incarnations=incarnations[start : start + INCARNATIONS_MAX])
            answer = self._rounds.ask_directory("Incarnations", request)
            states += map(Standing, answer.fenced, answer.expires_in_s)
        return states

    def dismiss(self, incarnations: Sequence[int], timeout_s: float | None = None) -> None:
        """Say of these incarnations that nothing of theirs is lost: once their leases have run out, the
        registry does not miss them. `timeout_s`: other than the client's. UnavailableError.
        """
        for start in range(0, len(incarnations), INCARNATIONS_MAX):
            request = pb.DismissRequest(incarnations=incarnations[start : start + INCARNATIONS_MAX])
            self._rounds.ask_directory("Dismiss", request, timeout_s)

    def hold(self, name: str, oldest_us: int | None) -> Held:
        """Let no event from `oldest_us` on expire while the dispatcher `name` may yet come with it.

        None: it does not know yet; what was held before stays so, or else all that is kept now.
        UsageError where too many hold something. UnavailableError.
        """
        answer = self._rounds.ask_directory("Hold", pb.HoldRequest(name=name, oldest_us=oldest_us))
        return Held(answer.boundary_us, answer.reached_us if answer.HasField("reached_us") else None)

    def release_hold(self, name: str) -> bool:
        """The dispatcher holds nothing any more: it has read all, or never comes back. Whether it held
        something until now. UnavailableError."""
        held: bool = self._rounds.ask_directory("Hold", pb.HoldRequest(name=name, release=True)).held
        return held

    def beat(self, group: str, name: str, life: int, address: str, shares: int) -> Group:
        """Say that a member of a group is there; whose its shares are. `life` grows with each start;
        `shares`: how many there are, where the group is new. UsageError where a later life is there.
        UnavailableError.
        """
        request = pb.BeatRequest(group=group, name=name, life=life, address=address, shares=shares)
        return _group_of(self._rounds.ask_directory("Beat", request, BEAT_EVERY_S))

    def drain(self, group: str, name: str, life: int = 0) -> Group:
        """A member is to have no shares any more; with its `life`, it leaves at once.

        UsageError if there is no such member, or nobody else to take its shares. UnavailableError.
        """
        request = pb.DrainRequest(group=group, name=name, life=life)
        return _group_of(self._rounds.ask_directory("Drain", request))

    def write_share(
        self,
        group: str,
        share: int,
        sequencer: int,
        rows: Mapping[bytes, bytes],
        removed: Sequence[bytes] = (),
        release: bool = False,
        read: bool = False,
    ) -> Written:
        """Keep rows of a share, whose owner has that sequencer, and let go of it if it is to `release`; all
        rows there are then, if it is to `read`. It may be called again. UsageError, UnavailableError."""
        request = pb.WriteRequest(
            group=group,
            share=share,
            sequencer=sequencer,
            keys=list(rows.keys()),
            values=list(rows.values()),
            removed=removed,
            release=release,
            read=read,
        )
        done = self._rounds.ask_directory("Write", request)
        return Written(done.stands, dict(zip(done.keys, done.values, strict=True)), done.written)

    def lease_holders(self) -> list[str]:
        """Addresses of the joiners whose leases run, as the nearest replica that answers has seen them
        renewed; it may be wrong by a lease where it has just started or is cut off. UnavailableError."""
        return list(self.directory().holders)

    def account(self, incarnations: Collection[int], address: str, window: int) -> Account:
        """What these incarnations hold in all shards, and all whose tokens have this address, without what
        tokens of `window` and later ones won. Each shard is asked at its leader. UnavailableError.
        """
        days: dict[tuple[int, int], Sum] = {}
        first_day = since = -(1 << 62)
        for shard in self.configuration().shards:
            request = pb.AccountRequest(
                shard=shard, incarnations=incarnations, address=address, window=window
            )
            answer = self._rounds.ask_leader(shard, "Account", request)
            sums = zip(answer.events, answer.sums, strict=True)
            for place, sum_ in zip(zip(answer.incarnations, answer.days, strict=True), sums, strict=True):
                days[place] = plus(days.get(place, NOTHING), sum_)
            first_day, since = max(first_day, answer.first_day), max(since, answer.since)
        return Account(days, first_day, since)

    def configuration(self) -> Configuration:
        """The newest that a replica which answers knows. UnavailableError."""
        known = self._routes.configuration
        return self._rounds.newer_configuration(0 if known is None else known.version - 1, always=True)

    def identity(self) -> str:
        """Which registry this is, as 32 hex digits: drawn when it was founded, and the same for its whole
        life, whatever its replicas, addresses and shards. UnavailableError.
        """
        why = "it has none yet: its replicas are starting, or most of them are down"
        for _ in self._rounds.attempts():
            try:
                if identity := self.directory().identity:
                    return identity.hex()
            except UnavailableError as error:
                why = str(error)
        raise UnavailableError(f"no identity of the registry within {self._timeout_s:g} s: {why}; retry")

    def recognise(self, home: Path) -> None:
        """Ask which registry this is, and hold it against the one that `home` remembers (`check_registry`).
        What this client commits from then on no other registry takes, were it founded a moment ago.
        UnavailableError, CorruptStateError, StorageError.
        """
        identity = self.identity()
        check_registry(home, identity)
        self.hold_to(identity, home)

    def hold_to(self, identity: str, home: Path | None = None) -> None:
        """No other registry takes what this client commits from now on; in vain it is asked until the time is
        up."""
        self._known = home, bytes.fromhex(identity)

    def directory(self) -> pb.DirectoryResponse:
        """What the nearest replica that answers knows of the directory. UnavailableError."""
        return self._rounds.ask_for_directory()

    def reshard(self, shards: int, at_us: int | None = None) -> Resharded:
        """Propose `shards` shards for events from `at_us` on (None: as soon as may be); wait for the outcome.

        UsageError for a time or number that can't be; UnavailableError if it is not decided in time: it may
        still be adopted.
        """
        attempts = self._rounds.attempts()
        before: Configuration | None = None
        with contextlib.suppress(UnavailableError):
            before = self.configuration()
        try:
            proposed = self._rounds.ask_directory(
                "Reshard", pb.ReshardRequest(shards=shards, at_us=at_us or 0)
            )
        except RefusedAfterUnknownError:
            adopted_already = None if before is None else self._adopted_since(before, shards, at_us)
            if adopted_already is None:
                raise
            return adopted_already
        for _ in attempts:
            configuration = self._rounds.newer_configuration(proposed.version - 1)
            if configuration.version >= proposed.version:
                starts = {interval.start_us: len(interval.shards) for interval in configuration.intervals}
                adopted = starts.get(proposed.start_us) == shards
                why = "" if adopted else self.directory().abandoned_why
                return Resharded(proposed.version, proposed.start_us, adopted, why)
        raise UnavailableError(
            f"resharding was proposed as version {proposed.version} and is not decided after "
            f"{self._timeout_s:g} s; see `photon status`"
        )

    def _adopted_since(self, before: Configuration, shards: int, at_us: int | None) -> Resharded | None:
        """What a proposal of ours came to whose answer was lost, where it was adopted."""
        answer = self._rounds.ask_directory("GetDirectory", pb.DirectoryRequest())  # of who refused us
        if not answer.configuration:
            return None
        now = msgspec.msgpack.decode(answer.configuration, type=Configuration)
        last = now.intervals[-1]
        ours = len(last.shards) == shards and (at_us or last.start_us) == last.start_us
        if not ours or now.version <= before.version:
            return None
        return Resharded(now.version, last.start_us, True, "")

    def replace(self, old: str, new: str, raft_address: str, grpc_address: str) -> None:
        """Let the empty replica `new` at these addresses take the place of `old`, which never comes back.

        UsageError for names and addresses that can't be. It is begun when this returns;
        `directory().replicas` loses `old` when it is done.
        """
        check_replica(new, raft_address, grpc_address)
        host, port = split(raft_address)
        replica = pb.Replica(name=new, raft_host=host, raft_port=port, grpc=grpc_address)
        self._rounds.ask_directory("Replace", pb.ReplaceRequest(old=old, replica=replica))

    def cancel_replacement(self, new: str) -> None:
        """Let `new` go again, and the one whose place it was to take stay. UsageError if none is under way.

        `directory().removed` has `new` when it is done. Turned round once more (with the other's name) it is
        the replacement that it was: for one that can't be without the new one, as the old one never returns.
        """
        self._rounds.ask_directory("Replace", pb.ReplaceRequest(cancel=new))

    def add_set(self, rows: Sequence[Row]) -> None:
        """Let a new set of empty replicas in. UsageError for names and addresses that can't be."""
        self._rounds.ask_directory("Set", pb.SetRequest(add=replicas_of(rows)))

    def retire_set(self, name: str) -> None:
        """Place no new shard on the set; its replicas are gone when it has none. UsageError."""
        self._rounds.ask_directory("Set", pb.SetRequest(retire=name))

    def close(self) -> None:
        """Close the channels; calls under way end with UnavailableError."""
        self._routes.close()


@dataclass(frozen=True, slots=True)
class RegistryAt:
    """Where a registry is: gRPC `host:port` of its replicas, and how they are reached.

    It may be pickled for another machine, where the network's PEM files must lie at the same paths.
    """

    addresses: tuple[str, ...]
    network: Network = LOOPBACK

    @contextlib.contextmanager
    def client(self, timeout_s: float, clock: Clock | None = None) -> Iterator[RegistryClient]:
        """One for the block, with dice of its own; by the system's clock if none is given."""
        clock = clock or SystemClock()
        client = RegistryClient(self.addresses, timeout_s, clock, random.Random(), self.network)
        try:
            yield client
        finally:
            client.close()


def check_registry(home: Path, identity: str) -> None:
    """The first registry that a process of this `home` works with is remembered, durably. Raises
    CorruptStateError for another one: it would let everything be joined again; and where what is remembered
    is damaged. StorageError."""
    path = home / "registry"
    with storage_errors(path):
        if not path.exists():
            write_file(path, identity.encode())
        known = path.read_text("ascii", "replace")
    if not re.fullmatch(f"[0-9a-f]{{{2 * IDENTITY_BYTES}}}", known):
        raise CorruptStateError(
            f"{path}: it is damaged, it names no registry; copy the file of this name of another process of "
            "the system here"
        )
    if known != identity:
        raise CorruptStateError(
            f"{path}: it works with registry {known}, and this is {identity}, which was founded "
            "anew and knows nothing of what is joined: restore the replicas' directories, or begin with "
            "empty ones and an empty output"
        )


def check_replica(name: str, raft_address: str, grpc_address: str) -> None:
    """UsageError for what can't be the name and the addresses of a replica."""
    mistake = replica_mistake(name, raft_address, grpc_address)
    if mistake is not None:
        raise UsageError(mistake)


def _route(part: Part) -> pb.Route:
    return pb.Route(known_us=part.route.known_us, guard=part.route.guard)


def _check(*mistakes: str | None) -> None:
    mistake = next(filter(None, mistakes), None)
    if mistake is not None:
        raise ValueError(mistake)


def _group_of(response: pb.GroupResponse) -> Group:
    try:
        return msgspec.msgpack.decode(response.group, type=Group)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"registry: an answer that is not understood ({error})") from error
