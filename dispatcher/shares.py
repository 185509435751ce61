"""The shares of a datacenter's foreign logs that this dispatcher has, as the registry's directory says.

A dispatcher says every second that it is there, and learns which shares are its own. Of each it has a thread,
which takes up what is kept of the share, runs a worker, and keeps a checkpoint of it
(dispatcher/checkpoint.py) about once a second, under the sequencer it was given. Where that is no longer
the present one, the share is another's, or its own again under the next one. What is here of it stays until
another dispatcher has written: that one has gone on with the share, and what is here is forgotten.

The state on this machine's disk counts if nobody else has written since: it is as new or newer, and it has
the lines of events that wait, whose logs may be gone. Who can't reach the registry for MEMBER_LEASE_S rests
until it can: by then others may have its shares.
"""

import contextlib
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from dispatcher.checkpoint import cut_letters, differing
from dispatcher.worker import INBOX_ONLY, Site, Worker, forget, restored
from dispatcher.workers import worker_directory
from idregistry.client import RegistryClient
from photon.core.clock import Background, Backoff
from photon.core.disk import storage_errors, write_file
from photon.core.errors import PhotonError, StorageError, UnavailableError, UsageError, told
from photon.logs.writer import LogPosition
from photon.raft.rules.placement import BEAT_EVERY_S, MEMBER_LEASE_S, Group

CHECKPOINT_EVERY_S: Final = 1.0
_COST_MAX: Final = 20
"""A checkpoint takes at most one part in so many of the time."""
_AGAIN_S: Final = 0.2
_RETRIES: Final = Backoff(0.1, 1.0)
_SEQUENCER: Final = "sequencer"


@dataclass(frozen=True, slots=True)
class Place:
    """`group`: of the datacenter's dispatchers; `life`: grows with each start of this one; `shares`: how many
    there are, where the group is new."""

    group: str
    name: str
    life: int
    address: str
    shares: int


class Want(Enum):
    """What is to become of a share that this dispatcher has."""

    RUN = auto()
    RELEASE = auto()
    """It is to be let go of, for another one or as this one stops."""
    REST = auto()
    """The registry can't be reached."""
    LOSE = auto()
    """Another one has it."""


class Shares:
    """From `start` to `stop`. `fail` gets what only a restart or the user can mend."""

    def __init__(self, site: Site, place: Place, fail: Callable[[BaseException], None]) -> None:
        self._site = site
        self._place = place
        self._fail = fail
        self._clock = site.clock
        self._heard = float("-inf")
        self._keepers: dict[int, Keeper] = {}
        self._left: dict[int, _Left] = {}
        """Shares that are lost, with which nobody has gone on yet."""
        self._inbox: Worker | None = None
        self._beats = Background("shares", self._beat, _RETRIES)

    def start(self) -> None:
        self._beats.start()

    def stop(self) -> None:
        """Let go of all shares, and leave."""
        self._beats.stop()
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.want(Want.RELEASE)
        for keeper in keepers:
            keeper.join()
        if self._inbox is not None:
            self._inbox.rest()
            self._inbox.close()
        with contextlib.suppress(PhotonError):
            self._site.registry.drain(self._place.group, self._place.name, self._place.life)

    @property
    def workers(self) -> list[Worker]:
        """Those that run."""
        running = [keeper.worker for keeper in list(self._keepers.values())]
        return [worker for worker in (*running, self._inbox) if worker is not None]

    def status(self) -> dict[str, Any]:
        """Of the shares: number -> sequencer, whether it runs, and why no checkpoint can be kept."""
        return {
            str(number): {
                "sequencer": keeper.sequencer,
                "runs": keeper.worker is not None,
                "trouble": keeper.trouble,
            }
            for number, keeper in sorted(self._keepers.items())
        }

    @property
    def trouble(self) -> str | None:
        return self._beats.trouble

    def _beat(self) -> float:
        self._look_for_failures()
        place, asked = self._place, self._clock.monotonic()
        try:
            group = self._site.registry.beat(place.group, place.name, place.life, place.address, place.shares)
        except UsageError as error:
            self._fail(error)
            return float("inf")
        except UnavailableError:
            if self._clock.monotonic() - self._heard > MEMBER_LEASE_S - BEAT_EVERY_S:
                for keeper in self._keepers.values():
                    keeper.want(Want.REST)
            raise
        self._heard = asked
        if self._inbox is None:
            try:
                # What is put into this process's inbox is of none of the shares.
                name = f"{place.name}-inbox"
                self._inbox = Worker(self._site, len(group.shares), INBOX_ONLY, name)
                self._inbox.start()
            except PhotonError as error:  # as one of a share: it takes up none
                self._fail(error)
                return float("inf")
        self._follow(group)
        return BEAT_EVERY_S if all(share.owner for share in group.shares) else _AGAIN_S

    def _follow(self, group: Group) -> None:
        owned = group.owned(self._place.name)
        for number, keeper in list(self._keepers.items()):
            share = owned.get(number)
            if share is None or share.sequencer != keeper.sequencer:
                keeper.want(Want.LOSE)
            elif share.heir:
                keeper.want(Want.RELEASE)
            if keeper.ended:
                del self._keepers[number]
                if keeper.left is not None:
                    self._left[number] = keeper.left
        self._look_after_left(group, owned)
        for number, share in owned.items():
            if number in self._keepers:
                continue
            if share.heir:
                # It was to be let go of before it was taken up.
                self._site.registry.write_share(self._place.group, number, share.sequencer, {}, release=True)
            else:
                keeper = self._keepers[number] = Keeper(
                    self._site,
                    self._place.group,
                    number,
                    share.sequencer,
                    len(group.shares),
                    self._beats.wake,
                )
                keeper.start()

    def _look_after_left(self, group: Group, owned: Container[int]) -> None:
        for number, left in list(self._left.items()):
            keeper = self._keepers.get(number)
            if keeper is not None and keeper.worker is not None:
                del self._left[number]
            elif number not in owned and not _is_ours(group.shares[number].written, left.here):
                try:
                    left.forget(self._site, number)
                    del self._left[number]
                except StorageError as error:  # it is tried again
                    self._site.notices.tell(told(error))

    def _look_for_failures(self) -> None:
        """Of those that only a restart or the user can mend."""
        failures = [keeper.failure for keeper in self._keepers.values()]
        failures += [self._inbox.driver.failure] if self._inbox else []
        for failure in failures:
            if failure is not None:
                self._fail(failure)


@dataclass(frozen=True, slots=True)
class _Left:
    """`here`: as of Keeper; `end`: of the dead letters that are kept."""

    here: tuple[int, ...]
    end: LogPosition

    def forget(self, site: Site, number: int) -> None:
        """Another one tells of the dead letters after those. StorageError."""
        cut_letters(site.dead_letters, number, site.number, self.end)
        forget(site, number)


def _is_ours(written: int, here: Container[int]) -> bool:
    """Whether nobody else has written what the directory keeps of a share."""
    return not written or written in here


class Keeper:
    """One share, from its first checkpoint here to its last; `on_end` is called once it has `ended`."""

    def __init__(
        self, site: Site, group: str, number: int, sequencer: int, of: int, on_end: Callable[[], None]
    ) -> None:
        self._site = site
        self._registry: RegistryClient = site.registry
        self._group = group
        self._number = number
        self._of = of
        self._on_end = on_end
        self._path = worker_directory(site.directory, number) / _SEQUENCER
        self._wanted = Want.RUN
        self._changed = threading.Event()
        self._kept: dict[bytes, bytes] = {}
        self._thread = threading.Thread(target=self._run, name=f"share-{number}", daemon=True)
        self.sequencer = sequencer
        self.worker: Worker | None = None
        self.failure: BaseException | None = None
        self.trouble: str | None = None
        """Why no checkpoint could be kept the last time."""
        self.ended = False
        self.left: _Left | None = None
        """If it was lost: then what is here still counts, unless another one has written."""

    def start(self) -> None:
        self._thread.start()

    def want(self, wanted: Want) -> None:
        """Nothing goes back to running: it ends, and another keeper takes the share up."""
        if self._wanted is Want.RUN or wanted is Want.LOSE:
            self._wanted = wanted
            self._changed.set()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._take_up():
                self._keep()
        except BaseException as error:
            self.failure = error
        finally:
            self.ended = True
            self._on_end()

    def _take_up(self) -> bool:
        """Make a worker of what is kept of the share, here or in the registry; False: it is another's."""
        read = self._try(
            lambda: self._registry.write_share(self._group, self._number, self.sequencer, {}, read=True)
        )
        if read is None or not read.stands:
            return False
        if not _is_ours(read.written, self._here()):
            restored(self._site, self._number, read.rows)
        self._kept = dict(read.rows)
        worker = Worker(self._site, self._number, self._of, f"{self._group}-{self._number}", moves=True)
        self._letters = worker.ledger.letters
        stands = self._try(lambda: self._checkpoint(worker))
        if stands:
            self.worker = worker
            return True
        worker.close()
        self.left = _Left(self._here(), self._letters)
        return False

    def _keep(self) -> None:
        worker = self.worker
        assert worker is not None
        worker.start()
        pause_s = CHECKPOINT_EVERY_S
        while self._wanted is Want.RUN and worker.driver.failure is None:
            self._changed.wait(pause_s)
            began = self._site.clock.monotonic()
            try:
                if not self._checkpoint(worker):
                    self._wanted = Want.LOSE
            except (UnavailableError, StorageError) as error:
                self.trouble = told(error)
            pause_s = max(CHECKPOINT_EVERY_S, _COST_MAX * (self._site.clock.monotonic() - began))
        worker.rest()
        if worker.driver.failure is not None:
            self.failure = worker.driver.failure
        elif self._wanted is Want.RELEASE:
            with contextlib.suppress(UnavailableError, StorageError):
                self._checkpoint(worker, release=True)
        else:
            self.left = _Left(self._here(), self._letters)
        self.worker = None
        worker.close()

    def _checkpoint(self, worker: Worker, release: bool = False) -> bool:
        """Keep what has changed; False: the share is another's. UnavailableError, StorageError."""
        assert worker.book is not None
        rows, letters = worker.book.rows()
        changed, removed = differing(rows, self._kept)
        if changed or removed or release:
            self._note_here()
            try:
                done = self._registry.write_share(
                    self._group, self._number, self.sequencer, changed, removed, release
                )
            except UsageError as error:
                # What is kept stays as it was: more is read again by who goes on with it.
                self.trouble = told(error)
                return True
            if not done.stands:
                return release
            self._kept, self._letters = rows, letters
        self.trouble = None
        return True

    def _here(self) -> tuple[int, ...]:
        """Under which sequencers the state that is here was kept last: the last one may not have been."""
        try:
            return tuple(map(int, self._path.read_text("ascii").split()))
        except (OSError, ValueError):
            return ()

    def _note_here(self) -> None:
        """Before the first write, whose answer may be lost. StorageError."""
        here = self._here()
        if self.sequencer not in here:
            with storage_errors(self._path):
                write_file(self._path, " ".join(map(str, (*here[-1:], self.sequencer))).encode())

    def _try(self, call: Callable[[], Any]) -> Any:
        """Until the registry answers; None where it is not wanted any more."""
        failures = 0
        while self._wanted is Want.RUN:
            try:
                return call()
            except UnavailableError as error:
                failures += 1
                self.trouble = told(error)
                self._changed.wait(_RETRIES.delay_s(failures))
        return None
