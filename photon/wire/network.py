"""How a process reaches others and is reached: through TLS or plainly, directly or by another address.

Everywhere else an address is the *advertised* one, by which all know a process. What is dialed for it may
differ from datacenter to datacenter (a proxy, a tunnel), and what is bound may differ too (a container).
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from photon.core.addresses import joined, parts, split
from photon.core.errors import SettingsError, UsageError
from photon.core.tls import Tls
from photon.wire.naming import NamedChannel, is_name

MESSAGE_BYTES_MAX: Final = 64 << 20

SIZES: Final = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
]
KEEPALIVE_MS: Final = 2_000
PING_TIMEOUT_MS: Final = 3_000
"""A server that is silent for so long while it owes an answer is pinged, and without an answer to that the
connection is given up, and calls fail: a machine that vanished sends no end of a connection."""

_CHANNEL: Final = [
    *SIZES,
    # A server that restarts is found again in milliseconds, not after gRPC's default second.
    ("grpc.initial_reconnect_backoff_ms", 20),
    # How long a try may take: a busy machine or a distant one needs more than the backoff's first.
    ("grpc.min_reconnect_backoff_ms", 300),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # Of any ping: gRPC measures bandwidth with some, and lets no other go while one is unanswered.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    # By default two pings without data are sent, then none.
    ("grpc.http2.max_pings_without_data", 0),
    # A server that comes back may have another address: its name is asked for again so soon.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]


@dataclass(frozen=True, slots=True)
class Network:
    """What one process knows of the network it is in."""

    tls: Tls | None = None
    via: Mapping[str, str] = field(default_factory=dict)
    """Advertised `host:port` -> the one to dial instead."""
    bind: str = ""
    """Host to bind in place of the advertised one's."""
    insecure_beyond_loopback: bool = False
    """Whoever reaches a port may use it, though it is not of loopback and there is no TLS."""
    server_credentials: grpc.ServerCredentials | None = field(init=False, repr=False, compare=False)
    _credentials: grpc.ChannelCredentials | None = field(init=False, repr=False, compare=False)
    """Of the files of `tls`, read once: a process goes on with what it started with."""

    def __post_init__(self) -> None:
        """SettingsError for a file that can't be read."""
        server, client = (None, None) if self.tls is None else _credentials(self.tls)
        object.__setattr__(self, "server_credentials", server)
        object.__setattr__(self, "_credentials", client)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the key: it is read from the same path where this arrives."""
        return type(self), (self.tls, self.via, self.bind, self.insecure_beyond_loopback)

    def open(
        self, address: str, options: Sequence[tuple[str, Any]] = (), advertised: str = ""
    ) -> grpc.Channel:
        """A lazily connected channel to `host:port`. Never fork after one exists.

        `advertised`: where `address` is what is dialed already, the one that it stands for.
        """
        dialed = self.via.get(address, address)
        known = advertised or address
        host = "" if dialed == known else parts(known)[0]
        if is_name(dialed):
            return NamedChannel(lambda: self._open(dialed, host, options))
        return self._open(dialed, host, options)

    def _open(self, dialed: str, host: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """`host`: the one to be looked for in the certificate, if not the one dialed."""
        if self.tls is None:
            return grpc.insecure_channel(dialed, options=[*_CHANNEL, *options])
        name = self.tls.name or host
        names = [("grpc.ssl_target_name_override", name)] if name else []
        return grpc.secure_channel(dialed, self._credentials, options=[*_CHANNEL, *names, *options])

    def bound(self, advertised: str) -> str:
        """What to listen on for an advertised `host:port`. UsageError where strangers could use it."""
        address = joined(self.bind, parts(advertised)[1]) if self.bind else advertised
        self.check_listen(address)
        return address

    def check_listen(self, address: str) -> None:
        """UsageError for a port beyond loopback that is not secured, unless that was asked for."""
        if self.tls is None and not self.insecure_beyond_loopback and not is_loopback(address):
            raise UsageError(
                f"refusing to listen on {address}: without TLS whoever reaches it can read and write "
                "everything; set [tls] (`photon certs` makes a test CA), listen on loopback, or say "
                "network.insecure_beyond_loopback = true"
            )

    def dialed(self, host: str, port: int) -> tuple[str, int]:
        """The same as in `open`, for a link that is not gRPC's."""
        there = self.via.get(joined(host, port))
        return (host, port) if there is None else split(there)


def _credentials(tls: Tls) -> tuple[grpc.ServerCredentials, grpc.ChannelCredentials]:
    try:
        ca, key, cert = tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"tls: {error.filename}: cannot be read ({error.strerror}); name an existing file"
        ) from error
    server = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
    return server, grpc.ssl_channel_credentials(ca, key, cert)


LOOPBACK: Final = Network()
"""Plain, and only on this machine."""


def is_loopback(address: str) -> bool:
    """Whether `host:port` can be reached from this machine alone."""
    host, _ = parts(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
