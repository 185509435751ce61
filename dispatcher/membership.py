"""A worker among others: it keeps its lease, takes the place of the dead, and goes on with what they left.

Dead is a worker whose slot's lock is free (the process has ended), or whose lease has run out (it stands
still, or the machine starves it). The latter finds out at its next transaction, which does nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

from dispatcher.adoption import adopt
from dispatcher.ledger import Group, Ledger, cut_letters
from dispatcher.rows import Rows, State, Worker
from dispatcher.slots import boot_id, try_slot

TICK_S_MAX: Final = 0.5
READERS_S: Final = 10.0
"""So often killed readers are looked for: what they read can't be overwritten, so the file grows."""
RENEWALS: Final = 3
"""A lease is asked for again after the third part of it."""


class Membership:
    """Used by one thread."""

    def __init__(self, ledger: Ledger, group: Group, notice: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._group = group
        self._notice = notice
        self._suspects: dict[int, tuple[Worker, float]] = {}
        self._settled: dict[int, Worker] = {}
        """Slots of the dead whose dead letters are as they were counted."""
        self._readers_at = group.clock.monotonic()

    @property
    def tick_s(self) -> float:
        return min(TICK_S_MAX, self._group.lease_s / RENEWALS)

    def tick(self) -> list[bytes]:
        """Do what is due; keys of the retries that it took over. FencedError if it was taken for dead."""
        with self._ledger.file.read() as rows:
            workers = rows.workers()
        now = self._group.clock.monotonic()
        if self._ledger.worker.until - now < self._group.lease_s * (RENEWALS - 1) / RENEWALS:
            self._ledger.transact(lambda _, state, worker: (state, dataclasses.replace(worker), None))
        for slot, worker in workers.items():
            if slot != self._ledger.slot and self._settled.get(slot) != worker:
                self._look_at(slot, worker, now)
        if now - self._readers_at >= READERS_S:
            self._readers_at = now
            self._ledger.file.sweep_readers()
        self._ledger.refresh()
        return adopt(self._ledger)

    def _look_at(self, slot: int, worker: Worker, now: float) -> None:
        lock = try_slot(self._ledger.directory, slot)
        if lock is not None:
            try:
                self._settle(slot)
            finally:
                lock.release()
        elif not worker.incarnation:
            return  # it stands still: when it goes on it cuts its dead letters itself, when it is gone we do
        elif worker.boot == boot_id() and worker.until >= now:
            self._suspects.pop(slot, None)
        else:
            # One that was only kept waiting, as we may have been ourselves, renews its lease meanwhile.
            seen, since = self._suspects.get(slot, (None, now))
            if seen != worker:
                self._suspects[slot] = worker, now
            elif now - since >= self._group.lease_s / RENEWALS:
                self._bury(slot, worker, f"is silent since {now - worker.until:.1f} s after its lease")

    def _settle(self, slot: int) -> None:
        """Of a slot whose lock we hold, so that nobody writes for it or comes to. May be done twice."""
        with self._ledger.file.read() as rows:
            worker = rows.worker(slot)
        if worker is None:
            return
        cut_letters(self._ledger.dead_letters, slot, worker.letters)
        if worker.incarnation:
            self._bury(slot, worker, "has ended")
        self._settled[slot] = dataclasses.replace(worker, incarnation=0)

    def _bury(self, slot: int, seen: Worker, why: str) -> None:
        def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, bool]:
            if rows.worker(slot) != seen:
                return state, worker, False  # it came back, or another one was quicker
            rows.put_worker(slot, dataclasses.replace(seen, incarnation=0))
            rows.drop_claims(slot)
            return dataclasses.replace(state, epoch=state.epoch + 1), worker, True

        if self._ledger.transact(work):
            self._suspects.pop(slot, None)
            self._ledger.file.sweep_readers()
            self._notice(f"worker {slot} ({seen.name}, process {seen.pid}) {why}; its files go to the others")
