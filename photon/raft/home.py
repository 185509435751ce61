"""What a host has on disk beside its groups: who it is, whom it has met, which groups it holds.

A replica that has lost its disk has forgotten votes and acknowledgements, so it must not go on under its
name. Three records tell: the host's list of groups (one of them is gone); the peers' memory of each other's
identity, which is made once with the directory (all of it is gone); and their memory of the last life of
each other, one a start, of which a directory that was put back from a copy knows nothing.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from photon.core import disk
from photon.core.disk import DirectoryLock
from photon.raft.journal import REPLACE_IT, DamagedError, storage_errors
from photon.raft.store import HARD_STATE_FILE

IDENTITY_BYTES: Final = 16
# A life: the directory's identity, how many lives it has had, and dice. Two that go on from the same copy
# differ in the dice.
_COUNT_BYTES: Final = 8
_DICE_BYTES: Final = 8
LIFE_BYTES: Final = IDENTITY_BYTES + _COUNT_BYTES + _DICE_BYTES
NO_LIFE: Final = bytes(LIFE_BYTES)
# So many are kept. What a peer remembers from before them is believed.
LIVES_MAX: Final = 1000
_GROUP: Final = "group-"
_GONE: Final = ".gone"  # a group that is being deleted


class Home:
    """One host's directory, locked. Raft thread only once the host runs."""

    def __init__(self, directory: Path, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """Open or create it, and finish deletions that a crash cut short.

        Raises CorruptStateError where something that was there is missing or damaged; LockedError,
        StorageError.
        """
        self.directory = directory
        self.identity = b""
        self.life = NO_LIFE
        self._groups: set[int] = set()
        self._peers: dict[str, str] = {}  # identity, as hex
        self._met: dict[str, str] = {}  # life, as hex
        self._lives: list[str] = []  # its own, as hex without the identity, this one last
        self._lock = DirectoryLock(directory)
        try:
            with storage_errors(directory, "opening a host's directory"):
                self._open(random_bytes)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Unlock. Again it does no harm."""
        self._lock.release()

    # -- groups -----------------------------------------------------------------------------------------

    def group(self, number: int) -> Path:
        """The directory of a group's replica."""
        return self.directory / f"{_GROUP}{number:04d}"

    def groups(self) -> list[int]:
        """The groups on disk, in order."""
        return sorted(self._groups)

    def added(self, number: int) -> None:
        """The group's directory is there, whole: from now on it must not be missing. Durable on return."""
        if number not in self._groups:
            self._store("groups", sorted([*self._groups, number]))
            self._groups.add(number)

    def remove(self, number: int) -> Path:
        """Take a group's directory away, whole or not at all. Durable on return. Raises StorageError.

        What is left of it, to be given to `delete`: the next start does so otherwise.
        """
        path = self.group(number)
        gone = path.with_name(path.name + _GONE)
        with storage_errors(path, "deleting a group"):
            if path.exists():
                disk.replace(path, gone)
            if number in self._groups:
                self._store("groups", sorted(self._groups - {number}))
                self._groups.discard(number)
        return gone

    # -- peers ------------------------------------------------------------------------------------------

    def identity_seen(self, peer: str, identity: bytes) -> str | None:
        """A peer has proved to have this identity: why it must be refused, or None. Raises StorageError."""
        known = self._peers.get(peer)
        if known is None:
            peers = {**self._peers, peer: identity.hex()}
            self._store("peers", peers)
            self._peers = peers
        elif known != identity.hex():
            return f"{peer} does not have the directory it had before (it has lost its disk?); {REPLACE_IT}"
        return None

    def met(self, peer: str, life: bytes) -> None:
        """Neither has refused the other: from now on both remember each other. Durable on return.

        Before that nothing of the peer may be believed that it could have forgotten when it is met again.
        Being told its identity is less: it may go on to refuse this host. Raises StorageError.
        """
        if self._met.get(peer) != life.hex():
            met = {**self._met, peer: life.hex()}
            self._store("met", met)
            self._met = met

    def last_life(self, peer: str) -> bytes:
        """In which it was last `met`; NO_LIFE where it never was."""
        return bytes.fromhex(self._met.get(peer, NO_LIFE.hex()))

    def check_life(self, peer: str, life: bytes) -> None:
        """A peer says that this host was in this life when it last met it.

        Raises CorruptStateError where the directory knows nothing of such a life of its own.
        """
        mark = life[IDENTITY_BYTES:].hex()
        if life.startswith(self.identity) and mark >= self._lives[0] and mark not in self._lives:
            raise DamagedError(
                self.directory,
                f"{peer} remembers a later life of this replica: its disk was put back from a copy, and it "
                "has forgotten what it acknowledged since",
            )

    def has_met(self, peer: str) -> bool:
        """Whether it was ever `met`."""
        return peer in self._met

    # -- the files --------------------------------------------------------------------------------------

    def _open(self, random_bytes: Callable[[int], bytes]) -> None:
        disk.sync_directory(self.directory)  # what a killed process has renamed may not be on the disk yet
        identity, groups, peers, met, lives = (
            _read(self.directory / name) for name in ("identity", "groups", "peers", "met", "lives")
        )
        if identity is None:
            if groups:
                raise DamagedError(self.directory / "identity", "the host's identity is missing")
            # The identity is written last: without it nobody was ever spoken to.
            identity, groups, peers, met, lives = random_bytes(IDENTITY_BYTES).hex(), [], {}, {}, []
            born = (("groups", groups), ("peers", peers), ("met", met), ("lives", lives))
            for name, value in (*born, ("identity", identity)):
                self._store(name, value)
        for name, value in (("groups", groups), ("peers", peers), ("met", met), ("lives", lives)):
            if value is None:
                raise DamagedError(self.directory / name, "it is missing")
        self.identity = bytes.fromhex(identity)
        self._groups = set(groups)
        self._peers = peers
        self._met = {peer: life for peer, life in met.items() if peer in peers}
        for path in self.directory.glob(f"{_GROUP}*{_GONE}"):
            delete(self.remove(int(path.name[len(_GROUP) : -len(_GONE)])))
        for number in self._groups:
            if not (self.group(number) / HARD_STATE_FILE).exists():
                raise DamagedError(self.group(number), "this replica was here and is missing, or cut")
        self._begin_life(lives, random_bytes(_DICE_BYTES))

    def _begin_life(self, before: list[str], dice: bytes) -> None:
        """On the disk before any peer hears of it."""
        count = int(before[-1][: 2 * _COUNT_BYTES], 16) + 1 if before else 1
        mark = count.to_bytes(_COUNT_BYTES, "big") + dice
        self._lives = [*before, mark.hex()][-LIVES_MAX:]
        self._store("lives", self._lives)
        self.life = self.identity + mark

    def _store(self, name: str, value: object) -> None:
        path = self.directory / name
        body = json.dumps(value).encode()
        with storage_errors(path, "writing it"):
            disk.write_file(path, body + b"\n%08x\n" % zlib.crc32(body))


def delete(gone: Path) -> None:
    """What `Home.remove` has left. Any thread: a snapshot may be large."""
    shutil.rmtree(gone, ignore_errors=True)


# -- for who looks from outside -------------------------------------------------------------------------


def read_identity(directory: Path) -> str:
    """The identity, as hex, of a host that may be running; "" where there is none. CorruptStateError."""
    return str(_read_other(directory / "identity") or "")


def read_peers(directory: Path) -> dict[str, str]:
    """Peer -> identity, as hex, as that host has met it. CorruptStateError."""
    return dict(_read_other(directory / "peers") or {})


def read_groups(directory: Path) -> list[int]:
    """The groups that host must hold. CorruptStateError."""
    return list(_read_other(directory / "groups") or [])


def _read_other(path: Path) -> Any:
    try:
        return _read(path)
    except OSError as error:
        raise DamagedError(path, f"it cannot be read ({error})") from error


def _read(path: Path) -> Any:
    """None where there is none. OSError, CorruptStateError."""
    try:
        body, _, crc = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    except FileNotFoundError:
        return None
    if crc != b"%08x" % zlib.crc32(body):
        raise DamagedError(path, "it is damaged")
    return json.loads(body)
