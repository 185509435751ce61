"""The dispatcher's durable state: one transaction a group of finished batches (paper 3.2; invariant 3).

At every commit: foreign events counted = events with a fate + events that wait for a retry, and the offsets
of the files have passed exactly the counted ones. Dead letters are on disk before the commit that counts
them; at start what a crash left after the last counted one is cut off. So each is there exactly once.

Several workers may share it. Each writes under a slot, and every transaction of its own first looks whether
the slot is still its own: one that others took for dead, because it stood still, records nothing any more.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, TypeVar

import lmdb

from dispatcher.rows import FORMAT, LedgerFile, Rows, State, Worker
from dispatcher.slots import FileLock, boot_id, claim_slot, hold_directory
from dispatcher.stopped import WriteMarks
from dispatcher.totals import Totals
from photon.core.clock import Clock
from photon.core.disk import storage_errors, sync_directory
from photon.core.errors import CorruptStateError, FencedError, StorageError
from photon.logs.files import FileState
from photon.logs.writer import LogPosition, RotatingLog

DEAD_LETTER_FILE_BYTES_MAX: Final = 64 << 20

R = TypeVar("R")
Work = Callable[[Rows, State, Worker], tuple[State, Worker, R]]
"""What a transaction does: rows, and the two rows as they are -> the two as they shall be, and an answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What one transaction adds: `letters` are whole lines; retries are packed as in retry_entries."""

    files: Sequence[FileState]
    added: Totals
    letters: bytes = b""
    retries_removed: Sequence[bytes] = ()
    retries_due: Callable[[int], list[bytes]] = lambda _: []
    """Keys of the added retries, given the first free sequence number."""
    retries: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The workers that share a directory: how many at most, and after how long silence one counts as dead.

    `name`: of this process, for people. `clock.monotonic` must be the same for all processes of the machine.
    """

    workers: int
    lease_s: float
    clock: Clock
    name: str = ""


class Ledger:
    """One process's, or a worker's of a group; usable from several threads.

    LockedError, CorruptStateError, DiskFullError, StorageError on opening; the latter two also later: then
    nothing of the entry is recorded and the same one can be recorded again. FencedError: another worker has
    taken over; nothing is or will be recorded.
    """

    def __init__(
        self,
        directory: Path,
        dead_letters: Path,
        bytes_max: int,
        group: Group | None = None,
        file: LedgerFile | None = None,
    ) -> None:
        """`group`: None to be alone. `file`: its environment, where the process has it open already."""
        self.directory = directory
        self.dead_letters = dead_letters
        self.group = group
        self.slot = 0
        self.marks: WriteMarks | None = None
        self.held: dict[tuple[int, int], int] = {}
        """Source -> number of the files that this worker reads, as far as they are recorded."""
        self._mutex = Lock()
        self._locks: list[FileLock] = [hold_directory(directory, alone=group is None)]
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go)
            if group is not None:
                self.slot, lock = claim_slot(directory, group.workers)
                self._locks.append(lock)
                self.marks = WriteMarks(directory, self.slot, group.clock)
            self.file = file or LedgerFile(
                directory, bytes_max, self.marks.writing if self.marks else contextlib.nullcontext
            )
            self._close_file = self.file.close if file is None else lambda: None
            undo.callback(self._close_file)
            self._letters = RotatingLog(dead_letters, letters_stem(self.slot), DEAD_LETTER_FILE_BYTES_MAX)
            undo.callback(self._letters.close)
            self.file.sweep_readers()  # also our slot's last one's: nobody need bury it any more
            self._state, self._worker = self._enter()
            self._letters.truncate(self._worker.letters)
            self.held = {state.source: state.number for state in self.files()}
            undo.pop_all()

    def corrupt(self, why: str) -> CorruptStateError:
        """The error for an entry that is not what was recorded."""
        return self.file.corrupt(why)

    @property
    def totals(self) -> Totals:
        """Of all workers, as of the last transaction or `refresh`."""
        return self._state.totals

    @property
    def pending(self) -> int:
        """Events that wait for a retry or are being retried."""
        return self._state.totals.foreign_events - self._state.totals.ended

    @property
    def worker(self) -> Worker:
        """This worker's row, as of its last transaction."""
        return self._worker

    @property
    def broken(self) -> bool:
        """The dead letters can't be written any more: only a restart can tell what is on disk."""
        return self._letters.broken

    def refresh(self) -> State:
        """Learn what other workers have recorded."""
        with self._mutex, self.file.read() as rows:
            self._state = rows.known_state()
            return self._state

    def files(self) -> list[FileState]:
        """The states of this worker's files that are still there as far as is known."""
        with self.file.read() as rows:
            states = [state for state in rows.files() if not state.gone]
            if self.group is None:
                return states
            claims = rows.claims()
            return [state for state in states if claims.get(state.source) == self.slot]

    def retries_from(
        self, key: bytes, wanted: Callable[[bytes], bool | None], bytes_max: int
    ) -> list[tuple[bytes, bytes]]:
        """Entries from `key` on: those `wanted`, up to the first for which it is None, or to `bytes_max`.

        The entry that reaches `bytes_max` is among them.
        """
        found: list[tuple[bytes, bytes]] = []
        size = 0
        with self.file.read() as rows, rows.retries() as cursor:
            more = cursor.set_range(key)
            while more and size < bytes_max:
                key = cursor.key()
                answer = wanted(key)
                if answer is None:
                    break
                if answer:
                    value = cursor.value()
                    size += len(value)
                    found.append((key, value))
                more = cursor.next()
        return found

    def record(self, entry: Entry) -> list[bytes]:
        """Commit it. The keys of the added retries."""
        with self._mutex:
            before = position = self._worker.letters
            if entry.letters:
                self._check_slot()
                if self._letters.position != position:
                    self._letters.truncate(position)  # an earlier try got so far and no further
                position = self._letters.append(entry.letters)
                self._letters.sync()

            def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, list[bytes]]:
                keys = entry.retries_due(state.sequence)
                after = dataclasses.replace(
                    state, sequence=state.sequence + len(keys), totals=state.totals.plus(entry.added)
                )
                self._write(rows, entry, keys, after.totals)
                rested = -1 if entry.added.foreign_events else worker.rested
                return after, dataclasses.replace(worker, letters=position, rested=rested), keys

            try:
                keys = self._transact(work)
            except FencedError:
                with contextlib.suppress(StorageError):  # else who has the slot next cuts it
                    self._letters.truncate(before)
                raise
            self._hold(entry.files)
            return keys

    def transact(self, work: Work[R]) -> R:
        """A transaction of this worker. If `work` gives back both rows as they were, nothing is written."""
        with self._mutex:
            return self._transact(work)

    def close(self) -> None:
        """Let go of everything, so that other workers need not find out."""
        if self.group is not None:
            # What can't be written now, others do when they see that the slot's lock is free.
            with contextlib.suppress(StorageError, FencedError):
                self.transact(self._leave)
        with self._mutex:
            self._close_file()
            self._letters.close()
            self._let_go()

    def _let_go(self) -> None:
        for lock in self._locks:
            lock.release()

    def _enter(self) -> tuple[State, Worker]:
        """Make the slot this process's own, with all that an earlier one left there."""
        with self.file.write() as rows:
            state, worker = rows.state(), rows.worker(self.slot)
            if state is None or worker is None:
                # Dead letters that are older than this ledger are not ours to cut.
                self._letters.cut_torn_line()
                worker = Worker(self._letters.position)
            state = state or State(FORMAT)
            numbers = [state.next_file]
            for file in rows.files():
                numbers.append(file.number + 1)
                if file.gone:
                    rows.drop_file(file.number)
            if self.group is None:
                self._end_others(rows)
            state = dataclasses.replace(state, epoch=state.epoch + 1, next_file=max(numbers))
            worker = dataclasses.replace(
                self._renewed(worker),
                incarnation=state.epoch,
                rested=-1,
                name=self.group.name if self.group else "",
                pid=os.getpid(),
            )
            rows.put_state(state)
            rows.put_worker(self.slot, worker)
        return state, worker

    def _end_others(self, rows: Rows) -> None:
        """Alone in the directory: what other slots have left is all ours (their retries: see adoption)."""
        for slot, other in rows.workers().items():
            if slot != self.slot:
                cut_letters(self.dead_letters, slot, other.letters)
                rows.put_worker(slot, dataclasses.replace(other, incarnation=0))
        for source in rows.claims():
            rows.drop_claim(source)

    def _leave(self, rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, None]:
        rows.drop_claims(self.slot)
        return (
            dataclasses.replace(state, epoch=state.epoch + 1),
            dataclasses.replace(worker, incarnation=0),
            None,
        )

    def _transact(self, work: Work[R]) -> R:
        after, mine = self._state, self._worker
        try:
            with self.file.write() as rows:
                state, worker = rows.known_state(), self._own(rows)
                after, mine, answer = work(rows, state, worker)
                if after is not state:
                    rows.put_state(after)
                if mine is not worker or after is not state:
                    mine = dataclasses.replace(self._renewed(mine), commits=worker.commits + 1)
                    rows.put_worker(self.slot, mine)
        except CorruptStateError:
            raise
        except StorageError as error:
            if not isinstance(error.__cause__, lmdb.PanicError) or not self._got_through():
                raise
        self._state, self._worker = after, mine
        return answer

    def _got_through(self) -> bool:
        """Whether the transaction was committed before the disk failed."""
        self.file.reopen()
        with self.file.read() as rows:
            worker = rows.worker(self.slot)
        return (
            worker is not None
            and worker.incarnation == self._worker.incarnation
            and worker.commits > self._worker.commits
        )

    def _own(self, rows: Rows) -> Worker:
        worker = rows.worker(self.slot)
        if worker is None or worker.incarnation != self._worker.incarnation:
            raise FencedError(
                f"{self.file.path}: this process stood still for longer than 'dispatcher.lease_s' and others "
                f"have taken over its slot {self.slot}; it has recorded nothing since. Start it again"
            )
        return worker

    def _check_slot(self) -> None:
        if self.group is not None:
            with self.file.read() as rows:
                self._own(rows)

    def _renewed(self, worker: Worker) -> Worker:
        if self.group is None:
            return worker
        until = self.group.clock.monotonic() + self.group.lease_s
        return dataclasses.replace(worker, boot=boot_id(), until=until)

    def _write(self, rows: Rows, entry: Entry, keys: list[bytes], totals: Totals) -> None:
        for state in entry.files:
            if self.group is not None:
                holder = rows.claim(state.source)
                assert holder in (None, self.slot), f"{state.name} is held by slot {holder}, not {self.slot}"
                rows.put_claim(state.source, self.slot)
            rows.put_file(state)
        removed = sum(map(rows.drop_retry, entry.retries_removed))
        assert removed == len(entry.retries_removed), "a retry was recorded twice"
        with rows.retries() as cursor:
            _, written = cursor.putmulti(list(zip(keys, entry.retries, strict=True)), overwrite=False)
        assert written == len(keys), "a retry's key was not free"
        waiting = rows.waiting()
        if totals.foreign_events != totals.ended + waiting:
            raise self.corrupt(
                f"{totals.foreign_events} events read, but {totals.ended} have a fate and {waiting} wait",
            )

    def _hold(self, states: Sequence[FileState]) -> None:
        for state in states:
            if not state.gone:
                self.held[state.source] = state.number
            else:  # its source is another one by now
                for source in [s for s, number in list(self.held.items()) if number == state.number]:
                    del self.held[source]


def letters_stem(slot: int) -> str:
    """The names of a slot's dead letters begin with it."""
    return f"foreign-w{slot}" if slot else "foreign"


def cut_letters(dead_letters: Path, slot: int, position: LogPosition) -> None:
    """Cut, durably, what a worker that is no more wrote and did not count. Its slot's lock must be held."""
    if not any(dead_letters.glob(f"{letters_stem(slot)}-*")):
        return  # somebody took them away
    letters = RotatingLog(dead_letters, letters_stem(slot), DEAD_LETTER_FILE_BYTES_MAX)
    try:
        letters.truncate(position)
        letters.sync()
        with storage_errors(dead_letters):
            sync_directory(dead_letters)
    finally:
        letters.close()
