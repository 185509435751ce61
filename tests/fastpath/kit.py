"""A followed run in real processes, its logs, and fast paths to its datacenters."""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter

from photon.core.clock import SystemClock
from photon.core.settings import Settings
from photon.fastpath import FastPath
from tests.system import children_of, join_arguments, joined_pairs, start_photon
from tests.waiting import wait_until

NOW_US = time.time_ns() // 1_000


def query(name, **more):
    return json.dumps({"id": name, "ts_us": NOW_US, **more}).encode()


def click(name, of, **more):
    return json.dumps({"id": name, "primary_id": of, "ts_us": NOW_US + 1, **more}).encode()


class Log:
    """One server's log."""

    def __init__(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self.lines = 0

    def write(self, line):
        self._file.write(line + b"\n")
        self.lines += 1


class Run:
    """`photon join --follow` and what it reads and writes."""

    def __init__(self, directory, *options):
        self.out = directory / "out"
        logs = directory / "logs"
        self.queries = Log(logs / "queries" / "q.jsonl")
        self.clicks = Log(logs / "clicks" / "c.jsonl")
        self._notices = (directory / "notices").open("w")
        arguments = join_arguments(logs, self.out, "--follow", *options)
        self._process = start_photon(*arguments, stderr=self._notices)
        self._paths = contextlib.ExitStack()
        self._rng = random.Random(5)

    def fast_path(self, datacenter="east", settings=None):
        """To a datacenter whose servers are up."""
        topology = self.out / ".photon" / "topology.json"
        wait_until(topology.exists)
        (pipeline,) = [
            p for p in json.loads(topology.read_bytes())["pipelines"] if p["datacenter"] == datacenter
        ]
        path = FastPath(
            pipeline["eventstores"][0], pipeline["joiners"], settings or Settings(), SystemClock()
        )
        return self._paths.enter_context(path)

    def children(self):
        return children_of(self._process.pid)

    def signal(self, role, number):
        """To one process of a role."""
        victims = sorted(pid for name, pid in self.children().items() if name.startswith(role))
        if victims:
            victim = self._rng.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)

    def pairs(self):
        return joined_pairs(self.out)

    def stop(self):
        """The summary of a run that ended well."""
        self._process.send_signal(signal.SIGINT)
        printed, _ = self._process.communicate(timeout=100)
        self._paths.close()
        assert self._process.returncode == 0
        return json.loads(printed)

    def kill(self):
        self._paths.close()
        self._process.kill()
        self._process.communicate()
        self._notices.close()


def join_by_fast_path(run, path, line, name, asked=None):
    """Hand a click in (and its query, if it is in no log) until the fast path says that it joined it.

    Servers that start take their time.
    """

    def joined():
        if asked is not None:
            path.primary(asked)
        path.foreign(line)
        path.flush(5)
        return path.foreigns.joined

    wait_until(joined, what=lambda: (path.foreigns, path.primaries, path.notices))
    assert Counter(pair[1] for pair in run.pairs())[name] == 1
