"""The parts of an event store over real files, driven step by step."""

import os
import subprocess
import sys
import time
from pathlib import Path

from eventstore.cache import CacheEventStore
from eventstore.log_file_map import LogFileMap
from eventstore.lookup import EventLookup, LogsEventStore
from eventstore.read_on import ReadOn
from eventstore.reader import Reader
from eventstore.server import EventStoreServer
from photon.core.clock import SystemClock
from photon.core.ids import IdPacker
from photon.core.settings import EventStore, Foreign, Logs, Primary, parse_settings
from photon.core.status import Notices
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines
from photon.logs.writer import RotatingLog

MIB = 1 << 20
PACKER = IdPacker()
LOGS = Logs(scan_interval_s=0.01, poll_interval_ms=1)


def pack(text):
    return PACKER.pack([text])


def line(ident, payload=""):
    return b'{"id":"%s","ts_us":1,"payload":"%s"}' % (ident.encode(), str(payload).encode())


def make_format():
    return JsonLines(Primary(), Foreign(), IdPacker())


def append(path, *lines, end=b"\n"):
    with open(path, "ab") as file:
        file.write(b"\n".join(lines) + end)


def serve(
    root,
    listen="127.0.0.1:0",
    document=None,
    patterns=None,
    drain=False,
    start=True,
    peers=(),
    number=0,
    dispatchers=1,
):
    """An event store on the logs below `root`."""
    server = EventStoreServer(
        parse_settings(document or {"logs": {"scan_interval_s": 0.05}}),
        listen,
        root / (f"eventstore-{number}" if number else "eventstore"),
        [str(pattern) for pattern in patterns or [root / "logs"]],
        root / "dead-letters",
        SystemClock(),
        drain,
        peers=peers,
        dispatchers=dispatchers,
        number=number,
    )
    if start:
        server.start()
    return server


def start_python(code, *arguments):
    """A process of its own, which prints its address first."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def end(child):
    child.kill()
    child.wait()
    child.stdout.close()


class Parts:
    """Reader, cache, map, logs store in one thread: `read_all` reads until caught up."""

    def __init__(
        self,
        root: Path,
        *patterns,
        settings=EventStore(),
        logs_settings=LOGS,
        drain=False,
        cache_bytes=MIB,
        read_on_bytes=0,
        clock=None,
        peers=None,
    ):
        self.root = root
        self.notices = Notices("eventstore")
        self.map = LogFileMap(root / "map", settings)
        self.cache = CacheEventStore(cache_bytes)
        self.dead_letters = RotatingLog(root / "dead-letters", "primary", MIB)
        follower = LogFollower(
            [str(p) for p in patterns or [root / "logs"]],
            root / "spool",
            logs_settings,
            SystemClock(),
            self.map.states(),
            drain,
            self.notices.tell,
            first=self.map.next_number,
        )
        log_format = make_format()
        self.reader = Reader(
            follower,
            self.map,
            self.cache.put_block,
            log_format,
            self.dead_letters,
            logs_settings,
            clock or SystemClock(),
            self.notices,
            peers=peers,
        )
        self.logs = LogsEventStore(self.map, make_format, self.notices.tell)
        self.read_on = ReadOn(self.reader, self.map, make_format(), read_on_bytes, SystemClock())
        self.lookup = EventLookup(
            self.cache, self.logs, self.reader, SystemClock(), self.cache.put_many, self.read_on
        )

    def read_all(self):
        """A whole scan begins after this call, and all that it finds is read."""
        time.sleep(LOGS.scan_interval_s)  # the next step scans
        deadline = time.monotonic() + 60
        while self.reader.step() or not self.reader.caught_up:
            assert time.monotonic() < deadline, "not caught up"
        return self

    def delete(self, log):
        """It is gone at the second scan: whoever writes to it may not know yet."""
        (self.root / "logs" / log).unlink()
        self.read_all().read_all()

    def in_logs(self, *idents):
        return self.logs.get_many([pack(i) for i in idents])[0]

    def letters(self):
        return sorted((self.root / "dead-letters").glob("primary-*.jsonl"))[-1].read_bytes().splitlines()

    def close(self):
        self.reader.stop()
        self.dead_letters.close()
        self.map.close()


def killed_at(step, work):
    """Whether a child that does `work(counted)` is killed before the n-th call of what it has `counted`; else
    it ends when all is done."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(call):
            def before(*arguments, **named):
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return call(*arguments, **named)

            return before

        work(counted)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def settled(held: LogFileMap, timeout_s: float) -> bool:
    """Wait until there is nothing left to merge."""
    with held._changing:
        return held._changing.wait_for(lambda: not held._due, timeout_s)
