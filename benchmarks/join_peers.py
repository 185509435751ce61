"""`photon bench join --peers`: what users would take instead, on the same logs in the same run.

The peers are those of benchmarks.peers. What they wrote is compared with the truth as ours is, and what they
lost is counted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.measuring import ROOT, Row, Usage
from benchmarks.peer_runs import PEER_S_MAX, Peer, chosen, interpreters, missing, run_peer
from joiner.joined_lines import blocks_of
from photon.dev.pairs import pairs_sha256

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
    logs: Path, out: Path, runs: int, names: str, pythons: Sequence[str], tell: Callable[[str], object]
) -> list[Row]:
    """A row for each peer: seconds from files to files, start included, and what it lost; its best run.

    `names`, `pythons`: as benchmarks.peer_runs takes them. UsageError.
    """
    pythons_of = interpreters(pythons, PEERS)
    rows = []
    for name, peer in chosen(names, PEERS).items():
        tell(peer.what)
        python = pythons_of[name]
        if why := missing(peer, python):
            rows.append({"engine": peer.what, "remark": why})
            continue
        done = [_run(name, python, logs, out) for _ in range(runs)]
        rows.append(min(done, key=lambda row: float(row.get("seconds", PEER_S_MAX))))
    return rows


def _run(name: str, python: str, logs: Path, out: Path, root: Path = ROOT) -> Row:
    what = PEERS[name].what
    run = run_peer("benchmarks.peers", name, python, logs, out, root=root)
    if run.status != 0:
        return {"engine": what, "remark": f"ended with status {run.status}; see {out / 'log'}"}
    truth = json.loads((logs / "truth.json").read_bytes())
    wrote = what_it_wrote(out / "joined", truth)
    return figures(what, run.seconds, run.usage, truth["distinct_joined_pairs"] - wrote["lost"]) | wrote


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
