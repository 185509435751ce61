"""Archives are unpacked beside the reading of other logs, one at a time (paper 3.2)."""

import threading
from collections.abc import Callable
from typing import Final

from photon.core.errors import StorageError
from photon.core.logfiles import SeenFile
from photon.core.packed import Spool

SMALL_BYTES: Final = 1 << 20
"""An archive of so many bytes is unpacked at once."""


class Unpacker:
    """For one thread. `wake` is called in another when `get` has something new to tell."""

    def __init__(self, spool: Spool, wake: Callable[[], None]) -> None:
        self._spool = spool
        self._wake = wake
        self._working_at: str | None = None
        self._failed: tuple[str, StorageError] | None = None
        self.news = False
        """Something is unpacked, or can't be, since its user last set this to False."""

    def get(self, archive: SeenFile) -> SeenFile | None:
        """The copy; None while it is made, or until its turn comes. Raises as Spool.unpack."""
        if archive.size <= SMALL_BYTES:
            return self._spool.unpack(archive)
        copy = self._spool.copy(archive)
        if copy is not None:
            return copy
        version = self._spool.version(archive)
        failed = self._failed
        if failed is not None and failed[0] == version:
            self._failed = None
            raise failed[1]
        if self._working_at is None:
            self._working_at = version
            # Not waited for at the end: what it leaves half made is swept away.
            threading.Thread(target=self._work, args=(archive, version), name="unpack", daemon=True).start()
        return None

    def _work(self, archive: SeenFile, version: str) -> None:
        try:
            self._spool.unpack(archive)
        except FileNotFoundError:
            pass  # the next scan will not find it either
        except StorageError as error:
            self._failed = version, error
        except Exception as error:  # it must be told to somebody, and tried again
            reason = f"{archive.name}: cannot be unpacked ({error!r}); see to the spool"
            self._failed = version, StorageError(reason)
        self._working_at = None
        self.news = True
        self._wake()
