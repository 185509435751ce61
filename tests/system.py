"""Running the photon command and systems of it as a user does, and reading what they left behind."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PHOTON = [sys.executable, "-m", "photon.cli.main"]


def photon(
    *arguments: object, timeout: float = 100.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHOTON, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd
    )


def start_photon(*arguments: object, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen([*PHOTON, *map(str, arguments)], stdout=subprocess.PIPE, stderr=stderr, text=True)


def join_arguments(logs: Path, out: Path, *more: object) -> list[object]:
    return [
        "join",
        "--primary",
        logs / "queries",
        "--foreign",
        logs / "clicks",
        "--out",
        out,
        "--json",
        *more,
    ]


def join(logs: Path, out: Path, *more: object) -> dict[str, Any]:
    """A `photon join` that must succeed; its summary."""
    done = photon(*join_arguments(logs, out, *more))
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def write_lines(path: Path, events: Iterable[Mapping[str, Any] | bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for event in events:
            file.write(event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")


def read_lines(directory: Path) -> list[dict[str, Any]]:
    if not directory.exists():
        return []
    return [
        json.loads(line)
        for path in sorted(directory.rglob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]


def joined_pairs(out: Path) -> Counter[tuple[str, str]]:
    """(primary id, foreign id) -> times, over the joined logs of all datacenters."""
    return Counter((str(e["primary"]["id"]), str(e["id"])) for e in read_lines(out / "joined"))


def fates_add_up(summary: Mapping[str, Any]) -> bool:
    fates = ("joined", "duplicate", "unjoinable", "filtered", "expired", "malformed", "pending")
    return summary["foreign_events"] == sum(summary[fate] for fate in fates)


def shared_data() -> Path | None:
    """The folder of real data sets, where there is one."""
    candidates = [os.environ.get("PHOTON_SHARED_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    return next((Path(c) for c in candidates if c and Path(c).is_dir()), None)


def children_of(pid: int) -> dict[str, int]:
    """Name (role-name) -> process id of the processes that a `photon join` started."""
    import psutil

    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "serve" in words:
            found[f"{words[words.index('serve') - 1]}-{words[words.index('--name') + 1]}"] = child.pid
    return found
