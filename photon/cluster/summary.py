"""What a run came to: pure sums over what the processes say and what stands in the output."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from photon.core.fates import LETTERS, Fate

_SUMMED: Final = ("foreign_events", "pending", "in_flight", "wasted_joins")

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What every process said at `at_s` (monotonic); None for one that did not answer."""

    at_s: float
    statuses: Mapping[str, Status | None]

    def of(self, role: str) -> list[Status]:
        """What the processes of a role said, of those that answered."""
        return [status for name, status in self.statuses.items() if status and name.startswith(role)]

    def silent(self, roles: tuple[str, ...] = ("",)) -> list[str]:
        """Those (of these roles) that did not answer."""
        return [name for name, status in self.statuses.items() if status is None and name.startswith(roles)]


def whole(dispatchers: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each datacenter what its workers that answered count together."""
    sums: dict[str, dict[str, Any]] = {}
    for status in dispatchers:
        known = sums.get(status["datacenter"], {})
        fates = Counter(known.get("fates", {}))
        fates.update(status["fates"])
        sums[status["datacenter"]] = {
            "datacenter": status["datacenter"],
            "fates": dict(fates),
            **{count: known.get(count, 0) + status.get(count, 0) for count in _SUMMED},
        }
    return list(sums.values())


def fates_of(dispatcher: Mapping[str, Any]) -> dict[str, Any]:
    """What became of every event that a datacenter has read, and whether it adds up (design invariant 3)."""
    fates = {**dispatcher["fates"], Fate.PENDING.value: dispatcher["pending"]}
    events = dispatcher["foreign_events"]
    adds_up = sum(fates.values()) == events and min(fates.values()) >= 0
    return {"foreign_events": events, "fates": fates, "adds_up": adds_up}


def merge_fates(dispatchers: Iterable[Mapping[str, Any]], joined: int) -> dict[str, int]:
    """Counts of all datacenters together, over the events of one copy of the logs.

    Every datacenter reads its own copy of the same logs, so an event has one fate in each: told "already
    registered" counts as joined or duplicate, which `joined`, the lines in the output, tells apart. Where
    datacenters judged differently, the one that got furthest decides: an event is unjoinable only if no
    datacenter joined it.
    """
    ledgers = list(dispatchers)
    if not ledgers:
        return {"foreign_events": 0, **{fate.value: 0 for fate in Fate}}
    events = max(int(ledger["foreign_events"]) for ledger in ledgers)
    rest = {fate: min(_fate(ledger, fate) for ledger in ledgers) for fate in LETTERS}
    told = max(_fate(ledger, Fate.JOINED) + _fate(ledger, Fate.DUPLICATE) for ledger in ledgers)
    registered = max(told, joined)  # a line may be out before the ledger says so
    # Stopped datacenters may have read different parts, a new ledger not yet what is joined.
    events = max(events, registered + sum(rest.values()))
    pending = events - registered - sum(rest.values())
    return {
        "foreign_events": events,
        Fate.JOINED.value: joined,
        Fate.DUPLICATE.value: registered - joined,
        **{fate.value: count for fate, count in rest.items()},
        Fate.PENDING.value: pending,
    }


def _fate(ledger: Mapping[str, Any], fate: Fate) -> int:
    return int(ledger["fates"].get(fate.value, 0))


def run_summary(
    ledgers: Sequence[Mapping[str, Any]], joined: int, joined_before: int, seconds: float
) -> dict[str, Any]:
    """What `photon join` and `photon dev` have in common. `ledgers`: of each datacenter; `joined`: lines."""
    new = joined - joined_before
    return {
        **merge_fates(ledgers, joined),
        "wasted_joins": sum(ledger["wasted_joins"] for ledger in ledgers),
        "seconds": round(seconds, 3),
        "joined_per_s": round(new / seconds, 1) if seconds > 0 else 0.0,
        "latency_ms": percentiles_ms(ledger["latency_us"] for ledger in ledgers),
        "joined_this_run": new,
    }


def percentiles_ms(histograms: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """p50, p90, p99 of merged histograms {edges: upper bounds us, counts}: the upper edge of their bucket."""
    edges: list[float] = []
    counts: list[int] = []
    for histogram in histograms:
        edges = list(histogram["edges"])
        # One that has counted nothing yet has no buckets.
        counts = [a + b for a, b in zip_longest(counts, histogram["counts"], fillvalue=0)]
    total = sum(counts)
    result: dict[str, float | None] = {}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        result[name] = None
        seen = 0
        for edge, count in zip(edges, counts, strict=False):
            seen += count
            if total and seen >= share * total:
                result[name] = round(edge / 1_000, 3)
                break
    return result
