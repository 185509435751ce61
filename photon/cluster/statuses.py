"""What the processes of a system say of themselves: asked for, summed up, shown to a person.

Statuses are plain mappings with the keys that each server documents. A process that does not answer is left
out, not waited for.
"""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, Final

import click

from photon.cluster.registry_access import notice
from photon.cluster.roles import ROLES
from photon.cluster.topology import Topology
from photon.core.errors import UnavailableError
from photon.core.fates import LETTERS, Fate

# Rich takes long to import and is of use on a terminal only.
if TYPE_CHECKING:
    from rich.progress import Progress

TIMEOUT_S: Final = 2.0
THREADS_MAX: Final = 32
WHY_CHARS_MAX: Final = 320
"""The longest hint of photon.rpc.network, after the name of who does not answer."""
_SUMMED: Final = ("foreign_events", "pending", "in_flight", "wasted_joins", "lost_bytes")
Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What every process said, asked at `at_s` (monotonic); None for one that has not answered."""

    at_s: float
    statuses: Mapping[str, Status | None]

    def of(self, role: str) -> list[Status]:
        """What the processes of a role said, of those that answered."""
        return [status for name, status in self.answered().items() if name.startswith(role)]

    def answered(self) -> dict[str, Status]:
        return {name: status for name, status in self.statuses.items() if status is not None}

    def silent(self, roles: tuple[str, ...] = ("",)) -> list[str]:
        """Those (of these roles) that did not answer."""
        return [name for name, status in self.statuses.items() if status is None and name.startswith(roles)]

    def fates(self) -> dict[str, dict[str, Any]]:
        """Datacenter -> the fates of its events (fates_of), by what its dispatchers that answered say."""
        return {row["datacenter"]: fates_of(row) for row in whole(self.of("dispatcher"))}

    def has_quorum(self) -> bool:
        """The registry's directory, and each of its shards, by what any replica says."""
        replicas = self.of("registry")
        led = {shard["shard"] for one in replicas for shard in one["shards"] if shard["has_quorum"]}
        wanted = {shard for one in replicas for shard in one["shards_expected"]}
        return any(one["directory"]["has_quorum"] for one in replicas) and wanted <= led


class StatusReader:
    """Holds a client of each process of a topology."""

    def __init__(self, topology: Topology) -> None:
        from photon.rpc.servers import StatusClient

        network = topology.network("")
        self._closing = contextlib.ExitStack()
        self._calls: dict[str, Callable[[], Status]] = {}
        for process in topology.processes():
            client = StatusClient(process.role, process.address, TIMEOUT_S, network)
            self._closing.callback(client.close)
            self._calls[process.title] = client.status
        self._pool = ThreadPoolExecutor(min(len(self._calls), THREADS_MAX), thread_name_prefix="status")
        self._last: dict[str, Status | None] = dict.fromkeys(self._calls)
        self.why_silent: dict[str, str] = {}
        """Process -> the error of its last call that failed, in a short line."""

    def read(self, roles: tuple[str, ...] = tuple(ROLES)) -> Sample:
        """Ask the processes of these roles at once; of the others, what they said last."""
        now = time.monotonic()
        chosen = [name for name in self._calls if name.startswith(roles)]
        self._last.update(zip(chosen, self._pool.map(self._ask, chosen), strict=True))
        return Sample(now, dict(self._last))

    def close(self) -> None:
        """End its channels and threads: what it still asks has no answer."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closing.close()
        self._pool.shutdown()

    def _ask(self, name: str) -> Status | None:
        try:
            return self._calls[name]()
        except UnavailableError as error:
            why = " ".join(str(error).split())
            self.why_silent[name] = f"{why[:WHY_CHARS_MAX]}..." if len(why) > WHY_CHARS_MAX else why
            return None


def whole(dispatchers: Iterable[Status]) -> list[dict[str, Any]]:
    """Of each datacenter what its workers that answered count together."""
    sums: dict[str, dict[str, Any]] = {}
    for status in dispatchers:
        name = status["datacenter"]
        none = {"datacenter": name, "fates": Counter(), "differing": Counter(), **dict.fromkeys(_SUMMED, 0)}
        known = sums.setdefault(name, none)
        known["fates"].update(status["fates"])
        known["differing"].update(status.get("differing", {}))
        for count in _SUMMED:
            known[count] += status.get(count, 0)
    return list(sums.values())


def fates_of(dispatcher: Status) -> dict[str, Any]:
    """What became of every event that a datacenter has read, and whether it adds up (design invariant 3)."""
    fates = {**dispatcher["fates"], Fate.PENDING.value: dispatcher["pending"]}
    events = dispatcher["foreign_events"]
    adds_up = sum(fates.values()) == events and min(fates.values()) >= 0
    return {"foreign_events": events, "fates": fates, "adds_up": adds_up}


def merge_fates(dispatchers: Iterable[Status], joined: int) -> dict[str, int]:
    """Counts of all datacenters together, over the events of one copy of the logs.

    Every datacenter reads its own copy of the same logs, so an event has one fate in each: told "already
    registered" counts as joined or duplicate, which `joined`, the lines in the output, tells apart; lines
    that were taken away since are joined, too. Where datacenters judged differently, the one that got
    furthest decides: an event is unjoinable only if no datacenter joined it. Where one has read less than
    another, for it is new or some logs were gone, the other's word counts: pending is no more than what waits
    somewhere.
    """
    ledgers = list(dispatchers)
    if not ledgers:
        return {"foreign_events": 0, **{fate.value: 0 for fate in Fate}}
    joined = max(joined, sum(_fate(ledger, Fate.JOINED) for ledger in ledgers))
    events = max(int(ledger["foreign_events"]) for ledger in ledgers)
    rest = {fate: min(_fate(ledger, fate) for ledger in ledgers) for fate in LETTERS}
    told = max(_fate(ledger, Fate.JOINED) + _fate(ledger, Fate.DUPLICATE) for ledger in ledgers)
    registered = max(told, joined)  # a line may be out before the ledger says so
    # Stopped datacenters may have read different parts, a new ledger not yet what is joined.
    events = max(events, registered + sum(rest.values()))
    pending = events - registered - sum(rest.values())
    furthest = max(ledgers, key=lambda ledger: int(ledger["foreign_events"]))
    waiting = max(int(ledger["foreign_events"]) - _settled(ledger) for ledger in ledgers)
    for fate in LETTERS:
        more = min(max(0, pending - waiting), _fate(furthest, fate) - rest[fate])
        rest[fate] += more
        pending -= more
    return {
        "foreign_events": events,
        Fate.JOINED.value: joined,
        Fate.DUPLICATE.value: registered - joined,
        **{fate.value: count for fate, count in rest.items()},
        Fate.PENDING.value: pending,
    }


def _fate(ledger: Status, fate: Fate) -> int:
    return int(ledger["fates"].get(fate.value, 0))


def _settled(ledger: Status) -> int:
    return sum(_fate(ledger, fate) for fate in (Fate.JOINED, Fate.DUPLICATE, *LETTERS))


def run_summary(
    ledgers: Sequence[Status], eventstores: Sequence[Status], joined: int, joined_before: int, seconds: float
) -> dict[str, Any]:
    """What `photon join` and `photon dev` have in common. `ledgers`: of each datacenter; `joined`: lines;
    `joined_before`: what this said of `joined` at the start."""
    counts = merge_fates(ledgers, joined)
    new = counts[Fate.JOINED.value] - joined_before
    return {
        **counts,
        "adds_up": all(fates_of(ledger)["adds_up"] for ledger in ledgers),
        "wasted_joins": sum(ledger["wasted_joins"] for ledger in ledgers),
        "lost_bytes": sum(one.get("lost_bytes", 0) for one in (*ledgers, *eventstores)),
        "differing": max((sum(ledger.get("differing", {}).values()) for ledger in ledgers), default=0),
        "seconds": round(seconds, 3),
        "joined_per_s": round(new / seconds, 1) if seconds > 0 else 0.0,
        "latency_ms": percentiles_ms(ledger["latency_us"] for ledger in ledgers),
        "joined_this_run": new,
    }


def percentiles_ms(histograms: Iterable[Status]) -> dict[str, float | None]:
    """p50, p90, p99 of merged histograms {edges: upper bounds us, counts}: the upper edge of their bucket."""
    edges: list[float] = []
    counts: list[int] = []
    for histogram in histograms:
        edges = list(histogram["edges"])
        # One that has counted nothing yet has no buckets.
        counts = [a + b for a, b in zip_longest(counts, histogram["counts"], fillvalue=0)]
    result: dict[str, float | None] = {}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        least = max(share * sum(counts), 1)
        edge = next(
            (edge for edge, seen in zip(edges, accumulate(counts), strict=False) if seen >= least), None
        )
        result[name] = None if edge is None else round(edge / 1_000, 3)
    return result


class Display:
    """Notices for a person, each text once: on stderr, or above what a terminal shows in place."""

    def __init__(self) -> None:
        self._in_place: Any = None
        """A Live or a Progress of rich."""
        self._told: set[str] = set()

    def notice(self, text: str) -> None:
        if text in self._told:
            return
        self._told.add(text)
        if self._in_place is None:
            notice(text)
        else:
            self._in_place.console.print(f"photon: {text}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._in_place is not None:
            self._in_place.stop()
            self._in_place = None


class RunDisplay(Display):
    """Progress of a run on stderr, only where that is a terminal."""

    def update(self, counts: Mapping[str, Any], per_second: float) -> None:
        if not sys.stderr.isatty():
            return
        if self._in_place is None:
            self._in_place = _make_progress()
            self._in_place.start()
        self._in_place.update(
            self._in_place.task_ids[0],
            description="joining",
            completed=counts["foreign_events"] - counts["pending"],
            total=max(1, counts["foreign_events"]),
            rate=f"{per_second:,.0f}",
            pending=f"{counts['pending']:,}",
        )

    def completing(self, files: int) -> None:
        """All is joined; this many files of the joined logs have still to be completed."""
        if self._in_place is not None:
            self._in_place.update(self._in_place.task_ids[0], description=f"completing {files:,} files")


def _make_progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}/s  pending {task.fields[pending]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task("starting", total=None, rate="-", pending="-")
    return progress


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Something that moves and says `what`, on a terminal only; and a function to say something else."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


def print_summary(summary: Mapping[str, Any]) -> None:
    """The summary as aligned text on stdout."""
    for name in ("foreign_events", *(fate.value for fate in Fate)):
        click.echo(f"{name.replace('_', ' '):<16}{summary[name]:>14,}")
    latency = summary["latency_ms"]
    click.echo(f"{'wasted joins':<16}{summary['wasted_joins']:>14,}")
    if summary.get("primary_malformed"):
        click.echo(
            f"{'no primary':<16}{summary['primary_malformed']:>14,}  malformed lines of primary logs, in the "
            "dead letters (primary-*.jsonl)"
        )
    if summary["differing"]:
        click.echo(
            f"{'differing':<16}{summary['differing']:>14,}  duplicates that are no plain repetitions: "
            "photon dead-letters list --fate duplicate"
        )
    if summary["lost_bytes"]:
        click.echo(
            f"{'LOST bytes':<16}{summary['lost_bytes']:>14,}  of logs that were gone before they were read"
        )
    if summary.get("lost_records"):
        click.echo(
            f"{'LOST records':<16}{summary['lost_records']:>14,}  of sources, deleted there before they were "
            "copied"
        )
    click.echo(f"{'seconds':<16}{summary['seconds']:>14,.2f}")
    click.echo(f"{'joined/s':<16}{summary['joined_per_s']:>14,.0f}")
    if latency["p50"] is not None:
        shown = "  ".join(f"{name} {value:,.1f}" for name, value in latency.items())
        click.echo(f"{'latency ms':<16}  {shown}")
