"""The links between datacenters: a toxiproxy proxy for each line of [via.*], slow as the distance asks.

Proxies are named `grpc:west>r0`, `raft:west>r0`. Goes on looking, so that a toxiproxy that was started anew
has its links again in seconds; what others change on a link (`toxiproxy-cli`, a test) stays as it is. Needs
nothing but Python.
"""

import argparse
import http.client
import json
import signal
import sys
import threading
import tomllib
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_S = 2.0
_REQUEST_TIMEOUT_S = 10.0
_ERRORS = (OSError, ValueError, http.client.HTTPException)
_UNFINISHED = "unfinished"
"""The upstream of a proxy that does not have its toxics yet."""


@dataclass(frozen=True, slots=True)
class Link:
    """From one datacenter to one port of a replica in another."""

    name: str
    listen: str
    upstream: str
    round_trip_ms: float


def links_of(document: dict[str, Any], between_regions_ms: float, within_region_ms: float) -> list[Link]:
    """The links that the settings name."""
    regions = {name: place.get("region") or name for name, place in document["datacenters"].items()}
    ports = {}
    for name, place in document["replicas"].items():
        for kind in ("grpc", "raft"):
            ports[place[kind]] = (kind, name, place["datacenter"])
    links = []
    for datacenter, dialed in document.get("via", {}).items():
        for advertised, there in dialed.items():
            kind, replica, home = ports[advertised]
            far = regions[datacenter] != regions[home]
            links.append(
                Link(
                    name=f"{kind}:{datacenter}>{replica}",
                    listen=f"0.0.0.0:{there.rpartition(':')[2]}",
                    upstream=advertised,
                    round_trip_ms=between_regions_ms if far else within_region_ms,
                )
            )
    return links


class Toxiproxy:
    """Its HTTP API (https://github.com/Shopify/toxiproxy#http-api)."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # Not by way of an HTTP proxy that the environment may name.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def names(self) -> set[str]:
        """The proxies that are whole. One whose maker was killed is not, and is thrown away."""
        upstreams = {name: proxy["upstream"] for name, proxy in self._call("GET", "/proxies").items()}
        for name in [name for name, upstream in upstreams.items() if upstream == _UNFINISHED]:
            self._call("DELETE", f"/proxies/{name}")
            del upstreams[name]
        return set(upstreams)

    def make(self, link: Link, jitter: float) -> None:
        """All of it or, by an error, nothing. It leads nowhere until no byte passes faster than it should."""
        proxy = {"name": link.name, "listen": link.listen, "upstream": _UNFINISHED, "enabled": False}
        self._call("POST", "/proxies", proxy)
        try:
            for stream in ("upstream", "downstream"):
                one_way = link.round_trip_ms / 2
                toxic = {
                    "name": f"latency_{stream}",
                    "type": "latency",
                    "stream": stream,
                    "attributes": {"latency": round(one_way), "jitter": round(one_way * jitter)},
                }
                self._call("POST", f"/proxies/{link.name}/toxics", toxic)
            self._call("POST", f"/proxies/{link.name}", {"upstream": link.upstream, "enabled": True})
        except _ERRORS:
            with suppress(*_ERRORS):
                self._call("DELETE", f"/proxies/{link.name}")
            raise

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 (the URL is the operator's)
            self._url + urllib.parse.quote(path), data, {"Content-Type": "application/json"}, method=method
        )
        with self._opener.open(request, timeout=_REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read() or b"null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--toxiproxy", default="http://toxiproxy:8474")
    parser.add_argument("--between-regions-ms", type=float, default=100.0, help="round trip")
    parser.add_argument("--within-region-ms", type=float, default=2.0, help="round trip")
    parser.add_argument("--jitter", type=float, default=0.05, help="share of the latency")
    options = parser.parse_args()
    document = tomllib.loads(options.config.read_text())
    links = links_of(document, options.between_regions_ms, options.within_region_ms)
    toxiproxy = Toxiproxy(options.toxiproxy)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: the handler interrupts this one, which may hold the event's lock.
        signal.signal(number, lambda *_: threading.Thread(target=told.set).start())
    while not told.is_set():
        try:
            there = toxiproxy.names()
            missing = [link for link in links if link.name not in there]
            for link in missing:
                toxiproxy.make(link, options.jitter)
            if missing:
                print(f"{len(missing)} of {len(links)} links made", flush=True)
        except _ERRORS as error:
            print(f"{options.toxiproxy}: {error}; tried again", file=sys.stderr, flush=True)
        told.wait(_LOOK_S)


if __name__ == "__main__":
    main()
