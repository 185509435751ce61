"""A sink in memory, of every URI: each batch and its place are one, and it fails as it is told to."""

from collections import Counter

from photon.connect import publishing, uris
from photon.connect.ports import Guarantee
from photon.core.clock import Backoff
from photon.core.columns import split_lines
from photon.logs.writer import LogPosition


class Store:
    """What outlives the sinks of a writer: lines, and the place, moved together."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(publishing, "RETRIES", Backoff(0.001, 0.01))
        monkeypatch.setattr(uris, "_maker", lambda *_: self.sink)
        self.lines = Counter()
        self.places = {}
        self.batches = []
        """Of how many lines each."""
        self.batch_bytes, self.linger_s = 1 << 20, 0.0
        self.fails = lambda: None
        """Called before and after each write: raises what is to fail there."""

    def sink(self, uri, writer):
        return Sink(self, f"{uri.path} {writer}")


class Sink:
    guarantee = Guarantee.ATOMIC

    @property
    def batch_bytes(self):
        return self._store.batch_bytes

    @property
    def linger_s(self):
        return self._store.linger_s

    def __init__(self, store, writer):
        self._store, self._writer = store, writer

    def open(self):
        return self._store.places.get(self._writer)

    def write(self, lines, start, end):
        store = self._store
        store.fails()
        assert start == store.places.get(self._writer, LogPosition(0, 0)) or not start.offset
        assert lines.endswith(b"\n")
        store.lines.update(split_lines(lines))
        store.batches.append(lines.count(b"\n"))
        store.places[self._writer] = end
        store.fails()

    def close(self):
        pass
