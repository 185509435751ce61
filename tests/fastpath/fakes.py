"""A cache and a joiner of the test's own, and a path to them."""

import json
import threading

from joiner.client import JoinOutcomes
from photon.core.clock import ManualClock, SystemClock
from photon.core.columns import split_lines
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Joined
from photon.core.settings import Settings, reading_fingerprint
from photon.fastpath.client import Limits, Sending

T0 = ManualClock().now_us()


def query(name):
    return json.dumps({"id": name, "ts_us": T0}).encode()


def click(name, of="q"):
    return json.dumps({"id": name, "primary_id": of, "ts_us": T0}).encode()


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
