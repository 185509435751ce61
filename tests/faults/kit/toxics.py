"""Faults of the links between datacenters: each link has a toxiproxy of its own (Toxiproxy, by Shopify).

A link leads from a dialing datacenter to one registry replica elsewhere, on one of its two ports:
`raft:east>r3` (the replicas in east that dial r3: those of a smaller name) and `grpc:west>r0` (all processes
in west: lookups, commits, leases). Upstream is what the dialing side sends.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from photon.cluster.topology import Topology
from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy, toxiproxy_binary

__all__ = ["Direction", "Kind", "Link", "Proxies", "need_toxiproxy", "toxiproxy_binary"]

Kind = Literal["raft", "grpc"]
Direction = Literal["both", "to", "from"]
"""Of `cut(a, b, ...)`: what is lost. `to`: what a sends to b; `from`: what b sends to a."""
_STREAMS: Final = ("upstream", "downstream")


@dataclass(frozen=True, slots=True)
class Link:
    """From a dialing datacenter to a replica in another one."""

    kind: Kind
    source: str
    replica: str
    target: str
    """The replica's datacenter."""
    advertised: str
    upstream: str
    """Where the replica listens."""

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.source}>{self.replica}"

    def stream(self, sender: str) -> str:
        """The one that carries what the datacenter `sender` sends."""
        return "upstream" if sender == self.source else "downstream"


def links_between(topology: Topology) -> list[Link]:
    """Every link that crosses datacenters."""
    replicas = topology.replicas
    sources = sorted({r.datacenter for r in replicas} | {p.datacenter for p in topology.pipelines})
    found = []
    for target in replicas:
        raft = target.raft
        for source in sources:
            if source == target.datacenter:
                continue
            link = Link("grpc", source, target.name, target.datacenter, target.grpc, target.grpc)
            found.append(replace(link, upstream=target.listen_grpc or target.grpc))
            # Of two replicas the one with the smaller name dials (photon.raft.transport).
            if any(r.datacenter == source and r.name < target.name for r in replicas):
                found.append(replace(link, kind="raft", advertised=raft, upstream=target.listen_raft or raft))
    return found


def _ports_of(topology: Topology) -> set[int]:
    """Where its processes listen, or will."""
    addresses = [a for p in topology.pipelines for a in (*p.eventstores, *p.joiners, *p.dispatchers)]
    addresses += [r.listen_grpc or r.grpc for r in topology.replicas]
    addresses += [r.listen_raft or r.raft for r in topology.replicas]
    return {int(address.rpartition(":")[2]) for address in (*addresses, *topology.metrics.values())}


class Proxies:
    """The proxies of one system. Make it, give the system the topology of `between`, `close` it after it."""

    def __init__(self, rng: random.Random) -> None:
        """Skips the test where there is no toxiproxy server."""
        self._server = ToxiproxyServer(need_toxiproxy())
        self._links: dict[str, Link] = {}

    def between(self, topology: Topology) -> Topology:
        """The same with a proxy in each link that crosses datacenters. Once."""
        assert not self._links, "one system has its proxies"
        self._links = {link.name: link for link in links_between(topology)}
        upstreams = {link.name: link.upstream for link in self._links.values()}
        listens = self._server.create(upstreams, _ports_of(topology))
        via = {datacenter: dict(addresses) for datacenter, addresses in topology.settings.via.items()}
        for link in self._links.values():
            via.setdefault(link.source, {})[link.advertised] = listens[link.name]
        return replace(topology, settings=replace(topology.settings, via=via))

    def links(
        self, a: str | None = None, b: str | None = None, kind: Kind | None = None, replica: str | None = None
    ) -> list[Link]:
        """Those between two datacenters, whoever dials; of one with all others; all."""
        return [
            link
            for link in self._links.values()
            if (a is None or a in (link.source, link.target))
            and (b is None or b in (link.source, link.target))
            and (kind is None or kind == link.kind)
            and (replica is None or replica == link.replica)
        ]

    # -- cuts: what is sent is lost, nobody is told ------------------------------------------------------

    def cut(self, a: str, b: str, direction: Direction = "both", kind: Kind | None = None) -> None:
        """Lose all that two datacenters send each other (of one kind of link), or one way only.

        Connections stay open and new ones are taken: bytes vanish, as behind a dead router.
        """
        for link in self._some(self.links(a, b, kind)):
            if direction in ("both", "to"):
                self._server.add(link.name, "timeout", link.stream(a), {"timeout": 0}, 1.0)
            if direction in ("both", "from"):
                self._server.add(link.name, "timeout", link.stream(b), {"timeout": 0}, 1.0)

    def isolate(self, datacenter: str, direction: Direction = "both", kind: Kind | None = None) -> None:
        """Cut one from all others. `to`: what it sends is lost; `from`: what it would hear."""
        for other in sorted(self._others(datacenter)):
            self.cut(datacenter, other, direction, kind)

    def isolate_region(self, regions: Mapping[str, str], region: str, direction: Direction = "both") -> None:
        """Cut all datacenters of a region (datacenter -> region) from those of the others."""
        for inside in sorted(d for d, r in regions.items() if r == region):
            for outside in sorted(d for d, r in regions.items() if r != region):
                if self.links(inside, outside):
                    self.cut(inside, outside, direction)

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """Take every toxic off these links, put what is down up again. What was cut is reconnected: the
        connections that have lost bytes are closed."""
        self._server.thaw()
        if a is None and b is None:
            self._server.reset()
        else:
            for link in self.links(a, b):
                self._server.clear(link.name)

    def mend_cuts(self, a: str | None = None, b: str | None = None) -> None:
        """As `heal`, but latency, bandwidth and the like stay."""
        for link in self.links(a, b):
            self._server.clear(link.name, ("timeout", "down"))

    # -- links that are slow or bad ----------------------------------------------------------------------

    def latency(self, regions: Mapping[str, str], round_trip_ms: float, jitter_ms: float = 0.0) -> None:
        """Between datacenters of different regions; in one region there is none. Half of it each way, each
        way with its own jitter (up to so much less or more)."""
        for link in self._links.values():
            if regions[link.source] != regions[link.target]:
                self.toxic([link], "latency", latency=round(round_trip_ms / 2), jitter=round(jitter_ms))

    def bandwidth(self, links: Iterable[Link], kb_per_s: int) -> None:
        self.toxic(links, "bandwidth", rate=kb_per_s)

    def slicer(self, links: Iterable[Link], bytes_average: int = 32, delay_us: int = 10) -> None:
        """Bytes come in pieces of about so many."""
        variation = bytes_average // 2
        self.toxic(links, "slicer", average_size=bytes_average, size_variation=variation, delay=delay_us)

    def limit_data(self, links: Iterable[Link], bytes_max: int) -> None:
        """Each connection is closed after so many bytes, in the middle of whatever it carries."""
        self.toxic(links, "limit_data", bytes=bytes_max)

    def reset_peer(self, links: Iterable[Link], after_ms: int = 0) -> None:
        """Each connection is reset so long after its first byte."""
        self.toxic(links, "reset_peer", timeout=after_ms)

    def timeout(self, links: Iterable[Link], after_ms: int) -> None:
        """Each connection carries nothing, and is closed after so long (0: never)."""
        self.toxic(links, "timeout", timeout=after_ms)

    def down(self, links: Iterable[Link]) -> None:
        """Connections are closed, new ones refused."""
        for link in self._some(links):
            self._server.enable(link.name, False)

    def toxic(
        self,
        links: Iterable[Link],
        type: str,
        streams: Sequence[str] = _STREAMS,
        toxicity: float = 1.0,
        **attributes: int,
    ) -> None:
        """Any of toxiproxy's toxics, on one stream (`upstream`, `downstream`) or both."""
        for link in self._some(links):
            for stream in streams:
                self._server.add(link.name, type, stream, attributes, toxicity)

    def freeze(self) -> None:
        """All links at once: what is sent is not lost, it comes after `thaw`, however late. Until then no
        other fault can be made."""
        self._server.freeze()

    def thaw(self) -> None:
        self._server.thaw()

    # -- what went through -------------------------------------------------------------------------------

    def traffic(self) -> Counter[str]:
        """Bytes by link, of connections that have ended: `down` and `up` ends them all."""
        return self._server.received_bytes()

    def close(self) -> None:
        self._server.close()

    def _others(self, datacenter: str) -> set[str]:
        ends = {end for link in self.links(datacenter) for end in (link.source, link.target)}
        return ends - {datacenter}

    @staticmethod
    def _some(links: Iterable[Link]) -> list[Link]:
        """A fault of no link would be a test of nothing."""
        found = list(links)
        assert found, "there is no such link"
        return found
