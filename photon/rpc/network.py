"""How a process reaches others and is reached: through TLS or plainly, directly or by another address.

Everywhere else an address is the *advertised* one, by which all know a process. What is dialed for it may
differ from datacenter to datacenter (a proxy, a tunnel), and what is bound may differ too (a container).

A channel to a host by its name is opened anew where gRPC asks for the name too rarely: it waits longer each
time that it can't resolve one, up to two minutes. The name of a container is known only while that runs, so
one that was away for a minute would be found half a minute late or more.
"""

import ipaddress
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from photon.core.addresses import joined, parts, split
from photon.core.errors import SettingsError, UsageError
from photon.rpc.tls import Tls

# --- What a failed call says, and how to mend it where TLS is why: gRPC tells the one, in OpenSSL's words.

_AGREE: Final = "set [tls] at both ends or at none"
_MENDS: Final = (
    ("WRONG_VERSION_NUMBER", f"the server does not speak TLS, which is set here: {_AGREE}"),
    (
        "Hostname Verification Check failed",
        "its certificate does not carry the name that clients look for: sign one that carries tls.name "
        "(`photon certs`), and set the same tls.name at both ends",
    ),
    (
        "certificate has expired",
        "the server's certificate has expired: sign a new one and restart the server, or set the clock",
    ),
    ("certificate is not yet valid", "the server's certificate is not valid yet: set the clocks"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not of the CA that tls.ca names here: take both from one CA",
    ),
    (
        "Socket closed",
        f"it closed the connection at once: if it serves, it may want TLS ({_AGREE}) or refuse the "
        "certificate of this end (expired, or not of the CA that tls.ca names there); its log says which",
    ),
)
_WHILE_CONNECTING: Final = ("failed to connect to all addresses", "connections to all backends failing")
_NEVER_SENT: Final = (
    *_WHILE_CONNECTING,
    "errors resolving",
    "address lookup failed",
    "DNS resolution failed",
)
"""What gRPC says of a call for which there was no connection; its status code is that of any other failure.
Where it is not recognised, the call counts as one that was sent, and a name is found as late as ever."""


def failure_of(error: grpc.RpcError) -> str:
    """`unavailable: mend; why`: who has no room for all of it cuts gRPC's words."""
    details = error.details() or ""
    mend = mend_of(details)
    return f"{error.code().name.lower()}: {f'{mend}; ' if mend else ''}{details}"


def mend_of(details: str) -> str | None:
    """Of a failed connection; None where TLS has no part in it."""
    if not any(sign in details for sign in _WHILE_CONNECTING):
        return None
    return next((mend for sign, mend in _MENDS if sign in details), None)


def was_never_sent(error: Any) -> bool:
    """Whether a call ended so (an RpcError, or a call's future) because there was no connection for it."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return any(sign in details for sign in _NEVER_SENT)


_Callback = Callable[[grpc.ChannelConnectivity], None]

RENEW_S: Final = 5.0
"""A channel to a name is so old at least before another takes its place."""

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


def is_name(target: str) -> bool:
    """Whether a target (`host:port`, `dns:///host:port`) is to be resolved; `localhost` always is."""
    if target.startswith(("ipv4:", "ipv6:", "unix:")):
        return False
    host, _ = parts(target.removeprefix("dns:///"))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


# --- channels to hosts by their names


@dataclass(slots=True, eq=False)
class _Opened:
    """One of gRPC's channels. Once another has taken its place it is closed when its calls have ended."""

    channel: grpc.Channel
    calls: int = 0
    forwards: dict[_Callback, _Callback] = field(default_factory=dict)


class NamedChannel(grpc.Channel):  # type: ignore[misc]
    """Of `open_channel`'s channels the newest, for each call; those under way end where they began.

    A channel is closed by a thread of its own: closing waits for gRPC's thread that ends the channel's calls,
    which is the one that tells of them. Calls with deadlines bound how many are kept.
    """

    def __init__(
        self, open_channel: Callable[[], grpc.Channel], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_channel = open_channel
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._callbacks: list[_Callback] = []
        self._closed = False
        self._retired: set[_Opened] = set()
        self._newest = _Opened(open_channel())
        self._opened_s = monotonic()

    def begin(self) -> _Opened:
        """Where a call is to be made; each is told of by `end`."""
        with self._lock:
            self._newest.calls += 1
            return self._newest

    def end(self, used: _Opened, error: Any = None) -> None:
        """A call on `used` ended, so. Where it was never sent the next get a new channel."""
        with self._lock:
            used.calls -= 1
            if error is not None and was_never_sent(error):
                self._renew(used)
            closing = used.calls == 0 and used in self._retired
            if closing:
                self._retired.remove(used)
        if closing:
            threading.Thread(target=used.channel.close, name="close-channel", daemon=True).start()

    def _renew(self, used: _Opened) -> None:
        now_s = self._monotonic()
        if used is not self._newest or now_s - self._opened_s < RENEW_S or self._closed:
            return
        self._retired.add(used)
        self._newest, self._opened_s = _Opened(self._open_channel()), now_s
        for callback in self._callbacks:
            self._forward(self._newest, callback, True)

    def unary_unary(self, *method: Any, **how: Any) -> grpc.UnaryUnaryMultiCallable:
        return _Method(self, lambda channel: channel.unary_unary(*method, **how))

    def unary_stream(self, *method: Any, **how: Any) -> grpc.UnaryStreamMultiCallable:
        return _Stream(self, lambda channel: channel.unary_stream(*method, **how))

    def stream_unary(self, *method: Any, **how: Any) -> grpc.StreamUnaryMultiCallable:
        return _Method(self, lambda channel: channel.stream_unary(*method, **how))

    def stream_stream(self, *method: Any, **how: Any) -> grpc.StreamStreamMultiCallable:
        return _Stream(self, lambda channel: channel.stream_stream(*method, **how))

    def subscribe(self, callback: _Callback, try_to_connect: bool = False) -> None:
        with self._lock:
            self._callbacks.append(callback)
            self._forward(self._newest, callback, try_to_connect)

    def unsubscribe(self, callback: _Callback) -> None:
        with self._lock:
            self._callbacks.remove(callback)
            self._newest.channel.unsubscribe(self._newest.forwards.pop(callback))

    def _forward(self, opened: _Opened, callback: _Callback, try_to_connect: bool) -> None:
        def forward(state: grpc.ChannelConnectivity) -> None:
            if opened is self._newest:
                callback(state)

        opened.forwards[callback] = forward
        opened.channel.subscribe(forward, try_to_connect)

    def close(self) -> None:
        """Calls under way are cancelled. Not to be called by what gRPC calls back."""
        with self._lock:
            self._closed = True
            closing = [self._newest, *self._retired]
            self._retired.clear()
        for opened in closing:
            opened.channel.close()

    def __enter__(self) -> "NamedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bound:
    """One method, on the newest channel."""

    def __init__(self, owner: NamedChannel, bind: Callable[[grpc.Channel], Any]) -> None:
        self._owner = owner
        self._bind = bind
        self._bound: tuple[_Opened | None, Any] = None, None

    def _on(self, opened: _Opened) -> Any:
        bound = self._bound
        if bound[0] is not opened:
            bound = self._bound = opened, self._bind(opened.channel)
        return bound[1]

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """For a call that ends here."""
        opened, error = self._owner.begin(), None
        try:
            yield self._on(opened)
        except grpc.RpcError as raised:
            error = raised
            raise
        finally:
            self._owner.end(opened, error)

    @contextmanager
    def _start(self) -> Iterator[tuple[_Opened, Any]]:
        """For a call that ends later, but for one that can't be made."""
        opened = self._owner.begin()
        try:
            yield opened, self._on(opened)
        except BaseException:
            self._owner.end(opened)
            raise


class _Method(_Bound, grpc.UnaryUnaryMultiCallable, grpc.StreamUnaryMultiCallable):  # type: ignore[misc]
    """With one answer."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        with self._call() as call:
            return call(*args, **how)

    def with_call(self, *args: Any, **how: Any) -> Any:
        with self._call() as call:
            return call.with_call(*args, **how)

    def future(self, *args: Any, **how: Any) -> Any:
        with self._start() as (opened, call):
            future = call.future(*args, **how)
        future.add_done_callback(lambda ended: self._owner.end(opened, ended))
        return future


class _Stream(_Bound, grpc.UnaryStreamMultiCallable, grpc.StreamStreamMultiCallable):  # type: ignore[misc]
    """With many answers."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        with self._start() as (opened, call):
            stream = call(*args, **how)
        # Weakly: gRPC cancels a stream that nobody holds any more.
        held = weakref.ref(stream)
        if not stream.add_callback(lambda: self._owner.end(opened, held())):
            self._owner.end(opened, stream)
        return stream
