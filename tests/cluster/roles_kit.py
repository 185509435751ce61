"""A system of two datacenters by one photon.toml, each process started alone, as an operator does."""

import json
import random
from collections import Counter

from photon.core.clock import SystemClock
from tests.health import health
from tests.ports import paired_ports
from tests.system import ENDS_S, PHOTON, Processes, joined_pairs
from tests.waiting import wait_until

METRICS_OFFSET = 1


class Roles(Processes):
    """`names`: whether they are known by names (j-east.photon.test), and bound on loopback all the same.
    `imported`: datacenters whose logs are CSV, with an importer. `machines`: how many east has, with an event
    store, a joiner and a dispatcher each."""

    def __init__(self, root, datacenters=("east", "west"), names=False, imported=(), machines=0, **tables):
        super().__init__(root)
        self.root, self.out = root, root / "out"
        self._names = names
        (root / "secret").touch(0o600)
        (root / "secret").write_text("0123456789abcdef")
        ports = iter(paired_ports(24))

        def address(who):
            return f"{who}.photon.test:{next(ports)}" if names else f"127.0.0.1:{next(ports)}"

        self.replicas = {f"r{n}": (address(f"r{n}"), address(f"r{n}")) for n in range(3)}
        self.places = {
            "east": {
                "eventstore": [address("es-east"), address("es1-east")],
                "joiner": [address("j-east"), address("j1-east")],
                "dispatcher": [address("d-east")],
            },
            "west": {role: [address(f"{role}-west")] for role in ("eventstore", "joiner", "dispatcher")},
        }
        if machines:
            roles = ("eventstore", "joiner", "dispatcher")
            self.places["east"] = {r: [address(f"{r}{n}-east") for n in range(machines)] for r in roles}
        self.places = {name: self.places[name] for name in datacenters}
        self.imported = imported
        for name in imported:
            self.places[name]["importer"] = [address(f"i-{name}")]
        self.config = root / "photon.toml"
        self.config.write_text(self._document(**tables))
        for datacenter in self.places:
            for kind in ("queries", "clicks"):
                (root / f"logs-{datacenter}" / kind).mkdir(parents=True)

    def _document(self, **tables):
        lines = []
        settings = {
            "system": {
                "out": str(self.out),
                "work": str(self.root / "work"),
                "secret_file": str(self.root / "secret"),
            },
            "registry": {"lease_s": 4.0},
            "logs": {"scan_interval_s": 0.2},
            "metrics": {"serve": True, "port_offset": METRICS_OFFSET},
            "network": {"insecure_beyond_loopback": self._names, "bind": "127.0.0.1" if self._names else ""},
        }
        for name, values in tables.items():
            settings[name] = settings.get(name, {}) | values
        for number, (name, (grpc, raft)) in enumerate(self.replicas.items()):
            datacenter = ["east", "west", "central"][number]
            settings[f"replicas.{name}"] = {"datacenter": datacenter, "grpc": grpc, "raft": raft}
        settings |= {f"datacenters.{name}": {} for name in ("east", "west", "central")}
        for name, roles in self.places.items():
            logs = "*.csv" if name in self.imported else ""
            settings[f"datacenters.{name}"] = {
                "primary": [str(self.root / f"logs-{name}" / "queries" / logs)],
                "foreign": [str(self.root / f"logs-{name}" / "clicks" / logs)],
                **{f"{role}s": addresses for role, addresses in roles.items()},
            }
        for table, values in settings.items():
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"

    @property
    def all(self):
        """(role, name) -> where its gRPC answers."""

        def bound(address):
            return f"127.0.0.1:{address.rpartition(':')[2]}"

        found = {("registry", name): bound(grpc) for name, (grpc, _) in self.replicas.items()}
        for datacenter, roles in self.places.items():
            for role, addresses in roles.items():
                for number, address in enumerate(addresses):
                    found[role, f"{datacenter}/{number}" if number else datacenter] = bound(address)
        return found

    def advertised(self):
        """All addresses in the settings."""
        registry = [address for pair in self.replicas.values() for address in pair]
        return registry + [a for roles in self.places.values() for some in roles.values() for a in some]

    def start(self, *who, wrapped=()):
        """Forks, as those of a run are; or fresh processes, each the argument of a command."""
        for role, name in who or self.all:
            if wrapped:
                words = [role, "serve", "--config", str(self.config), "--name", name]
                self.launch((role, name), [*wrapped, *PHOTON, *words])
            else:
                self.fork((role, name), role, self.config, name)

    def health(self, role, name, service=""):
        return health(self.all[role, name], service)

    def await_health(self, wanted, *who):
        for role, name in who or self.all:
            wait_until(
                lambda role=role, name=name: self.health(role, name) == wanted,
                what=lambda role=role, name=name: (
                    f"{role} {name}: {self.health(role, name)}\n{self.said((role, name))[-2000:]}"
                ),
            )


class Truth:
    """Writes both datacenters' logs; knows what must come of them without asking any of the system."""

    def __init__(self, roles, seed=1, files=1):
        self._roles = roles
        self._files = files
        self._rng = random.Random(seed)
        self._clock = SystemClock()
        self._number = 0
        self.pairs = set()
        self.clicks = 0
        """Lines, of each datacenter."""

    def write(self, count, twice=0.1):
        """So many queries, a click on most, some twice, to each datacenter's logs in its own order."""
        queries, clicks = [], []
        for _ in range(count):
            self._number += 1
            now_us = self._clock.now_us()
            query = {"id": f"q-{self._number}", "ts_us": now_us}
            queries.append(query)
            if self._rng.random() < 0.8:
                click = {"id": f"c-{self._number}", "primary_id": query["id"], "ts_us": now_us + 5}
                clicks += [click] * (2 if self._rng.random() < twice else 1)
                self.pairs.add((query["id"], click["id"]))
        self.clicks += len(clicks)
        for datacenter in self._roles.places:
            self._rng.shuffle(clicks)
            self._append(datacenter, "clicks", clicks)
            self._append(datacenter, "queries", queries)

    def _append(self, datacenter, kind, events):
        for number in range(self._files):
            name = f"log{number or ''}.jsonl"
            with (self._roles.root / f"logs-{datacenter}" / kind / name).open("ab") as file:
                some = events[number :: self._files]
                file.write(b"".join(json.dumps(event).encode() + b"\n" for event in some))

    def joined(self):
        return joined_pairs(self._roles.out, growing=True)

    def await_all(self, what="", seconds=2 * ENDS_S):
        """Until every pair was joined once, in one datacenter or the other."""

        def told():
            missing = self.pairs - self.joined().keys()
            few = f"{len(missing)} of {len(self.pairs)} missing: {sorted(missing)[:5]}"
            return f"{what}: {few}\n{self._roles.told()}"

        wait_until(lambda: self.joined().keys() >= self.pairs, seconds, told)
        assert self.joined() == Counter(self.pairs)
