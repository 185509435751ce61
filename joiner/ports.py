"""What the joiner asks of the rooms below and of whoever wires it. Their clients fit as they are."""

from collections.abc import Callable
from typing import Protocol


class Registry(Protocol):
    """The IdRegistry (paper 2.1). For many threads at once."""

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        """16 x N ids, 8 x N times -> 1 x N outcomes (core.fates.Committed).

        UnavailableError: the outcome of each event is unknown. Again with the same token, it is the same.
        """
        ...

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes, /) -> None:
        """From now on this incarnation is not fenced for so long.

        `settings`: core.settings_identity.identity_digest, or empty. FencedError: it is, for ever.
        SettingsMismatchError: others hold leases by other settings, so this one never will. UnavailableError:
        perhaps, perhaps not.
        """
        ...


class EventStore(Protocol):
    """The EventStore (paper 3.4). For many threads at once."""

    def lookup(self, ids: bytes, timeout_s: float | None = None, /) -> tuple[bytes, list[bytes]]:
        """16 x N ids -> 1 x N outcomes (core.fates.Found) and N lines, b"" where not found.

        UnavailableError if it could not answer, in its own time or in `timeout_s`.
        """
        ...


Checkpoint = Callable[[str], None]
"""Told before each IO step of a request what the step before was; tests kill the process there."""

Notice = Callable[[str], None]
"""Told, in a line, what the operator should know."""
