"""`photon bench join --rooms`: what an event costs in each room, of two datacenters that read the same logs.

What a system of another size needs follows from these by multiplication (docs/scaling.md). Syncs are counted
by strace and bytes sent by ss; where these are not installed, the columns are left out.
"""

import json
import re
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.join import Plan, check, generated, output_bytes, photon_join
from benchmarks.measuring import BenchError, Row, cpu_seconds, fresh, machine_now

DATACENTERS: Final = 2
_STILL_S: Final = 3.0
_SECONDS_MAX: Final = 900.0
_SENT: Final = re.compile(r"pid=(\d+),.*?\bbytes_sent:(\d+)")
_SYNC: Final = re.compile(r"^(\d+) +f(?:data)?sync\(", re.MULTILINE)


def rooms(plan: Plan) -> list[Row]:
    """A row a room, its processes together, over the logs of catch-up. BenchError for a wrong output.

    `events`: what the columns are divided by: primary events that event stores read, foreign events that
    dispatchers read, lines that joiners wrote, ids that each replica registered.
    """
    logs, out = generated(plan.directory, plan.queries, plan.clicks), fresh(plan.directory / "rooms")
    traced = plan.directory / "rooms-syncs"
    traced.write_bytes(b"")
    options = ["-f", "--seccomp-bpf", "-qq", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o"]
    under = ["strace", *options, str(traced)] if shutil.which("strace") else []
    with photon_join(logs, out, "--follow", "--datacenters", str(DATACENTERS), under=under) as command:
        _wait_until_still(out, command)
        of_room = _processes(command.pid)
        sent, synced = _sent(), _SYNC.findall(traced.read_text())
        costs = {room: _costs(pids, sent, synced) for room, pids in of_room.items()}
        ours = psutil.Process(command.pid)
        (ours.children()[0] if under else ours).terminate()
        command.communicate()
    truth = json.loads((logs / "truth.json").read_bytes())
    pairs = check(out / "joined", truth["distinct_joined_pairs"], truth["joined_pairs_sha256"])
    events = {
        "eventstore": DATACENTERS * truth["primary_rows"],
        "dispatcher": DATACENTERS * truth["foreign_rows"],
        "joiner": pairs,
        "registry": pairs * len(of_room["registry"]),
    }
    return [
        {"room": room, "processes": len(of_room[room]), "events": count}
        | {key: round(value / (1 if key.endswith("mib") else count), 4) for key, value in costs[room].items()}
        for room, count in events.items()
    ]


def run(plan: Plan, tell: Callable[[str], object]) -> dict[str, Any]:
    """The machine and the rooms. BenchError."""
    tell("rooms")
    return {"machine": machine_now(), "rooms": rooms(plan)}


def _wait_until_still(out: Path, command: "subprocess.Popen[bytes]") -> None:
    """Until the joined logs have grown no more for a while. BenchError."""
    deadline, size, since = time.monotonic() + _SECONDS_MAX, 0, time.monotonic()
    while not size or time.monotonic() - since < _STILL_S:
        if command.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"photon join ended, or did not within {_SECONDS_MAX:.0f} s")
        time.sleep(0.2)
        if (now := output_bytes(out)) != size:
            size, since = now, time.monotonic()


def _processes(root: int) -> dict[str, list[int]]:
    """Room -> pids: `photon joiner serve ...`."""
    found: dict[str, list[int]] = defaultdict(list)
    for process in psutil.Process(root).children(recursive=True):
        match process.cmdline():
            case ["photon", room, "serve", *_]:
                found[room].append(process.pid)
    return found


def _costs(pids: Sequence[int], sent: Mapping[int, int], synced: Sequence[str]) -> dict[str, float]:
    """Since their start: CPU, bytes sent and written, synced writes; memory of their own, now."""
    threads = {str(thread.id) for pid in pids for thread in psutil.Process(pid).threads()}
    costs: dict[str, float] = {"cpu_us_an_event": cpu_seconds(pids) * 1e6}
    if sent:
        costs["bytes_sent_an_event"] = sum(sent.get(pid, 0) for pid in pids)
    if synced:
        costs["syncs_an_event"] = sum(thread in threads for thread in synced)
    costs["bytes_written_an_event"] = sum(psutil.Process(pid).io_counters().write_bytes for pid in pids)
    costs["memory_mib"] = sum(psutil.Process(pid).memory_full_info().uss for pid in pids) / 2**20
    return costs


def _sent() -> Counter[int]:
    """Pid -> bytes sent over the TCP connections that it has now."""
    sent = Counter[int]()
    if shutil.which("ss"):
        told = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout
        for pid, count in _SENT.findall(told):
            sent[int(pid)] += int(count)
    return sent
