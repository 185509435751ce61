"""Joiners whose tokens are cleared, and events for them; for the tests of joiner/clearing.py."""

import json
import time

from joiner.batch import ForeignColumns
from photon.core.columns import join_lines, pack_times, split_ids, unpack_times
from photon.core.fates import Joined
from photon.core.formats import JsonLines
from photon.core.ids import IdPacker
from photon.core.settings import parse_settings
from tests.joiner.fakes import CLEARED, NOW_US, FakeRegistry, make_worker, packed_id


class Registry(FakeRegistry):
    """Remembers what it was asked to clear."""

    def __init__(self):
        super().__init__()
        self.asked: list[list[tuple[bytes, int]]] = []

    def clear(self, ids, times):
        outcomes = super().clear(ids, times)
        self.asked.append([*zip(split_ids(ids), unpack_times(times).tolist(), strict=True)])
        return outcomes

    @property
    def cleared(self):
        return {key for key, token in self.tokens.items() if token == CLEARED}


def made_settings(**parts):
    tables = {"joiner": {"fsync": False, "output_file_bytes_max": 1024, "clear_ids_per_s": 1_000_000}}
    for name, table in parts.items():
        tables[name] = tables.get(name, {}) | table
    return parse_settings(tables)


def event(name, **more):
    return {"id": name, "primary_id": f"q-{name}", "ts_us": NOW_US, **more}


def foreign(settings, events):
    """As a dispatcher sends them; the fake event store knows primary events by their names."""
    lines = join_lines([json.dumps(e).encode() for e in events])
    parsed = JsonLines(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode())).parse_foreign(
        lines
    )
    assert not parsed.malformed
    count = len(events)
    primaries = b"".join(packed_id(f"q-{number}") for number in range(count))
    return ForeignColumns(
        parsed.ids, primaries, parsed.times, lines, bytes(4 * count), pack_times([NOW_US] * count)
    )


def join(worker, settings, *batches):
    """Each of the batches fills a file. The ids and times of them all."""
    registered = []
    for events in batches:
        batch = foreign(settings, events)
        assert set(worker.join(batch).outcomes) == {Joined.JOINED}
        registered += zip(split_ids(batch.ids), unpack_times(batch.times).tolist(), strict=True)
    return registered


def names(start, count=6):
    """So many fill a file."""
    return [event(f"e{start}-{row}", pad="x" * 100) for row in range(count)]


def clear(worker):
    worker._completer.step()
    if worker._clearer is not None:
        worker._clearer.step()
    return worker.status()["clearing"]


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def workers(root, registry):
    """A fixture's: what makes joiners, which are closed at the end."""
    made = []

    def build(settings=None, **options):
        worker = make_worker(root, registry, settings=settings or made_settings(), **options)
        made.append(worker)
        return worker

    yield build
    for worker in made:
        worker.close()
