"""A run of `photon millwheel` as processes, in a directory of its own."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from millwheel.links import CONTROL
from millwheel.testing import in_order
from tests.certificates import Authority
from tests.connect.postgresql import Postgresql, need_server
from tests.millwheel.topologies import SECOND, clicks, expected
from tests.ports import free_ports, port_before
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
NAME = "tests.millwheel.topologies:TOPOLOGY"
HELD = "tests.millwheel.topologies:HELD"
LOSES = "may_lose_acknowledged=yes"
"""Of a server without a standby, in its URI."""


class System:
    """A run in a directory of its own, where the topology has logs/ and out/."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "logs").mkdir()
        self._process = None
        self.listen = f"127.0.0.1:{free_ports(1)[0]}"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "LISTEN": self.listen}

    def command(self, *words):
        return [sys.executable, "-m", "photon", "millwheel", *words]

    def write(self, name, lines, mode="w"):
        with (self.directory / "logs" / name).open(mode) as file:
            for line in lines:
                file.write(line if isinstance(line, str) else json.dumps(line) + "\n")

    def start(self, *words, name=NAME, told=None, work="work"):
        """`told`: a file for what it tells on the way."""
        with told.open("w") if told else contextlib.nullcontext(subprocess.PIPE) as errors:
            return self.start_as("run", name, "--work", work, "--json", *words, errors=errors)

    def start_as(self, *words, errors=subprocess.PIPE):
        self._process = subprocess.Popen(
            self.command(*words),
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        return self._process

    def run(self, *words, status=0, name=NAME):
        said, errors = self.start(*words, name=name).communicate(timeout=100)
        assert self._process.returncode == status, (said, errors)
        return json.loads(said) if said else errors

    def ask(self, *words):
        return self._done(0, *words).stdout

    def refused(self, *words):
        """What it says of words that can't be."""
        return self._done(2, *words).stderr

    def _done(self, status, *words):
        done = subprocess.run(
            self.command(*words),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == status, done.stderr
        return done

    def status(self, work="work"):
        return json.loads(self.ask("status", "--work", work, "--json"))

    def is_up(self):
        """It answers."""
        return (self.directory / "work" / CONTROL).exists()

    def stop(self, status=0):
        self._process.send_signal(signal.SIGTERM)
        said, errors = self._process.communicate(timeout=100)
        assert self._process.returncode == status, errors
        return json.loads(said)

    def kill(self):
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def push(self, address, file, producer="p"):
        return self.ask("push", address, str(file), "--producer", producer)

    def dead_letters(self):
        files = (self.directory / "work/dead-letters").glob("*.jsonl")
        return sum(len(path.read_text().splitlines()) for path in files)

    def workers(self, kind=b"worker", work="work"):
        return [pid for pid, words in self.processes(work) if kind in words]

    def processes(self, work="work"):
        """(pid, words) of those of the run in the work directory."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if work.encode() in words and os.readlink(path.parent / "cwd") == str(self.directory):
                    yield int(path.parent.name), words

    def signal(self, work, number):
        """To all of them, the run itself first."""
        for pid, _ in sorted(self.processes(work), key=lambda one: b"worker" in one[1]):
            os.kill(pid, number)

    def sink(self, name):
        """Whole lines."""
        return [
            json.loads(line)
            for path in sorted((self.directory / "out" / name).glob("*.jsonl"))
            for line in path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"\n")
        ]

    def sinks(self):
        return {sink: self.sink(sink) for sink in ("counts", "totals")}

    def check(self, lines):
        assert in_order(self.sinks()) == in_order(expected(lines))


class Several:
    """Machines: work directories with processes of their own, over the same logs, sinks and store."""

    def __init__(self, system, uri, tmp_path, seed, lines=30_000):
        self.system, self.uris, self._directory = system, [uri], tmp_path
        made = clicks(random.Random(seed), lines, users=200, seconds=60)
        self.lines = sorted(made, key=lambda line: line["ts"])
        self.config = tmp_path / "photon.toml"
        authority = Authority(tmp_path / "ca")
        tls = authority.issue("node")
        files = "".join(f'{name} = "{getattr(tls, name)}"\n' for name in ("cert", "key", "ca"))
        self.config.write_text(f"[tls]\n{files}")
        self.addresses = {}

    def start(self, name, *words, workers=2, topology=HELD):
        address = self.addresses.setdefault(name, f"127.0.0.1:{port_before(4)}")
        where = ["--machine", address, "--config", str(self.config), "--workers", str(workers)]
        where += [word for uri in self.uris for word in ("--store", uri)]
        told = self._directory / f"{name}.told"
        return self.system.start(*where, *words, name=topology, told=told, work=name)

    def computes(self, *names, workers=0):
        """They do, and no other, with so many workers; 0: two each."""

        def agreed():
            if not all((self._directory / name / "control.sock").exists() for name in names):
                return False
            with contextlib.suppress(AssertionError):  # until they have agreed who leads
                told = self.system.status(names[-1])
                machines = sorted(shown.rpartition("/")[2] for shown in told["machines"])
                there = [status["machine"] for status in told["processes"].values()]
                wanted = workers or 2 * len(names)
                return machines == sorted(names) and len({*there}) == len(names) and len(there) == wanted

        wait_until(agreed, what=lambda: str(names))

    def feed(self, start, end):
        """Until all is known that can be."""
        self.write(start, end)
        upto = self.lines[end * 1000 - 1]["ts"] - 3 * SECOND
        known = expected(self.lines[: end * 1000])["counts"]
        due = sum((count["second"] + 1) * SECOND <= upto for count in known)
        wait_until(lambda: len(self.system.sink("counts")) >= due, what=lambda: f"{due} lines")

    def write(self, start, end):
        for part in range(start, end):
            for file in (0, 1):
                self.system.write(
                    f"{file}.jsonl", self.lines[part * 1000 + file : (part + 1) * 1000 : 2], "a"
                )
            time.sleep(0.02)

    def finish(self, *names):
        """They end together, once all is worked off, and say the same of it."""
        runs = [self.start(name) for name in names]
        told = [run.communicate(timeout=100)[0] for run in runs]
        assert [run.returncode for run in runs] == [0] * len(runs), told
        self.system.check(self.lines)


class Proxied(Several):
    """Each machine advertises 127.0.0.2, where proxies are, and listens on 127.0.0.1."""

    def __init__(self, system, uri, tmp_path, seed, proxies, names, **given):
        super().__init__(system, uri, tmp_path, seed, **given)
        self.proxies = proxies
        self.config.write_text(f'{self.config.read_text()}\n[network]\nbind = "127.0.0.1"\n')
        self.links = []
        for name in names:
            port = port_before(2)
            self.addresses[name] = f"127.0.0.2:{port}"
            upstreams = {f"{name}-{at}": f"127.0.0.1:{at}" for at in range(port, port + 3)}
            proxies.create(upstreams, listens=[f"127.0.0.2:{at}" for at in range(port, port + 3)])
            self.links += upstreams

    def each(self, does, *given):
        for link in self.links:
            does(link, *given)


class Pair:
    """A server, and its standby, which confirms each commit."""

    def __init__(self):
        programs = need_server()
        self.first = Postgresql(programs, ["synchronous_standby_names=*", "wal_level=replica"])
        self.second = Postgresql(programs, ["synchronous_standby_names="], self.first)
        hosts = ",".join(one.uri.partition("@")[2].partition("/")[0] for one in (self.first, self.second))
        self.uri = f"postgresql://photon@{hosts}/postgres?{{}}"
        import psycopg

        with psycopg.connect(self.first.uri) as connection:
            wait_until(
                lambda: connection.execute(
                    "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
                ).fetchone()
            )

    def close(self):
        self.first.close()
        self.second.close()
