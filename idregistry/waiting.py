"""How a gRPC handler waits for the raft thread, and what an answer is on the wire."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Final, NoReturn, Protocol

import grpc

from idregistry.answers import Answer, NotLeader, OutcomeUnknown, Overloaded
from idregistry.messages import LEADER_DETAILS
from photon.core.clock import Clock

_MARGIN_S: Final = 0.05
"""A handler outwaits its deadline by so much, so that who answers in time is heard."""
_POLL_S: Final = 0.005


class Context(Protocol):
    """What is used of grpc.ServicerContext."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...

    def time_remaining(self) -> float | None: ...

    def is_active(self) -> bool: ...


class Waiting:
    """How every handler waits for the raft thread, and what an answer is on the wire."""

    def __init__(self, addresses: Callable[[str], str], clock: Clock, timeout_s: float) -> None:
        """`addresses`: node id -> gRPC address, or empty."""
        self._addresses = addresses
        self._clock = clock
        self._timeout_s = timeout_s

    def wait(
        self, context: Context, offer: Callable[[float, Callable[[Answer], None]], Answer | None]
    ) -> Answer:
        """`offer` is given the deadline and whom to answer. Until the caller's deadline, or our own."""
        wait_s = self._wait_s(context)
        future: Future[Answer] = Future()
        refused = offer(self._clock.monotonic() + wait_s, future.set_result)
        if refused is not None:
            return refused
        try:
            return future.result(wait_s + _MARGIN_S)
        except NotInTime:
            return OutcomeUnknown()

    def deadline(self, context: Context) -> float:
        """Until when a handler may wait, in monotonic seconds: the caller's deadline, or our own."""
        return self._clock.monotonic() + self._wait_s(context)

    def until(self, context: Context, deadline: float, reached: Callable[[], bool]) -> bool:
        """Look every few ms whether it is `reached`; False if it is not by the deadline, or nobody waits."""
        while not reached():
            if self._clock.monotonic() >= deadline or not context.is_active():
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_s(self, context: Context) -> float:
        remaining = context.time_remaining()
        return self._timeout_s if remaining is None else max(0.0, min(remaining, self._timeout_s))

    def abort(self, context: Context, answer: Answer) -> NoReturn:
        match answer:
            case NotLeader(leader):
                address = self._addresses(leader) if leader is not None else ""
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, LEADER_DETAILS + address)
            case Overloaded(why):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            case OutcomeUnknown():
                context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    "it is not known whether it was committed: retry with the same token",
                )
        raise AssertionError(answer)
