"""Which log files this worker reads, when several share them (paper 3.2): photon.logs.inventory.Claims.

What a file's holder is, is decided in the ledger's transactions alone, so no file ever has two. It changes
hands when it is free: its holder was told to leave it and has recorded all it read, or is dead.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from dispatcher.assignment import Source, plan
from dispatcher.ledger import Ledger
from dispatcher.rows import Rows, State, Worker
from photon.logs.files import FileState, SeenFile
from photon.logs.inventory import Content, Share
from photon.logs.packed import is_packed

NUMBERS_TAKEN: Final = 64
"""File numbers are fetched so many at a time."""


class FileClaims:
    """Asked by the follower's thread; `release` may be another's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._share = Share(frozenset(), (), frozenset())
        self._seen: frozenset[Source] = frozenset()
        self._epoch = -1
        self._settled = False
        self._numbers: deque[int] = deque()
        self._records: list[FileState] | None = None  # of all workers, as of this scan

    @property
    def epoch(self) -> int:
        """What is shared out now was thought over at this epoch."""
        return self._epoch

    def share(self, seen: Sequence[SeenFile]) -> Share:
        """Claim what is free and this worker's by the rules; say what it is to leave."""
        self._records = None
        sources = frozenset([file.source for file in seen])
        epoch = self._ledger.refresh().epoch
        known = self._settled and epoch == self._epoch and sources == self._seen
        if known and self._share.leave.issubset(self._ledger.held.values()):
            if self._share.taken:  # said once
                self._share = dataclasses.replace(self._share, taken=())
            return self._share
        self._share, self._epoch = self._ledger.transact(
            lambda rows, state, worker: self._think_over(rows, state, worker, {f.source: f for f in seen})
        )
        self._seen = sources
        for file in self._share.taken:
            self._ledger.held[file.source] = file.number
        return self._share

    def held_elsewhere(self, file: SeenFile) -> bool:
        """Compare it with the records of all workers, and hand it over to who holds one of the same content.

        Its copy under another inode would else be read again from its start. Also True while such a record
        is between two holders: the next scan asks again.
        """
        if self._records is None:
            with self._ledger.file.read() as rows:
                self._records = rows.files()
        try:
            numbers = _records_of(file, self._records)
        except OSError:
            return False  # reading will tell the reason
        if not numbers:
            return False

        def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, bool]:
            records = [record for record in map(rows.file, numbers) if record is not None]
            holders = [rows.claim(record.source) for record in records]
            heirs = [holder for holder in holders if holder is not None]
            if self._ledger.slot in heirs:
                return state, worker, False  # it has looked, and knows better
            if not heirs:
                return state, worker, not all(record.gone for record in records)
            if any(record.source == file.source for record in rows.files()):
                return state, worker, True  # its inode was another's, whose end is to be recorded first
            assert rows.claim(file.source) == self._ledger.slot, file.name
            rows.put_claim(file.source, heirs[0])
            return dataclasses.replace(state, epoch=state.epoch + 1), worker, True

        return self._ledger.transact(work)

    def number(self) -> int:
        if not self._numbers:
            self._numbers += self._ledger.transact(_fetch_numbers)
        return self._numbers.popleft()

    def release(self, numbers: Iterable[int]) -> None:
        """Let go of files of which all that was read is recorded: whose they are now may take them."""
        numbers = list(numbers)

        def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, list[Source]]:
            sources = []
            for number in numbers:
                file = rows.file(number)
                assert file is not None and rows.claim(file.source) == self._ledger.slot, number
                rows.drop_claim(file.source)
                sources.append(file.source)
            return dataclasses.replace(state, epoch=state.epoch + 1), worker, sources

        for source in self._ledger.transact(work):
            self._ledger.held.pop(source, None)

    def rest(self) -> None:
        """This worker has read all there is for it, has recorded it, and that was all of it at `epoch`."""
        if self._ledger.worker.rested == self._epoch:
            return

        def work(_: Rows, state: State, worker: Worker) -> tuple[State, Worker, None]:
            if state.epoch != self._epoch:
                return state, worker, None  # the next scan may find more
            return state, dataclasses.replace(worker, rested=state.epoch), None

        self._ledger.transact(work)

    def _think_over(
        self, rows: Rows, state: State, worker: Worker, seen: dict[Source, SeenFile]
    ) -> tuple[State, Worker, tuple[Share, int]]:
        slot, claims = self._ledger.slot, rows.claims()
        files = rows.files()
        known = {file.source: file for file in files if not file.gone}
        sources = known.keys() | seen.keys()
        # Who has read a file that is gone is asked when a copy of it turns up.
        kept = sources.union([file.source for file in files if file.gone])
        for source in [s for s, holder in claims.items() if holder == slot and s not in kept]:
            rows.drop_claim(source)  # deleted before anything of it was recorded
            del claims[source]
        todo = plan(slot, rows.live(), claims, sources, seen)
        taken = [known[source] for source in todo.claim if source in known]
        fresh = [source for source in todo.claim if source not in known]
        moved = _remounted(
            [seen[source] for source in fresh], known.keys() - claims.keys() - seen.keys(), known
        )
        # A record goes with the file as it is seen now, and is not looked for where it was.
        mine = todo.claim.difference(moved)
        taken = [record for record in taken if record.source not in moved] + list(moved.values())
        for source in mine:
            rows.put_claim(source, slot)
        # A file whose first record is still on its way is left once it is there.
        leave = frozenset([self._ledger.held[s] for s in todo.leave if s in self._ledger.held])
        self._settled = len(leave) == len(todo.leave)
        mine = mine.union([source for source, holder in claims.items() if holder == slot])
        share = Share(mine, tuple(taken), leave)
        short = len(fresh) - len(self._numbers)
        if short > 0:
            self._numbers += _new(state, short)
            state = _with_numbers(state, short)
        if todo.claim:
            worker = dataclasses.replace(worker, rested=-1)
        return state, worker, (share, state.epoch)


def _remounted(
    files: Iterable[SeenFile], free: Collection[Source], known: dict[Source, FileState]
) -> dict[Source, FileState]:
    """Free records of these files on a device that had another number then (reboot, remount), by source."""
    if not free:
        return {}
    records = {(source[1], known[source].name): known[source] for source in free}
    same = [records.get((file.source[1], file.name)) for file in files]
    return {record.source: record for record in same if record is not None}


def _records_of(file: SeenFile, records: Iterable[FileState]) -> list[int]:
    """Numbers of those of the same content. If there are none, of the plain file by an archive's name, if
    nothing that was read of it is recorded yet: its holder knows. OSError."""
    content = Content(file)
    found = [record.number for record in records if content.holds(record)]
    if found or not is_packed(file.name):
        return found
    plain = file.name.rpartition(".")[0]
    return [r.number for r in records if r.name == plain and not r.tail_at and not r.gone]


def _fetch_numbers(_: Rows, state: State, worker: Worker) -> tuple[State, Worker, range]:
    return _with_numbers(state, NUMBERS_TAKEN), worker, _new(state, NUMBERS_TAKEN)


def _new(state: State, count: int) -> range:
    return range(state.next_file, state.next_file + count)


def _with_numbers(state: State, count: int) -> State:
    return dataclasses.replace(state, next_file=state.next_file + count)
