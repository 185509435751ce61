"""What the other replicas' clocks say: what the boundary is measured by (paper 2.3).

What another's clock says now is reckoned from its last answer by our MONOTONIC time. Our own wall clock has
no part in it: a step of it would make the others' clocks seem to jump along, and expire everything.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Final

import grpc

from idregistry.directory_commands import Row
from idregistry.upkeep import majority_time_us
from photon.core.clock import Clock
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import IdRegistryStub
from photon.wire.network import LOOPBACK, Network

_ASK_EVERY_S: Final = 5.0
_FIRST_ASK_S: Final = 0.2
_TIMEOUT_S: Final = 2.0
_KEEP_S: Final = 60.0


class ClockWatch:
    """Asks the others in a thread of its own. `rows`: name -> where each replica is now, this one too."""

    def __init__(
        self, node: str, rows: Callable[[], Mapping[str, Row]], clock: Clock, network: Network = LOOPBACK
    ) -> None:
        self._node = node
        self._rows = rows
        self._clock = clock
        self._network = network
        self._answers: dict[str, tuple[int, float]] = {}
        """Name -> what its clock said (us), and when that was heard (monotonic s). Replaced as a whole, never
        changed: the raft thread may be reading it."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clocks", daemon=True)

    def trusted_us(self) -> int | None:
        """The time that a majority's clocks have reached; None where too few are known. Any thread."""
        now = self._clock.monotonic()
        names = self._rows()
        clocks_us = [
            said_us + round((now - at) * 1e6)
            for name, (said_us, at) in self._answers.items()
            if name in names and now - at < _KEEP_S
        ]
        if self._node in names:
            clocks_us.append(self._clock.now_us())
        return majority_time_us(clocks_us, len(names))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _TIMEOUT_S)

    def _run(self) -> None:
        channels: dict[str, grpc.Channel] = {}
        wait_s = _FIRST_ASK_S
        while not self._stop.wait(wait_s):
            others = {name: row.grpc for name, row in self._rows().items() if name != self._node}
            for name, address in others.items():
                if address not in channels:
                    channels[address] = self._network.open(address)
                self._ask(name, channels[address])
            for address in channels.keys() - set(others.values()):
                channels.pop(address).close()
            self._answers = {name: answer for name, answer in self._answers.items() if name in others}
            # Until a majority is known, no boundary can move.
            wait_s = _FIRST_ASK_S if self.trusted_us() is None else _ASK_EVERY_S
        for channel in channels.values():
            channel.close()

    def _ask(self, name: str, channel: grpc.Channel) -> None:
        stub = IdRegistryStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            now_us = stub.Now(pb.NowRequest(), timeout=_TIMEOUT_S).now_us
        except grpc.RpcError:
            return
        # Too small by the way back, never too great.
        self._answers = {**self._answers, name: (now_us, self._clock.monotonic())}
