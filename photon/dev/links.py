"""The links between datacenters in `photon dev`: a proxy for each, to be cut and slowed down.

    a process in datacenter A -> port of A's for replica r of B -> r

A link that is cut passes nothing and closes nothing, as a network that loses all packets: what was under way
arrives once it is mended.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from photon.cluster.topology import Topology
from photon.core.addresses import split_address
from photon.core.errors import UsageError

DELAY_MS_MAX: Final = 10_000
_CHUNK_BYTES: Final = 64 << 10
_CHUNKS_MAX: Final = 64
"""Under way in one direction of one connection; what is beyond it waits with the sender."""


class _Link:
    """Both ways between two datacenters. But for `state`, of the loop's thread."""

    def __init__(self) -> None:
        self.state = ""
        self.open = asyncio.Event()
        self.open.set()
        self.delay_s = 0.0

    def set(self, is_open: bool, delay_s: float) -> None:
        self.delay_s = delay_s
        if is_open:
            self.open.set()
        else:
            self.open.clear()


class Links:
    """Serves from a thread while it is entered."""

    def __init__(self, topology: Topology, proxied: bool) -> None:
        """A link for each two datacenters one of which asks a replica in the other, or none. OSError without
        ports."""
        self._links: dict[tuple[str, ...], _Link] = {}
        self._listening: list[tuple[_Link, socket.socket, tuple[str, int]]] = []
        via: dict[str, dict[str, str]] = {}
        for here in sorted({process.datacenter for process in topology.processes()} - {""}):
            for replica in topology.replicas if proxied else ():
                if replica.datacenter not in ("", here):
                    names = tuple(sorted((here, replica.datacenter)))
                    link = self._links.setdefault(names, _Link())
                    dialed = {known: self._listen(link, known) for known in (replica.grpc, replica.raft)}
                    via.setdefault(here, {}).update(dialed)
        settings = replace(topology.settings, via=via) if proxied else topology.settings
        self.topology = replace(topology, settings=settings)
        """The topology, for processes that go by the proxies."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._over = asyncio.Event()

    def _listen(self, link: _Link, address: str) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        self._listening.append((link, listener, split_address(address, "a replica's address")))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def __enter__(self) -> "Links":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """All connections through it end."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        for _link, listener, _upstream in self._listening:
            listener.close()

    def told(self) -> list[dict[str, Any]]:
        """[{between: two datacenters, state: empty for one that is as it should be}]."""
        return [{"between": list(names), "state": link.state} for names, link in sorted(self._links.items())]

    def cut(self, between: Iterable[str]) -> str:
        """What was done. UsageError if there is no such link, as of `delay` and `mend`."""
        return self._set(between, "cut", False)

    def delay(self, between: Iterable[str], round_trip_ms: float) -> str:
        """A round trip over it takes so much longer."""
        if not 1 <= round_trip_ms <= DELAY_MS_MAX:
            raise UsageError(f"a link can be slower by 1 to {DELAY_MS_MAX} ms a round trip")
        return self._set(between, f"slower by {round_trip_ms:g} ms", True, round_trip_ms / 2000)

    def mend(self, between: Iterable[str]) -> str:
        return self._set(between, "", True)

    def _set(self, between: Iterable[str], state: str, is_open: bool, delay_s: float = 0.0) -> str:
        names: tuple[str, ...] = tuple(sorted(between))
        link = self._links.get(names)
        if link is None:
            known = ", ".join("-".join(one) for one in sorted(self._links)) or "none"
            raise UsageError(f"there is no link between {' and '.join(names)}; there are: {known}")
        link.state = state
        self._loop.call_soon_threadsafe(link.set, is_open, delay_s)
        return f"the link between {' and '.join(names)} is {state or 'mended'}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        for link, listener, upstream in self._listening:
            await asyncio.start_server(partial(_relay, link, upstream), sock=listener, limit=_CHUNK_BYTES)
        await self._over.wait()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(
    link: _Link, upstream: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection, until either side ends it."""
    await link.open.wait()
    try:
        from_there, to_there = await asyncio.open_connection(*upstream, limit=_CHUNK_BYTES)
    except OSError:
        writer.close()
        return
    ways = [_way(link, reader, to_there), _way(link, from_there, writer)]
    tasks = [asyncio.ensure_future(one) for one in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        to_there.close()
        writer.close()


async def _way(link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction; each chunk as late as the link was slow when it came."""
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_CHUNKS_MAX)
    now = asyncio.get_running_loop().time

    async def read() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await under_way.put((now() + link.delay_s, data))
        await under_way.put((now() + link.delay_s, b""))

    reading = asyncio.ensure_future(read())
    try:
        with contextlib.suppress(OSError):
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - now()))
                await link.open.wait()
                if not data:
                    return
                writer.write(data)
                await writer.drain()
    finally:
        reading.cancel()
