"""Matches files on disk to files already read, across renames, rotation and compression (paper 3.2)."""

import contextlib
import dataclasses
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from photon.core.clock import Clock
from photon.core.errors import StorageError
from photon.logs.files import (
    HEAD_BYTES,
    TAIL_BYTES_MAX,
    FileState,
    Identity,
    SeenFile,
    digest,
    file_size,
    goes_on,
    names_by_inode,
    read_at,
    same_content,
    tail_at,
)
from photon.logs.packed import SMALL_BYTES, Spool, TruncatedError, Unpacker, is_packed
from photon.logs.shares import unrotated


@dataclass(slots=True, eq=False)
class Followed:
    """A file that is followed, or was: `state` as its owner knows it, `read`: handed out up to here."""

    state: FileState
    read: int
    tail_at: int = 0
    last: bytes = b""  # tail_of what stands before tail_at, or none if that was before the start
    seen: SeenFile | None = None  # as the last scan found it
    linked: bool = True  # it may be written through a name elsewhere
    size: int = 0  # the most that it was seen to hold
    held: int = -1  # a descriptor
    adrift: bool = False  # it has no name any more, and is read through `held`
    away: bool = False  # it is nowhere to be found, but an archive of it may turn up
    suspect: bool = False  # not the file it was, says a read
    waiting: bool = False
    stalled_at: int = -1  # size at which nothing could be read on
    failed: str = ""

    @property
    def identity(self) -> Identity:
        return self.state.device, self.state.inode

    @property
    def key(self) -> Identity:
        """What it is known by while it is there: an archive by its content, as copies come and go."""
        return archive_key(self.state.version) if self.state.version else self.identity

    @property
    def state_now(self) -> FileState:
        """With what was read, though it is not yet recorded."""
        return dataclasses.replace(self.state, **self.tail)

    @property
    def known_at(self) -> int:
        """The place at which it is known what stands before."""
        return self.tail_at if self.last else self.state.tail_at

    @property
    def tail(self) -> dict[str, Any]:
        """The fields of FileState that say what was read last, if anything was."""
        if not self.last:
            return {}
        return {"tail_at": self.tail_at, "tail": digest(self.last), "tail_bytes": len(self.last)}

    @property
    def path(self) -> str:
        """By which it can be read."""
        return held_path(self.held) if self.adrift else self.state.path

    @property
    def unread(self) -> int:
        """Bytes that it was seen to hold and that were not handed out."""
        return max(0, self.size - self.read)

    @property
    def here(self) -> bool:
        """It can be read, as far as is known."""
        return not (self.away or self.state.gone)

    @property
    def ended(self) -> bool:
        """Nothing of it is left that can be read."""
        return not self.unread or (self.stalled_at == self.size and not self.failed)

    @property
    def packed(self) -> bool:
        return bool(self.state.version)


def path_key(path: str) -> str:
    """As a watch names a file: directory, slash, name."""
    return f"{os.path.dirname(path) or '.'}/{os.path.basename(path)}"


def held_path(descriptor: int) -> str:
    """A name of an open file, also of one that has no other."""
    return f"/proc/self/fd/{descriptor}"


def archive_key(version: str) -> Identity:
    return -1, int(version, 16)


def key_of(seen: SeenFile) -> Identity:
    """As Followed.key."""
    plain = seen.path == seen.name
    return (seen.device, seen.inode) if plain else archive_key(version_of(seen))


def version_of(copy: SeenFile) -> str:
    return os.path.basename(copy.path).partition(".")[0]


def place_of(seen: SeenFile) -> dict[str, Any]:
    """The fields of FileState that say where a file is and what it is a copy of."""
    names = ("path", "name", "device", "inode", "source")
    version, unpacked = (version_of(seen), seen.size) if seen.path != seen.name else ("", 0)
    return {name: getattr(seen, name) for name in names} | {"version": version, "unpacked": unpacked}


def read_by_others(seen: SeenFile, offset: int, number: int) -> FileState:
    """What to remember of a file that was read up to this offset, of an archive to the end of what is in it,
    by somebody who does not follow it. OSError if it can't be looked into."""
    state = FileState(number, **place_of(seen), offset=offset, size=seen.size)
    if is_packed(seen.name):
        version = Spool.version(seen)
        copy = dataclasses.replace(state, path=f"{version}.log", version=version)
        return dataclasses.replace(copy, unpacked=offset, size=offset)
    if not offset:
        return state
    identity = seen.device, seen.inode
    head = read_at(seen.path, 0, min(HEAD_BYTES, offset), identity)
    tail = tail_at(seen.path, offset, identity)
    state = dataclasses.replace(state, head_bytes=len(head), head=digest(head))
    return dataclasses.replace(state, tail_at=offset, tail=digest(tail), tail_bytes=len(tail))


def renamed_to(file: Followed, listings: dict[str, dict[int, str]]) -> str | None:
    """The name that the file has now: in its directory, or anywhere if it is held."""
    directory = os.path.dirname(file.state.path) or "."
    if directory not in listings:
        listings[directory] = {}
        with contextlib.suppress(OSError):
            listings[directory] = names_by_inode(directory)
    path = listings[directory].get(file.state.inode, "")
    if not path and file.held >= 0:
        path = os.readlink(held_path(file.held))
    size = file_size(path, file.identity)
    if size is None or not file.state.head_bytes:
        return None
    with contextlib.suppress(OSError):
        if goes_on(SeenFile(path, path, *file.identity, size), file.state_now, file.read):
            return path
    return None


def is_linked(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return True
    return status.st_nlink != 1 or not stat.S_ISREG(status.st_mode)


HELD_MAX: Final = 256
"""Descriptors of files that were seen to grow: each may be deleted or moved before it is read."""
AWAY_S: Final = 10.0
"""For so long, and until the next scan at least, an archive is waited for that holds a file which is away."""
AWAY_MAX: Final = 1024
"""Files that are away."""
_ELSEWHERE: Final = "has a name now by which another worker reads it"
_SETTLED_US: Final = 2_000_000  # an archive that was written to so lately may not be whole yet


class Inventory:
    """For one thread, but for `advanced`. `notice` is told of what was replaced, shrank or vanished."""

    def __init__(
        self,
        spool: Path,
        spool_bytes_max: int,
        clock: Clock,
        states: Iterable[FileState],
        keep_copies: bool,
        drain: bool,
        notice: Callable[[str], None],
        wake: Callable[[], None],
        first: int = 0,
        by_name: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`keep_copies`: unpacked copies stay though they are read and recorded; `wake`: as Unpacker.
        `by_name`: of a path, whether the file is known by that alone, so that another one is read, whatever
        it holds and whichever inode it got.
        """
        self._spool = Spool(spool, spool_bytes_max)
        self.unpacker = Unpacker(self._spool, wake)
        self._clock = clock
        self._keep_copies = keep_copies
        self._drain = drain
        self._notice = notice
        self._mutex = threading.Lock()  # over the states of `files`
        self.files: dict[int, Followed] = {}
        self.by_path: dict[str, Followed] = {}
        self.current: dict[Identity, Followed] = {}  # those that are there
        self._archives: dict[Identity, Followed] = {}
        self._changed: list[FileState] = []  # not told yet
        self._twins: dict[str, str] = {}  # name of an archive -> of the plain file that is read instead
        self.unlisted: dict[str, str] = {}
        """Names of archives that can't be read -> why."""
        self.settling: set[str] = set()
        """Names of archives that are left for later: being written to still, it seems, or being unpacked."""
        self.away: dict[Followed, tuple[str, float]] = {}
        """Files that are away -> what became of them, it seems, and since when; since longest first."""
        self.reads_on = False
        """There are files without a name, that are held: the next scan must look again."""
        self.lost_bytes = 0
        """Of files that were deleted, cut or written anew before they were read."""
        self._held: dict[int, Followed] = {}  # by descriptor, the one that grew longest ago first
        self.none_idle = False
        """All that are held had something unread, and nothing was read since."""
        self._displaced: dict[Followed, str] = {}  # as `lost` in update
        self._next_number = first
        self._by_name = by_name
        for state in states:
            self._next_number = max(self._next_number, state.number + 1)
            file = Followed(state, state.offset, size=state.size)
            self.files[state.number] = file
            if state.gone:
                continue
            before = self.current.get(file.key)
            self._index(file)
            if before is not None:  # it was away when it was recorded, and the other has its inode
                self._unindex(before)
                self._displaced[before] = "was overwritten"

    @property
    def incomplete(self) -> bool:
        """There may be more to read, in an archive that is left for later or has yet to turn up."""
        return bool(self.settling) or any(file.unread for file in self.away)

    def advanced(self, number: int, offset: int) -> FileState:
        """As LogFollower.advanced. Any thread."""
        with self._mutex:
            file = self.files[number]
            size = max(file.size, offset)
            file.state = dataclasses.replace(file.state, offset=offset, size=size, **file.tail)
            return file.state

    def hold(self, file: Followed) -> None:
        """It has bytes that are not read: keep them within reach, whatever becomes of its name."""
        if file.packed:
            return
        if file.held >= 0:
            del self._held[file.held]  # to the end of the line
            self._held[file.held] = file
            return
        if len(self._held) >= HELD_MAX:
            if self.none_idle:
                return
            idle = next((one for one in self._held.values() if not one.unread), None)
            if idle is None:
                self.none_idle = True
                return
            self._let_go(idle)
        with contextlib.suppress(OSError):  # reading will tell the reason
            held = os.open(file.state.path, os.O_RDONLY | os.O_CLOEXEC)
            if file_size(held_path(held), file.identity) is None:
                os.close(held)  # another file has its name by now
            else:
                file.held, self._held[held] = held, file

    def close(self) -> None:
        """Hold no file any more."""
        for file in list(self._held.values()):
            self._let_go(file)

    def _let_go(self, file: Followed) -> None:
        if file.held >= 0:
            del self._held[file.held]
            os.close(file.held)
            file.held, file.adrift = -1, False

    def set_head(self, file: Followed, length: int, head: bytes) -> None:
        self._change(file, head_bytes=length, head=head)

    def update(self, found: Sequence[SeenFile], elsewhere: Collection[Identity] = ()) -> list[FileState]:
        """Take in what a scan found; the states that are new or changed.

        `elsewhere`: files that match, too, and are another process's: one that was read here until it got
        such a name is let go.
        """
        self.unlisted, self.settling, self.reads_on, self.unpacker.news = {}, set(), False, False
        present = {file.source for file in found if not is_packed(file.name)}
        archives = {file.source for file in found if is_packed(file.name)}
        present |= {held.key for source, held in self._archives.items() if source in archives}
        seen = [file for file in map(self._readable, found) if file is not None]
        present |= set(map(key_of, seen))
        new: list[SeenFile] = []
        lost, self._displaced = self._displaced, {}
        for file in seen:
            old = self.current.get(key_of(file))
            if old is not None and old.seen == file and not old.suspect:
                continue
            same = self._same(file, old, present)
            if same is not None:
                self._refresh(same, file)
                continue
            new.append(file)
            if old is not None and old.held < 0 and not os.path.lexists(old.state.path):
                lost[old] = ""  # deleted, and its inode is another's now
            elif old is not None:
                lost[old] = f"shrank to {file.size} bytes" if file.size < old.read else "was overwritten"
        lost |= self._missing(present, elsewhere)
        for file in new:
            self._adopt(file, lost)
        for old, what in lost.items():
            if what == _ELSEWHERE or self._by_name(old.state.path):
                self._lose(old, what)
            elif what or not self._reads_on(old):
                self._miss(old, what)
        self._give_up()
        if found or self._archives:
            self._sweep(found)
        changed, self._changed = self._changed, []
        return changed

    def _readable(self, file: SeenFile) -> SeenFile | None:
        """What is read of a file: itself, or its unpacked copy; None if that can't be had now."""
        if not is_packed(file.name):
            return file
        held = self.current.get(archive_key(self._spool.version(file)))
        if held is not None and not self._keep_copies and held.state.offset >= held.state.unpacked > 0:
            self._spool.remove(held.state.path)  # read and recorded: nobody needs it any more
            return SeenFile(
                held.state.path, file.name, *held.identity, held.state.unpacked, source=file.source
            )
        return self._spool.copy(file) or self._unpack(file)

    def _unpack(self, file: SeenFile) -> SeenFile | None:
        age_us = self._clock.now_us() - file.modified_ns // 1000
        recent = not self._drain and 0 <= age_us < _SETTLED_US
        if recent and not 0 < file.size <= SMALL_BYTES:
            self.settling.add(file.name)
            return None
        if not file.size:
            return None  # whoever makes it has written nothing yet: it may be of a file that is read
        try:
            copy = self.unpacker.get(file)
            if copy is None:
                self.settling.add(file.name)
            return copy
        except FileNotFoundError:
            return None  # deleted since the listing
        except StorageError as error:
            if recent and isinstance(error, TruncatedError):
                self.settling.add(file.name)
            else:
                self.unlisted[file.name] = str(error)
            return None

    def _same(self, file: SeenFile, old: Followed | None, present: set[Identity]) -> Followed | None:
        """The file that was read before and is this one, going by what it is called; its head and what
        was read last must agree."""
        known = old
        if known is None and file.path != file.name:
            known = self._archives.get(file.source)
            if known is not None and known.read and not known.known_at:
                return None  # nothing says what was read of it: another archive may have got its inode
        elif known is None:
            known = self.by_path.get(path_key(file.path))
            if known is not None and (known.state.inode != file.inode or known.key in present):
                known = None  # else the same inode by the same path: only the device has another number now
        if known is None or file.size < known.read:
            return None
        if self._by_name(file.path) and path_key(file.path) != path_key(known.state.path):
            return None
        try:
            return known if goes_on(file, known.state_now, known.read) else None
        except OSError:
            return known  # reading on will tell the reason

    def _refresh(self, file: Followed, seen: SeenFile) -> None:
        """A known file was found, by whatever name and as whatever copy."""
        if file.adrift or (seen.device, seen.inode) != file.identity:
            self._let_go(file)
            file.stalled_at = -1  # the last line of an archive needs no newline
        was_away, file.away = file.away, False
        self.away.pop(file, None)
        old, file.suspect, file.seen = file.state, False, seen
        place = place_of(seen)
        if dataclasses.replace(old, gone=False, **place) == old and not was_away:
            return
        self._unindex(file)
        self._changed.append(self._change(file, gone=False, **place))
        if old.version and old.path != seen.path:
            self._spool.remove(old.path)
        self._index(file)

    def _adopt(self, file: SeenFile, lost: dict[Followed, str]) -> None:
        """A file that nothing is known of goes on where one with the same content ended, or is a new one."""
        with contextlib.suppress(OSError):  # reading will tell the reason
            packed = file.path != file.name
            # What a plain file that comes later holds is told once more: somebody put it there again.
            away = (old for old in self.away if packed or old.identity == (file.device, file.inode))
            olds = [] if self._by_name(file.path) else [o for o in (*lost, *away) if file.size >= o.size]
            olds.sort(key=lambda old: (-old.known_at, -old.size))  # of two that begin alike, the longer one
            head = read_at(file.path, 0, HEAD_BYTES, (file.device, file.inode)) if olds or packed else b""
            same = next((old for old in olds if _holds(file, head, old)), None)
            if packed and same is None:
                if self._is_twin(file, head):
                    return
                # What nobody has read is not compared: to be read from its start is right for any.
                unread = (old for old in olds if old.size and not old.read and not old.known_at)
                same = next((o for o in unread if unrotated(o.state.name) == unrotated(file.name)), None)
            if same is not None:
                lost.pop(same, None)
                self._refresh(same, file)
                return
        number, self._next_number = self._next_number, self._next_number + 1
        followed = Followed(FileState(number, **place_of(file), size=file.size), 0, seen=file)
        self.files[number] = followed
        self._index(followed)
        self._changed.append(followed.state)

    def _is_twin(self, copy: SeenFile, head: bytes) -> bool:
        """Whether the plain file that it was made of is there: gzip lets go of that last."""
        for other in self.current.values():
            if other.packed or other.seen is None or other.seen.size < copy.size:
                continue
            if not other.known_at and other.seen.size != copy.size:
                continue  # nearly all that are unread: no need to look into them
            if _holds(copy, head, other):
                name = other.state.name
                if self._twins.get(copy.name) != name:
                    self._notice(f"{copy.name} holds what {name} holds and is not read again")
                self._twins[copy.name] = name
                return True
        return False

    def _missing(self, present: set[Identity], elsewhere: Collection[Identity]) -> dict[Followed, str]:
        """Those that no pattern matches any more and can't be read on, mostly as they are gone."""
        missing: dict[Followed, str] = {}
        listings: dict[str, dict[int, str]] = {}
        for file in [file for key, file in self.current.items() if key not in present]:
            size, what = file_size(file.path, file.identity), ""
            if file.packed:
                if size is None or file.state.offset >= size:  # else what was unpacked is read to its end
                    missing[file] = ""
                continue
            if file.identity in elsewhere:
                missing[file] = _ELSEWHERE
                continue
            renamed = size is None and not self._by_name(file.state.path)
            if renamed and (path := renamed_to(file, listings)) is not None:
                self._unindex(file)
                self._changed.append(self._change(file, path=path, name=path))
                self._index(file)
                size = file_size(path, file.identity)
            if size is not None and not file.adrift:
                file.seen = SeenFile(file.state.path, file.state.name, *file.identity, size)
                what = "" if size >= file.read else f"shrank to {size} bytes"
                if not what and (not file.suspect or self._same(file.seen, file, present) is not None):
                    file.suspect = False
                    continue
                what = what or "was overwritten"
            missing[file] = what
        return missing

    def _miss(self, file: Followed, what: str) -> None:
        """It is away. Its owner is told when it is given up, and until then keeps its state over a restart:
        rotation lets go of a file before or after its archive is there, and another may get its inode."""
        self._drop(file)
        file.away, self.away[file] = True, (what, self._clock.monotonic())
        if what and self._drain and not file.unread:
            self._tell_anew(file, what)  # a drain may end before it is given up

    def _give_up(self) -> None:
        """Those whose archives have not turned up."""
        upto = self._clock.monotonic() - AWAY_S
        for file, (what, since) in list(self.away.items()):
            # An archive that is being written or unpacked may be what became of it.
            if len(self.away) <= AWAY_MAX and (since > upto or self.settling):
                return
            del self.away[file]
            self._lose(file, what)

    def _lose(self, file: Followed, what: str) -> None:
        copied = what and file.unread and self._is_copied(file)
        lost = 0 if what == _ELSEWHERE or copied else file.unread
        self.lost_bytes += lost
        if lost:
            became = what or "was deleted"
            self._notice(f"{file.state.name} {became} before it was read: {lost} bytes of it are lost")
        elif self._by_name(file.state.path):
            pass  # deleted when it was read; another file may have its inode by now
        elif not self._keep_copies and file.packed and file.state.offset >= file.state.unpacked:
            pass  # as is to be expected of an archive that is read
        elif what:
            if not self._drain:
                self._tell_anew(file, what)
        else:
            self._notice(f"{file.state.name} is gone; it was read to its end")
        self._drop(file)
        file.away = False
        self._changed.append(self._change(file, gone=True))

    def _is_copied(self, file: Followed) -> bool:
        """Whether a later log of its name, as `copytruncate` leaves one, holds all that it held."""
        name, number = unrotated(file.state.name), file.state.number
        later = [one.seen for one in self.current.values() if one.seen and one.state.number > number]
        alike = (seen for seen in later if seen.size >= file.size and unrotated(seen.name) == name)
        with contextlib.suppress(OSError):
            return any(same_content(seen, file.state_now) for seen in alike)
        return False

    def _tell_anew(self, file: Followed, what: str) -> None:
        self._notice(f"{file.state.name} {what}; what it holds now is read from its start")

    def _drop(self, file: Followed) -> None:
        self._unindex(file)
        self._let_go(file)
        if file.packed:
            self._spool.remove(file.state.path)

    def _reads_on(self, file: Followed) -> bool:
        """Whether a file without a name is read on as it is held: until it stood at its end at two scans, for
        whoever writes to it may not know yet."""
        if file.held < 0 or file.seen is None:
            return False
        size = file_size(held_path(file.held), file.identity) or 0
        over = file.adrift and file.seen.size == size and file.ended
        file.adrift, file.seen = True, dataclasses.replace(file.seen, size=size)
        self.reads_on |= not over
        return not over

    def _sweep(self, found: Sequence[SeenFile]) -> None:
        packed = {self._spool.version(file) for file in found if is_packed(file.name)}
        held = {file.state.path for file in self._archives.values()}
        self._spool.sweep(packed, held)

    def _change(self, file: Followed, **values: Any) -> FileState:
        with self._mutex:
            file.state = dataclasses.replace(file.state, **values)
            return file.state

    def _index(self, file: Followed) -> None:
        self.current[file.key] = file
        if file.packed:
            self._archives[file.state.source] = file
        else:
            self.by_path[path_key(file.state.path)] = file
            file.linked = is_linked(file.state.path)

    def _unindex(self, file: Followed) -> None:
        _discard(self.current, file.key, file)
        _discard(self._archives, file.state.source, file)
        _discard(self.by_path, path_key(file.state.path), file)


def _holds(seen: SeenFile, head: bytes, file: Followed) -> bool:
    """As same_content, of what was read of the file. `head`: the first bytes of what was seen. OSError."""
    if not file.known_at:
        return _is_copy(seen, head, file)
    if digest(head[: file.state.head_bytes]) != file.state.head:
        return False  # nearly all differ here already
    return same_content(seen, file.state_now)


def _is_copy(seen: SeenFile, head: bytes, file: Followed) -> bool:
    """Whether it holds the same as a file of which nothing is read yet: as long, and alike at both ends."""
    path, identity = held_path(file.held) if file.held >= 0 else file.state.path, file.identity
    size = file_size(path, identity)
    if not size or size != seen.size:
        return False
    start = max(0, size - TAIL_BYTES_MAX)
    tail = read_at(seen.path, start, TAIL_BYTES_MAX, (seen.device, seen.inode))
    with contextlib.suppress(OSError):
        same_tail = read_at(path, start, TAIL_BYTES_MAX, identity) == tail
        return same_tail and read_at(path, 0, HEAD_BYTES, identity) == head
    return False


def _discard(index: dict[Any, Followed], key: object, file: Followed) -> None:
    if index.get(key) is file:
        del index[key]
