"""What a run of `photon dev` came to, and what must hold: read from its files, not asked of the processes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from photon.cluster.dead_letters import replayed_digests
from photon.cluster.ledgers import ledger_of
from photon.cluster.run import joined_lines
from photon.cluster.statuses import fates_of, percentiles_ms, run_summary
from photon.cluster.topology import Topology
from photon.core.fates import Fate
from photon.core.settings import Settings
from photon.dev.pairs import PairsReport, check_pairs, pairs_sha256
from photon.dev.plan import fed_datacenters, logs_of

LINES_MAX: Final = 1_000_000
"""Pairs of more joined lines or written clicks than these are not compared: each takes half a KiB of memory.
`photon verify` can."""
_READ_BYTES: Final = 4 << 20
_RATE_S_MIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """`ok` None: it could not be done, `text` says why."""

    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a datacenter ended: its ledger as in dispatcher.workers; lines in its copy of the generated logs.

    `written` None: its logs are not the generator's. `seen`: events that were recorded or in hand when it was
    last seen; None where nobody looked.
    """

    ledger: Mapping[str, Any]
    killed: bool
    written: int | None
    seen: int | None = None


class _Query(msgspec.Struct, gc=False):
    id: str


class _Click(msgspec.Struct, gc=False):
    id: str
    primary_id: str


def checks_of(
    out: Path,
    settings: Settings,
    ended: Mapping[str, Ended],
    joined_lines: int,
    logs: Mapping[str, Path],
    waited: bool,
) -> list[Check]:
    """`logs`: datacenter -> its copy of the generated logs, where all is generated, or else nothing.

    `waited`: nobody cut it short that what was written gets its fate.
    """
    found = [counts_add_up(ended), lines_are_there(ended, joined_lines)]
    if logs:
        replayed = [name for name in ended if replayed_digests(out / "dead-letters" / name)]
        found.append(all_is_read(ended, waited, replayed))
    else:
        found.append(registered_are_there(ended, joined_lines))
    lines = max([joined_lines, *(ended[name].written or 0 for name in logs)])
    if lines > LINES_MAX:
        found.append(Check(None, f"{lines:,} lines are too many to compare; `photon verify` can"))
        return found
    if settings.joiner.output_format != "jsonl" or settings.adapter.use or not _is_flat(settings):
        found.append(
            Check(
                None,
                "joined logs in Parquet, of an adapter's own or with nested ids are not compared here; "
                "`photon verify` can",
            )
        )
        return found
    truth = true_pairs(logs.values()) if logs else None
    report = check_pairs(out / "joined", settings, truth)
    found.append(nothing_twice(report))
    if truth is not None:
        found.append(pairs_are_true(report, ended, truth, logs, waited))
    return found


def counts_add_up(ended: Mapping[str, Ended]) -> Check:
    """Every event read has one fate (design invariant 3), or what was in hand at the end has none yet."""
    wrong = [name for name, one in ended.items() if not fates_of(one.ledger)["adds_up"]]
    if wrong:
        return Check(False, f"the fates of {', '.join(wrong)} do not add up to the events read")
    in_hand = {
        name: one.seen - one.ledger["foreign_events"]
        for name, one in ended.items()
        if one.seen is not None and one.seen > one.ledger["foreign_events"]
    }
    if in_hand:
        return Check(
            None,
            f"{sum(in_hand.values()):,} events were in hand and not decided "
            f"({', '.join(f'{name} {count:,}' for name, count in in_hand.items())}); "
            "the same command goes on with them",
        )
    read = ", ".join(f"{name} {one.ledger['foreign_events']:,}" for name, one in ended.items())
    return Check(True, f"every event read has one fate ({read})")


def lines_are_there(ended: Mapping[str, Ended], joined_lines: int) -> Check:
    """What the dispatchers were told is joined stands in the output, by number: their ledgers hold no ids."""
    told = sum(one.ledger["fates"][Fate.JOINED.value] for one in ended.values())
    if told > joined_lines:
        return Check(False, f"{told - joined_lines:,} events are told to be joined and are not in the output")
    return Check(True, f"all that is told to be joined is in the output ({joined_lines:,} lines)")


def registered_are_there(ended: Mapping[str, Ended], joined_lines: int) -> Check:
    """What the registry has is in the output, by number; where more is told, the logs must have repeated it.

    What a joiner registered and nobody wrote counts as a duplicate in every datacenter.
    """
    registered = {
        name: one.ledger["fates"][Fate.JOINED.value] + one.ledger["fates"][Fate.DUPLICATE.value]
        for name, one in ended.items()
    }
    name = max(registered, key=lambda name: registered[name])
    missing = registered[name] - joined_lines
    if missing > 0:
        return Check(
            None,
            f"{missing:,} events more than there are joined lines count as joined or duplicates in {name}: "
            "the logs repeat them, or a joiner that is not here registered them and has not written them; "
            "`photon verify` can tell",
        )
    return Check(True, "no event counts as a duplicate that is not in the output")


def all_is_read(ended: Mapping[str, Ended], waited: bool, replayed: Collection[str] = ()) -> Check:
    """Every event that was written is accounted for, in each datacenter that was there to read it.

    `replayed`: datacenters that have read dead letters again, each of which counts as one more event.
    """
    unread, more = [], []
    for name, one in ended.items():
        assert one.written is not None, "of generated logs it is known"
        missing = one.written - one.ledger["foreign_events"]
        if missing < 0 and name not in replayed:
            return Check(False, f"{name} counts {-missing:,} events more than were written")
        if missing > 0 and one.killed:
            more.append(f"; {name}, which is down, has {missing:,} to read yet")
        elif missing > 0:
            unread.append(f"{name} {missing:,}")
    if unread:
        missed = f"not all that was written is read: {', '.join(unread)} events are missing"
        return Check(False, missed) if waited else Check(None, f"{missed}, which were not waited for")
    if replayed:
        return Check(
            None,
            f"dead letters of {', '.join(replayed)} were replayed, each one event more that is read: "
            "by number it can't be told whether all that was written is",
        )
    return Check(True, f"every event written is read{''.join(more)}")


def nothing_twice(report: PairsReport) -> Check:
    """Design invariant 1, and that every line holds what it names."""
    wrong = {
        "joined twice": report.repeated,
        "with another primary event than the one named": report.mismatched,
        "no joined event": report.unreadable,
    }
    bad = [f"{count:,} lines {what}" for what, count in wrong.items() if count]
    if bad:
        return Check(False, "; ".join([*bad, *report.examples]))
    return Check(True, f"no event is joined twice in all datacenters together ({report.distinct:,} events)")


def pairs_are_true(
    report: PairsReport, ended: Mapping[str, Ended], truth: Set[bytes], logs: Mapping[str, Path], waited: bool
) -> Check:
    """What the generator wrote is what was joined: every click with its query, and nothing else."""
    if report.untrue:
        return Check(
            False, "; ".join([f"{report.untrue:,} pairs are joined that were not written", *report.examples])
        )
    down = [name for name, one in ended.items() if one.killed]
    pending = {name: one.ledger["pending"] for name, one in ended.items() if one.ledger["pending"]}
    by_adapter = (Fate.FILTERED, Fate.ADAPTER_ERROR)
    skipped = any(one.ledger["fates"].get(fate.value) for one in ended.values() for fate in by_adapter)
    if not pending and not down and waited:
        problems = report.problems(len(truth), pairs_sha256(truth))
        if not problems:
            return Check(True, f"the {len(truth):,} pairs are the true ones (sha256 {report.sha256[:16]}...)")
        if not skipped:
            return Check(False, "; ".join(problems))
    why = [f"{', '.join(down)} may have joins to finish"] if down else []
    if skipped:
        why.append("an adapter skipped events before")
    if pending and waited and not down:
        late = sum(max(0, count - _orphans(logs[name])) for name, count in pending.items())
        if late:
            return Check(False, f"{late:,} events wait yet, though all is written and nobody is down")
        why.append(f"{sum(pending.values()):,} events wait for queries that a killed generator held back")
    elif pending:
        why.append(f"{sum(pending.values()):,} events wait yet")
    if not waited:
        why.append("the rest was not waited for")
    return Check(None, f"{report.distinct:,} of {len(truth):,} clicks are joined: {' and '.join(why)}")


def true_pairs(logs: Iterable[Path]) -> set[bytes]:
    """The pairs that generated clicks name, as photon.dev.pairs writes them.

    A generator that was killed has not written the same to all copies.
    """
    decoder = msgspec.json.Decoder(_Click)
    return {
        f"{click.primary_id}\t{click.id}\n".encode()
        for copy in logs
        for lines in _lines(copy / "clicks")
        for click in map(decoder.decode, lines)
    }


def _orphans(logs: Path) -> int:
    """Clicks whose query is not in the same copy: a generator that was killed held it back."""
    clicks, queries = msgspec.json.Decoder(_Click), msgspec.json.Decoder(_Query)
    named = Counter(
        click.primary_id for lines in _lines(logs / "clicks") for click in map(clicks.decode, lines)
    )
    for lines in _lines(logs / "queries"):
        for query in map(queries.decode, lines):
            named.pop(query.id, None)
    return named.total()


def _lines(directory: Path) -> Iterator[list[bytes]]:
    """Whole lines of all logs in it, some MiB at a time."""
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            while lines := file.readlines(_READ_BYTES):
                if not lines[-1].endswith(b"\n"):  # of a generator that was killed
                    lines.pop()
                yield lines


def count_lines(directory: Path) -> int:
    """Lines of all logs in it."""
    count = 0
    for path in directory.glob("*.jsonl"):
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                count += data.count(b"\n")
    return count


def _is_flat(settings: Settings) -> bool:
    return not any(
        "." in name for name in (settings.foreign.id, settings.foreign.primary_id, settings.primary.id)
    )


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
    seen: Mapping[str, int | None] = field(default_factory=dict)
    """Datacenter -> events that were recorded or in hand at the end, where it is not kept down."""
    feeder_failed: str = ""
    """Why the generator ended as it should not have, if it did."""


def summary_of(topology: Topology, work: Path, joined_before: int, course: Course) -> dict[str, Any]:
    """Of the work directory as a whole, like that of `photon join`; and whether all is as it must be."""
    out = Path(topology.output)
    fed = fed_datacenters(topology, work)
    ended = {
        p.datacenter: Ended(
            ledger_of(topology, p),
            p.datacenter in course.killed,
            count_lines(logs_of(work, p.datacenter) / "clicks") if p.datacenter in fed else None,
            course.seen.get(p.datacenter),
        )
        for p in topology.pipelines
    }
    lines = joined_lines(out)
    joined = sum(lines.values())
    logs = {name: logs_of(work, name) for name in fed} if len(fed) == len(ended) else {}
    checks = checks_of(out, topology.settings, ended, joined, logs, not course.cut_short)
    if course.feeder_failed:
        checks.append(Check(False, course.feeder_failed))
    ledgers = [one.ledger for one in ended.values()]
    return {
        **run_summary(ledgers, (), joined, joined_before, course.seconds),
        "datacenters": {name: _row(one, lines.get(name, 0)) for name, one in ended.items()},
        "killed": list(course.killed),
        "restarts": course.restarts,
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
