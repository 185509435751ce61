"""Checks joined logs: which pairs they hold, whether an event stands twice, what a truth says of them.

The digest is the sha256 over the sorted lines `primary_id<TAB>foreign_id<NEWLINE>` of the distinct pairs.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from joiner.joined_lines import ID, JoinedDecoder, blocks_of, inside, joined_files
from photon.core.columns import Field, parse_path
from photon.core.errors import UsageError
from photon.core.settings import Settings

_EXAMPLES_MAX: Final = 10


@dataclass(slots=True)
class PairsReport:
    """What stands in the joined logs of all datacenters. Memory: about 250 bytes a pair while it is made.

    `lines`: joined lines; `distinct`: distinct foreign ids; `repeated`: lines whose foreign id stood before;
    `mismatched`: lines whose primary is not the one they name; `unreadable`: lines that are no joined event;
    `sha256`: of the distinct pairs; `examples`: the first of what is wrong, with file and line.
    """

    files: int = 0
    lines: int = 0
    distinct: int = 0
    repeated: int = 0
    mismatched: int = 0
    unreadable: int = 0
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


def check_pairs(joined: Path) -> PairsReport:
    """Read every file of joined lines under `joined` (a directory for each datacenter) and report its pairs.

    UsageError if there is no such directory. A last line without its newline is unreadable.
    """
    if not joined.is_dir():
        raise UsageError(f"{joined}: no such directory; name the `joined` directory of a run")
    check = _Check(Settings())
    for path in joined_files(joined):
        check.file(path)
    return check.end()


class _Check:
    def __init__(self, settings: Settings) -> None:
        named = Field(parse_path(settings.foreign.primary_id), ID)
        self._lines = JoinedDecoder(settings, {"primary_id": named, "inside": inside(settings)})
        self._report = PairsReport()
        self._foreign: set[str] = set()
        self._pairs: set[bytes] = set()

    def file(self, path: Path) -> None:
        self._report.files += 1
        number = 1
        for _, data in blocks_of(path):
            self._block(data, path, number)
            number += data.count(b"\n")

    def end(self) -> PairsReport:
        self._report.distinct = len(self._foreign)
        self._report.sha256 = pairs_sha256(self._pairs)
        return self._report

    def _block(self, data: bytes, path: Path, number: int) -> None:
        """Whole lines, but for the last one, perhaps; the first is that of this number in the file."""
        whole = data.rfind(b"\n") + 1
        count = data.count(b"\n")
        found = self._lines.decode(data[:whole])
        self._report.lines += count
        self._report.unreadable += count - len(found.events)
        for bad in found.malformed:
            at = number + data.count(b"\n", 0, bad.start)
            self._example(f"{path}:{at}: no joined event: {bad.reason}")
        if whole < len(data):
            self._report.lines += 1
            self._report.unreadable += 1
            self._example(f"{path}:{number + count}: no joined event: the line has no end")
        foreign, named, held = (
            list(map(str, self._lines.columns[name](found.events))) for name in ("id", "primary_id", "inside")
        )
        if named != held:
            for text, name, got in zip(foreign, named, held, strict=True):
                if name != got:
                    self._report.mismatched += 1
                    self._example(f"{path}: '{text}' names the primary '{name}' and holds '{got}'")
        fresh = set(foreign)
        if len(fresh) < len(foreign) or not self._foreign.isdisjoint(fresh):
            self._note_repeats(foreign, path)
        self._foreign |= fresh
        pairs = map("%s\t%s\n".__mod__, zip(named, foreign, strict=True))
        self._pairs.update(pair.encode("utf-8", "surrogatepass") for pair in pairs)

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
