"""What a run of `photon dev` came to."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from photon.cluster.running import joined_lines, ledger_of
from photon.cluster.summary import percentiles_ms, run_summary
from photon.cluster.topology import Topology
from photon.core.fates import Fate
from photon.dev.checks import Check, Ended, checks_of, count_lines
from photon.dev.plan import fed_datacenters, logs_of

_RATE_S_MIN: Final = 0.05


def summary_of(
    topology: Topology,
    work: Path,
    killed: Sequence[str],
    restarts: int,
    seconds: float,
    joined_before: int,
    waited: bool,
    seen: Mapping[str, int | None],
    feeder_failed: str = "",
) -> dict[str, Any]:
    """Of the work directory as a whole, like that of `photon join`; and whether all is as it must be.

    `waited`, `seen` (datacenter -> events): as in photon.dev.checks. `feeder_failed`: why the generator
    ended as it should not have.
    """
    out = Path(topology.output)
    fed = fed_datacenters(topology, work)
    ended = {
        p.datacenter: Ended(
            ledger_of(topology, p),
            p.datacenter in killed,
            count_lines(logs_of(work, p.datacenter) / "clicks") if p.datacenter in fed else None,
            seen.get(p.datacenter),
        )
        for p in topology.pipelines
    }
    lines = joined_lines(out)
    joined = sum(lines.values())
    logs = {name: logs_of(work, name) for name in fed} if len(fed) == len(ended) else {}
    checks = checks_of(out, topology.settings, ended, joined, logs, waited)
    if feeder_failed:
        checks.append(Check(False, feeder_failed))
    ledgers = [one.ledger for one in ended.values()]
    return {
        **run_summary(ledgers, joined, joined_before, seconds),
        "datacenters": {name: _row(one, lines.get(name, 0)) for name, one in ended.items()},
        "killed": list(killed),
        "restarts": restarts,
        "checks": [asdict(check) for check in checks],
        "ok": all(check.ok is not False for check in checks),
    }


def _row(one: Ended, lines: int) -> dict[str, Any]:
    ledger = one.ledger
    return {
        "joined": lines,
        "foreign_events": ledger["foreign_events"],
        "written": one.written,
        "fates": {**ledger["fates"], Fate.PENDING.value: ledger["pending"]},
        "wasted_joins": ledger["wasted_joins"],
        "latency_ms": percentiles_ms([ledger["latency_us"]]),
    }


def print_dev_summary(summary: Mapping[str, Any]) -> None:
    """The summary as aligned text on stdout."""
    for name, row in summary["datacenters"].items():
        latency = row["latency_ms"]
        shown = "/".join("-" if latency[p] is None else f"{latency[p]:,.0f}" for p in ("p50", "p90", "p99"))
        pending = row["fates"][Fate.PENDING.value]
        wasted = row["wasted_joins"]
        share = wasted / max(1, wasted + row["joined"])
        click.echo(
            f"{name:<10} joined {row['joined']:,} of {row['foreign_events']:,} events read, "
            f"pending {pending:,}, wasted joins {wasted:,} ({share:.1%}), p50/p90/p99 {shown} ms"
        )
    click.echo(
        f"{'together':<10} joined {summary['joined']:,} in {summary['seconds']:,.1f} s "
        f"({_rate(summary)}), restarts {summary['restarts']:,}"
        + (f", killed: {', '.join(summary['killed'])}" if summary["killed"] else "")
    )
    for check in summary["checks"]:
        word = {True: "ok", False: "WRONG", None: "?"}[check["ok"]]
        click.echo(f"{word:<6} {check['text']}")


def _rate(summary: Mapping[str, Any]) -> str:
    """Of a run that was shorter than what is shown of its seconds there is none."""
    return f"{summary['joined_per_s']:,.0f}/s" if summary["seconds"] >= _RATE_S_MIN else "-"
