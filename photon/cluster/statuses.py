"""Asks every process of a topology for its status; one that does not answer is left out, not waited for."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from photon.cluster.registry_access import registry_of
from photon.cluster.roles import ROLES
from photon.cluster.topology import Topology
from photon.core.errors import UnavailableError

TIMEOUT_S: Final = 2.0
THREADS_MAX: Final = 32
WHY_CHARS_MAX: Final = 320
"""The longest hint of photon.rpc.network, after the name of who does not answer."""


for _role in ROLES.values():  # with this module: it is imported while a nursery imports the same
    importlib.import_module(_role.client)


class StatusReader:
    """Holds a client of each process. Name -> last status, or None while it does not answer."""

    def __init__(self, topology: Topology) -> None:
        network = topology.network("")
        self._closing = contextlib.ExitStack()
        registry = self._closing.enter_context(registry_of(topology).client(TIMEOUT_S))
        self._calls: dict[str, Callable[[], dict[str, Any]]] = {}
        for process in topology.processes():
            asks = ROLES[process.role].asks
            if asks is None:
                self._calls[process.title] = partial(registry.status, process.address)
            else:
                asked = asks(process.address, TIMEOUT_S, network)
                self._closing.callback(asked.close)
                self._calls[process.title] = asked.status
        self._pool = ThreadPoolExecutor(min(len(self._calls), THREADS_MAX), thread_name_prefix="status")
        self._last: dict[str, dict[str, Any] | None] = dict.fromkeys(self._calls)
        self._why: dict[str, str] = {}

    def read(
        self, roles: tuple[str, ...] = ("dispatcher", "eventstore", "joiner")
    ) -> tuple[list[dict[str, Any]], ...]:
        """Ask the processes of these roles at once; the lists, in this order, of those that answered."""
        chosen = [name for name in self._calls if name.startswith(roles)]
        for name, status in zip(chosen, self._pool.map(self._ask, chosen), strict=True):
            self._last[name] = status
        return tuple(
            [status for n in chosen if n.startswith(role) and (status := self._last[n])] for role in roles
        )

    def named(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and last status of each process that answered when last asked."""
        return ((name, status) for name, status in self._last.items() if status is not None)

    def silent(self, roles: tuple[str, ...] = ("",)) -> list[str]:
        """Those (of these roles) that did not answer when last asked, or were not asked yet."""
        return [name for name, status in self._last.items() if status is None and name.startswith(roles)]

    def why_silent(self, name: str) -> str:
        """The error of the last call that failed, in a short line; empty before there was one."""
        return self._why.get(name, "")

    def registry_has_quorum(self) -> bool:
        (replicas,) = self.read(("registry",))
        return any(
            r["directory"]["has_quorum"] and all(shard["has_quorum"] for shard in r["shards"])
            for r in replicas
        )

    def close(self) -> None:
        """End its channels and threads: what it still asks has no answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closing.close()
        self._pool.shutdown()

    def _ask(self, name: str) -> dict[str, Any] | None:
        try:
            return self._calls[name]()
        except UnavailableError as error:
            why = " ".join(str(error).split())
            self._why[name] = f"{why[:WHY_CHARS_MAX]}..." if len(why) > WHY_CHARS_MAX else why
            return None
