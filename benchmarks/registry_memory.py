"""What ids cost in a replica's memory, and what stops it while it holds them.

    python benchmarks/registry_memory.py [--ids 10000000] [--quick]

One process, no log, no disk: the state machine alone. Bytes an id are of the process' resident memory (RSS),
over what it had when empty. A pause is the time of one call in the thread that applies, by wall and CPU;
these differ where the machine has other work. While a snapshot is drawn, it is also the longest time in which
a second thread that only counts could not run.
"""

import argparse
import gc
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil

from idregistry.commands import Boundary, Commit, Configure, encode
from idregistry.configuration import BEGINNING, Configuration, Interval
from idregistry.idtable import FREEZE_AFTER_US
from idregistry.state import ShardState
from photon.core.columns import pack_times
from photon.core.tokens import Token

START_US = 1_700_000_000_000_000
HOUR_US = 3_600_000_000
HOURS = 6
COMMIT_IDS = 4_000
SNAPSHOT_IDS = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    arguments = parser.parse_args()
    ids = arguments.ids // (10 if arguments.quick else 1)
    snapshot_ids = min(ids, SNAPSHOT_IDS // (10 if arguments.quick else 1))
    print(machine())
    for batch in (1_000, 10):
        in_new_process(memory_of_recent, min(ids, 3_000_000), batch)
    in_new_process(all_recent, ids)
    in_new_process(tidied_meanwhile, ids)
    in_new_process(expiring, ids)
    for frozen in (False, True):
        in_new_process(snapshot, snapshot_ids, frozen)


def machine() -> str:
    memory = psutil.virtual_memory().total / (1 << 30)
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}"
    )


def in_new_process(work: Callable[..., None], *arguments: Any) -> None:
    """Each figure of memory in a process of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        work(*arguments)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("a measurement failed")


# --- what is measured


def memory_of_recent(ids: int, batch: int) -> None:
    """Ids in dicts, as they are filled."""
    state, before = new_state(), resident()
    worst, checkpoints = 0.0, []
    for number, command in enumerate(commands(ids, batch)):
        state.apply(command)
        if number * batch % 50_000 == 0 and number * batch >= 500_000:
            per_id = (resident() - before) / state.ids
            worst = max(worst, per_id)
            checkpoints.append(per_id)
    print(
        f"\nfilling, batches of {batch}, {ids:,} ids in dicts: RSS an id {checkpoints[-1]:.0f} bytes"
        f" at the end,\n  {min(checkpoints):.0f} at best, {worst:.0f} at worst (target: under 110)"
    )


def all_recent(ids: int) -> None:
    """Never tidied: what a replica does that has no time for it; then frozen."""
    state, before = new_state(), resident()
    print(f"\n{ids:,} ids, batches of {COMMIT_IDS}, nothing frozen meanwhile")
    report("  apply", Pauses().each(state.apply, commands(ids, COMMIT_IDS)), COMMIT_IDS)
    print(f"  RSS an id: {(resident() - before) / ids:.0f} bytes")
    lookups(state, ids, "in dicts")
    steps = freeze_all(state)
    gc.collect()
    print(f"  frozen in {steps.count} steps, {steps.total:.1f} s, {steps}")
    print(
        f"  RSS an id: {(resident() - before) / ids:.0f} bytes (target: under 40), reckoned {reckoned(state)}"
    )
    lookups(state, ids, "in segments")
    report(
        "  commits again, all retries",
        Pauses().each(state.apply, commands(ids // 10, COMMIT_IDS)),
        COMMIT_IDS,
    )


def tidied_meanwhile(ids: int) -> None:
    """A step of tidying between commits, as in the raft thread."""
    state, before = new_state(), resident()
    applied, tidied = Pauses(), Pauses()
    peak = 0.0
    for command in commands(ids, COMMIT_IDS):
        applied.time(state.apply, command)
        tidied.time(state.tidy)
        peak = max(peak, (resident() - before) / max(ids // 4, state.ids))
    print(f"\n{ids:,} ids, batches of {COMMIT_IDS}, a step of tidying after each")
    report("  apply", applied, COMMIT_IDS)
    print(f"  tidy: {tidied.total / ids * 1e6:.2f} us an id, {tidied}")
    print(f"  RSS an id: {(resident() - before) / ids:.0f} bytes at the end, {peak:.0f} at worst")
    print(f"  {reckoned(state)}")
    lookups(state, ids, "mostly in segments")


def expiring(ids: int) -> None:
    """The boundary passes over hour after hour."""
    state, before = new_state(), resident()
    for command in commands(ids, COMMIT_IDS):
        state.apply(command)
        state.tidy()
    steps, raised = Pauses(), Pauses()
    print(f"\n{ids:,} ids in {HOURS} hours expire, hour after hour")
    for hour in range(1, HOURS + 1):
        now_us = START_US + hour * FREEZE_AFTER_US
        raised.time(state.apply, encode(Boundary(now_us, START_US // HOUR_US * HOUR_US + hour * HOUR_US)))
        while steps.time(state.tidy):
            pass
        left = (resident() - before) / (1 << 20)
        print(f"  {state.ids:>10,} ids left, RSS {left:.0f} MiB")
    print(f"  Boundary: {raised}; tidy: {steps}")


def snapshot(ids: int, frozen: bool) -> None:
    """Drawn in another thread, while commits go on in this one."""
    state, empty = new_state(), resident()
    for command in commands(ids, COMMIT_IDS):
        state.apply(command)
    if frozen:
        freeze_all(state)
    before = resident()
    started = time.perf_counter()
    cut = state.freeze()
    stop = time.perf_counter() - started
    drawn: dict[str, float] = {}
    peak = [before]

    def draw() -> None:
        at, size = time.perf_counter(), 0
        for chunk in cut:
            size += len(chunk)
            peak[0] = max(peak[0], resident())
        drawn["seconds"], drawn["bytes"] = time.perf_counter() - at, size

    drawer = threading.Thread(target=draw)
    more = commands(2_000_000, COMMIT_IDS, seed=9)
    drawer.start()
    last, gap = time.perf_counter(), 0.0
    while drawer.is_alive():
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
    drawer.join()
    quiet = drawn["seconds"]
    print(f"\nsnapshot of {ids:,} ids, {'in segments' if frozen else 'in dicts'}")
    print(
        f"  freeze() {stop * 1e3:.2f} ms; drawn in {quiet:.2f} s beside a thread that counts, whose longest"
    )
    print(f"  pause was {gap * 1e3:.1f} ms (target: under 100); {drawn['bytes'] / ids:.0f} bytes an id")
    at_most = (peak[0] - empty) / ids
    print(f"  RSS an id: {(before - empty) / ids:.0f} bytes before, {at_most:.0f} at most meanwhile")
    cut, peak[0] = state.freeze(), 0
    drawer = threading.Thread(target=draw)
    drawer.start()
    applied = Pauses()
    for command in more:
        applied.time(state.apply, command)
        if not drawer.is_alive():
            break
    drawer.join()
    report(f"  commits beside drawing ({drawn['seconds']:.2f} s): apply", applied, COMMIT_IDS)
    chunks = list(state.freeze())
    other = new_state()
    started = time.perf_counter()
    other.restore(chunks)
    print(f"  restored in {time.perf_counter() - started:.2f} s ({other.ids:,} ids)")


def lookups(state: ShardState, ids: int, where: str) -> None:
    """Half of the ids are there."""
    rng = np.random.default_rng(1)
    batches = [rng.bytes(16 * 2_000) + random_ids(0, at) for at in range(0, ids // 4, ids // 400)]
    times = pack_times([START_US] * (len(batches[0]) // 16))
    looked = Pauses().each(lambda batch: state.lookup(batch, times), batches)
    report(f"  lookup {where}", looked, len(batches[0]) // 16)


# --- parts


class Pauses:
    """How long each of many calls took: seconds by the wall and of this thread's CPU."""

    def __init__(self) -> None:
        self.count, self.total, self.worst = 0, 0.0, 0.0
        self.cpu_total, self.cpu_worst = 0.0, 0.0

    def time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started, cpu_started = time.perf_counter(), time.thread_time()
        result = call(*arguments)
        cpu, took = time.thread_time() - cpu_started, time.perf_counter() - started
        self.count, self.total, self.worst = self.count + 1, self.total + took, max(self.worst, took)
        self.cpu_total, self.cpu_worst = self.cpu_total + cpu, max(self.cpu_worst, cpu)
        return result

    def each(self, call: Callable[[Any], Any], items: Iterable[Any]) -> "Pauses":
        for item in items:
            self.time(call, item)
        return self

    def __str__(self) -> str:
        return f"the longest {self.worst * 1e3:.1f} ms ({self.cpu_worst * 1e3:.1f} of CPU)"


def report(what: str, pauses: Pauses, ids: int) -> None:
    each = max(1, pauses.count) * ids / 1e6
    print(f"{what}: {pauses.total / each:.2f} us an id ({pauses.cpu_total / each:.2f} of CPU), {pauses}")


def new_state() -> ShardState:
    state = ShardState(0)
    state.apply(encode(Configure(START_US, Configuration(1, (Interval(BEGINNING, 1),)))))
    gc.collect()
    return state


def random_ids(seed: int, first: int) -> bytes:
    """2,000 ids, alike for the same arguments."""
    return np.random.default_rng((seed, first)).bytes(16 * 2_000)


def commands(ids: int, batch: int, seed: int = 0) -> Iterator[bytes]:
    """Commits of `ids` ids in order of time, over HOURS hours; every one with a token of its own."""
    waiting = b""
    first = 0
    for number in range(ids // batch):
        while len(waiting) < 16 * batch:
            waiting += random_ids(seed, first)
            first += 2_000
        taken, waiting = waiting[: 16 * batch], waiting[16 * batch :]
        time_us = START_US + number * batch * HOURS * HOUR_US // ids
        token = Token("10.20.30.40:4242", 0x1234_5678_9ABC, START_US + number)
        yield encode(Commit(START_US, [token.pack()], [batch], taken, pack_times([time_us] * batch)))


def freeze_all(state: ShardState) -> Pauses:
    """Let leaders' time pass, then tidy."""
    steps = Pauses()
    state.tidy()
    state.apply(encode(Boundary(START_US + 2 * FREEZE_AFTER_US, BEGINNING)))
    while steps.time(state.tidy):
        pass
    return steps


def reckoned(state: ShardState) -> str:
    memory = state.memory()
    ids = memory["recent_ids"] + memory["frozen_ids"]
    each = (memory["recent_bytes"] + memory["frozen_bytes"]) / ids
    return (
        f"{memory['recent_ids']:,} ids in dicts, {memory['frozen_ids']:,} in {memory['segments']} segments, "
        f"{each:.0f} bytes each"
    )


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
