"""What the dispatcher asks of the rooms below it; their clients fit these shapes."""

from collections.abc import Mapping
from typing import Protocol

from joiner.client import ForeignColumns


class Registry(Protocol):
    """idregistry.client.RegistryClient, of which only lookups are used."""

    def lookup(self, ids: bytes, times: bytes, tell_pending: bool) -> bytes:
        """16 x N ids, 8 x N times -> N bytes of core.fates.Registered. UnavailableError on failure."""
        ...


class Outcomes(Protocol):
    """What a joiner says of a batch."""

    @property
    def outcomes(self) -> bytes:
        """N bytes of core.fates.Joined."""
        ...

    @property
    def reasons(self) -> Mapping[int, str]:
        """Why, for some of the rows."""
        ...


class Joiner(Protocol):
    """joiner.client.JoinerClient."""

    def join(self, batch: ForeignColumns) -> Outcomes:
        """UnavailableError: nothing is known of any event of the batch; OverloadedError: nothing was done."""
        ...
