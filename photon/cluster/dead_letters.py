"""The dead letters of a run: counted, shown, and put before the dispatchers again (docs/operating.md).

Each datacenter's letters go to its own dispatchers, as each reads its own copy of the logs. What has been
replayed is noted down after it is in the inbox: a crash between the two replays it again, and the IdRegistry
joins it once all the same.
"""

import base64
import contextlib
import hashlib
import itertools
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from photon.cluster.topology import Topology
from photon.core.disk import make_directory, open_alone, storage_errors, sync_directory, write_all
from photon.core.errors import StorageError, UsageError
from photon.core.fates import LETTER_REASONS, LETTERS, Fate
from photon.core.settings import parse_path

FATES: Final = [fate.value for fate in Fate if fate in (*LETTERS, Fate.DUPLICATE)]
"""Those that have letters."""
REPLAYED: Final = tuple(LETTER_REASONS)
"""Fates that another try may change. A malformed line is replayed where it is asked for."""
INDEX_FILE: Final = "replayed.index"
REASONS_MAX: Final = 10_000
_NUMBER: Final = re.compile(r"(?<![\w-])\d+(?:[.,]\d+)*(?!\w)")
_DIGEST_BYTES: Final = 16


class Letter(msgspec.Struct, frozen=True):
    """One dead letter, as photon.logs.writer writes it."""

    fate: Fate
    reason: str
    event: msgspec.Raw
    file: str
    offset: int
    event_base64: str | None = None

    def line(self) -> bytes:
        """The event as it stood in its log."""
        if self.event_base64 is not None:
            return base64.b64decode(self.event_base64)
        if self.fate is Fate.MALFORMED:
            text: str = msgspec.json.decode(self.event, type=str)
            return text.encode()
        return bytes(self.event)

    def told(self, datacenter: str) -> dict[str, Any]:
        """Plain values."""
        return {
            "datacenter": datacenter,
            "fate": self.fate.value,
            "reason": self.reason,
            "file": self.file,
            "offset": self.offset,
            "event": self.line().decode("utf-8", "replace"),
        }


_decode: Final = msgspec.json.Decoder(Letter).decode


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters are meant; None and empty: all."""

    fates: Collection[Fate] = ()
    reason: str = ""
    id: str | None = None
    id_path: str = "id"
    """Of the foreign event's id, as in the settings."""

    def takes(self, letter: Letter) -> bool:
        if self.fates and letter.fate not in self.fates:
            return False
        return self.reason in letter.reason and (self.id is None or self._has_id(letter))

    def _has_id(self, letter: Letter) -> bool:
        try:
            return text_at(msgspec.json.decode(letter.line()), self.id_path) == self.id
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False


def text_at(event: Any, path: str) -> str | None:
    """The id at a path of the settings, as text; None where there is none."""
    for name in parse_path(path):
        event = event.get(name) if isinstance(event, dict) else None
    return None if event is None or isinstance(event, bool) else str(event)


def read_letters(directory: Path, stem: str = "foreign") -> Iterator[tuple[bytes, Letter]]:
    """Each letter of a datacenter with its own line, oldest files first; a torn last line is left out, and
    what comes meanwhile.

    StorageError for a line that is no letter.
    """
    for path, size in [(path, path.stat().st_size) for path in sorted(directory.glob(f"{stem}-*.jsonl"))]:
        at = 0
        with storage_errors(path), path.open("rb") as file:
            for line in file:
                at += len(line)
                if at > size or not line.endswith(b"\n"):
                    break
                yield line, letter_of(path, line)


def letter_of(path: Path, line: bytes) -> Letter:
    """A line of the file. StorageError for one that is no letter."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        raise StorageError(f"{path}: a line that is no dead letter ({error}); move the file away") from error


def count_letters(directory: Path, chosen: Filter) -> list[dict[str, Any]]:
    """{log, fate, reason, count, replayed} of each kind, the most frequent first.

    Numbers in a reason (tries, seconds, places in a line) are shown as N: they make no kind. Beyond
    REASONS_MAX kinds the rest count as one with the reason "(others)". `log`: foreign, or primary, whose
    malformed lines are kept beside.
    """
    rows = []
    path = directory / INDEX_FILE
    done: set[bytes] = set()
    if path.exists():
        with storage_errors(path), path.open("rb") as index:
            done = _read_digests(index)
    for log in ("foreign", "primary"):
        counts: Counter[tuple[str, str]] = Counter()
        again: Counter[tuple[str, str]] = Counter()
        for line, letter in read_letters(directory, log):
            if chosen.takes(letter):
                kind = letter.fate.value, _NUMBER.sub("N", letter.reason)
                if kind not in counts and len(counts) >= REASONS_MAX:
                    kind = letter.fate.value, "(others)"
                counts[kind] += 1
                again[kind] += _digest(line) in done
        rows += [
            {"log": log, "fate": fate, "reason": reason, "count": count, "replayed": again[fate, reason]}
            for (fate, reason), count in counts.most_common()
        ]
    return rows


def replay(
    directory: Path, inbox: Path, name: str, chosen: Filter, again: bool = False, most: int | None = None
) -> Iterator[int]:
    """Put the events of the chosen letters into an inbox, `most` at a time, as files of this name; how many,
    each time.

    An event once, however many letters it has. Letters that were replayed before are left out, unless
    `again`; a replay that failed leaves new ones. LockedError, StorageError, DiskFullError: nothing more is
    in the inbox then, or a file whole and not noted down.
    """
    with _locked_index(directory) as index:
        done = set() if again else _read_digests(index)
        written: set[bytes] = set()
        letters = (
            (digest, letter.line())
            for line, letter in read_letters(directory)
            if chosen.takes(letter) and (digest := _digest(line)) not in done
        )
        for number in itertools.count():
            before = len(written)
            digests = _put(letters, inbox / f"{name}-{number:06d}.jsonl", written, most)
            if digests:
                with storage_errors(directory / INDEX_FILE):
                    write_all(index.fileno(), b"".join(digests))
                    os.fsync(index.fileno())
            yield len(written) - before
            if most is None or len(written) - before < most:
                return


def _put(
    letters: Iterator[tuple[bytes, bytes]], final: Path, written: set[bytes], most: int | None
) -> list[bytes]:
    """The next events that are not `written`, as a file that is there whole or not at all; digests of what
    was taken."""
    digests: list[bytes] = []
    before = len(written)
    temporary = final.with_name(f".{final.name}.partial")
    with storage_errors(temporary):
        make_directory(final.parent)
        try:
            with temporary.open("wb") as file:
                for digest, event in letters:
                    digests.append(digest)
                    if (of_event := _digest(event)) not in written:
                        written.add(of_event)
                        file.write(event + b"\n")
                        if len(written) - before == most:
                            break
                file.flush()
                os.fsync(file.fileno())
            if len(written) > before:
                temporary.rename(final)
                sync_directory(final.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return digests


def replay_in(
    topology: Topology, letters: Path, chosen: Filter, again: bool = False, rate: int | None = None
) -> Iterator[int]:
    """As `replay`, from a datacenter's directory of letters to its dispatchers; `rate` events a second, or
    all at once. UsageError if these are on another machine."""
    home = topology.pipeline(letters.name).home("dispatcher")
    if not home.is_dir():
        raise UsageError(
            f"{home}: the dispatchers of '{letters.name}' run elsewhere; replay its letters there"
        )
    due = time.monotonic()
    for part in replay(letters, home / "inbox", f"replay-{secrets.token_hex(8)}", chosen, again, rate):
        yield part
        if part == rate:
            due += 1.0
            time.sleep(max(0.0, due - time.monotonic()))


def _digest(line: bytes) -> bytes:
    """Of a letter: its event's log, offset and reason are in it, so that no two are alike."""
    return hashlib.blake2b(line, digest_size=_DIGEST_BYTES).digest()


@contextlib.contextmanager
def _locked_index(directory: Path) -> Iterator[IO[bytes]]:
    with storage_errors(directory):
        make_directory(directory)
    fd = open_alone(directory / INDEX_FILE, "another replay runs; wait for it", os.O_APPEND)
    with open(fd, "r+b", buffering=0) as index:
        yield index


def _read_digests(index: IO[bytes]) -> set[bytes]:
    """A torn last one, as a crash leaves it, is cut off where the file may be written."""
    index.seek(0)
    data = index.read()
    whole = len(data) - len(data) % _DIGEST_BYTES
    if whole < len(data) and index.writable():
        index.truncate(whole)
    return {data[n : n + _DIGEST_BYTES] for n in range(0, whole, _DIGEST_BYTES)}
