"""A cache process's share of the CacheEventStore, and whose events are in it (paper 3.4.1)."""

import threading
from collections.abc import Sequence

from eventstore.cache import CacheEventStore


class CacheShare:
    """Thread-safe. `store` names the log file map that the events belong to; None until home was heard.

    Lines of one store are never given to who asks for another's: not after home's logs were exchanged, nor
    where a port has come to another system.
    """

    def __init__(self, bytes_max: int) -> None:
        self.cache = CacheEventStore(bytes_max)
        self.store: bytes | None = None
        self._filling = threading.Lock()

    def belong_to(self, store: bytes) -> None:
        """Forget what another store has put here."""
        if store == self.store:
            return
        with self._filling:
            self.store = None
            self.cache.clear()
            self.store = store

    def get_many(self, store: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        lines = self.cache.get_many(keys)
        # Looked at after the lines: had the store changed before, this would be another one already.
        return lines if store == self.store else [None] * len(keys)

    def put_many(self, store: bytes, keys: Sequence[bytes], lines: Sequence[bytes]) -> None:
        with self._filling:
            if store == self.store:
                self.cache.put_many(keys, lines)
