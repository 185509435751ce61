"""The only door into this room for others, and the gRPC targets that reach all joiners of a list."""

import ipaddress
import itertools
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from joiner.rules import ForeignColumns, JoinOutcomes
from photon.core.addresses import parts
from photon.core.errors import OverloadedError, SettingsMismatchError, UnavailableError, UsageError
from photon.rpc import joiner_pb2, joiner_pb2_grpc
from photon.rpc.network import LOOPBACK, Network, was_never_sent
from photon.rpc.servers import StatusClient, to_photon_error

__all__ = ["ForeignColumns", "JoinOutcomes", "JoinerClient"]


TRY_AWAY_S: Final = 0.25
"""Joiners that are away are asked for their status so often, while there are batches: they are back when one
answers. A channel by name is opened anew after calls that failed (photon.rpc.network)."""
_ANSWER_S: Final = 2.0

OPTIONS: Final[list[tuple[str, Any]]] = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                # One that says NOT_SERVING (no lease, a disk that fails, draining) is sent nothing.
                "healthCheckConfig": {"serviceName": "photon.joiner.v1.Joiner"},
            }
        ),
    )
]
"""Of a channel to joiners."""


def targets(addresses: Sequence[str], together: bool) -> list[str]:
    """`host:port`s -> gRPC targets: one for all IPv4 literals, one for all IPv6 literals, one for each name.

    A name may stand for several joiners. `together` false: each literal has its own, too (TLS where host
    names are checked: gRPC looks for one name on all connections of a channel).
    """
    literals: dict[str, list[str]] = {"ipv4": [], "ipv6": []}
    found = []
    for address in dict.fromkeys(addresses):
        try:
            scheme = f"ipv{ipaddress.ip_address(parts(address)[0]).version}"
        except ValueError:
            scheme = "dns"
        if scheme == "dns":
            found.append(f"dns:///{address}")
        elif together:
            literals[scheme].append(address)
        else:
            found.append(f"{scheme}:{address}")
    return [f"{scheme}:{','.join(those)}" for scheme, those in literals.items() if those] + found


def addresses_of(target: str) -> list[str]:
    """The `host:port`s that one target of `targets` stands for."""
    return re.sub("^(dns:///|ipv[46]:)", "", target).split(",")


@dataclass(slots=True, eq=False)
class _Group:
    """Joiners of one channel, among which gRPC takes turns."""

    channel: grpc.Channel
    stub: Any
    who: str
    size: int
    """How many addresses it has."""
    is_away: bool = False
    """None of them can be reached and is healthy: since a call was never sent, until a status is answered."""
    why: str = ""
    """What the last call met with, while they are away."""
    asked_s: float = float("-inf")
    """When the last status was asked for while they were away; monotonic."""
    asking: grpc.Future | None = None
    """Held, for gRPC cancels a call that nobody holds."""

    def failed(self, error: Any) -> None:
        """A call was never sent."""
        self.is_away, self.why = True, str(to_photon_error(error, self.who))

    def ask(self, now_s: float) -> None:
        """In the background: no batch waits for joiners that may be away."""
        if now_s - self.asked_s >= TRY_AWAY_S and (self.asking is None or self.asking.done()):
            self.asked_s = now_s
            self.asking = self.stub.Status.future(joiner_pb2.StatusRequest(), timeout=_ANSWER_S)
            self.asking.add_done_callback(self._asked)

    def _asked(self, call: grpc.Future) -> None:
        if call.code() is grpc.StatusCode.OK:
            self.is_away = False
        elif was_never_sent(call):
            self.failed(call)


class JoinerClient:
    """Sends batches to joiners, which are all alike, in turn (paper 3.3.1), by gRPC's own load balancing: one
    that is away, hangs, or says that it is not healthy is left out. For many threads at once."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        network: Network = LOOPBACK,
        identity: bytes = b"",
    ) -> None:
        """UsageError without an address. Connects at the first call.

        `identity`: core.settings.identity_digest; without it only statuses are to be had.
        """
        if not addresses:
            raise UsageError("no joiner's address was given; name one at least")
        self._addresses = list(addresses)
        self._timeout_s = timeout_s
        self._network = network
        self._identity = identity
        self._lock = threading.Lock()
        self._groups: list[_Group] = []
        self._turns: list[_Group] = []
        self._turn = itertools.count()
        self._own: dict[str, StatusClient] = {}

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. The joiner registers nothing after the timeout.

        OverloadedError: refused, or no joiner is there; nothing was done. UnavailableError: unknown; send
        again, to any joiner. SettingsMismatchError: refused, as everything from this client will be.
        """
        request = joiner_pb2.JoinRequest(
            ids=batch.ids,
            primary_ids=batch.primary_ids,
            times=batch.times,
            events=batch.events,
            tries=batch.tries,
            ages=batch.ages,
            identity=self._identity,
        )
        response = self._send(request, self._timeout_s if timeout_s is None else timeout_s)
        reasons = dict(zip(response.reason_rows, response.reasons, strict=True))
        return JoinOutcomes(response.outcomes, reasons)

    def agree(self) -> None:
        """Return when a joiner that has a lease makes the same ids; errors as of `join`."""
        self._send(joiner_pb2.JoinRequest(identity=self._identity), self._timeout_s)

    def statuses(self) -> dict[str, dict[str, Any] | UnavailableError]:
        """What each joiner says of itself, by address, or why it says nothing."""
        answers: dict[str, dict[str, Any] | UnavailableError] = {}
        for address in self._addresses:
            with self._lock:
                if address not in self._own:
                    self._own[address] = StatusClient("joiner", address, self._timeout_s, self._network)
            try:
                answers[address] = self._own[address].status()
            except UnavailableError as error:
                answers[address] = error
        return answers

    def close(self) -> None:
        with self._lock:
            for opened in (*(group.channel for group in self._groups), *self._own.values()):
                opened.close()

    def _send(self, request: joiner_pb2.JoinRequest, timeout_s: float) -> joiner_pb2.JoinResponse:
        """By the group whose turn it is, or the next where that could not even be sent."""
        deadline_s = time.monotonic() + timeout_s
        met: grpc.RpcError | None = None
        for group in self._in_turn():
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                response: joiner_pb2.JoinResponse = group.stub.Join(request, timeout=left_s)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise SettingsMismatchError(f"{group.who}: {error.details()}") from error
                if not was_never_sent(error):  # it was answered, or may have been
                    raise to_photon_error(error, group.who) from error
                group.failed(error)
                met = error
            else:
                return response
        # It is not the batch that makes them fail.
        whys = "; ".join(group.why for group in self._groups)
        raise OverloadedError(f"nothing was sent, for no joiner is there and healthy: {whys}") from met

    def _in_turn(self) -> Iterable[_Group]:
        """Those that are not away, each as often the first as it has addresses."""
        turns = self._turns or self._open()
        there = [group for group in turns if not group.is_away]
        if len(there) < len(turns):
            now_s = time.monotonic()
            with self._lock:
                for group in self._groups:
                    if group.is_away:
                        group.ask(now_s)
        start = next(self._turn) % (len(there) or 1)
        return dict.fromkeys(there[start:] + there[:start])

    def _open(self) -> list[_Group]:
        with self._lock:
            if not self._turns:
                network = self._network
                together = network.tls is None or bool(network.tls.name)
                known = {network.via.get(address, address): address for address in self._addresses}
                self._groups = [self._group(target, known) for target in targets([*known], together)]
                self._turns = [group for group in self._groups for _ in range(group.size)]
            return self._turns

    def _group(self, target: str, known: Mapping[str, str]) -> _Group:
        """`known`: what is dialed -> the advertised address."""
        addresses = addresses_of(target)
        # All have one name in their certificates where a target has several.
        channel = self._network.open(target, OPTIONS, advertised=known[addresses[0]])
        who = f"joiner{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"
        stub = joiner_pb2_grpc.JoinerStub(channel)  # type: ignore[no-untyped-call]
        return _Group(channel, stub, who, len(addresses))
