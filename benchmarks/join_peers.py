"""`photon bench join --peers`: what users would take instead, on the same logs in the same run.

Each peer of benchmarks.peers is a process of its own, run by an interpreter that has it. What it wrote is
compared with the truth as ours is, and what it lost is counted.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measuring import ROOT, ProcessTree, Row, Usage, fresh
from joiner.joined_lines import blocks_of
from photon.core.errors import UsageError
from photon.dev.pairs import pairs_sha256

PEER_S_MAX: Final = 900.0


@dataclass(frozen=True, slots=True)
class Peer:
    """`needs`: what its interpreter must be able to import."""

    needs: str
    what: str
    java: bool = False


PEERS: Final = {
    "spark": Peer("pyspark", "Spark Structured Streaming, checkpoint, 25 h range", java=True),
    "pathway": Peer("pathway", "Pathway, no persistence"),
    "duckdb": Peer("duckdb", "DuckDB, one batch join (the floor)"),
}


class _Pair(msgspec.Struct, gc=False):
    click_id: str
    primary_id: str
    query_id: str


_LINE: Final = msgspec.json.Decoder(_Pair)


def beside_us(
    logs: Path, out: Path, runs: int, pythons: Sequence[str], tell: Callable[[str], object]
) -> list[Row]:
    """A row for each peer: seconds from files to files, start included, and what it lost; its best run.

    `pythons`: NAME=PATH, the interpreter of a peer. UsageError for one that is none.
    """
    interpreters = _interpreters(pythons)
    rows = []
    for name, peer in PEERS.items():
        tell(peer.what)
        python = interpreters.get(name, sys.executable)
        if missing := _missing(peer, python):
            rows.append({"engine": peer.what, "remark": missing})
            continue
        done = [_run(name, python, logs, out) for _ in range(runs)]
        rows.append(min(done, key=lambda row: float(row.get("seconds", PEER_S_MAX))))
    return rows


def _interpreters(pythons: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in pythons:
        name, equals, path = text.partition("=")
        if not equals or name not in PEERS or not shutil.which(path):
            raise UsageError(
                f"--peer-python {text}: give NAME=PATH, a name of {', '.join(PEERS)} and a Python's path"
            )
        found[name] = path
    return found


def _missing(peer: Peer, python: str) -> str:
    """Why this peer can't run; empty if it can."""
    if peer.java and not shutil.which("java"):
        return "no Java on PATH"
    found = subprocess.run([python, "-c", f"import {peer.needs}"], check=False, capture_output=True)
    return f"{python} has no {peer.needs}" if found.returncode else ""


def _run(name: str, python: str, logs: Path, out: Path, root: Path = ROOT) -> Row:
    peer = PEERS[name]
    fresh(out)
    arguments = [python, "-m", "benchmarks.peers", name, str(logs.absolute())]
    with (out / "log").open("wb") as log:
        began = time.monotonic()
        process = subprocess.Popen([*arguments, str(out.absolute())], cwd=root, stdout=log, stderr=log)
        tree = ProcessTree(process.pid)
        try:
            process.wait(PEER_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        usage = tree.stop()
    if process.returncode != 0:
        return {"engine": peer.what, "remark": f"ended with status {process.returncode}; see {out / 'log'}"}
    truth = json.loads((logs / "truth.json").read_bytes())
    wrote = what_it_wrote(out / "joined", truth)
    return figures(peer.what, seconds, usage, truth["distinct_joined_pairs"] - wrote["lost"]) | wrote


def figures(engine: str, seconds: float, usage: Usage, joined: int) -> Row:
    return {
        "engine": engine,
        "seconds": round(seconds, 2),
        "clicks_per_s": round(joined / seconds),
        "cpu_s": round(usage.cpu_s, 1),
        "peak_mib": usage.peak_mib,
    }


def what_it_wrote(joined: Path, truth: Mapping[str, Any]) -> Row:
    """Lost, repeated and wrong, of all .json and .jsonl files below.

    msgspec.DecodeError for a line that is no joined click.
    """
    lines = mismatched = 0
    pairs: set[bytes] = set()
    for path in sorted(joined.rglob("*.json*")):
        if path.name.startswith((".", "_")) or path.is_dir():
            continue
        for _, block in blocks_of(path):
            events: list[Any] = _LINE.decode_lines(block)
            lines += len(events)
            mismatched += sum(event.primary_id != event.query_id for event in events)
            pairs.update(f"{event.primary_id}\t{event.click_id}\n".encode() for event in events)
    lost = truth["distinct_joined_pairs"] - len(pairs)
    wrong = [f"{mismatched:,} with another query"] if mismatched else []
    if not lost and pairs_sha256(pairs) != truth["joined_pairs_sha256"]:
        wrong.append("not the true pairs")
    return {"lost": lost, "repeated": lines - len(pairs), "remark": "; ".join(wrong)}
