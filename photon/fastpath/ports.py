"""What the fast path asks of the rooms below. Their clients fit as they are."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from joiner.client import ForeignColumns, JoinOutcomes
from photon.core.errors import UnavailableError


class PrimaryCache(Protocol):
    """The caches of the EventStore (paper 3.4.1)."""

    def put(self, ids: bytes, lines: Sequence[bytes], /) -> None:
        """16 x N ids and N lines without newline; best effort. UnavailableError if it could not."""
        ...

    def close(self) -> None: ...


class Joiner(Protocol):
    """The joiners of a datacenter (paper 3.3). For many threads at once."""

    def join(self, batch: ForeignColumns, /) -> JoinOutcomes:
        """Each event's outcome. OverloadedError: nothing was done. UnavailableError: unknown."""
        ...

    def statuses(self) -> Mapping[str, dict[str, Any] | UnavailableError]:
        """What each joiner says of itself, by address, or why it says nothing."""
        ...

    def close(self) -> None: ...
