"""A system of two datacenters by one photon.toml, each process started alone, as an operator does."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter

from photon.core.clock import SystemClock
from tests.health import health
from tests.ports import paired_ports
from tests.system import PHOTON, joined_pairs
from tests.waiting import wait_until

METRICS_OFFSET = 1
SECONDS = 60  # a machine that is busy takes its time


class Roles:
    """`names`: whether they are known by names (j-east.photon.test), and bound on loopback all the same."""

    def __init__(self, root, datacenters=("east", "west"), names=False, **tables):
        self.root, self.out = root, root / "out"
        self._names = names
        (root / "secret").write_text("0123456789abcdef")
        ports = iter(paired_ports(14))

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
        self.places = {name: self.places[name] for name in datacenters}
        self.config = root / "photon.toml"
        self.config.write_text(self._document(**tables))
        for datacenter in self.places:
            for kind in ("queries", "clicks"):
                (root / f"logs-{datacenter}" / kind).mkdir(parents=True)
        self._processes = {}

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
            settings[f"datacenters.{name}"] = {
                "primary": [str(self.root / f"logs-{name}" / "queries")],
                "foreign": [str(self.root / f"logs-{name}" / "clicks")],
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
        for role, name in who or self.all:
            log = self.log_of(role, name)
            with log.open("ab") as output:
                self._processes[role, name] = subprocess.Popen(
                    [*wrapped, *PHOTON, role, "serve", "--config", str(self.config), "--name", name],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self.root,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"},
                )

    def log_of(self, role, name):
        return self.root / f"{role}-{name.replace('/', '-')}.log"

    def process(self, role, name):
        return self._processes[role, name]

    def running(self):
        return [who for who, process in self._processes.items() if process.poll() is None]

    def signal(self, number, *who):
        for one in who:
            self._processes[one].send_signal(number)

    def kill(self, *who):
        for one in who:
            self._processes[one].kill()
            self._processes[one].wait()

    def terminate(self, *who):
        """SIGTERM to all at once; their exit statuses."""
        self.signal(signal.SIGTERM, *who)
        return [self.ended(one) for one in who]

    def ended(self, who):
        """The exit status of a process that is to end by itself."""
        process = self._processes[who]
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it tells then where it stands
            process.wait()
            raise AssertionError(f"{who} does not end:\n{self.log_of(*who).read_text()[-6000:]}") from None

    def close(self):
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def health(self, role, name, service=""):
        return health(self.all[role, name], service)

    def await_health(self, wanted, *who):
        for role, name in who or self.all:
            wait_until(
                lambda role=role, name=name: self.health(role, name) == wanted,
                what=lambda role=role, name=name: (
                    f"{role} {name}: {self.health(role, name)}\n{self.log_of(role, name).read_text()[-2000:]}"
                ),
            )


class Truth:
    """Writes both datacenters' logs; knows what must come of them without asking any of the system."""

    def __init__(self, roles, seed=1):
        self._roles = roles
        self._rng = random.Random(seed)
        self._clock = SystemClock()
        self._number = 0
        self.pairs = set()

    def write(self, count):
        """So many queries, a click on most, some twice, to each datacenter's logs in its own order."""
        queries, clicks = [], []
        for _ in range(count):
            self._number += 1
            now_us = self._clock.now_us()
            query = {"id": f"q-{self._number}", "ts_us": now_us}
            queries.append(query)
            if self._rng.random() < 0.8:
                click = {"id": f"c-{self._number}", "primary_id": query["id"], "ts_us": now_us + 5}
                clicks += [click] * (2 if self._rng.random() < 0.1 else 1)
                self.pairs.add((query["id"], click["id"]))
        for datacenter in self._roles.places:
            self._rng.shuffle(clicks)
            self._append(datacenter, "clicks", clicks)
            self._append(datacenter, "queries", queries)

    def _append(self, datacenter, kind, events):
        path = self._roles.root / f"logs-{datacenter}" / kind / "log.jsonl"
        with path.open("ab") as file:
            file.write(b"".join(json.dumps(event).encode() + b"\n" for event in events))

    def joined(self):
        return joined_pairs(self._roles.out)

    def await_all(self, what="", seconds=2 * SECONDS):
        """Until every pair was joined once, in one datacenter or the other."""

        def told():
            missing = self.pairs - self.joined().keys()
            logs = [p.name + ": " + p.read_text()[-800:] for p in self._roles.root.glob("*.log")]
            return (
                f"{what}: {len(missing)} of {len(self.pairs)} missing: {sorted(missing)[:5]}\n"
                + "\n".join(logs)
            )

        wait_until(lambda: self.joined().keys() >= self.pairs, seconds, told)
        assert self.joined() == Counter(self.pairs)
