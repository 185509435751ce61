"""What can be said of a foreign event, which of it breaks an invariant, and the report. Pure: no Spark."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

LOSERS_SHOWN: Final = 10
LOSERS_MAX: Final = 1000
"""Lives of joiners that are reported with what they lost."""
SETTLE_S: Final = 60.0
"""An event registered so shortly before the scan may be on its way into a joined log."""


class Verdict(StrEnum):
    """One for each distinct foreign id. The order is that of the report."""

    JOINED = "joined"
    UNJOINABLE = "unjoinable"
    FILTERED = "filtered"
    ADAPTER_ERROR = "adapter_error"
    EXPIRED = "expired"
    LATE = "late"
    PENDING = "pending"
    PENDING_JOINABLE = "pending_joinable"
    LOST_PENDING = "lost_pending"
    UNREAD = "unread"
    LOST_UNJOINABLE = "lost_unjoinable"
    JOINED_TWICE = "joined_twice"
    WRONG_PRIMARY = "wrong_primary"
    ALTERED_PRIMARY = "altered_primary"
    ALTERED_FOREIGN = "altered_foreign"
    LOST = "lost"
    UNREGISTERED = "unregistered"
    IN_FLIGHT = "in_flight"
    NOT_IN_EXPORT = "not_in_export"
    ALIEN = "alien"
    OTHER_INPUTS = "other_inputs"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    """No id: what stands in lines that can't be read, together."""
    OTHER_REGISTERED = "other_registered"
    """No account: ids that only the registry has, together."""


MEANINGS: Final[Mapping[str, str]] = {
    "foreign_events": "lines of the inputs, blank ones left out",
    "malformed": "lines that are no event, or that the dead letters call malformed",
    "repeated": "further lines of an id counted below, like one of it in every byte",
    "differing": "further lines of such an id with another primary, time or content",
    Verdict.JOINED: "events joined once, with the primary event they name",
    Verdict.UNJOINABLE: "dead letters: their primary event is not in the logs",
    Verdict.FILTERED: "dead letters: the adapter skipped them",
    Verdict.ADAPTER_ERROR: "dead letters: the adapter failed at them",
    Verdict.EXPIRED: "dead letters: older than the registry remembers",
    Verdict.LATE: "dead letters: their primary event was said to be unmatched before",
    Verdict.NOT_IN_EXPORT: "joined, not in the export of the registry: joined since, or never registered",
    Verdict.PENDING: "in no output yet",
    Verdict.IN_FLIGHT: "registered a moment ago, in no joined log yet: ask again",
    Verdict.LOST: "registered by a joiner that wrote them to no joined log",
    Verdict.PENDING_JOINABLE: "in no output yet, though their primary event is in the logs",
    Verdict.LOST_PENDING: "in no output, not registered, and no dispatcher waits with them",
    Verdict.UNREAD: "behind where every dispatcher has read to, though the run was to read all",
    Verdict.LOST_UNJOINABLE: "given up, though their primary event is in the logs",
    Verdict.JOINED_TWICE: "joined twice or more",
    Verdict.WRONG_PRIMARY: "joined with none, or another than the primary event they name",
    Verdict.ALTERED_PRIMARY: "the primary event inside is none of the logs",
    Verdict.ALTERED_FOREIGN: "the rest of the line is no line of the inputs",
    Verdict.UNREGISTERED: "joined, but not in the registry",
    Verdict.ALIEN: "joined, but not in the inputs",
    "joined_unreadable": "joined lines that are no event",
    "dead_letters_unreadable": "dead letters that can't be read",
    Verdict.OTHER_INPUTS: "dead letters of events that are not in the inputs",
    Verdict.OTHER_REGISTERED: "registered, but not in the inputs and in no output",
}

BROKEN: Final = (
    Verdict.LOST,
    Verdict.LOST_PENDING,
    Verdict.UNREAD,
    Verdict.LOST_UNJOINABLE,
    Verdict.JOINED_TWICE,
    Verdict.WRONG_PRIMARY,
    Verdict.ALTERED_PRIMARY,
    Verdict.ALTERED_FOREIGN,
    Verdict.UNREGISTERED,
    Verdict.ALIEN,
    "joined_unreadable",
    "dead_letters_unreadable",
)
_NEEDS_PRIMARIES: Final = (Verdict.PENDING_JOINABLE, Verdict.LOST_UNJOINABLE, Verdict.ALTERED_PRIMARY)
_NEEDS_REGISTRY: Final = (Verdict.LOST, Verdict.IN_FLIGHT, Verdict.OTHER_REGISTERED)
_OF_NO_INPUT: Final = (Verdict.ALIEN, Verdict.OTHER_INPUTS, Verdict.UNREADABLE, Verdict.OTHER_REGISTERED)
_OF_AN_INPUT: Final = tuple(verdict for verdict in Verdict if verdict not in _OF_NO_INPUT)


class Asked(StrEnum):
    """How the registry was asked."""

    NOT = "not asked"
    ITSELF = "asked"
    EXPORT = "export"


@dataclass(frozen=True, slots=True)
class Total:
    """All ids of one verdict: how many, their lines in inputs, joined logs and dead letters, how many of the
    former are unlike others of their id; one of the ids, and one with such lines."""

    verdict: Verdict
    events: int
    lines: int
    joined: int
    letters: int
    differing: int = 0
    example: str | None = None
    differs: str | None = None

    def __add__(self, other: "Total") -> "Total":
        return Total(
            self.verdict,
            self.events + other.events,
            self.lines + other.lines,
            self.joined + other.joined,
            self.letters + other.letters,
            self.differing + other.differing,
            _first(self.example, other.example),
            _first(self.differs, other.differs),
        )


def _first(*examples: str | None) -> str | None:
    return min((example for example in examples if example is not None), default=None)


@dataclass(frozen=True, slots=True)
class Loser:
    """A life of a joiner with events that are registered and in no joined log: how many are lost or in
    flight, their oldest and newest tokens (us), and its lease now (LEASES; None: nobody was asked)."""

    address: str
    incarnation: int
    events: int
    in_flight: int
    first_us: int
    last_us: int
    lease: str | None = None

    def __add__(self, other: "Loser") -> "Loser":
        return replace(
            self,
            events=self.events + other.events,
            in_flight=self.in_flight + other.in_flight,
            first_us=min(self.first_us, other.first_us),
            last_us=max(self.last_us, other.last_us),
        )

    def as_document(self) -> dict[str, Any]:
        times = {"first_token_us": self.first_us, "last_token_us": self.last_us, "lease": self.lease}
        counts = {"lost": self.events, "in_flight": self.in_flight}
        return {"joiner": self.address, "incarnation": f"{self.incarnation:016x}", **counts, **times}

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.first_us / 1e6, UTC).isoformat(" ", "seconds")
        lease = f", its lease {LEASES[self.lease]}" if self.lease else ""
        return (
            f"{self.events:,} lost and {self.in_flight:,} in flight by joiner {self.address}, incarnation "
            f"{self.incarnation:016x}, since {since.removesuffix('+00:00')} UTC{lease}"
        )


def most_lost(losers: Iterable[Loser]) -> list[Loser]:
    """One for each life, of parts; those that lost most, LOSERS_MAX of them."""
    by_life: dict[tuple[str, int], Loser] = {}
    for loser in losers:
        life = loser.address, loser.incarnation
        by_life[life] = by_life[life] + loser if life in by_life else loser
    found = sorted(
        by_life.values(), key=lambda one: (-one.events, -one.in_flight, one.address, one.incarnation)
    )
    return found[:LOSERS_MAX]


LEASES: Final[Mapping[str, str]] = {"runs": "runs", "over": "is over", "fenced": "is fenced"}


@dataclass(frozen=True, slots=True)
class Report:
    """`counts` by the names of MEANINGS, without those that need what was not given: primary logs, registry.

    foreign_events = malformed + repeated + differing + the events of every verdict on an event of the inputs.
    `losers`: those that lost most. `note`: why the counts can't be trusted; "": they can.
    """

    counts: dict[str, int]
    examples: dict[str, str] = field(default_factory=dict)
    asked: Asked = Asked.NOT
    losers: Sequence[Loser] = ()
    note: str = ""

    @property
    def broken(self) -> list[str]:
        """Names of the counts that must be zero and are not."""
        return [str(name) for name in BROKEN if self.counts.get(name, 0)]

    def as_document(self) -> dict[str, Any]:
        """For --json."""
        broken = self.broken
        losers = [loser.as_document() for loser in self.losers]
        told = {"registry": self.asked.value, "lost_by": losers, "note": self.note}
        return {**self.counts, "ok": not broken, "broken": broken, "examples": self.examples, **told}


def make_report(
    totals: Iterable[Total],
    primaries_given: bool,
    asked: Asked = Asked.NOT,
    ledgers_known: bool = False,
    others_counted: bool = False,
    losers: Sequence[Loser] = (),
    note: str = "",
) -> Report:
    """Totals, several of a verdict perhaps -> the report. `ledgers_known`: who is lost can be told from who
    waits; `others_counted`: the ids that only the registry has are."""
    by_verdict: dict[Verdict, Total] = {}
    for total in totals:
        known = by_verdict.get(total.verdict)
        by_verdict[total.verdict] = total if known is None else known + total
    got = {verdict: by_verdict.get(verdict, Total(verdict, 0, 0, 0, 0)) for verdict in Verdict}
    unreadable = got[Verdict.UNREADABLE]
    judged = [got[verdict] for verdict in _OF_AN_INPUT if verdict is not Verdict.MALFORMED]
    counts: dict[str, int] = {
        **{verdict.value: total.events for verdict, total in got.items()},
        "foreign_events": sum(total.lines for total in got.values()),
        "malformed": unreadable.lines + got[Verdict.MALFORMED].lines,
        "repeated": sum(total.lines - total.events - total.differing for total in judged),
        "differing": sum(total.differing for total in judged),
        "joined_unreadable": unreadable.joined,
        "dead_letters_unreadable": unreadable.letters,
    }
    hidden = {*(() if primaries_given else _NEEDS_PRIMARIES), *_hidden(asked)}
    if not ledgers_known:
        hidden |= {Verdict.LOST_PENDING, Verdict.UNREAD}
    if not others_counted:
        hidden.add(Verdict.OTHER_REGISTERED)
    told = [str(name) for name in MEANINGS if name not in hidden]
    examples = {t.verdict.value: t.example for t in by_verdict.values() if t.verdict in BROKEN and t.example}
    if differs := _first(*(total.differs for total in judged)):
        examples["differing"] = differs
    return Report({name: counts[name] for name in told}, examples, asked, losers, note)


def _hidden(asked: Asked) -> Sequence[str]:
    """What can't be told by the registry, as it was asked."""
    if asked is Asked.ITSELF:
        return [Verdict.NOT_IN_EXPORT]
    if asked is Asked.EXPORT:
        return [Verdict.UNREGISTERED]
    return [*_NEEDS_REGISTRY, Verdict.UNREGISTERED, Verdict.NOT_IN_EXPORT]


def as_table(report: Report) -> str:
    """Aligned text: count, name, meaning; what is broken is marked and one of its ids named."""
    width = max(map(len, report.counts))
    lines = []
    for name, count in report.counts.items():
        mark = "!" if name in report.broken else " "
        lines.append(f"{mark} {name.replace('_', ' '):<{width}}{count:>14,}   {MEANINGS[name]}")
        if name in report.examples:
            lines.append(f"  {'':<{width}}{'':>14}   such as {report.examples[name]!r}")
    lines += [f"  {loser}" for loser in report.losers[:LOSERS_SHOWN]]
    if len(report.losers) > LOSERS_SHOWN:
        lines.append(f"  and {len(report.losers) - LOSERS_SHOWN} joiners more")
    if report.asked is Asked.NOT:
        lines.append("the registry was not asked; --work, --registry or --export name one")
    if report.note:
        lines.append(f"note: {report.note}")
    broken = ", ".join(name.replace("_", " ") for name in report.broken)
    lines.append(f"broken: {broken}" if broken else "every invariant holds")
    return "\n".join(lines)
