"""What the event store costs: filling, lookups by tier, bytes of map and memory (paper 3.4).

    python -m benchmarks.eventstore [EVENTS] [--files N] [--directory DIR]

Photon ids (of 4 servers, and of 64 interleaved in each file) and opaque ids. All in one process.
"""

import argparse
import os
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from eventstore.client import EventStoreClient
from eventstore.server import EventStoreServer
from photon.core.clock import SystemClock
from photon.core.fates import Found
from photon.core.ids import IdPacker
from photon.core.settings import Settings, parse_settings

BATCH = 1024
KINDS = ("photon, 4 servers", "photon, 64 servers", "opaque")


def machine() -> str:
    memory = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def events(kind: str, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    servers = 64 if "64" in kind else 4
    at = 1_700_000_000_000_000
    for number in range(count):
        at += rng.randrange(1, 100)
        if kind == "opaque":
            ident = f"{rng.getrandbits(64):016x}"
        else:
            server = rng.randrange(servers)
            ident = f"10.0.0.{server // 4}:{4000 + server % 4}:{at}"
        yield ident, f'{{"id":"{ident}","ts_us":{at},"payload":{{"q":"{"x" * 110}","user":{number}}}}}\n'


def write_logs(directory: Path, kind: str, count: int, files: int) -> list[str]:
    """The logs, one after the other in time; the ids in them."""
    directory.mkdir(parents=True)
    idents = []
    rows = events(kind, count, random.Random(3))
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


def lookups(server: EventStoreServer, packed: list[bytes], batch: int, through_grpc: bool) -> str:
    client = EventStoreClient(server.listen, 60.0)
    look_up = client.lookup if through_grpc else server.lookup
    before = server.status()

    def work() -> None:
        for start in range(0, len(packed), batch):
            outcomes, _ = look_up(b"".join(packed[start : start + batch]))
            assert outcomes.count(Found.FOUND) == len(outcomes)

    wall, cpu = timed(work)
    client.close()
    after = server.status()
    hits = after["cache"]["hits"] - before["cache"]["hits"]
    return (
        f"{wall / len(packed) * 1e6:8.2f} us wall {cpu / len(packed) * 1e6:8.2f} us CPU an event, "
        f"{hits / len(packed):4.0%} from the cache"
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
    print(f"  cache, batches {BATCH}  {lookups(server, recent, BATCH, False)}")
    print(f"  the same by gRPC     {lookups(server, recent, BATCH, True)}")
    server.stop()

    small = parse_settings({"eventstore": {"cache_bytes": 1 << 20}})
    sample = [pack([ident]) for ident in random.Random(4).sample(idents, 20_000)]
    server = serve(root, small)
    fill(server)
    print(f"  logs, batches {BATCH}   {lookups(server, sample[:10_000], BATCH, False)}")
    print(f"  logs, one by one     {lookups(server, sample[10_000:12_000], 1, False)}")
    drop_from_page_cache(root / "logs")
    print(f"  cold, batches {BATCH}   {lookups(server, sample[12_000:16_000], BATCH, False)}")
    drop_from_page_cache(root / "logs")
    print(f"  cold, one by one     {lookups(server, sample[16_000:16_500], 1, False)}")
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=None, help="where to write, on the disk to measure")
    parser.add_argument("--kind", choices=KINDS, action="append")
    options = parser.parse_args()
    print(machine())
    for kind in options.kind or KINDS:
        root = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            run(kind, options.events, options.files, root)
        finally:
            shutil.rmtree(root)


if __name__ == "__main__":
    main()
