"""The joined logs of all datacenters, read while they grow: nothing may stand twice, at any instant.

A joiner may take lines back that it has just written (its lease ran out meanwhile), so what was read is read
again before it is held against anybody.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

LOOK_S: Final = 0.1
_READ_BYTES: Final = 1 << 20


class _Named(msgspec.Struct):
    id: str | int


_NAMED: Final = msgspec.json.Decoder(_Named)


def id_of(line: bytes) -> str | None:
    """The event's; None if it has none."""
    try:
        return str(_NAMED.decode(line).id)
    except msgspec.DecodeError:
        return None


@dataclass(slots=True)
class _File:
    datacenter: str
    descriptor: int
    offset: int = 0
    ends: list[tuple[int, str]] = field(default_factory=list)
    """Of each line that was read: where it ends, and its foreign id."""


class Watch:
    """Reads all joined logs of an output, over and over. Thread-safe.

    `joined`: distinct ids that stand there now; `repeated`: those seen twice at one instant, and where.
    """

    def __init__(self, out: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = out / "joined"
        self._clock = clock
        self._files: dict[Path, _File] = {}
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._grew_at = clock()
        self._longest_stall_s = 0.0
        self.repeated: dict[str, list[str]] = {}
        self.expects: Callable[[], bool] = lambda: True
        """Whether lines should come now: only then is their absence a stall."""

    def start(self) -> None:
        """Look every LOOK_S seconds, in a thread."""
        self._thread = threading.Thread(target=self._run, name="watch-output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for file in self._files.values():
                os.close(file.descriptor)
            self._files.clear()

    @property
    def joined(self) -> int:
        with self._lock:
            return len(self._seen)

    def by_datacenter(self) -> dict[str, int]:
        """Joined lines."""
        with self._lock:
            counts = Counter[str]()
            for file in self._files.values():
                counts[file.datacenter] += len(file.ends)
            return dict(counts)

    def longest_stall_s(self) -> float:
        """The longest time in which no line came though some were to come."""
        with self._lock:
            return max(self._longest_stall_s, self._stall_s(self._clock()))

    def look(self) -> None:
        """Read what is new."""
        expected = self.expects()
        with self._lock:
            before = len(self._seen)
            for path in sorted(self._directory.glob("*/*.jsonl")):
                if path not in self._files:
                    self._files[path] = _File(path.parent.name, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            for path, file in list(self._files.items()):
                if os.fstat(file.descriptor).st_nlink:
                    self._follow(path, file)
                else:  # a disk was lost
                    os.close(self._files.pop(path).descriptor)
                    for _, text in file.ends:
                        self._forget(text)
            now = self._clock()
            if len(self._seen) != before:
                self._longest_stall_s = max(self._longest_stall_s, self._stall_s(now))
                self._grew_at = now
            elif not expected:
                self._grew_at = now

    def _stall_s(self, now: float) -> float:
        return now - self._grew_at

    def _follow(self, path: Path, file: _File) -> None:
        size = os.fstat(file.descriptor).st_size
        if size < file.offset:
            while file.ends and file.ends[-1][0] > size:
                self._forget(file.ends.pop()[1])
            file.offset = file.ends[-1][0] if file.ends else 0
        while data := os.pread(file.descriptor, _READ_BYTES, file.offset):
            whole = data.rfind(b"\n") + 1
            if not whole:
                break
            for line in data[:whole].splitlines(keepends=True):
                file.offset += len(line)
                self._take(path, file, line)

    def _take(self, path: Path, file: _File, line: bytes) -> None:
        text = id_of(line)
        if text is None:
            return  # the checkers of the whole output name it
        file.ends.append((file.offset, text))
        self._seen[text] += 1
        if self._seen[text] > 1:
            places = self._places(text)
            if len(places) > 1:
                self.repeated[text] = places

    def _forget(self, text: str) -> None:
        self._seen[text] -= 1
        if not self._seen[text]:
            del self._seen[text]

    def _places(self, text: str) -> list[str]:
        """Where it stands now, by reading all again."""
        wanted = text.encode()
        found = []
        for path in sorted(self._directory.glob("*/*.jsonl")):
            for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
                if wanted in line and line.endswith(b"\n") and id_of(line) == text:
                    found.append(f"{path.parent.name}/{path.name}:{number}")
        return found

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()
