"""The files that generated logs go to, and the truth beside them."""

import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from photon.core.errors import DiskFullError, StorageError, UsageError


@dataclass(frozen=True, slots=True)
class GeneratedTruth:
    """What is in generated logs, and what joining them must come to. Counts are of lines, or say distinct.

    `foreign_rows` = joinable clicks (`distinct_joined_pairs`) + `orphans` + `duplicates` + `malformed`;
    orphans are all distinct and name queries that were never logged; duplicates repeat a joinable click byte
    for byte; `early` ones are older than their query or, in a stream, logged before it. The digest is that
    of photon.app.verify_pairs.
    """

    mode: str
    seed: int
    ids: str
    primary_rows: int
    primary_distinct_ids: int
    primary_duplicates: int
    primary_malformed: int
    foreign_rows: int
    foreign_distinct_ids: int
    distinct_joined_pairs: int
    orphans: int
    duplicates: int
    early: int
    malformed: int
    joined_pairs_sha256: str

    def expected_summary(self) -> dict[str, int]:
        """The fates that `photon join` must report once it has drained the logs."""
        return {
            "foreign_events": self.foreign_rows,
            "joined": self.distinct_joined_pairs,
            "duplicate": self.duplicates,
            "unjoinable": self.orphans,
            "malformed": self.malformed,
            "filtered": 0,
            "expired": 0,
            "pending": 0,
        }

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"expected_summary": self.expected_summary()}


class ServerLog:
    """The log of one server process, `<directory>/<ip>-<pid>-NNNNNN.jsonl`, rotated at `file_bytes_max`.

    Nothing is kept open or synced: there may be thousands, and what is lost is generated again.
    """

    def __init__(self, directory: Path, head: str, file_bytes_max: int) -> None:
        self._stem = str(directory / head.replace(":", "-"))
        self._file_bytes_max = file_bytes_max
        self._number = 0
        self._size = 0

    def write(self, lines: Sequence[bytes]) -> None:
        """Append whole lines, each with its newline; a line longer than the maximum has a file of its own."""
        while lines:
            sizes = list(accumulate(map(len, lines), initial=self._size))
            fitting = len(lines)
            if sizes[-1] > self._file_bytes_max:
                fitting = next(n for n, size in enumerate(sizes) if size > self._file_bytes_max and n) - 1
            if not fitting and not self._size:
                fitting = 1
            if fitting:
                self._append(b"".join(lines[:fitting]))
            lines = lines[fitting:]
            if lines:
                self._number, self._size = self._number + 1, 0

    def _append(self, data: bytes) -> None:
        path = f"{self._stem}-{self._number:06d}.jsonl"
        try:
            with open(path, "ab", buffering=0) as file:
                written = file.write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise StorageError(f"{path}: {error.strerror}") from error
            written = 0
        if written != len(data):
            raise DiskFullError(f"{path}: no space left on the device; free some and generate again")
        self._size += len(data)


def server_logs(directory: Path, heads: Sequence[str], file_bytes_max: int) -> list[ServerLog]:
    return [ServerLog(directory, head, file_bytes_max) for head in heads]


def prepare_directory(out: Path) -> None:
    """Make OUT/queries and OUT/clicks. UsageError if there are logs already or they can't be made."""
    for name in ("queries", "clicks"):
        try:
            (out / name).mkdir(parents=True, exist_ok=True)
            full = next((out / name).iterdir(), None)
        except OSError as error:
            raise UsageError(
                f"{error.filename}: {error.strerror}; name a directory that can be written"
            ) from error
        if full is not None:
            raise UsageError(f"{out / name} already holds {full.name}; name another directory or delete it")


def write_truth(out: Path, truth: GeneratedTruth) -> None:
    """OUT/truth.json, last of all: where it is, the logs are whole."""
    partial = out / "truth.json.partial"
    partial.write_text(json.dumps(truth.document(), indent=1) + "\n", "utf-8")
    os.replace(partial, out / "truth.json")


def logs_sha256(out: Path) -> str:
    """One digest of all generated files, names included: the same seed gives the same."""
    digest = hashlib.sha256()
    for path in sorted(out.rglob("*.jsonl")):
        digest.update(f"{path.relative_to(out)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
