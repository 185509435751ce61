"""Retries of workers that are no more go over to one that lives, a bounded number in a transaction."""

import dataclasses
from typing import Final

from dispatcher.ledger import Ledger
from dispatcher.retry_entries import adopted, slot_of, slot_prefix
from dispatcher.rows import Rows, State, Worker

ADOPTED_MAX: Final = 4096


def adopt(ledger: Ledger) -> list[bytes]:
    """Take over some entries; their new keys. [] when there are none (any more)."""
    with ledger.file.read() as rows:
        if not _orphaned(rows):
            return []

    def work(rows: Rows, state: State, worker: Worker) -> tuple[State, Worker, list[bytes]]:
        slots = _orphaned(rows)
        if not slots:
            return state, worker, []
        with rows.retries() as cursor:
            found: list[tuple[bytes, bytes]] = []
            more = cursor.set_range(slot_prefix(slots[0]))
            while more and len(found) < ADOPTED_MAX and slot_of(cursor.key()) == slots[0]:
                found.append((cursor.key(), cursor.value()))
                more = cursor.next()
            items = [(adopted(key, ledger.slot), value) for key, value in found]
            dropped = sum([rows.drop_retry(key) for key, _ in found])
            _, written = cursor.putmulti(items, overwrite=False)
            assert dropped == written == len(found), "an entry was adopted twice"
        return state, dataclasses.replace(worker, rested=-1), [key for key, _ in items]

    return ledger.transact(work)


def _orphaned(rows: Rows) -> list[int]:
    live = rows.live()
    return [slot for slot in rows.retry_slots() if slot not in live]
