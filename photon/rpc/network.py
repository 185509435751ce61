"""How a process reaches others and is reached: through TLS or plainly, directly or by another address.

Everywhere else an address is the *advertised* one, by which all know a process. What is dialed for it may
differ from datacenter to datacenter (a proxy, a tunnel), and what is bound may differ too (a container).

TLS is mutual: both ends show a certificate of one CA, which is the system's own. Between registry replicas
host names are not checked, since nodes are known by their ids, which their room proves by the system's
secret. Clients of gRPC look for `tls.name` in the server's certificate; where it is empty, for the host they
dial.

A channel to a host by its name is opened anew where gRPC asks for the name too rarely: it waits longer each
time that it can't resolve one, up to two minutes. The name of a container is known only while that runs, so
one that was away for a minute would be found half a minute late or more.
"""

import ipaddress
import math
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

from photon.core.addresses import joined, parts, split
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import Settings

EXPIRES_SOON_S: Final = 14 * 86_400.0
"""A certificate that ends within so long is complained of."""

_HANDSHAKE_STEPS_MAX: Final = 10
_OTHER_NAME: Final = 62  # X509_V_ERR_HOSTNAME_MISMATCH


@dataclass(frozen=True, slots=True)
class Tls:
    """[tls]: three PEM files. Make it by `load_tls`, which has tried them."""

    cert: Path
    """This node's certificate, with those between it and the CA behind it."""
    key: Path
    """Its key, without a passphrase."""
    ca: Path
    """The certificates of the CA that all nodes' certificates are of, and nobody else's."""
    name: str = ""
    """Of every certificate of the system, looked for by gRPC in place of the host name; empty: that is."""
    expires_s: float = field(default=math.inf, compare=False)
    """Unix time at which nobody accepts the certificate any more, as it was when it was tried."""

    def server_context(self) -> ssl.SSLContext:
        """For the end that was dialed. Raises SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # No session is resumed: each connection shows its certificates.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        return self._set(context)

    def client_context(self) -> ssl.SSLContext:
        """For the end that dials. Raises SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._set(context)

    def _set(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"tls.ca: {self.ca}: holds no certificates ({reason_of(error)}); name the CA's PEM file"
            ) from error
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"tls.cert, tls.key: {self.cert} and {self.key}: are no certificate and its key "
                f"({reason_of(error)}); name PEM files that belong together, the key without a passphrase"
            ) from error
        return context


def load_tls(cert: str | Path, key: str | Path, ca: str | Path, name: str = "") -> Tls:
    """The files, once this node was able to shake hands with itself by them. Raises SettingsError.

    `name`: one that the certificate must carry, as every other of the system; empty: none is asked for.
    """
    cert, key, ca = Path(cert), Path(key), Path(ca)
    for setting, path in (("cert", cert), ("key", key), ("ca", ca)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise SettingsError(
                f"tls.{setting}: {path}: cannot be read ({error.strerror}); name an existing file"
            ) from error
    tls = Tls(cert, key, ca, name)
    return replace(tls, expires_s=_try(tls))


def expiry_complaint(tls: Tls, now_s: float) -> str | None:
    """What to tell of a certificate that ends soon; None of one that does not."""
    left_s = tls.expires_s - now_s
    if left_s > EXPIRES_SOON_S:
        return None
    when = f"expires in {left_s / 86_400:.1f} days" if left_s > 0 else "has expired"
    return (
        f"tls.cert: {tls.cert}: {when}: sign a new one (`photon certs` does for its own CA), then restart "
        "the processes one after the other"
    )


def _try(tls: Tls) -> float:
    """What no peer would accept (another CA's, expired, not for this use, without the name) is found before
    it is served. When it expires, in Unix seconds."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    dials = tls.client_context()
    # The rule of gRPC's clients: one of the alternative names; the common name counts for nothing.
    dials.check_hostname, dials.hostname_checks_common_name = bool(tls.name), False
    try:
        client = dials.wrap_bio(to_client, to_server, server_hostname=tls.name or None)
        server = tls.server_context().wrap_bio(to_server, to_client, server_side=True)
        ends = [client, server]
        for _ in range(_HANDSHAKE_STEPS_MAX):
            for end in list(ends):
                try:
                    end.do_handshake()
                    ends.remove(end)
                except ssl.SSLWantReadError:
                    pass
            if not ends:
                shown = client.getpeercert() or {}
                return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
        raise AssertionError("a TLS handshake without an end")
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _OTHER_NAME:
            raise SettingsError(
                f"tls.cert: {tls.cert}: no client would accept it: it does not carry the name '{tls.name}' "
                f"(subjectAltName DNS:{tls.name}), which tls.name asks of every certificate; sign one that "
                "does (`photon certs`), or set tls.name"
            ) from error
        raise SettingsError(
            f"tls.cert: {tls.cert}: no node would accept it: {error.verify_message}; "
            f"take one that the CA in {tls.ca} has signed, valid now, for servers and for clients"
        ) from error
    except ssl.SSLError as error:
        raise SettingsError(f"tls.cert: {tls.cert}: TLS fails with it ({reason_of(error)})") from error
    except ValueError as error:
        raise SettingsError(f"tls.name: {tls.name!r} is no name of a host ({error})") from error


def _no_passphrase() -> str:
    # OpenSSL would ask for it on the terminal.
    raise ValueError("the key is encrypted")


def reason_of(error: BaseException | None) -> str:
    """In a few words."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return str(error) or type(error).__name__


# What a failed call says, and how to mend it where TLS is why: gRPC tells the one, in OpenSSL's words.

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

MEANT_FOR: Final = "photon-run/"
"""Begins the user agent of calls that are meant for one run."""

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
    run: str = ""
    """Which run on this machine its calls are meant for: a server of another one refuses them, as it may have
    got the port of a process that has ended."""
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
        return type(self), (self.tls, self.via, self.bind, self.insecure_beyond_loopback, self.run)

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
        if self.run:
            # In each call's headers, at no cost to it.
            options = [*options, ("grpc.primary_user_agent", f"{MEANT_FOR}{self.run}")]
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


def network_of(settings: Settings, datacenter: str = "") -> Network:
    """As a process in the datacenter, or in none, sees it. SettingsError for TLS files that can't be used."""
    files, own = settings.tls, settings.network
    tls = None
    if files.cert:
        # Absolute: a network may be sent to processes that run elsewhere.
        cert, key, ca = (Path(file).absolute() for file in (files.cert, files.key, files.ca))
        tls = load_tls(cert, key, ca, files.name)
    return Network(tls, settings.via.get(datacenter, {}), own.bind, own.insecure_beyond_loopback)


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


@dataclass(slots=True, eq=False)
class _Opened:
    """One of gRPC's channels. Once another has taken its place it is closed when its calls have ended."""

    channel: grpc.Channel
    calls: int = 0


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

    def unary_unary(self, *method: Any, **how: Any) -> grpc.UnaryUnaryMultiCallable:
        return _Method(self, lambda channel: channel.unary_unary(*method, **how))

    def unary_stream(self, *method: Any, **how: Any) -> grpc.UnaryStreamMultiCallable:
        return _Stream(self, lambda channel: channel.unary_stream(*method, **how))

    def stream_unary(self, *method: Any, **how: Any) -> grpc.StreamUnaryMultiCallable:
        return _Method(self, lambda channel: channel.stream_unary(*method, **how))

    def stream_stream(self, *method: Any, **how: Any) -> grpc.StreamStreamMultiCallable:
        return _Stream(self, lambda channel: channel.stream_stream(*method, **how))

    def subscribe(self, *_: Any) -> NoReturn:
        """gRPC's own asks five times a second, in a thread of its own."""
        raise NotImplementedError

    unsubscribe = subscribe

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
    def _start(self) -> Iterator[tuple[_Opened, Any]]:
        """Around the start of a call that ends later, unless it can't be made."""
        opened = self._owner.begin()
        try:
            yield opened, self._on(opened)
        except BaseException:
            self._owner.end(opened)
            raise


class _Method(_Bound, grpc.UnaryUnaryMultiCallable, grpc.StreamUnaryMultiCallable):  # type: ignore[misc]
    """With one answer."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        return self.with_call(*args, **how)[0]

    def with_call(self, *args: Any, **how: Any) -> Any:
        opened, error = self._owner.begin(), None
        try:
            return self._on(opened).with_call(*args, **how)
        except grpc.RpcError as raised:
            error = raised
            raise
        finally:
            self._owner.end(opened, error)

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
