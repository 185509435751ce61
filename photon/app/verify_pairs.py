"""Checks joined logs: which pairs they hold, whether an event stands twice, what a truth says of them.

The digest is the sha256 over the sorted lines `primary_id<TAB>foreign_id<NEWLINE>` of the distinct pairs.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from photon.core.errors import UsageError
from photon.core.settings import Settings

_BLOCK_BYTES: Final = 4 << 20
_EXAMPLES_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class PairFields:
    """Names of the fields of a joined line: the foreign event's two, and the primary's inside `holder`."""

    foreign_id: str = "id"
    primary_id: str = "primary_id"
    primary: str = "id"
    holder: str = "primary"

    @classmethod
    def of(cls, settings: Settings) -> "PairFields":
        foreign = settings.foreign
        return cls(foreign.id, foreign.primary_id, settings.primary.id, settings.adapter.field)


@dataclass(slots=True)
class PairsReport:
    """What stands in the joined logs of all datacenters. Memory: about 250 bytes a pair while it is made.

    `lines`: joined lines; `distinct`: distinct foreign ids; `repeated`: lines whose foreign id stood before;
    `mismatched`: lines whose primary is not the one they name; `unreadable`: lines that are no joined event;
    `untrue`: distinct pairs that the truth lacks, where one is given; `sha256`: of the distinct pairs;
    `examples`: the first of what is wrong, with file and line.
    """

    files: int = 0
    lines: int = 0
    distinct: int = 0
    repeated: int = 0
    mismatched: int = 0
    unreadable: int = 0
    untrue: int = 0
    sha256: str = ""
    examples: list[str] = field(default_factory=list)

    def problems(self, distinct_joined_pairs: int, joined_pairs_sha256: str) -> list[str]:
        """What is wrong against a truth, a line each; empty if nothing is."""
        found = []
        if self.lines != distinct_joined_pairs:
            found.append(f"{self.lines:,} joined lines instead of {distinct_joined_pairs:,}")
        if self.repeated:
            found.append(f"{self.repeated:,} lines join a foreign event again")
        if self.mismatched:
            found.append(f"{self.mismatched:,} lines hold another primary than the one they name")
        if self.unreadable:
            found.append(f"{self.unreadable:,} lines are no joined event")
        if self.sha256 != joined_pairs_sha256:
            found.append(f"the pairs' sha256 is {self.sha256}, not {joined_pairs_sha256}")
        return found + self.examples if found else []


def pairs_sha256(lines: Iterable[bytes]) -> str:
    """The digest of pairs given as distinct lines `primary_id<TAB>foreign_id<NEWLINE>`, in any order."""
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def check_pairs(
    joined: Path, fields: PairFields | None = None, truth: Set[bytes] | None = None
) -> PairsReport:
    """Read every .jsonl file under `joined` (a directory for each datacenter) and report its pairs.

    `truth`: all pairs that there may be, as lines of the digest.
    UsageError if there is no such directory. A last line without its newline is unreadable.
    """
    if not joined.is_dir():
        raise UsageError(f"{joined}: no such directory; name the `joined` directory of a run")
    check = _Check(fields or PairFields())
    for path in sorted(joined.rglob("*.jsonl")):
        check.file(path)
    return check.end(truth)


class _Check:
    def __init__(self, fields: PairFields) -> None:
        primary = msgspec.defstruct(
            "JoinedPrimary", [("id", str | int)], rename={"id": fields.primary}, gc=False
        )
        names = {"id": fields.foreign_id, "primary_id": fields.primary_id, "primary": fields.holder}
        event = msgspec.defstruct(
            "JoinedEvent",
            [("id", str | int), ("primary_id", str | int), ("primary", primary)],
            rename=names,
            gc=False,
        )
        self._decoder = msgspec.json.Decoder(event)
        self._report = PairsReport()
        self._foreign: set[str] = set()
        self._pairs: set[bytes] = set()

    def file(self, path: Path) -> None:
        self._report.files += 1
        number = 1
        for lines in _blocks(path):
            self._lines(lines, path, number)
            number += len(lines)

    def end(self, truth: Set[bytes] | None) -> PairsReport:
        untrue = self._pairs - truth if truth is not None else ()
        self._report.untrue = len(untrue)
        for pair in itertools.islice(untrue, _EXAMPLES_MAX):
            self._example(f"not among the true pairs: {pair.decode('utf-8', 'replace').strip()}")
        self._report.distinct = len(self._foreign)
        self._report.sha256 = pairs_sha256(self._pairs)
        return self._report

    def _lines(self, lines: Sequence[bytes], path: Path, number: int) -> None:
        self._report.lines += len(lines)
        events = self._decoded(lines)
        if events is None:
            events = self._readable(lines, path, number)
        foreign = _texts([e.id for e in events])
        named = _texts([e.primary_id for e in events])
        inside = _texts([e.primary.id for e in events])
        if named != inside:
            for text, name, got in zip(foreign, named, inside, strict=True):
                if name != got:
                    self._report.mismatched += 1
                    self._example(f"{path}: '{text}' names the primary '{name}' and holds '{got}'")
        fresh = set(foreign)
        if len(fresh) < len(foreign) or not self._foreign.isdisjoint(fresh):
            self._note_repeats(foreign, path)
        self._foreign |= fresh
        pairs = map("%s\t%s\n".__mod__, zip(named, foreign, strict=True))
        self._pairs.update(pair.encode("utf-8", "surrogatepass") for pair in pairs)

    def _decoded(self, lines: Sequence[bytes]) -> list[Any] | None:
        if not lines[-1].endswith(b"\n"):
            return None
        try:
            return list(map(self._decoder.decode, lines))
        except (msgspec.DecodeError, RecursionError):
            return None

    def _readable(self, lines: Sequence[bytes], path: Path, number: int) -> list[Any]:
        events = []
        for at, line in enumerate(lines, number):
            try:
                if not line.endswith(b"\n"):
                    raise msgspec.DecodeError("the line has no end")
                events.append(self._decoder.decode(line))
            except (msgspec.DecodeError, RecursionError) as error:
                self._report.unreadable += 1
                self._example(f"{path}:{at}: no joined event: {error}")
        return events

    def _note_repeats(self, foreign: Sequence[str], path: Path) -> None:
        seen: set[str] = set()
        for text in foreign:
            if text in seen or text in self._foreign:
                self._report.repeated += 1
                self._example(f"{path}: '{text}' is joined again")
            seen.add(text)

    def _example(self, text: str) -> None:
        if len(self._report.examples) < _EXAMPLES_MAX:
            self._report.examples.append(text)


def _blocks(path: Path) -> Iterator[list[bytes]]:
    """Lines of a file, some MiB at a time; only the last line of all may lack its newline."""
    with path.open("rb") as file:
        while lines := file.readlines(_BLOCK_BYTES):
            yield lines


def _texts(ids: Sequence[Any]) -> list[str]:
    return list(map(str, ids))
