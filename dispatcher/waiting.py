"""What is known of events that wait for their retry (for `photon explain`)."""

from typing import Any, Final

from dispatcher.ledger import Ledger
from dispatcher.rules.retry_entries import due_us_of, unpack_id, unpack_values
from photon.core.columns import split_ids

SCANNED_MAX: Final = 16_384
"""Entries looked through in a read transaction: a long one would keep old pages from being used again."""


def find_waiting(ledger: Ledger, ids: bytes) -> list[dict[str, Any] | None]:
    """16 x N ids -> of each that waits, what its entry says; None of others.

    Looks through all entries: about a second a million. CorruptStateError for one that is no entry.
    """
    asked = split_ids(ids)
    wanted = set(asked)
    found: dict[bytes, dict[str, Any]] = {}
    key = b""
    while len(found) < len(wanted) and (page := _page(ledger, key, wanted)) is not None:
        key, entries = page
        for entry_key, value in entries:
            found.setdefault(unpack_id(value), _described(ledger, entry_key, value))
    return [found.get(id_) for id_ in asked]


def _page(ledger: Ledger, after: bytes, wanted: set[bytes]) -> tuple[bytes, list[tuple[bytes, bytes]]] | None:
    """The wanted ones of the entries behind `after`, and the last key that was looked at; None at the end."""
    entries: list[tuple[bytes, bytes]] = []
    with ledger.file.read() as rows, rows.retries() as cursor:
        more = cursor.set_range(after) if after else cursor.first()
        if more and cursor.key() == after:
            more = cursor.next()
        if not more:
            return None
        last = after
        for _ in range(SCANNED_MAX):
            last, value = cursor.item()
            if unpack_id(value) in wanted:
                entries.append((last, value))
            if not cursor.next():
                break
    return last, entries


def _described(ledger: Ledger, key: bytes, value: bytes) -> dict[str, Any]:
    try:
        event = unpack_values([value])
    except ValueError as error:  # UnicodeDecodeError too
        raise ledger.corrupt(f"a retry entry: {error}") from error
    return {
        "waiting_since_us": int(event.first_seen[0]),
        "tries": int(event.tries[0]),
        "sends": int(event.sends[0]),
        "due_us": due_us_of(key),
        "file": event.name(0),
        "offset": int(event.offsets[0]),
        "worker": ledger.worker,
        "line": event.lines[0].decode("utf-8", "replace"),
    }
