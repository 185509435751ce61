"""Checks joined logs: which pairs they hold, whether an event stands twice, what a truth says of them.

The digest is the sha256 over the sorted lines `primary_id<TAB>foreign_id<NEWLINE>` of the distinct pairs.
Which events are wrong, `photon verify` tells.
"""

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from joiner.joined_lines import ID, JoinedDecoder, blocks_of, inside, joined_files
from photon.core.columns import Field, parse_path
from photon.core.errors import UsageError
from photon.core.settings import Settings


@dataclass(slots=True)
class PairsReport:
    """What stands in the joined logs of all datacenters. Memory: about 250 bytes a pair while it is made.

    `lines`: joined lines; `distinct`: distinct foreign ids; `repeated`: lines whose foreign id stood before;
    `mismatched`: lines whose primary is not the one they name; `unreadable`: lines that are no joined event,
    or have no end; `sha256`: of the distinct pairs.
    """

    lines: int = 0
    distinct: int = 0
    repeated: int = 0
    mismatched: int = 0
    unreadable: int = 0
    sha256: str = ""

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
        return found


def pairs_sha256(lines: Iterable[bytes]) -> str:
    """The digest of pairs given as distinct lines `primary_id<TAB>foreign_id<NEWLINE>`, in any order."""
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def check_pairs(joined: Path) -> PairsReport:
    """Read every file of joined lines under `joined` (a directory for each datacenter) and report its pairs.

    UsageError if there is no such directory.
    """
    if not joined.is_dir():
        raise UsageError(f"{joined}: no such directory; name the `joined` directory of a run")
    settings = Settings()
    named = Field(parse_path(settings.foreign.primary_id), ID)
    decoder = JoinedDecoder(settings, {"primary_id": named, "inside": inside(settings)})
    report = PairsReport()
    foreign: set[str] = set()
    pairs: set[bytes] = set()
    for path in joined_files(joined):
        for _, data in blocks_of(path):
            whole = data.rfind(b"\n") + 1
            events = decoder.decode(data[:whole]).events
            lines = data.count(b"\n") + (whole < len(data))
            report.lines += lines
            report.unreadable += lines - len(events)
            ids, names, held = (
                list(map(str, decoder.columns[name](events))) for name in ("id", "primary_id", "inside")
            )
            report.mismatched += sum(map(operator.ne, names, held))
            foreign.update(ids)
            texts = map("%s\t%s\n".__mod__, zip(names, ids, strict=True))
            pairs.update(text.encode("utf-8", "surrogatepass") for text in texts)
    report.distinct = len(foreign)
    report.repeated = report.lines - report.unreadable - report.distinct
    report.sha256 = pairs_sha256(pairs)
    return report
