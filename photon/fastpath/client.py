"""The only door into this room: what a server that makes events holds one of."""

from collections.abc import Sequence
from typing import Final

from eventstore.client import EventStoreClient
from joiner.client import JoinerClient
from photon.core.clock import Clock
from photon.core.settings import Settings
from photon.core.settings_identity import identity_digest
from photon.fastpath.limits import Limits
from photon.fastpath.sending import Sending
from photon.wire.network import LOOPBACK, Network

DEFAULT_LIMITS: Final = Limits()


class FastPath(Sending):
    """Sends events to the servers of one datacenter. Write an event's line to its log first, then call.

    `eventstore`: address of its home process. `settings`: the photon.toml of the system; with another one
    nothing is sent. `network`: TLS, where the servers have it. One for a process, made after the last fork.
    For many threads at once.
    """

    def __init__(
        self,
        eventstore: str,
        joiners: Sequence[str],
        settings: Settings,
        clock: Clock,
        limits: Limits = DEFAULT_LIMITS,
        network: Network = LOOPBACK,
    ) -> None:
        """UsageError for addresses that can't be used. Servers that are away are no error."""
        identity = identity_digest(settings)
        joiner = JoinerClient(joiners, limits.timeout_s, network=network, identity=identity)
        store = EventStoreClient(eventstore, limits.timeout_s, network=network)
        super().__init__(store, joiner, settings, clock, limits)

    def __enter__(self) -> "FastPath":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
