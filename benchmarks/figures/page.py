"""docs/results.md: the paper's claims, what was measured here, and the figures. Pure."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.figures.drawing import p90_ms, series, wasted_percent
from benchmarks.figures.system import ARRIVAL_S, WASTED_RUNS

_WIDTH: Final = 115
_SETTLED_S: Final = 5.0
"""After a kill: who was with the dead one's replica looks for another."""


def page(data: Mapping[str, Any]) -> str:
    """The whole page, of the parts that `data` has."""
    machine = data["machine"]
    written = [
        "# The paper's figures, and ours",
        _text(
            "`make results` measures everything on this page anew, draws it and writes the page.",
            "The system is real: two pipelines and five registry replicas in three regions as in section 4 of",
            "the paper, a process a role, and a toxiproxy in every link between datacenters, which adds 100 ms",
            "to a round trip between regions; for the last two figures, which are the registry's alone, three",
            f"replicas of it. All of it runs on one machine with {machine['cores']} cores",
            f"({machine['processor']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python",
            f"{machine['python']}). The paper's figures are of Google's production, mostly without a scale:",
            "what is compared is what they claim. The numbers are in [results/data.json](results/data.json).",
        ),
    ]
    for name, writer in _PARTS.items():
        if name in data:
            written += writer(data[name])
    return "\n\n".join(written) + "\n"


def _outage(outage: Mapping[str, Any]) -> list[str]:
    rows, down, report = outage["rows"], outage["down"], outage["report"]
    down_at, up_at = outage["down_at_s"], outage["up_at_s"]
    well = [row for row in rows if row["at_s"] < down_at]
    during = [row for row in rows if down_at + _SETTLED_S < row["at_s"] < up_at]
    after = [row for row in rows if up_at < row["at_s"]]
    east, west = (_mean(series(well, name, "joined_per_s")[1]) for name in ("east", "west"))
    alone = _mean(series(during, "west", "joined_per_s")[1])
    cache, logs = (_mean(series(well, "west", f"{tier}_hits_per_s")[1]) for tier in ("cache", "logs"))
    hit_percent = 100.0 * cache / (cache + logs) if cache + logs else float("nan")
    read = _highest(series(after, down, "read_per_s")[1])
    best = [row["datacenters"][down] for row in after if _reads(row, down) == read]
    skipped = 100.0 * _mean([row["skipped_per_s"] for row in best]) / read
    worst_ms = _highest(p90_ms([row for row in rows if down_at < row["at_s"]], "west")[1])
    return [
        "## Through an outage (Figs. 7, 8, 9, 13)",
        _text(
            f"{outage['seconds']:.0f} s of logs. After {down_at:.0f} s every process of `{down}` is killed, its",
            f"registry replica too; {up_at - down_at:.0f} s later they start again on what is on their disks.",
            "Nobody does anything by hand.",
        ),
        _table(
            (
                "Fig. 7: p90 from event to joined event",
                "below 7 s (from the event's time)",
                f"{_mean(p90_ms(well)[1]):,.0f} ms before, {worst_ms:,.0f} ms at worst in the other datacenter "
                "(from the line's reading)",
            ),
            (
                "Fig. 8: lookups found in the cache",
                "most",
                f"{hit_percent:.1f} %, where the cache has 1 MiB and clicks come up to 20 s late",
            ),
            (
                "Fig. 9: joined a second",
                "half by each; all by the other in a disaster",
                f"{east:.0f} and {west:.0f}; `west` alone {alone:.0f}",
            ),
            (
                "Fig. 13: the dispatcher that comes back",
                "skips what the IdRegistry knows",
                f"reads up to {read:,.0f} events a second; {skipped:.0f} % of them are known, and not sent",
            ),
            (
                "events joined twice; lost",
                "none; few",
                f"{report['duplicates']}; {report['lost']} (of {report['events_in']:,} read)",
            ),
            ("longest time without a joined line", "", f"{report['longest_stall_s']:.1f} s"),
        ),
        "![p90](results/fig07.svg)\n![lookups](results/fig08.svg)\n![joined](results/fig09.svg)\n"
        "![catching up](results/fig13.svg)",
    ]


_TOLD: Final = {
    True: ("the dispatcher asks the IdRegistry before it sends", "below 5 %"),
    False: ("it does not (`lookup_before_send = false`)", ""),
}


def _wasted(wasted: Mapping[str, Any]) -> list[str]:
    percent = {name: _mean(wasted_percent(run["rows"])[1]) for name, run in wasted["runs"].items()}
    return [
        "## Wasted joins (Fig. 12)",
        _text(
            "Both datacenters read all events. A join is wasted where the other one had registered the event first;",
            "the shares are of the events that are joined.",
            "It can't be helped where the two read the event within the time that one's commit takes to the",
            "shard's leader and from there to the other's replica, some 130 ms here (each region is 50 ms from",
            "the next). So it depends on how far apart an event reaches the two: here the copies of the logs are",
            f"late by up to {ARRIVAL_S:g} s, or {5 * ARRIVAL_S:g} s, each by itself.",
        ),
        _table(
            *(
                (f"{told}; copies up to {late:g} s late", paper if lookup else "", f"{percent[name]:.1f} %")
                for name, (lookup, late) in WASTED_RUNS.items()
                for told, paper in [_TOLD[lookup]]
            )
        ),
        "![wasted joins](results/fig12.svg)",
    ]


def _batching(batching: Mapping[str, Any]) -> list[str]:
    low, high = batching["ids_a_request"]
    lines = []
    for name, rows in batching["series"].items():
        mean = {key: _mean([row[key] for row in rows]) for key in rows[0]}
        lines.append(
            (
                f"{name}: requests; Raft commits a second",
                "hundreds; 6 to 12" if name == "one at a time" else "",
                f"{mean['requests_per_s']:.0f}; {mean['commits_per_s']:.1f}, "
                f"each of {mean['ids_a_commit']:.0f} ids; p50 {mean['p50_ms']:.0f} ms",
            )
        )
    return [
        "## Server-side batching (Fig. 10)",
        _text(
            f"One shard, three replicas, {batching['round_trip_ms']:.0f} ms between them (a delaying proxy of the",
            "benchmark's own). Clients ask for",
            f"{batching['requests_per_s']:.0f} commits a second, of {low} to {high} ids. *One at a time* is the",
            "paper's way (`registry.batches_in_flight_max = 1`): what arrives while a commit is under way makes",
            "the next one. *Pipelined* is the default: the next begin before a majority has answered.",
        ),
        _table(*lines),
        "![batching](results/fig10.svg)",
    ]


def _upsharding(sharding: Mapping[str, Any]) -> list[str]:
    rows = sharding["rows"]
    before = max(row["ids"][0] for row in rows if row["at_h"] <= sharding["resharded_at_h"])
    last = ", ".join(f"{ids:,}" for ids in rows[-1]["ids"])
    return [
        "## Time-based upsharding (Fig. 11)",
        _text(
            f"{sharding['ids_per_h']:,} ids an hour of event time, remembered for {sharding['retention_h']} h;",
            "then `photon reshard 3` where there was one shard. The replicas' clocks run an hour a second, and no",
            "link is delayed; all else is real.",
        ),
        _table(
            ("size of shard 0 before", "1.6 GB", f"{before:,} ids"),
            ("of each of three, the retention time later", "500 MB", f"{last} ids"),
        ),
        "![upsharding](results/fig11.svg)",
    ]


_PARTS: Final = {"outage": _outage, "wasted": _wasted, "batching": _batching, "upsharding": _upsharding}


def _text(*lines: str) -> str:
    return textwrap.fill(" ".join(lines), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(*rows: tuple[str, str, str]) -> str:
    return "\n".join(["| | paper | here |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def _reads(row: Mapping[str, Any], datacenter: str) -> float | None:
    found: float | None = row["datacenters"].get(datacenter, {}).get("read_per_s")
    return found


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else float("nan")


def _highest(values: Sequence[float]) -> float:
    return max(_known(values), default=float("nan"))
