"""Following a set of growing log files: what is new in which file, with little cost while nothing is.

Holds reading positions in memory; its owner keeps FileStates on disk and decides when an offset counts.
"""

import contextlib
import errno
import heapq
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from photon.core.clock import Clock
from photon.core.settings import Logs
from photon.logs.files import (
    HEAD_BYTES,
    TAIL_BYTES,
    Chunk,
    FileState,
    check_begins,
    digest,
    file_size,
    read_at,
    read_chunk,
    shown,
    tail_at,
    tail_of,
    unended_line,
)
from photon.logs.inventory import Followed, Inventory
from photon.logs.watch import Finder, Polling

_NOW: Final = float("-inf")


class LogFollower:
    """Finds files by globs and hands out their whole records, one chunk of one file at a time, in turn.

    `drain`: the logs will grow no more, so a last line without its newline counts if it is a JSON object.
    `notice` is told, in a line, of files that were replaced, shrank, vanished or could not be read.
    `mine`: by its name, whether a file is read here; None is all. `wake` is called, from another thread, when
    there is something to `poll` for. `keep_copies`: False deletes the unpacked copy of an archive that is
    read and recorded. `first`: files that are found get numbers from here on. `by_name`: as Inventory.
    For one thread, but for `advanced`.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        spool: Path,
        settings: Logs,
        clock: Clock,
        states: Iterable[FileState] = (),
        drain: bool = False,
        notice: Callable[[str], None] = lambda _: None,
        mine: Callable[[str], bool] | None = None,
        wake: Callable[[], None] = lambda: None,
        keep_copies: bool = True,
        first: int = 0,
        by_name: Callable[[str], bool] = lambda _: False,
    ) -> None:
        def tell(line: str) -> None:
            notice(shown(line))

        self._settings = settings
        self._clock = clock
        self.drain = drain
        self._notice = tell
        self._mine = mine
        bound = settings.spool_bytes_max
        self._inventory = Inventory(
            spool, bound, clock, states, keep_copies, drain, tell, wake, first, by_name
        )
        self.order: Callable[[int], int] = lambda _: 0
        """By its number, a rank of each file: of those with something unread the lowest is read next."""
        self.room: Callable[[FileState], int] = lambda _: sys.maxsize
        """So many bytes of a file may be read on, up to the end of a line. It is not caught up while that is
        none and something is unread."""
        self._left: set[Followed] = set()
        watch = settings.watch and not drain
        self._finder = Finder(patterns, settings.scan_interval_s, clock, wake if watch else None, tell)
        weakref.finalize(self, self._finder.close)
        weakref.finalize(self, self._inventory.close)
        self._next_scan = self._next_sizes = _NOW
        self._sizes: list[tuple[Followed, int]] = []
        self._growing: list[tuple[int, int, Followed]] = []
        """A heap: rank, turn, file. A rank may have grown since."""
        self._turns = itertools.count()
        self._failed: set[Followed] = set()
        self._unlisted: dict[str, str] = {}
        self._polling = Polling()
        self.caught_up = False
        """Every whole record is read: of all files (drain), or of those that were last seen to grow. Files in
        `unreadable` don't count: the owner says what they mean to it."""
        self._has_scanned = False

    @property
    def unreadable(self) -> dict[str, str]:
        """Name -> reason of files that could not be read when last tried (each scan tries again).

        Names are told as `shown` here and below.
        """
        reasons = {file.state.name: file.failed for file in list(self._failed)} | self._unlisted
        return {shown(name): shown(reason) for name, reason in reasons.items()}

    @property
    def settling(self) -> frozenset[str]:
        """Names of archives that are left for a later scan: they seem to be written to still or are being
        unpacked."""
        return frozenset(map(shown, self._inventory.settling))

    @property
    def news(self) -> bool:
        """The kernel has told of something since the last `poll`."""
        return self._finder.news

    @property
    def files(self) -> int:
        return len(self._inventory.current)

    def unread_bytes(self) -> int:
        """Of all files, unless all is read: a stat each, but no more often than scans look. Any thread."""
        if self.caught_up:
            return 0
        now, files = self._clock.monotonic(), list(self._inventory.current.values())
        if now >= self._next_sizes or len(files) != len(self._sizes):
            self._next_sizes = now + self._settings.scan_interval_s
            self._sizes = [(file, file_size(file.path, file.identity) or 0) for file in files]
        return sum(max(0, size - file.read) for file, size in self._sizes)

    @property
    def patience_s(self) -> float:
        """Nothing is to be looked for so long, unless `wake` is called."""
        if self._finder.watches_all and not self._polling and not self._unsure:
            return max(0.0, self._next_scan - self._clock.monotonic())
        return self._settings.poll_interval_ms / 1000

    def ends(self) -> dict[int, int] | None:
        """File number -> its size now; None while some can't be seen or read. A stat each. Any thread."""
        if not self._has_scanned or self.unreadable or self._inventory.incomplete:
            return None
        files = list(self._inventory.current.values())
        return {file.state.number: file_size(file.path, file.identity) or 0 for file in files}

    def is_past(self, ends: Mapping[int, int], offsets: Mapping[int, int]) -> bool:
        """Whether these offsets, by file number, leave no whole record unread of those before `ends`. Files
        that are gone don't count. Any thread."""
        for number, end in ends.items():
            file = self._inventory.files.get(number)
            if file is None or file.state.gone:
                continue
            whole = file.read if file.stalled_at >= end else end
            if offsets.get(number, 0) < whole:
                return False
        return True

    def known_to(self, now_us: int) -> int:
        """Up to when all that was written is known, but for what is `unreadable`, by a `poll` that began at
        `now_us`: where files came, or nothing tells of them, up to the last listing."""
        return now_us if self._finder.watches_all else self._finder.listed_us

    def close(self) -> None:
        """Watch no more, and hold no file. Done by itself when nobody holds the follower."""
        self._finder.close()
        self._inventory.close()

    def take_lost(self) -> int:
        """Bytes of files that were deleted, cut or written anew before they were read, since last asked."""
        lost, self._inventory.lost_bytes = self._inventory.lost_bytes, 0
        return lost

    def scan_if_due(self) -> list[FileState]:
        """Look for new, renamed and replaced files every `scan_interval_s`, and for growth of all.

        Where the kernel watches, only after it told of such, and every tenth time in any case. The states
        that are new or changed, for the owner to keep: also those that are `gone` now.
        """
        self._take_news()
        now = self._clock.monotonic()
        if now < self._next_scan and not self._finder.hurry(now) and not self._inventory.unpacker.news:
            return []
        try:
            return self._scan(now)
        except BaseException:
            self._scan_now()  # what was found has not been looked through yet
            raise

    def poll(self) -> None:
        """Look for growth: of the files the kernel told of; and of those it does not watch, such as grew
        lately (a stat each), and some others in turn."""
        self._take_news()
        left, self._left = self._left, set()
        for one in left:
            self._wait(one)
        for number in self._polling.turn(self._clock.monotonic()):
            file = self._inventory.files.get(number)
            if file is None or not file.here:
                self._polling.forget(number)
                continue
            try:
                status = os.stat(file.path)
            except FileNotFoundError:
                self._scan_now()
                continue
            except OSError:
                continue  # the next scan tells what became of it
            if (status.st_dev, status.st_ino) != file.identity or status.st_size < file.read:
                self._scan_now()
            else:
                self._look(file, status.st_size)

    def next_chunk(self, most: int | None = None) -> tuple[FileState, Chunk] | None:
        """The next unread whole records of some file, of at most so many bytes, where that is less than the
        settings say; None when all that is known is read."""
        while self._growing:
            file = self._next_waiting()
            file.waiting = False
            if not file.here:
                continue
            room = self.room(file.state)
            if room <= 0:
                self._leave(file)
                continue
            chunk = self._read_on(file, min(room, most or self._settings.chunk_bytes))
            if chunk is not None:
                self._note_read(file, chunk)
                self._heat(file)
                if chunk.more:
                    self._wait(file)
                return file.state, chunk
        if self._left:
            return None
        if self.drain and not self.caught_up and not self._inventory.incomplete:
            self._scan_now()  # only a whole scan can say that nothing is left
        elif self._next_scan != _NOW and not self._inventory.incomplete:
            self.caught_up = True
        return None

    def growing(self) -> list[FileState]:
        """Files of which something is known that was not read."""
        return [file.state for file in self._unread()]

    def unread_to(self) -> dict[int, int]:
        """The numbers of these, and how many bytes each was seen to hold."""
        return {file.state.number: file.size for file in self._unread()}

    def _unread(self) -> list[Followed]:
        return [file for file in (*(file for _, _, file in self._growing), *self._left) if file.here]

    def behind(self) -> list[FileState]:
        """The same, and those that could not be read or vanished before they were."""
        failed = (file.state for file in self._failed if file.here)
        away = (file.state for file in self._inventory.away if file.unread)
        return list({state.number: state for state in (*self.growing(), *failed, *away)}.values())

    def advanced(self, number: int, offset: int) -> FileState:
        """The state of a file whose events before `offset` are taken care of; the owner keeps it.

        Any thread.
        """
        return self._inventory.advanced(number, offset)

    def passed_over(self, number: int, offset: int) -> FileState:
        """As `advanced`, of a file that counts as read to there though it was not. OSError."""
        file = self._inventory.files[number]
        self._note_place(file, offset)
        return self._inventory.advanced(number, offset)

    def knows(self, number: int) -> bool:
        """Whether it follows the file, or did and was not told to forget it."""
        return number in self._inventory.files

    def forget(self, number: int) -> None:
        """A file that is gone, and recorded so. Any thread."""
        del self._inventory.files[number]

    def unended(self) -> dict[str, int]:
        """Files whose end can't be read, mostly as their last record is not whole -> bytes so far."""
        return {
            shown(file.state.name): file.stalled_at - file.read
            for file in list(self._inventory.files.values())
            if file.stalled_at > file.read and file.here
        }

    def _leave(self, file: Followed) -> None:
        """For later, if there is something to be read."""
        file.size = max(file.size, file_size(file.path, file.identity) or 0)
        if file.unread and file.stalled_at != file.size:
            self._left.add(file)

    def _next_waiting(self) -> Followed:
        while True:
            rank, _, file = heapq.heappop(self._growing)
            now = self.order(file.state.number)
            if now <= rank:
                return file
            self._put_by(file, now)

    def _put_by(self, file: Followed, rank: int) -> None:
        heapq.heappush(self._growing, (rank, next(self._turns), file))

    @property
    def _unsure(self) -> bool:
        """Something is to be tried again at every scan."""
        inventory = self._inventory
        return bool(self._failed or self._unlisted or inventory.settling or inventory.reads_on)

    def _scan(self, now: float) -> list[FileState]:
        whole = self._finder.due(now) or self._next_scan == _NOW or self._unsure or self._inventory.away
        self._next_scan = now + self._settings.scan_interval_s
        if not whole:
            return []
        self._finder.find()
        found, elsewhere = self._finder.found, []
        if self._mine is not None:
            elsewhere = [file.source for file in found if not self._mine(file.name)]
            found = [file for file in found if self._mine(file.name)]
        changed = self._inventory.update(found, frozenset(elsewhere))
        self._tell_unlisted()
        followed = list(self._inventory.current.values())
        self._finder.cover_also(os.path.dirname(file.state.path) or "." for file in followed)
        for state in changed:
            if not state.gone:
                self._heat(self._inventory.files[state.number])
        for file in followed:
            if file.seen is not None:
                self._look(file, file.seen.size)
        self._failed = {file for file in self._failed if file.here}
        if not self._growing:
            self.caught_up = not self._inventory.incomplete
        self._has_scanned = True
        return changed

    def _tell_unlisted(self) -> None:
        unlisted = self._finder.unreadable | self._inventory.unlisted
        for name, reason in unlisted.items():
            if self._unlisted.get(name) != reason:
                self._notice(f"{reason}; tried again at every scan")
        self._unlisted = unlisted

    def _take_news(self) -> None:
        for path in self._finder.grown(self._inventory.by_path):
            self.caught_up = False
            self._wait(self._inventory.by_path[path])

    def _look(self, file: Followed, size: int) -> None:
        """Note that a file has `size` bytes now; it waits to be read if that is news."""
        file.size = max(file.size, size)
        if size <= file.read or file.waiting:
            return
        if file.stalled_at == size and not (file.failed and _readable(file.path, file.read)):
            return
        self.caught_up = False
        self._heat(file)
        self._wait(file)

    def _wait(self, file: Followed) -> None:
        if not file.waiting:
            file.waiting = True
            self._put_by(file, self.order(file.state.number))
            self._inventory.hold(file)

    def _heat(self, file: Followed) -> None:
        if file.packed or (not file.linked and self._finder.covers(file.state.path)):
            self._polling.forget(file.state.number)
        else:
            self._polling.grew(file.state.number, self._clock.monotonic())

    def _scan_now(self) -> None:
        self._next_scan = _NOW
        self.caught_up = False

    def _read_on(self, file: Followed, most: int) -> Chunk | None:
        state, settings = file.state, self._settings
        head = (state.head_bytes, state.head)
        size = file_size(file.path, file.identity) or 0  # what comes after it is read next
        try:
            chunk = read_chunk(
                file.path,
                file.read,
                min(most, settings.chunk_bytes),
                settings.line_bytes_max,
                file.identity,
                head,
                file.last if file.tail_at == file.read else b"",
                -1 if file.failed else file.stalled_at,
            )
            if chunk is None and (self.drain or file.packed or file.adrift):
                chunk = unended_line(file.path, file.read, settings.line_bytes_max, file.identity)
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                file.suspect = True  # renamed, replaced or written anew: the scan finds out
                self._scan_now()
            else:
                self._fail(file, error.strerror or str(error))
            return None
        if file.failed:
            file.failed = ""
            self._failed.discard(file)
        if chunk is None:
            file.stalled_at = size
        return chunk

    def _fail(self, file: Followed, reason: str) -> None:
        if file.failed != reason:
            self._notice(f"{file.state.name} cannot be read ({reason}); tried again at every scan")
        file.failed = reason
        file.stalled_at = file_size(file.path, file.identity) or 0
        self._failed.add(file)

    def _note_read(self, file: Followed, chunk: Chunk) -> None:
        self._inventory.none_idle = False
        data = chunk.data
        if len(data) > chunk.end - chunk.start:
            data = data[: chunk.end - chunk.start]  # a last line was given the newline that it had not
        known = file.last if file.tail_at == chunk.start else b""
        whole = len(known) == chunk.start and not chunk.oversized
        file.read, file.stalled_at = chunk.end, -1
        file.size = max(file.size, chunk.end)
        file.tail_at = chunk.end
        file.last = tail_of(data if len(data) >= TAIL_BYTES else known + data)
        with contextlib.suppress(OSError):  # renamed or deleted meanwhile: the next scan says so
            if len(file.last) < min(TAIL_BYTES, chunk.end) or chunk.oversized:
                file.last = b""
                file.last = tail_at(file.path, chunk.end, file.identity)
            self._note_head(file, chunk.end, known + data if whole else None)

    def _note_place(self, file: Followed, offset: int) -> None:
        """The same, of what stands before the offset: OSError if it can't be read."""
        file.last = tail_at(file.path, offset, file.identity)
        file.read = file.tail_at = offset
        self._inventory.none_idle = False
        self._note_head(file, offset, None)

    def _note_head(self, file: Followed, offset: int, begun: bytes | None) -> None:
        """`begun`: what stands before the offset, None where it is to be read. OSError."""
        length = min(HEAD_BYTES, offset)
        if file.state.head_bytes < length:
            head = read_at(file.path, 0, length, file.identity) if begun is None else begun[:length]
            self._inventory.set_head(file, length, digest(head))


def _readable(path: str, offset: int) -> bool:
    try:
        with open(path, "rb", buffering=0) as file:
            os.pread(file.fileno(), 1, offset)
            check_begins(file.fileno(), path, offset)
    except OSError:
        return False
    return True
