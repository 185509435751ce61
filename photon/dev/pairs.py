"""Checks joined logs: which pairs they hold, whether an event stands twice, what a truth says of them.

The digest is the sha256 over the sorted lines `primary_id<TAB>foreign_id<NEWLINE>` of the distinct pairs.
Which events are wrong, `photon verify` tells. While a run goes on it is checked again and again.
"""

import hashlib
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from joiner.joined_lines import ID, JoinedDecoder, blocks_of, inside, joined_files
from photon.core.clock import Background
from photon.core.columns import Field
from photon.core.errors import UsageError
from photon.core.settings import Settings, parse_path

EVERY_S: Final = 3.0
SHARE: Final = 0.1
"""Of a core at most."""
LINES_MAX: Final = 2_000_000
"""With more only the check at the end is made."""


@dataclass(slots=True)
class PairsReport:
    """What stands in the joined logs of all datacenters.

    `lines`: joined lines; `distinct`: distinct foreign ids; `repeated`: lines whose foreign id stood before;
    `mismatched`: lines whose primary is not the one they name; `unreadable`: lines that are no joined event,
    or have no end; `sha256`: of the distinct pairs, if it was asked for.
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


def check_pairs(joined: Path, with_sha256: bool = True) -> PairsReport:
    """Read every file of joined lines under `joined` (a directory for each datacenter) and report its pairs.

    Memory while it does: 16 bytes a line, as ids are told apart by 64 bits of them; with the sha256 200 more.
    UsageError if there is no such directory.
    """
    if not joined.is_dir():
        raise UsageError(f"{joined}: no such directory; name the `joined` directory of a run")
    settings = Settings()
    named = Field(parse_path(settings.foreign.primary_id), ID)
    decoder = JoinedDecoder(settings, {"primary_id": named, "inside": inside(settings)})
    report = PairsReport()
    foreign = [np.zeros(0, np.int64)]
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
            foreign.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            if with_sha256:
                texts = map("%s\t%s\n".__mod__, zip(names, ids, strict=True))
                pairs.update(text.encode("utf-8", "surrogatepass") for text in texts)
    report.distinct = len(np.unique(np.concatenate(foreign)))
    report.repeated = report.lines - report.unreadable - report.distinct
    report.sha256 = pairs_sha256(pairs) if with_sha256 else ""
    return report


class LiveCheck:
    """From `start` to `stop`. A joiner that starts again may write a line anew while the logs are read: what
    is wrong is told when it is found a second time."""

    def __init__(self, joined: Path) -> None:
        self._joined = joined
        self._looks = Background("live-check", self.step)
        self.start, self.stop = self._looks.start, self._looks.stop
        self._wrong = ""
        self._told: dict[str, Any] = {"ok": None, "text": "nothing is joined yet"}

    def told(self) -> list[dict[str, Any]]:
        """[{ok: None where it is not known, text}]. Any thread."""
        trouble = self._looks.trouble  # such as a file that was made Parquet meanwhile
        return [self._told if trouble is None else {"ok": None, "text": trouble}]

    def step(self) -> float:
        """One look; the seconds until the next."""
        began = time.monotonic()
        report = check_pairs(self._joined, with_sha256=False)
        if report.lines > LINES_MAX:
            text = f"more than {LINES_MAX:,} joined lines: they are checked at the end"
            self._told = {"ok": None, "text": text}
            return float("inf")
        found = {
            "join an event again": report.repeated,
            "hold another primary event than the one they name": report.mismatched,
        }
        wrong = ", ".join(f"{count:,} lines {what}" for what, count in found.items() if count)
        if wrong and wrong == self._wrong:
            self._told = {"ok": False, "text": wrong}
        elif not wrong and report.lines:
            text = f"{report.lines:,} joined lines, each event once, each with its own primary"
            self._told = {"ok": True, "text": text}
        self._wrong = wrong
        return max(EVERY_S, (time.monotonic() - began) / SHARE)
