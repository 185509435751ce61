"""The only door into this room for others."""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from joiner.batch import ForeignColumns, JoinOutcomes
from joiner.spreading import OPTIONS, targets
from photon.core.errors import OverloadedError, UnavailableError, UsageError
from photon.wire import joiner_pb2, joiner_pb2_grpc
from photon.wire.naming import was_never_sent
from photon.wire.network import LOOPBACK, Network
from photon.wire.rpc import ask_status, to_photon_error

__all__ = ["ForeignColumns", "JoinOutcomes", "JoinerClient"]


TRY_AWAY_S: Final = 2.0
"""While all are away one call is let through so often: it learns why, and a channel by name is opened anew
after calls that failed (photon.wire.naming)."""


@dataclass(slots=True, eq=False)
class _Group:
    """Joiners of one channel, among which gRPC takes turns."""

    channel: grpc.Channel
    stub: Any
    state: grpc.ChannelConnectivity = grpc.ChannelConnectivity.IDLE
    tried_s: float = float("-inf")
    """When the last call was let through while all were away; monotonic."""

    def told(self, state: grpc.ChannelConnectivity) -> None:
        self.state = state

    @property
    def is_away(self) -> bool:
        """None of them can be reached and is healthy."""
        return self.state is grpc.ChannelConnectivity.TRANSIENT_FAILURE


class JoinerClient:
    """Sends batches to joiners, which are all alike, in turn (paper 3.3.1), by gRPC's own load balancing: one
    that is away, hangs, or says that it is not healthy is left out. For many threads at once."""

    def __init__(self, addresses: Sequence[str], timeout_s: float, network: Network = LOOPBACK) -> None:
        """UsageError without an address. Connects at the first call."""
        if not addresses:
            raise UsageError("no joiner's address was given; name one at least")
        self._addresses = list(addresses)
        self._timeout_s = timeout_s
        self._network = network
        self._lock = threading.Lock()
        self._groups: list[_Group] = []
        self._turn = itertools.count()
        self._why = ""
        self._own: dict[str, grpc.Channel] = {}
        self._who = f"joiner {addresses[0]}" if len(addresses) == 1 else f"joiners {', '.join(addresses)}"

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. The joiner registers nothing after the timeout.

        OverloadedError: refused, or no joiner is there; nothing was done. UnavailableError: unknown; send
        again, to any joiner.
        """
        request = joiner_pb2.JoinRequest(
            ids=batch.ids,
            primary_ids=batch.primary_ids,
            times=batch.times,
            events=batch.events,
            tries=batch.tries,
            first_seen=batch.first_seen,
        )
        group = self._next()
        try:
            response = group.stub.Join(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            failure = to_photon_error(error, self._who)
            if was_never_sent(error):
                self._why = str(failure)
                raise self._all_are_away() from error
            raise failure from error
        reasons = dict(zip(response.reason_rows, response.reasons, strict=True))
        return JoinOutcomes(response.outcomes, reasons)

    def status(self) -> dict[str, Any]:
        """What the first joiner says of itself. UnavailableError if it does not answer."""
        return self._status_of(self._addresses[0])

    def statuses(self) -> dict[str, dict[str, Any] | UnavailableError]:
        """What each joiner says of itself, by address, or why it says nothing."""
        answers: dict[str, dict[str, Any] | UnavailableError] = {}
        for address in self._addresses:
            try:
                answers[address] = self._status_of(address)
            except UnavailableError as error:
                answers[address] = error
        return answers

    def close(self) -> None:
        with self._lock:
            for channel in [group.channel for group in self._groups] + list(self._own.values()):
                channel.close()

    def _next(self) -> _Group:
        """Whose turn it is. OverloadedError where all are away: it is not the batch that makes them fail."""
        groups = self._groups or self._open()
        turn = next(self._turn)
        for step in range(len(groups)):
            group = groups[(turn + step) % len(groups)]
            if not group.is_away:
                return group
        group, now_s = groups[turn % len(groups)], time.monotonic()
        if now_s - group.tried_s < TRY_AWAY_S:
            raise self._all_are_away()
        group.tried_s = now_s
        return group

    def _all_are_away(self) -> OverloadedError:
        return OverloadedError(f"nothing was sent, for no joiner is there and healthy: {self._why}")

    def _open(self) -> list[_Group]:
        with self._lock:
            if not self._groups:
                network = self._network
                together = network.tls is None or bool(network.tls.name)
                dialed = [network.via.get(address, address) for address in self._addresses]
                self._groups = [self._group(target) for target in targets(dialed, together)]
            return self._groups

    def _group(self, target: str) -> _Group:
        channel = self._network.open(target, OPTIONS)
        group = _Group(channel, joiner_pb2_grpc.JoinerStub(channel))  # type: ignore[no-untyped-call]
        channel.subscribe(group.told)
        return group

    def _status_of(self, address: str) -> dict[str, Any]:
        with self._lock:
            if address not in self._own:
                self._own[address] = self._network.open(address)
            channel = self._own[address]
        stub = joiner_pb2_grpc.JoinerStub(channel)  # type: ignore[no-untyped-call]
        return ask_status(stub.Status, joiner_pb2.StatusRequest(), self._timeout_s, f"joiner {address}")
