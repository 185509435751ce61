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
from dispatcher.slots import FileLock, boot_id, try_slot

TICK_S_MAX: Final = 0.5
RENEWALS: Final = 3
"""A lease is asked for again after the third part of it."""


class Membership:
    """Used by one thread."""

    def __init__(self, ledger: Ledger, group: Group, notice: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._group = group
        self._notice = notice
        self._suspects: dict[int, tuple[Worker, float]] = {}

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
            if slot != self._ledger.slot and worker.incarnation:
                self._look_at(slot, worker, now)
        self._ledger.refresh()
        return adopt(self._ledger)

    def _look_at(self, slot: int, worker: Worker, now: float) -> None:
        lock = try_slot(self._ledger.directory, slot)
        if lock is not None:
            try:
                self._bury(slot, worker, "has ended", lock)
            finally:
                lock.release()
        elif worker.boot == boot_id() and worker.until >= now:
            self._suspects.pop(slot, None)
        else:
            # One that was only kept waiting, as we may have been ourselves, renews its lease meanwhile.
            seen, since = self._suspects.get(slot, (None, now))
            if seen != worker:
                self._suspects[slot] = worker, now
            elif now - since >= self._group.lease_s / RENEWALS:
                self._bury(slot, worker, f"is silent since {now - worker.until:.1f} s after its lease", None)

    def _bury(self, slot: int, seen: Worker, why: str, lock: FileLock | None) -> None:
        def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, bool]:
            if rows.worker(slot) != seen:
                return state, worker, False  # it came back, or another one was quicker
            rows.put_worker(slot, dataclasses.replace(seen, incarnation=0))
            rows.drop_claims(slot)
            return dataclasses.replace(state, epoch=state.epoch + 1), worker, True

        if self._ledger.transact(work):
            self._suspects.pop(slot, None)
            self._ledger.file.sweep_readers()
            if lock is not None:
                cut_letters(self._ledger.dead_letters, slot, seen.letters)
            self._notice(f"worker {slot} ({seen.name}, process {seen.pid}) {why}; its files go to the others")
