"""What can be said of a foreign event, which of it breaks an invariant, and the report. Pure: no Spark."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Verdict(StrEnum):
    """One for each distinct foreign id. The order is that of the report."""

    JOINED = "joined"
    UNJOINABLE = "unjoinable"
    FILTERED = "filtered"
    EXPIRED = "expired"
    PENDING = "pending"
    LOST_PENDING = "lost_pending"
    LOST_UNJOINABLE = "lost_unjoinable"
    JOINED_TWICE = "joined_twice"
    WRONG_PRIMARY = "wrong_primary"
    ALTERED_PRIMARY = "altered_primary"
    ALIEN = "alien"
    OTHER_INPUTS = "other_inputs"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    """No id: what stands in lines that can't be read, all of them together in one row."""


MEANINGS: Final[Mapping[str, str]] = {
    "foreign_events": "lines of the inputs, blank ones left out",
    "malformed": "lines that are no event, or that the dead letters call malformed",
    "repeated": "further lines of an id counted below",
    Verdict.JOINED: "events joined once, with the primary event they name",
    Verdict.UNJOINABLE: "dead letters: their primary event is not in the logs",
    Verdict.FILTERED: "dead letters: the adapter skipped them",
    Verdict.EXPIRED: "dead letters: older than the registry remembers",
    Verdict.PENDING: "in no output yet",
    Verdict.LOST_PENDING: "in no output yet, though their primary event is in the logs",
    Verdict.LOST_UNJOINABLE: "given up, though their primary event is in the logs",
    Verdict.JOINED_TWICE: "joined twice or more",
    Verdict.WRONG_PRIMARY: "joined with none, or another than the primary event they name",
    Verdict.ALTERED_PRIMARY: "the primary event inside is none of the logs",
    Verdict.ALIEN: "joined, but not in the inputs",
    "joined_unreadable": "joined lines that are no event",
    "dead_letters_unreadable": "dead letters that can't be read",
    Verdict.OTHER_INPUTS: "dead letters of events that are not in the inputs",
}

BROKEN: Final = (
    Verdict.LOST_UNJOINABLE,
    Verdict.JOINED_TWICE,
    Verdict.WRONG_PRIMARY,
    Verdict.ALTERED_PRIMARY,
    Verdict.ALIEN,
    "joined_unreadable",
    "dead_letters_unreadable",
)
_NEEDS_PRIMARIES: Final = (Verdict.LOST_PENDING, Verdict.LOST_UNJOINABLE, Verdict.ALTERED_PRIMARY)
_OF_AN_INPUT: Final = tuple(
    v for v in Verdict if v not in (Verdict.ALIEN, Verdict.OTHER_INPUTS, Verdict.UNREADABLE)
)


@dataclass(frozen=True, slots=True)
class Total:
    """All ids of one verdict: how many, their lines in inputs, joined logs and dead letters, one of them."""

    verdict: Verdict
    events: int
    lines: int
    joined: int
    letters: int
    example: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """`counts` by the names of MEANINGS, without those that need the primary logs where they are not given.

    foreign_events = malformed + repeated + the events of every verdict on an event of the inputs.
    """

    counts: dict[str, int]
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """Names of the counts that must be zero and are not."""
        return [str(name) for name in BROKEN if self.counts.get(name, 0)]

    def as_document(self) -> dict[str, Any]:
        """For --json."""
        broken = self.broken
        return {**self.counts, "ok": not broken, "broken": broken, "examples": self.examples}


def make_report(totals: Iterable[Total], primaries_given: bool) -> Report:
    """Totals by verdict -> the report."""
    by_verdict = {total.verdict: total for total in totals}
    got = {verdict: by_verdict.get(verdict, Total(verdict, 0, 0, 0, 0)) for verdict in Verdict}
    unreadable = got[Verdict.UNREADABLE]
    judged = [got[verdict] for verdict in _OF_AN_INPUT if verdict is not Verdict.MALFORMED]
    counts: dict[str, int] = {
        **{verdict.value: total.events for verdict, total in got.items()},
        "foreign_events": sum(total.lines for total in got.values()),
        "malformed": unreadable.lines + got[Verdict.MALFORMED].lines,
        "repeated": sum(total.lines - total.events for total in judged),
        "joined_unreadable": unreadable.joined,
        "dead_letters_unreadable": unreadable.letters,
    }
    told = [str(name) for name in MEANINGS if primaries_given or name not in _NEEDS_PRIMARIES]
    examples = {t.verdict.value: t.example for t in by_verdict.values() if t.verdict in BROKEN and t.example}
    return Report({name: counts[name] for name in told}, examples)


def as_table(report: Report) -> str:
    """Aligned text: count, name, meaning; what is broken is marked and one of its ids named."""
    width = max(map(len, report.counts))
    lines = []
    for name, count in report.counts.items():
        mark = "!" if name in report.broken else " "
        lines.append(f"{mark} {name.replace('_', ' '):<{width}}{count:>14,}   {MEANINGS[name]}")
        if name in report.examples:
            lines.append(f"  {'':<{width}}{'':>14}   such as {report.examples[name]!r}")
    broken = ", ".join(name.replace("_", " ") for name in report.broken)
    lines.append(f"broken: {broken}" if broken else "every invariant holds")
    return "\n".join(lines)
