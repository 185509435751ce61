"""A client process of a benchmark: `python -m benchmarks.registry_client JSON`, then one load a line.

It prints `true` when it is ready. It keeps `threads` calls under way for a time and answers what it saw. With
`rate` the calls begin at fixed moments, and a latency counts from that moment: a queue that grows shows.
"""

import json
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.registry_cluster import connect
from idregistry.client import RegistryClient
from photon.app.supervisor import die_with_parent
from photon.core.columns import pack_times
from photon.core.errors import PhotonError
from photon.core.fates import Committed
from photon.core.tokens import Token

_KNOWN_BATCHES = 64


@dataclass
class Load:
    """One measurement. Times by the monotonic clock, which all processes of a machine share."""

    call: str
    ids_min: int
    ids_max: int
    threads: int
    begin: float
    end: float
    rate: float | None = None
    """Calls a second of this process, all threads together; None: each thread calls again at once."""
    keep_times: bool = False
    """Answer the moment of each success, too."""


@dataclass
class Seen:
    latencies_ms: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ids: int = 0
    late: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class Caller:
    """The threads' common part."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._slot = 0
        self._incarnation = random.getrandbits(63)
        self._made = 0
        self._committed: deque[tuple[bytes, bytes]] = deque(maxlen=_KNOWN_BATCHES)

    def run(self, load: Load) -> dict[str, Any]:
        seen = [Seen() for _ in range(load.threads)]
        self._slot = 0
        threads = [threading.Thread(target=self._work, args=(load, one)) for one in seen]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, load.begin - time.monotonic()))
        cpu = time.process_time()
        time.sleep(max(0.0, load.end - time.monotonic()))
        cpu = time.process_time() - cpu
        for thread in threads:
            thread.join()
        return {
            "latencies_ms": [round(ms, 3) for one in seen for ms in one.latencies_ms],
            "ends": sorted(at for one in seen for at in one.ends),
            "ids": sum(one.ids for one in seen),
            "failures": dict(sum((one.failures for one in seen), Counter())),
            "cpu_s": cpu,
        }

    def _work(self, load: Load, seen: Seen) -> None:
        rng = random.Random()
        while True:
            start = self._next_start(load)
            if start >= load.end:
                return
            count = rng.randint(load.ids_min, load.ids_max)
            try:
                self._call(load.call, count)
            except PhotonError as error:
                seen.failures[type(error).__name__] += 1
                continue
            done = time.monotonic()
            if load.begin <= done < load.end:
                seen.latencies_ms.append((done - start) * 1e3)
                seen.ids += count
                if load.keep_times:
                    seen.ends.append(done)

    def _next_start(self, load: Load) -> float:
        if load.rate is None:
            return time.monotonic()
        with self._lock:
            slot, self._slot = self._slot, self._slot + 1
        start = load.begin + slot / load.rate
        if start < load.end:
            time.sleep(max(0.0, start - time.monotonic()))
        return start

    def _call(self, call: str, count: int) -> None:
        if call == "lookup":
            self._lookup(count)
            return
        ids = os.urandom(16 * count)
        times = pack_times([time.time_ns() // 1000] * count)
        with self._lock:
            self._made += 1
            token = Token("127.0.0.1:7000", self._incarnation, self._made).pack()
        outcomes = self._client.commit(ids, times, token)
        assert outcomes == bytes([Committed.WON]) * count, "every id is new"
        self._committed.append((ids, times))

    def _lookup(self, count: int) -> None:
        """Every second batch of ids that are registered, where some of this size are known."""
        known = random.random() < 0.5 and len(self._committed) > 0
        if known:
            ids, times = random.choice(self._committed)
            ids, times = ids[: 16 * count], times[: 8 * count]
        else:
            ids, times = os.urandom(16 * count), pack_times([time.time_ns() // 1000] * count)
        self._client.lookup(ids, times)


def main() -> None:
    die_with_parent()
    client = connect(json.loads(sys.argv[1])["addresses"], 15.0)
    caller = Caller(client)
    print("true", flush=True)
    for line in sys.stdin:
        print(json.dumps(caller.run(Load(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
