"""A whole system for strangers to come to: a process for each role, by settings, plain or inside TLS."""

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from photon.rpc import (
    eventstore_pb2,
    eventstore_pb2_grpc,
)
from photon.rpc.network import Network, Tls
from photon.rpc.servers import StatusClient
from tests.certificates import Authority
from tests.ports import paired_ports
from tests.system import PHOTON, Processes
from tests.waiting import wait_until

ROLES: Final = ("registry", "eventstore", "joiner", "dispatcher")
OFFSET: Final = 1
"""Of the metrics ports, which follow those of the roles and of Raft."""
WAIT_S: Final = 90.0
GROWTH_BYTES_MAX: Final = 96 << 20
"""What a process may have grown by after strangers: its pools' threads, gRPC's buffers, arenas."""

POOLS: Final = {"registry": 152, "eventstore": 16, "joiner": 32, "dispatcher": 10}
"""Threads that a process may have started: those of gRPC's pool, and as many scrapes as there may be."""


@dataclass(slots=True)
class Size:
    """Of a process at a moment."""

    memory: int
    threads: int
    descriptors: int


class Site(Processes):
    """One datacenter with one replica, on loopback. `start`, then `terminate`."""

    def __init__(self, directory: Path, tls: Tls | None = None, more: str = "", secret: str = "") -> None:
        """`more`: settings beside those that say who runs where; `secret`: file of the replicas' secret."""
        super().__init__(directory)
        self.tls, self._more, self._secret = tls, more, secret
        self.ports: dict[str, int] = {}
        self._pairs = 0

    @property
    def network(self) -> Network:
        """As one of its processes sees it."""
        return Network(tls=self.tls)

    @property
    def config(self) -> Path:
        return self.directory / "photon.toml"

    def address(self, port: str) -> str:
        return f"127.0.0.1:{self.ports[port]}"

    def prepare(self) -> None:
        """Logs and settings."""
        (self.directory / "logs" / "queries").mkdir(parents=True)
        (self.directory / "logs" / "clicks").mkdir()
        self.ports = dict(zip([*ROLES, "raft"], paired_ports(len(ROLES) + 1), strict=True))
        self.ports |= {f"{role} metrics": self.ports[role] + OFFSET for role in ROLES}
        self.config.write_text(self._settings() + self._more)

    def start(self) -> "Site":
        self.prepare()
        for role in ROLES:
            self.launch(role, self.command(role))
        self.join_more(20)
        return self

    def command(self, role: str) -> list[str]:
        name = "r0" if role == "registry" else "east"
        return [*PHOTON, role, "serve", "--config", str(self.config), "--name", name]

    # -- whether all is well ----------------------------------------------------------------------------

    def join_more(self, pairs: int = 1) -> None:
        """New queries and clicks are joined: every role, each within its time, still does its work."""
        numbers = range(self._pairs, self._pairs + pairs)
        self._pairs += pairs
        for kind, line in (("queries", _query), ("clicks", _click)):
            with (self.directory / "logs" / kind / "a.jsonl").open("ab") as file:
                file.write(b"".join(map(line, numbers)))
        wait_until(
            lambda: len(self.joined()) >= self._pairs, what=f"{pairs} pairs more joined: {self.told()}"
        )
        wait_until(lambda: self._fated() >= self._pairs, what="the dispatcher knows of them")

    def _fated(self) -> int:
        fates: dict[str, int] = self.status("dispatcher")["fates"]
        return sum(fates.values())

    def joined(self) -> list[bytes]:
        """The joined lines of the pairs that `join_more` wrote."""
        lines = b"".join(path.read_bytes() for path in sorted(self.directory.rglob("joined/**/*.jsonl")))
        return [line for line in lines.splitlines() if line.startswith(b'{"id":"click-')]

    def status(self, role: str) -> dict[str, Any]:
        with closing(StatusClient(role, self.address(role), WAIT_S, self.network)) as client:
            return client.status()

    def facts(self) -> dict[str, Any]:
        """What strangers must not change."""
        registry, events = self.status("registry"), self.status("dispatcher")
        return {
            "ids": [shard["ids"] for shard in registry["shards"]],
            "version": registry["version"],
            "members": registry["members"],
            "stores": self.stores(),
            "primary": self.status("eventstore")["primary_events"],
            "joined": self.status("joiner")["joined"],
            "fates": events["fates"],
            "lines": self.joined(),
        }

    def stores(self) -> list[str]:
        """The event stores that one tells of."""
        with self.network.open(self.address("eventstore")) as channel:
            stub = eventstore_pb2_grpc.EventStoreStub(channel)  # type: ignore[no-untyped-call]
            return list(stub.Members(eventstore_pb2.MembersRequest(), timeout=WAIT_S).members)

    def check_unharmed(self, before: Mapping[str, Size], facts: Mapping[str, Any] | None = None) -> None:
        """All processes live, work, are as large as before, and have written no traceback."""
        if facts is not None:
            now = self.facts()
            assert now == facts, f"{now} != {facts}"
        self.join_more()
        for role in ROLES:
            assert role in self.running, f"{role} has ended: {self.told()}"
            log = self.said(role)
            assert "Traceback" not in log and "Error in service handler" not in log, log[-3000:]
            wait_until(lambda role=role: self.size(role).descriptors <= before[role].descriptors + 8,  # type: ignore[misc]
                       what=f"descriptors of {role} closed: {before[role]}, {self.size(role)}")  # fmt: skip
            size = self.size(role)
            assert size.memory <= before[role].memory + GROWTH_BYTES_MAX, (role, before[role], size)
            assert size.threads <= before[role].threads + POOLS[role], (role, before[role], size)

    def sizes(self) -> dict[str, Size]:
        return {role: self.size(role) for role in ROLES}

    def size(self, role: str) -> Size:
        process = psutil.Process(self.process(role).pid)
        return Size(process.memory_info().rss, process.num_threads(), process.num_fds())

    def _settings(self) -> str:
        at = {name: f'"{self.address(name)}"' for name in (*ROLES, "raft")}
        tls = ""
        if self.tls is not None:
            files = {"cert": self.tls.cert, "key": self.tls.key, "ca": self.tls.ca, "name": self.tls.name}
            tls = "[tls]\n" + "".join(f"{key} = {json.dumps(str(value))}\n" for key, value in files.items())
        return f"""
[system]
out = "out"
work = "work"
secret_file = {json.dumps(self._secret)}
[replicas.r0]
datacenter = "east"
grpc = {at["registry"]}
raft = {at["raft"]}
[datacenters.east]
primary = ["logs/queries"]
foreign = ["logs/clicks"]
eventstores = [{at["eventstore"]}]
joiners = [{at["joiner"]}]
dispatchers = [{at["dispatcher"]}]
[metrics]
serve = true
port_offset = {OFFSET}
[logs]
scan_interval_s = 0.1
{tls}"""


def certified(directory: Path) -> Site:
    """One inside TLS."""
    return Site(directory / "site", Authority(directory / "ca").issue("node", tls_name="photon"))


def _query(number: int) -> bytes:
    return json.dumps({"id": f"query-{number}", "ts_us": number}).encode() + b"\n"


def _click(number: int) -> bytes:
    click = {"id": f"click-{number}", "primary_id": f"query-{number}", "ts_us": number}
    return json.dumps(click, separators=(",", ":")).encode() + b"\n"
