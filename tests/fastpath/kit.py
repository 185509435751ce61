"""Fast paths to a cache and a joiner of the test's own, and to the datacenters of a run in real processes."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter

from joiner.client import JoinOutcomes
from photon.core.clock import SystemClock
from photon.core.columns import split_lines
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Joined
from photon.core.settings import Settings, reading_fingerprint
from photon.fastpath import FastPath, Limits
from photon.fastpath.client import Sending
from tests.system import children_of, join_arguments, joined_pairs, start_photon
from tests.waiting import wait_until

NOW_US = time.time_ns() // 1_000


def query(name, **more):
    return json.dumps({"id": name, "ts_us": NOW_US, **more}).encode()


def click(name, of="q", **more):
    return json.dumps({"id": name, "primary_id": of, "ts_us": NOW_US + 1, **more}).encode()


class FakeCache:
    def __init__(self):
        self.lines = {}
        self.down = False
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def put(self, ids, lines):
        self.gate.wait(60)
        if self.down:
            raise UnavailableError("cache: away")
        for row, line in enumerate(lines):
            self.lines.setdefault(ids[16 * row : 16 * row + 16], line)

    def close(self):
        self.closed = True


class FakeJoiner:
    """Joins what the cache has, each id once."""

    def __init__(self, cache, settings=None):
        self._cache = cache
        self._lock = threading.Lock()
        self.batches = []
        self.joined = {}
        self.failures = []
        """What befalls the next requests: an exception or outcomes of the test's own."""
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)
        self.says = [{"reading": reading_fingerprint(settings or Settings())}]
        """What each joiner says of itself, or why it does not."""
        self.closed = False

    def join(self, batch):
        batch.check()
        self.arrived.release()
        self.gate.wait(60)
        with self._lock:
            self.batches.append(batch)
            if self.failures:
                failure = self.failures.pop(0)
                if isinstance(failure, Exception):
                    raise failure
                return JoinOutcomes(failure(len(batch)), {})
            return JoinOutcomes(bytes(map(self._one, range(len(batch)), [batch] * len(batch))), {})

    def _one(self, row, batch):
        key, primary = (column[16 * row : 16 * row + 16] for column in (batch.ids, batch.primary_ids))
        if primary not in self._cache.lines:
            return Joined.RETRY_ABSENT
        if key in self.joined:
            return Joined.DUPLICATE
        self.joined[key] = split_lines(batch.events)[row]
        return Joined.JOINED

    def statuses(self):
        return dict(enumerate(self.says))

    def close(self):
        self.closed = True


def overloaded():
    return OverloadedError("joiner: busy")


class Rig:
    """`sending` with a cache and a joiner that the test can break."""

    def __init__(self, settings=None, clock=None, **limits):
        self.cache = FakeCache()
        self.joiner = FakeJoiner(self.cache, settings)
        self.sending = Sending(
            self.cache, self.joiner, settings or Settings(), clock or SystemClock(), Limits(**limits)
        )

    def hand_in(self, primaries=(), foreigns=()):
        """And wait until they have come to their end. The counts of foreign events."""
        self.sending.primary_many(primaries)
        self.sending.foreign_many(foreigns)
        assert self.sending.flush(10)
        return self.sending.foreigns

    def close(self):
        self.cache.gate.set()
        self.joiner.gate.set()
        self.sending.close()


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
        path = FastPath(pipeline["eventstores"], pipeline["joiners"], settings or Settings(), SystemClock())
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
