"""Channels to a host by its name: opened anew where gRPC asks for the name too rarely.

gRPC waits longer each time that it can't resolve a name, up to two minutes. The name of a container is known
only while that runs, so one that was away for a minute would be found half a minute late or more.
"""

import ipaddress
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from photon.core.addresses import parts

_Callback = Callable[[grpc.ChannelConnectivity], None]

RENEW_S: Final = 5.0
"""A channel is so old at least before another takes its place."""

_NEVER_SENT: Final = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "errors resolving",
    "address lookup failed",
    "DNS resolution failed",
)
"""What gRPC says of a call for which there was no connection. Where it is not recognised, the call counts
as one that was sent, and a name is found as late as ever."""


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


def was_never_sent(error: Any) -> bool:
    """Whether a call ended so (an RpcError, or a call's future) because there was no connection for it."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return any(sign in details for sign in _NEVER_SENT)
