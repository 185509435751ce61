"""What a run of `photon dev` came to, and what must hold: read from its files, not asked of the processes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from photon.cluster.ledgers import known_to, ledger_of
from photon.cluster.run import joined_lines
from photon.cluster.statuses import fates_of, percentiles_ms, run_summary
from photon.cluster.topology import Topology
from photon.core.disk import lines_in
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.dev.plan import fed_datacenters, logs_of
from spark.verification.rules import MEANINGS, Verdict
from spark.verification.verify import HERE_BYTES_MAX, Question, engine_for, verify

_RATE_S_MIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` None: it could not be done, or not to its end; `text` says why."""

    ok: bool | None
    text: str


@dataclass(slots=True)
class Course:
    """How a run went, as far as no file tells."""

    seconds: float = 0.0
    """From when all was up to the end of the feed."""
    restarts: int = 0
    killed: Sequence[str] = ()
    """Datacenters that are kept down."""
    cut_short: bool = False
    """Somebody did not want to wait until what was written has its fate."""
    has_quorum: bool = True
    """The registry, when it was last looked at."""
    seen: Mapping[str, int | None] = field(default_factory=dict)
    """Datacenter -> events that were recorded or in hand at the end, where it is not kept down."""
    feeder_failed: str = ""
    """Why the generator ended as it should not have, if it did."""


def counts_add_up(ledgers: Mapping[str, Mapping[str, Any]], seen: Mapping[str, int | None]) -> Check:
    """Every event read has one fate (design invariant 3), or what was in hand at the end has none yet.

    Of each datacenter: its ledger as in dispatcher.workers, and the events that were recorded or in hand when
    it was last seen, where somebody looked.
    """
    wrong = [name for name, ledger in ledgers.items() if not fates_of(ledger)["adds_up"]]
    if wrong:
        return Check(False, f"the fates of {', '.join(wrong)} do not add up to the events read")
    read = {name: ledger["foreign_events"] for name, ledger in ledgers.items()}
    in_hand = {name: more for name in read if (more := (seen.get(name) or 0) - read[name]) > 0}
    if in_hand:
        return Check(
            None,
            f"{sum(in_hand.values()):,} events were in hand and not decided ({_told(in_hand)}); "
            "the same command goes on with them",
        )
    return Check(True, f"every event read has one fate ({_told(read)})")


def lines_are_there(ledgers: Mapping[str, Mapping[str, Any]], lines: int) -> Check:
    """What the dispatchers were told is joined stands in the output, by number: their ledgers hold no ids."""
    told = sum(ledger["fates"][Fate.JOINED.value] for ledger in ledgers.values())
    if told > lines:
        return Check(False, f"{told - lines:,} events are told to be joined and are not in the output")
    return Check(True, f"all that is told to be joined is in the output ({lines:,} lines)")


def logs_are_joined(topology: Topology, work: Path, complete: bool, why: str = "") -> Check:
    """What `photon verify` says of the logs and the output. The registry, which has ended, is not asked.

    `complete`: everything that was logged was to have its fate; `why` not, if there is more to say of it.
    """
    foreign, primary = (
        tuple(dict.fromkeys(text for p in topology.pipelines for text in topology.patterns_of(p, side)))
        for side in ("foreign", "primary")
    )
    question = Question(foreign, (topology.output,), primary, complete=complete)
    try:
        if question.log_bytes() > HERE_BYTES_MAX:
            return Check(None, "the logs are too large to be verified here; `photon verify` can")
        with engine_for(question, None) as engine:
            report = verify(engine, known_to(question, topology, work), topology.settings)
    except UsageError as error:  # there are no logs yet
        return Check(None, f"nothing to verify: {error}")
    counts = report.counts
    wrong = report.broken + ([Verdict.PENDING_JOINABLE] if complete and counts["pending_joinable"] else [])
    if wrong:
        found = [f"{counts[name]:,} {MEANINGS[name]}" for name in wrong]
        return Check(False, "; ".join([*found, *(f"such as {one!r}" for one in report.examples.values())]))
    joined = f"{counts['joined']:,} events are joined, each once and with the event it names"
    left = counts["pending"] + counts["pending_joinable"]
    if left and not complete:
        return Check(None, f"{joined}; {left:,} have no fate yet{why}")
    return Check(True, f"{joined}" + (f"; {left:,} wait for events that are in no log" if left else ""))


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def count_lines(directory: Path) -> int:
    """Lines of all logs in it."""
    return sum(map(lines_in, directory.glob("*.jsonl")))


def summary_of(topology: Topology, work: Path, joined_before: int, course: Course) -> dict[str, Any]:
    """Of the work directory as a whole, like that of `photon join`; and whether all is as it must be."""
    fed = fed_datacenters(topology, work)
    ledgers = {p.datacenter: ledger_of(topology, p) for p in topology.pipelines}
    lines = joined_lines(Path(topology.output))
    joined = sum(lines.values())
    complete = len(fed) == len(ledgers) and not course.cut_short and not course.killed and course.has_quorum
    why = "" if course.has_quorum else ": the registry had no quorum; the same command goes on with them"
    checks = [
        counts_add_up(ledgers, course.seen),
        lines_are_there(ledgers, joined),
        logs_are_joined(topology, work, complete, why),
    ]
    if course.feeder_failed:
        checks.append(Check(False, course.feeder_failed))
    return {
        **run_summary(list(ledgers.values()), (), joined, joined_before, course.seconds),
        "datacenters": {
            name: {
                "joined": lines.get(name, 0),
                "foreign_events": ledger["foreign_events"],
                "written": count_lines(logs_of(work, name) / "clicks") if name in fed else None,
                "fates": fates_of(ledger)["fates"],
                "wasted_joins": ledger["wasted_joins"],
                "latency_ms": percentiles_ms([ledger["latency_us"]]),
            }
            for name, ledger in ledgers.items()
        },
        "killed": list(course.killed),
        "restarts": course.restarts,
        "checks": [asdict(check) for check in checks],
        "ok": all(check.ok is not False for check in checks),
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
