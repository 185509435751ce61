"""The invariants of the design, over all that a system has written. Pure: facts in, what is broken out.

Facts are read from files below, and by `tests.faults.kit.system` from the registry. The same rules hold for
a fault test, the soak and the figures. The numbers are those of "What must always hold" in the design.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from photon.cluster.dead_letters import read_letters
from photon.core.columns import split_ids
from photon.core.errors import StorageError
from photon.core.fates import Fate
from photon.core.ids import IdPacker
from tests.faults.kit.feeder import Truth
from tests.faults.kit.output import id_of

EXAMPLES_MAX: Final = 5
_JOINED: Final = (Fate.JOINED.value, Fate.DUPLICATE.value)


@dataclass(frozen=True, slots=True)
class JoinedLine:
    """`id` is None for a line that is no joined event (a torn last one, too)."""

    datacenter: str
    place: str
    """File and line."""
    id: str | None
    line: bytes


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter of a foreign log. `id`: None for what has none."""

    datacenter: str
    fate: str
    id: str | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a datacenter's dispatchers count: events read, and fates by name (`pending` among them)."""

    foreign_events: int
    fates: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Scan:
    """What one replica holds of one shard: packed id -> incarnation of its token."""

    replica: str
    shard: int
    holders: Mapping[bytes, int]

    def digest(self) -> str:
        whole = hashlib.sha256()
        for key in sorted(self.holders):
            whole.update(key + repr(self.holders[key]).encode())
        return whole.hexdigest()


@dataclass(slots=True)
class Facts:
    """All that is known of a run that is over, or stands still."""

    truth: Truth
    lines: list[JoinedLine] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Of the datacenters that have read all of their logs, from the first line on."""
    scans: list[Scan] = field(default_factory=list)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    """Ids that stood twice at some instant of the run, and where."""
    fences: list["Fenced"] = field(default_factory=list)
    longest_stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fenced:
    """An incarnation, and what stood in the joined logs when its fence was confirmed (`ids`)."""

    incarnation: int
    ids: frozenset[str]


@dataclass(slots=True)
class Report:
    """`broken`: rule -> what it found, EXAMPLES_MAX of them; empty if all hold."""

    broken: dict[str, list[str]]
    events_in: int = 0
    joined: int = 0
    fates: dict[str, dict[str, int]] = field(default_factory=dict)
    duplicates: int = 0
    """Foreign ids that stand, or stood at some instant, in more than one joined line."""
    lost: int = 0
    """Foreign ids that could be joined and are not; 0 where that was not asked."""
    longest_stall_s: float = 0.0

    def hold(self) -> "Report":
        """BrokenError that names what is broken."""
        if self.broken:
            raise BrokenError(self)
        return self

    def as_document(self) -> dict[str, Any]:
        return asdict(self) | {"longest_stall_s": round(self.longest_stall_s, 2)}

    def __str__(self) -> str:
        return json.dumps(self.as_document(), indent=2)


class BrokenError(AssertionError):
    """A promise was broken."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


# -- the rules -------------------------------------------------------------------------------------------


def joined_twice(facts: Facts) -> Iterator[str]:
    """1. No foreign id stands twice in the joined logs of all datacenters together, at any instant."""
    places: dict[str, list[str]] = {}
    for line in facts.lines:
        if line.id is not None:
            places.setdefault(line.id, []).append(line.place)
    for text, where in places.items():
        if len(where) > 1:
            yield f"{text} is joined {len(where)} times: {', '.join(where)}"
    for text, where in facts.repeated.items():
        if len(places.get(text, ())) < 2:
            yield f"{text} stood twice for a moment: {', '.join(where)}"


def joined_wrong(facts: Facts) -> Iterator[str]:
    """A joined line is the click as it was logged, with the query that it names; nothing else is there."""
    truth = facts.truth
    for line in facts.lines:
        if line.id is None:
            yield f"{line.place} is no joined event: {line.line[:80]!r}"
        elif line.id not in truth.clicks:
            yield f"{line.place} joins {line.id}, which was never logged"
        elif line.id not in truth.pairs:
            yield f"{line.place} joins {line.id}, whose query was never logged"
        else:
            query = truth.queries[truth.pairs[line.id]]
            if line.line != truth.clicks[line.id][:-1] + b',"primary":' + query + b"}\n":
                yield f"{line.place} does not hold {line.id} and its query as they were logged"


def lost(facts: Facts) -> Iterator[str]:
    """4. Nothing joinable is lost."""
    there = {line.id for line in facts.lines}
    held = {key for scan in facts.scans for key in scan.holders}
    for text, key in packed_ids([text for text in facts.truth.pairs if text not in there]):
        yield f"{text} is not joined" + (", though it is registered" if key in held else "")


def fates_off(facts: Facts) -> Iterator[str]:
    """3. Every event that was read has one fate: the counts add up, and are those of the logs."""
    truth = facts.truth
    orphan_lines = truth.orphans.total()
    lines = Counter(line.datacenter for line in facts.lines)
    if not facts.ledgers:
        yield "no ledger was read"
    for datacenter, ledger in facts.ledgers.items():
        fates = ledger.fates
        total, events = sum(fates.values()), ledger.foreign_events
        if total != events or min(fates.values(), default=0) < 0:
            yield f"{datacenter}: {events} events, {total} fates: {dict(fates)}"
        if events != truth.foreign_lines:
            yield f"{datacenter} has read {events} events of {truth.foreign_lines}"
        if (joined := fates.get(Fate.JOINED.value, 0)) > lines[datacenter]:
            yield f"{datacenter}: {joined} are told joined, and {lines[datacenter]} lines stand there"
        wanted = {
            "joined or duplicate": len(truth.clicks) + truth.repeated - orphan_lines,
            Fate.UNJOINABLE.value: orphan_lines,
            Fate.MALFORMED.value: truth.malformed,
            Fate.PENDING.value: 0,
        }
        counted = {
            **{fate: count for fate, count in fates.items() if fate not in _JOINED},
            "joined or duplicate": sum(fates.get(fate, 0) for fate in _JOINED),
        }
        for fate in sorted({*wanted, *counted}):
            if counted.get(fate, 0) != wanted.get(fate, 0):
                yield f"{datacenter}: {counted.get(fate, 0)} {fate}, not {wanted.get(fate, 0)}"


def letters_off(facts: Facts) -> Iterator[str]:
    """3. What is not joined is kept, with its reason: a letter for each, of the right events."""
    for datacenter, ledger in facts.ledgers.items():
        letters = [letter for letter in facts.letters if letter.datacenter == datacenter]
        kept = Counter(letter.fate for letter in letters)
        for fate in sorted({*kept, *ledger.fates} - {*_JOINED, Fate.PENDING.value}):
            if kept[fate] != ledger.fates.get(fate, 0):
                yield f"{datacenter}: {ledger.fates.get(fate, 0)} {fate}, and {kept[fate]} dead letters"
        for letter in letters:
            if letter.id in facts.truth.pairs:
                yield f"{datacenter}: {letter.id} is {letter.fate}, and its query was logged"
        unjoinable = Counter(str(letter.id) for letter in letters if letter.fate == Fate.UNJOINABLE.value)
        for text in (unjoinable.keys() | facts.truth.orphans.keys()) - facts.truth.pairs.keys():
            if unjoinable[text] != facts.truth.orphans[text]:
                yield (
                    f"{datacenter}: {text} was logged {facts.truth.orphans[text]} times without a query, "
                    f"and has {unjoinable[text]} dead letters"
                )


def replicas_differ(facts: Facts) -> Iterator[str]:
    """6. Replicas agree."""
    by_shard: dict[int, list[Scan]] = {}
    for scan in facts.scans:
        by_shard.setdefault(scan.shard, []).append(scan)
    for shard, scans in sorted(by_shard.items()):
        first, digest = scans[0], scans[0].digest()
        for other in scans[1:]:
            if other.digest() != digest:
                yield (
                    f"shard {shard}: {first.replica} holds {len(first.holders)} ids, "
                    f"{other.replica} {len(other.holders)}, "
                    f"{len(first.holders.items() ^ other.holders.items())} differ"
                )


def unregistered(facts: Facts) -> Iterator[str]:
    """2. What stands in a joined log is registered, for one holder; what is registered was logged.

    Ids within the spread of a resharding stand in the older shard too (docs/decisions/008).
    """
    if not facts.scans:
        yield "no replica was scanned"
        return
    owners: dict[bytes, dict[int, int]] = {}
    for scan in facts.scans:
        for key, holder in scan.holders.items():
            owners.setdefault(key, {})[scan.shard] = holder
    texts = {line.id for line in facts.lines if line.id is not None}
    for text, key in packed_ids(texts):
        if key not in owners:
            yield f"{text} is joined and not registered"
    known = {key for _, key in packed_ids(facts.truth.clicks)}
    for key, shards in owners.items():
        if len(set(shards.values())) > 1:
            yield f"{key.hex()} has several holders: {shards}"
        if key not in known:
            yield f"{key.hex()} is registered and was never logged"


def wrote_after_fence(facts: Facts) -> Iterator[str]:
    """A fenced incarnation writes nothing more: all lines of its ids stood there when it was fenced."""
    holders = {key: holder for scan in facts.scans for key, holder in scan.holders.items()}
    texts = {line.id for line in facts.lines if line.id is not None}
    for fenced in facts.fences:
        for text, key in packed_ids(texts - fenced.ids):
            if holders.get(key) == fenced.incarnation:
                yield f"{text} was written by {fenced.incarnation:016x} after it was fenced"


Rule = Callable[[Facts], Iterator[str]]
RULES: Final[tuple[Rule, ...]] = (
    joined_twice,
    joined_wrong,
    lost,
    fates_off,
    letters_off,
    replicas_differ,
    unregistered,
    wrote_after_fence,
)
AT_ANY_INSTANT: Final[tuple[Rule, ...]] = (joined_twice, joined_wrong, wrote_after_fence)
"""Those that hold while the system runs, too."""


def check(facts: Facts, rules: Sequence[Rule] = RULES) -> Report:
    """What is broken, and the figures of the run."""
    found = {rule.__name__: list(rule(facts)) for rule in rules}
    counts = Counter(line.id for line in facts.lines if line.id is not None)
    twice = {text for text, count in counts.items() if count > 1}
    return Report(
        broken={name: _some(findings) for name, findings in found.items() if findings},
        events_in=sum(ledger.foreign_events for ledger in facts.ledgers.values()),
        joined=len(counts),
        fates={name: dict(ledger.fates) for name, ledger in facts.ledgers.items()},
        duplicates=len(twice | facts.repeated.keys()),
        lost=len(found.get(lost.__name__, ())),
        longest_stall_s=facts.longest_stall_s,
    )


def _some(findings: Sequence[str]) -> list[str]:
    more = len(findings) - EXAMPLES_MAX
    return [*findings[:EXAMPLES_MAX], *([f"... and {more} more"] if more > 0 else [])]


# -- gathering the facts ---------------------------------------------------------------------------------


def read_joined(out: Path, grows: bool = False) -> list[JoinedLine]:
    """All joined lines of an output, or of several roots' first. `grows`: a last line without its end is
    still being written, and left out."""
    found = []
    for path in sorted((out / "joined").glob("*/*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            whole = line.endswith(b"\n")
            if whole or not grows:
                text = id_of(line) if whole else None
                place = f"{path.parent.name}/{path.name}:{number}"
                found.append(JoinedLine(path.parent.name, place, text, line))
    return found


def read_dead_letters(out: Path) -> list[Letter]:
    """Of the foreign logs of all datacenters. AssertionError for a line that is no letter."""
    found = []
    for directory in sorted((out / "dead-letters").glob("*")):
        try:
            for _, letter in read_letters(directory):
                fate = letter.fate.value
                text = None if letter.fate is Fate.MALFORMED else id_of(letter.line())
                found.append(Letter(directory.name, fate, text))
        except StorageError as error:
            raise AssertionError(str(error)) from error
    return found


def ledger_of(counted: Mapping[str, Any]) -> Ledger:
    """Of a dispatcher's status, or of what it left on disk."""
    fates = {**counted["fates"], Fate.PENDING.value: counted["pending"]}
    return Ledger(counted["foreign_events"], fates)


def packed_ids(texts: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Each with its key in the registry."""
    listed = list(texts)
    return zip(listed, split_ids(IdPacker().pack(listed)), strict=True)
