"""What the event store costs: filling, lookups by tier, bytes of map and memory (paper 3.4).

    python -m benchmarks.eventstore [EVENTS] [--files N] [--directory DIR]
    python -m benchmarks.eventstore --curve     M and W: entries and bytes of map, bytes and time a lookup
    python -m benchmarks.eventstore --shares    lookups over one, two and three cache processes
    python -m benchmarks.eventstore --dense     writes and lookups of the dense map as it grows

Photon ids (of 4 servers, and of 64 interleaved in each file) and opaque ids. All in one process, but for
the cache processes of --shares.
"""

import argparse
import functools
import itertools
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from eventstore.client import EventStoreClient
from eventstore.log_file_map import Counts, LogFileMap, Rows
from eventstore.server import EventStoreServer
from photon.core.clock import SystemClock
from photon.core.columns import split_ids
from photon.core.fates import Found
from photon.core.ids import IdPacker
from photon.core.logfiles import FileState
from photon.core.settings import Settings, parse_settings

BATCH = 1024
KINDS = ("photon, 4 servers", "photon, 64 servers", "opaque")
INTERVALS_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
INTERVALS_S = (1.0, 10.0, 100.0)
STEPS_US = {"busy": 1_000, "quiet": 200_000}
"""Of the curve: mean time from event to event in a file."""

ENTRY_BYTES = 28 + 12 + 8
"""Of a sparse entry in LMDB: key, value and its own header."""
CACHE_PROCESS = """
import sys, threading
from eventstore.server import CacheServer
from photon.core.clock import SystemClock
from photon.core.settings import Settings
CacheServer(Settings(), "127.0.0.1:0", sys.argv[1], SystemClock()).start()
threading.Event().wait()
"""


def machine() -> str:
    memory = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def events(kind: str, count: int, rng: random.Random, step_us: int = 50) -> Iterator[tuple[str, str]]:
    servers = 64 if "64" in kind else 4
    at = 1_700_000_000_000_000
    for number in range(count):
        at += rng.randrange(1, 2 * step_us)
        if kind == "opaque":
            ident = f"{rng.getrandbits(64):016x}"
        else:
            server = rng.randrange(servers)
            ident = f"10.0.0.{server // 4}:{4000 + server % 4}:{at}"
        yield ident, f'{{"id":"{ident}","ts_us":{at},"payload":{{"q":"{"x" * 110}","user":{number}}}}}\n'


def write_logs(directory: Path, kind: str, count: int, files: int, step_us: int = 50) -> list[str]:
    """The logs, one after the other in time; the ids in them."""
    directory.mkdir(parents=True)
    idents = []
    rows = events(kind, count, random.Random(3), step_us)
    for number in range(files):
        with (directory / f"{number:05d}.jsonl").open("w") as file:
            for ident, text in (next(rows) for _ in range(count // files)):
                idents.append(ident)
                file.write(text)
    return idents


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the wall and of CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def serve(root: Path, settings: Settings) -> EventStoreServer:
    return EventStoreServer(
        settings,
        "127.0.0.1:0",
        root / "eventstore",
        [str(root / "logs")],
        root / "dead-letters",
        SystemClock(),
        drain=True,
    )


def fill(server: EventStoreServer) -> None:
    server.start()
    while not server.status()["caught_up"]:
        time.sleep(0.01)


def drop_from_page_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def lookups(
    server: EventStoreServer, packed: list[bytes], batch: int, client: EventStoreClient | None = None
) -> str:
    look_up = client.lookup if client else server.lookup
    before = server.status()

    def work() -> None:
        for start in range(0, len(packed), batch):
            outcomes, _ = look_up(b"".join(packed[start : start + batch]))
            assert outcomes.count(Found.FOUND) == len(outcomes)

    wall, cpu = timed(work)
    after = server.status()
    hits = after["cache"]["hits"] - before["cache"]["hits"]
    read = after["logs"]["bytes_read"] - before["logs"]["bytes_read"]
    return (
        f"{wall / len(packed) * 1e6:8.2f} us wall {cpu / len(packed) * 1e6:8.2f} us CPU an event, "
        f"{hits / len(packed):4.0%} from home's cache, {read / len(packed):,.0f} bytes read"
    )


def run(kind: str, count: int, files: int, root: Path) -> None:
    idents = write_logs(root / "logs", kind, count, files)
    server = serve(root, Settings())
    wall, cpu = timed(lambda: fill(server))
    status = server.status()
    used = psutil.Process().memory_info()
    memory = (used.rss - used.shared) / (1 << 20)  # without the map's pages, which are the system's cache
    print(f"\n{kind}: {count} events in {files} files")
    each = f"{wall / count * 1e6:.2f} us wall {cpu / count * 1e6:.2f} us CPU an event"
    print(f"  fill                 {wall:.2f} s, {each}")
    print(f"  map                  {status['map_bytes'] / count:.0f} bytes an event")
    print(f"  memory               {memory:.0f} MiB, cache {status['cache']['bytes'] >> 20} MiB of it "
          f"({status['cache']['events']} events)")  # fmt: skip
    pack = IdPacker().pack
    # The files are read side by side, so the latest events are at the end of each.
    latest = 50_000 // files
    ends = range(count // files, count + 1, count // files)
    recent = [pack([ident]) for end in ends for ident in idents[end - latest : end]]
    print(f"  cache, batches {BATCH}  {lookups(server, recent, BATCH)}")
    client = EventStoreClient(server.listen, 60.0)
    print(f"  the same by gRPC     {lookups(server, recent, BATCH, client)}")
    client.close()
    server.stop()

    small = parse_settings({"eventstore": {"cache_bytes": 1 << 20}})
    sample = [pack([ident]) for ident in random.Random(4).sample(idents, 20_000)]
    server = serve(root, small)
    fill(server)
    print(f"  logs, batches {BATCH}   {lookups(server, sample[:10_000], BATCH)}")
    print(f"  logs, one by one     {lookups(server, sample[10_000:12_000], 1)}")
    drop_from_page_cache(root / "logs")
    print(f"  cold, batches {BATCH}   {lookups(server, sample[12_000:16_000], BATCH)}")
    drop_from_page_cache(root / "logs")
    print(f"  cold, one by one     {lookups(server, sample[16_000:16_500], 1)}")
    server.stop()


def curve(count: int, root: Path) -> None:
    """What M and W cost and give; 4 servers take turns in one file."""
    print("\n            M     W s    entries  map KiB   bytes a lookup  CPU us in batches  one by one")
    for name, step_us in STEPS_US.items():
        idents = write_logs(root / name / "logs", KINDS[0], count, 1, step_us)
        pack = IdPacker().pack
        sample = [pack([ident]) for ident in random.Random(4).sample(idents, 9000)]
        for interval_bytes, interval_s in itertools.product(INTERVALS_BYTES, INTERVALS_S):
            document = {
                "cache_bytes": 1 << 20,
                "map_interval_bytes": interval_bytes,
                "map_interval_s": interval_s,
            }
            server = serve(root / name, parse_settings({"eventstore": document}))
            fill(server)
            entries = server.status()["map_entries"]["sparse"]
            batches, _ = lookup_costs(server, sample[:8192], BATCH)
            one_by_one, read = lookup_costs(server, sample[8192:], 1)
            server.stop()
            # Not the file: LMDB grows it in steps and reuses what it has freed.
            size = entries * ENTRY_BYTES / 1024
            print(
                f"{name:5} {interval_bytes >> 10:4} KiB {interval_s:7.0f} {entries:10,} {size:8,.0f} "
                f"{read:16,.0f} {batches:14.1f} {one_by_one:14.1f}",
                flush=True,
            )
            shutil.rmtree(root / name / "eventstore")


def lookup_costs(server: EventStoreServer, packed: list[bytes], batch: int) -> tuple[float, float]:
    """us of CPU, and bytes read, an event."""
    before = server.status()["logs"]["bytes_read"]

    def work() -> None:
        for start in range(0, len(packed), batch):
            outcomes, _ = server.lookup(b"".join(packed[start : start + batch]))
            assert outcomes.count(Found.FOUND) == len(outcomes)

    _, cpu = timed(work)
    read = server.status()["logs"]["bytes_read"] - before
    return cpu / len(packed) * 1e6, read / len(packed)


def shares(count: int, root: Path) -> None:
    """One home process here and cache processes beside it; what is asked for is in their caches."""
    idents = write_logs(root / "logs", KINDS[0], count, 4)
    server = serve(root, Settings())
    server.start()
    client = EventStoreClient(server.listen, 60.0)
    children: list[subprocess.Popen[bytes]] = []
    pack = IdPacker().pack
    packed = [pack([ident]) for ident in idents]
    print(f"\n{KINDS[0]}: {count} events, by gRPC")
    try:
        while not server.status()["caught_up"]:
            time.sleep(0.01)
        for processes in (1, 2, 3):
            while len(server.status()["members"]) < processes - 1:
                if len(children) < processes - 1:
                    children.append(subprocess.Popen([sys.executable, "-c", CACHE_PROCESS, server.listen]))
                time.sleep(0.1)
            for _ in range(2):  # the owners' caches fill by the lookups that miss
                for start in range(0, count, 4096):
                    client.lookup(b"".join(packed[start : start + 4096]))
                while server.status()["fill"]["waiting_bytes"]:
                    time.sleep(0.01)
            for batch in (1, 64, BATCH):
                part = packed[: 500 * batch] if batch < BATCH else packed
                print(f"  {processes} processes, batches {batch:4}  {lookups(server, part, batch, client)}")
            print(f"    fill {server.status()['fill']}")
    finally:
        for child in children:
            child.kill()
            child.wait()
        client.close()
        server.stop()


def dense(count: int, root: Path) -> None:
    """Opaque ids into the map, as a reader that catches up does: 160,000 a transaction."""
    group = 160_000
    held = LogFileMap(root / "map", Settings().eventstore)
    dice = np.random.default_rng(5)
    print("\n       ids   us an id written  slowest write s   us an id found   us an id not there  MiB")
    sample = []
    began, slowest, told = time.perf_counter(), 0.0, 0
    for start in range(0, count, group):
        ids = opaque_ids(dice, group)
        sample.append(ids[: 16 * 200])
        places = np.arange(start, start + group)
        rows = Rows(ids, np.zeros(group, np.int64), places * 190, np.full(group, 190))
        before = time.perf_counter()
        held.write(rows, [FileState(0, "/0", "/0", 1, 1)], Counts(start + group))
        slowest = max(slowest, time.perf_counter() - before)
        if start + group - told >= count // 8:
            each = (time.perf_counter() - began) / (start + group - told) * 1e6
            told = start + group
            known = split_ids(b"".join(sample))
            found = time_look_ups(held, known)
            absent = time_look_ups(held, split_ids(opaque_ids(dice, 8192)))
            print(
                f"{told:10,} {each:14.2f} {slowest:14.2f} {found:16.2f} "
                f"{absent:16.2f} {held.disk_bytes >> 20:10,}",
                flush=True,
            )
            began, slowest = time.perf_counter(), 0.0
    held.close()


def time_look_ups(held: LogFileMap, ids: Sequence[bytes]) -> float:
    """us an id, in batches."""
    began = time.perf_counter()
    for start in range(0, 8192, BATCH):
        held.look_up(ids[start : start + BATCH])
    return (time.perf_counter() - began) / 8192 * 1e6


def opaque_ids(dice: np.random.Generator, count: int) -> bytes:
    column = np.frombuffer(bytearray(dice.bytes(16 * count)), np.uint8).reshape(-1, 16)
    column[:, 0] = column[:, 0] & 0x0F | 0xE0
    return column.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=None, help="where to write, on the disk to measure")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--curve", action="store_true", help="what M and W cost")
    parser.add_argument("--shares", action="store_true", help="one, two, three processes")
    parser.add_argument("--dense", action="store_true", help="the dense map as it grows")
    options = parser.parse_args()
    print(machine())
    works: list[Callable[[Path], None]] = [
        functools.partial(run, kind, options.events, options.files) for kind in options.kind or KINDS
    ]
    if options.curve:
        works = [functools.partial(curve, options.events)]
    elif options.shares:
        works = [functools.partial(shares, options.events)]
    elif options.dense:
        works = [functools.partial(dense, options.events)]
    for work in works:
        root = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            work(root)
        finally:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
