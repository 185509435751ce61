"""Channels to a host by its name: opened anew where gRPC asks for the name too rarely.

gRPC waits longer each time that it can't resolve a name, up to two minutes. The name of a container is known
only while that runs, so one that was away for a minute would be found half a minute late or more.
"""

import ipaddress
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import grpc

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
    host = target.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


class NamedChannel(grpc.Channel):  # type: ignore[misc]
    """Of `open_channel`'s channels the newest. Streams stay with the one that they were opened on."""

    def __init__(
        self, open_channel: Callable[[], grpc.Channel], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._open_channel = open_channel
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[grpc.ChannelConnectivity], None]] = []
        self._closed = False
        self.newest = open_channel()
        self._opened_s = monotonic()

    def failed(self, used: grpc.Channel, error: Any) -> None:
        """A call on `used` ended so: where it was never sent, others get a new channel."""
        if not was_never_sent(error):
            return
        with self._lock:
            now_s = self._monotonic()
            if used is not self.newest or now_s - self._opened_s < RENEW_S or self._closed:
                return
            self.newest, self._opened_s = self._open_channel(), now_s
            for callback in self._callbacks:
                self.newest.subscribe(callback)
        used.close()

    def unary_unary(self, *method: Any, **how: Any) -> grpc.UnaryUnaryMultiCallable:
        return _Method(self, lambda channel: channel.unary_unary(*method, **how))

    def unary_stream(self, *method: Any, **how: Any) -> grpc.UnaryStreamMultiCallable:
        return self.newest.unary_stream(*method, **how)

    def stream_unary(self, *method: Any, **how: Any) -> grpc.StreamUnaryMultiCallable:
        return self.newest.stream_unary(*method, **how)

    def stream_stream(self, *method: Any, **how: Any) -> grpc.StreamStreamMultiCallable:
        return self.newest.stream_stream(*method, **how)

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        with self._lock:
            self._callbacks.append(callback)
            self.newest.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        with self._lock:
            self._callbacks.remove(callback)
            self.newest.unsubscribe(callback)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.newest.close()

    def __enter__(self) -> "NamedChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Method(grpc.UnaryUnaryMultiCallable):  # type: ignore[misc]
    """One method, on the newest channel."""

    def __init__(
        self, owner: NamedChannel, bind: Callable[[grpc.Channel], grpc.UnaryUnaryMultiCallable]
    ) -> None:
        self._owner = owner
        self._bind = bind
        self._bound = owner.newest, bind(owner.newest)

    def __call__(self, *args: Any, **how: Any) -> Any:
        channel, call = self._newest()
        try:
            return call(*args, **how)
        except grpc.RpcError as error:
            self._owner.failed(channel, error)
            raise

    def with_call(self, *args: Any, **how: Any) -> Any:
        channel, call = self._newest()
        try:
            return call.with_call(*args, **how)
        except grpc.RpcError as error:
            self._owner.failed(channel, error)
            raise

    def future(self, *args: Any, **how: Any) -> Any:
        channel, call = self._newest()
        future = call.future(*args, **how)
        future.add_done_callback(lambda ended: self._owner.failed(channel, ended))
        return future

    def _newest(self) -> tuple[grpc.Channel, grpc.UnaryUnaryMultiCallable]:
        channel = self._owner.newest
        if self._bound[0] is not channel:
            self._bound = channel, self._bind(channel)
        return self._bound


def was_never_sent(error: Any) -> bool:
    """Whether a call ended so (an RpcError, or a call's future) because there was no connection for it."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return any(sign in details for sign in _NEVER_SENT)
