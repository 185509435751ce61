"""What statuses mean, in words: whether all is well, a line for each process, the fates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from photon.cluster.statuses import Sample, Status, percentiles_ms

_WRONG_MAX: Final = 3
"""So many things are named in the verdict."""
_TROUBLES: Final = (
    "storage_error", "lost_bytes", "account", "lease", "output", "unreadable", "trouble", "sources", "sinks",
    "paused", "shares",
)  # fmt: skip
"""What a process says of itself only when something is wrong, the worst first."""
_OWN_LINE: Final = ("fates", "registered", "foreign_events", "pending", "wasted_joins")


def groups_of(sample: Sample) -> Mapping[str, Status]:
    """Who has which shares, as the replica that knows the most says."""
    told: list[Mapping[str, Status]] = [one["groups"] for one in sample.of("registry") if one.get("groups")]
    return max(told, key=len, default={})


def group_line(group: Status) -> str:
    parts = []
    for name, shares in group["members"].items():
        leaves = ", which leaves" if name in group["leaving"] else ""
        parts.append(f"{name}{leaves}: {' '.join(map(str, shares)) or 'none'}")
    parts += [f"{share} moves to {heir}" for share, heir in group["moving"].items()]
    parts += [f"{share} is NOBODY'S" for share in group["unowned"]]
    return "; ".join(parts)


def verdict(sample: Sample) -> str:
    """Whether all is well; else what is not, the worst first, and how much more there is.

    Of complete files that are gone it says nothing: their readers may take them away; nor of the shares of
    a datacenter that is not of the system any more.
    """
    replicas, fates = sample.of("registry"), sample.fates()
    led = not replicas or sample.has_quorum()
    wrong = [] if led else ["the registry has no quorum"]
    wrong += [f"{name} does not answer" for name in sample.silent()]
    if led:
        wrong += [f"{name} hears no leader" for name, one in sample.answered().items() if _hears_none(one)]
    wrong += [f"the fates of {name} do not add up" for name, row in fates.items() if not row["adds_up"]]
    for name, group in groups_of(sample).items():
        theirs = f"dispatcher-{name.removesuffix('-dispatchers')}"
        if any(process.startswith(theirs) for process in sample.statuses):
            wrong += [f"share {share} of {name} is nobody's" for share in group["unowned"]]
    for name, status in sample.answered().items():
        told = {**status, "account": {**account, "gone": 0} if (account := status.get("account")) else None}
        told["sources"] = [one for one in status.get("sources", ()) if one["lost"] or one["trouble"]]
        told["sinks"] = [one for one in status.get("sinks", ()) if one["trouble"]]
        wrong += [f"{name}: {text}" for key in _TROUBLES if told.get(key) for text in _SHOWN[key](told[key])]
    wrong += sorted({text for one in replicas for text in _gone_joiners(one.get("gone_joiners") or ())})
    if wrong:
        more = f"; and {len(wrong) - _WRONG_MAX} more below" if len(wrong) > _WRONG_MAX else ""
        return f"NOT WELL: {'; '.join(wrong[:_WRONG_MAX])}{more}"
    waiting = max((row["fates"]["pending"] for row in fates.values()), default=0)
    waits = "event waits" if waiting == 1 else "events wait"
    return f"all well: {len(sample.answered())} processes answer, {waiting:,} {waits} to be joined"


def _hears_none(status: Status) -> bool:
    """Of a replica of the registry: of its directory or a shard, as one that has lost its disk."""
    parts = [status["directory"], *status["shards"]] if status.get("directory") else []
    return not all(part["has_quorum"] for part in parts)


def fates_line(row: Status) -> str:
    """12 foreign events = joined 10 + pending 2."""
    parts = [f"{fate} {count:,}" for fate, count in row["fates"].items() if count]
    equals = "=" if row["adds_up"] else "!= (DOES NOT ADD UP)"
    return f"{row['foreign_events']:,} foreign events {equals} {' + '.join(parts) or 'none'}"


def line_of(status: Status) -> str:
    """The plain values of a status in one line, and of the others what a person wants to know."""
    shown: list[str] = []
    for key, value in status.items():
        if key in _SHOWN:
            shown += _SHOWN[key](value) if value else []
        elif key in _OWN_LINE:
            continue
        elif isinstance(value, bool):
            shown.append(key.replace("_", " ") if value else f"not {key.replace('_', ' ')}")
        elif isinstance(value, int):
            shown.append(f"{key.replace('_', ' ')} {value:,}")
    return ", ".join(shown)


def _directory(directory: Status) -> list[str]:
    """The registry's directory: only what is out of the ordinary, but for its leader."""
    shown = [f"directory: leader {directory['leader']}" + ("" if directory["has_quorum"] else ", NO QUORUM")]
    resharding, replacing = directory["resharding"], directory["replacing"]
    if isinstance(resharding, list):
        shown.append(f"resharding to {resharding[1]}")
    if isinstance(replacing, list):
        shown.append(f"replacing {replacing[0]} by {replacing[1]}")
    for name, held_s in directory["holding"].items():
        if held_s > _HELD_S:
            shown.append(f"for {name} {_longer(held_s)}")
    return shown


_HELD_S: Final = 7 * 86_400
"""A boundary that is so far behind, by event times, wants a person."""


def _longer(held_s: float) -> str:
    """Of a new registry, too, whose events are old."""
    return f"ids are kept {held_s / 86_400:,.0f} days longer than registry.retention_days"


def _shards(shards: Iterable[Status]) -> list[str]:
    shown = []
    for shard in shards:
        line = f"shard {shard['shard']}: leader {shard['leader']}, {shard['ids']:,} ids"
        if not shard["has_quorum"]:
            line += ", NO QUORUM"
        if (held_s := shard["boundary_held_s"]) > _HELD_S:
            line += f", {_longer(held_s)}"
        shown.append(line)
    return shown


def _sets(sets: Mapping[str, Status]) -> list[str]:
    """Where there is more than one; each replica tells of all."""
    if len(sets) == 1:
        return []
    shown = []
    for name, one in sets.items():
        shards = f"shards {' '.join(map(str, one['shards']))}" if one["shards"] else "no shards"
        shown.append(f"set {name}: {shards}" + (", RETIRING" if one["retiring"] else ""))
    return shown


def _lease(lease: Status) -> list[str]:
    """Only its trouble: while it runs there is nothing to tell."""
    if lease["fenced"]:
        return ["FENCED: it ends, and a new one starts"]
    why = f" ({lease['trouble']})" if lease["trouble"] else ""
    if lease["seconds_left"] <= 0:
        return [f"NO LEASE{why}: it writes nothing until it has one"]
    return [f"lease not renewed{why}, {lease['seconds_left']:.1f} s left"] if why else []


def _account(account: Status) -> list[str]:
    """Of a joiner: what it has won and nobody can read."""
    shown = []
    if events := account["unwritten"]:
        shown.append(f"registered {events:,} events that stand in no output: run `photon recover`")
    if events := account["gone"]:
        shown.append(
            f"{events:,} events stood in files that are gone or cut short ({account['missing_file']}): run "
            "`photon recover`, unless they were taken away on purpose"
        )
    if events := account["unknown"]:
        shown.append(
            f"registered {events:,} events before its directory was lost, which may stand in no output: run "
            "`photon recover`"
        )
    return shown


def _gone_joiners(joiners: Iterable[Status]) -> list[str]:
    return [
        f"joiner {one['address']} is gone and holds {one['events']:,} events: run `photon recover` unless it "
        "comes back"
        for one in joiners
    ]


def _tier(name: str) -> Callable[[Status], list[str]]:
    """An event store's cache or logs: how many lookups it answered, of how many it was asked."""

    def shown(tier: Status) -> list[str]:
        asked = tier["hits"] + tier["misses"]
        share = f" ({tier['hits'] / asked:.1%})" if asked else ""
        read = f", {tier['bytes_read'] / asked:,.0f} bytes a lookup" if asked and "bytes_read" in tier else ""
        held = f", {tier['events']:,} events in {tier['bytes']:,} bytes" if "events" in tier else ""
        return [f"{name}: {tier['hits']:,} of {asked:,} lookups{share}{read}{held}"]

    return shown


def _members(members: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Of an event store those that are asked; the registry's replicas all have lines of their own."""
    alone = isinstance(members, Mapping) or len(members) == 1
    return [] if alone else [f"one of {len(members)} that serve"]


def _event_latency(histogram: Status) -> list[str]:
    """From an event's own time to its joined line, of all that were joined (paper 4.1)."""
    shown = percentiles_ms([histogram])
    if shown["p50"] is None:
        return []
    parts = [
        f"{name} {ms / 1_000:{',.0f' if ms >= 100_000 else '.3g'}} s"
        for name, ms in shown.items()
        if ms is not None
    ]
    return [f"event to joined: {' '.join(parts)}"]


def _sources(sources: Iterable[Status]) -> list[str]:
    shown = []
    for one in sources:
        line = f"{one['source']}: {one['records']:,} records copied"
        if one["behind"]:
            line += f", {one['behind']:,} behind"
        if one["lost"]:
            line += f", {one['lost']:,} LOST that were deleted before they were read"
        if one["trouble"]:
            line += f" ({one['trouble']})"
        shown.append(line)
    return shown


def _sinks(sinks: Iterable[Status]) -> list[str]:
    """Of a joiner: only those that have not all."""
    return [
        f"{one['sink']}: behind" + (f" ({one['trouble']})" if one["trouble"] else "")
        for one in sinks
        if one["behind"]
    ]


def _told(value: object) -> list[str]:
    return [str(value)]


_SHOWN: Final[dict[str, Callable[[Any], list[str]]]] = {
    "directory": _directory,
    "shards": _shards,
    "sets": _sets,
    "lease": _lease,
    "account": _account,
    "gone_joiners": _gone_joiners,
    "cache": _tier("cache"),
    "logs": _tier("logs"),
    "output": lambda output: [f"output: {output['trouble']}"] if output.get("trouble") else [],
    "members": _members,
    "backlog": lambda backlog: (
        [f"{backlog['events']:,} events to read, {backlog['seconds']:,.1f} s behind"]
        if backlog["bytes"]
        else []
    ),
    "event_latency_us": _event_latency,
    "worker": lambda worker: [f"worker {worker['slot']} reads {worker['files']:,} files"],
    "drained": lambda _: ["drained"],  # with --follow there is no such thing
    "sources": _sources,
    "sinks": _sinks,
    "trouble": _told,
    "shares": lambda shares: [
        f"share {number} is not kept ({one['trouble']})" for number, one in shares.items() if one["trouble"]
    ],
    "storage_error": _told,
    "paused": _told,
    "lost_bytes": lambda lost: [f"LOST {lost:,} bytes of logs that were gone before they were read"],
    "differing": lambda kinds: [
        f"{count:,} duplicates with another {kind}" for kind, count in kinds.items() if count
    ],
    "unreadable": lambda files: [f"{file} not read ({reason})" for file, reason in files.items()],
}
