"""Calls that keep a thread, and bytes that are no request: both are few, and end."""

import logging
import queue
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from photon.rpc import dispatcher_pb2 as pb
from photon.rpc import dispatcher_pb2_grpc
from photon.rpc import servers as rpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import STREAMS_MAX, Complaints
from tests.waiting import wait_until

TIMEOUT_S = 30.0


@pytest.fixture
def channel(serve) -> Iterator[grpc.Channel]:
    """To a server of few threads."""
    with LOOPBACK.open(serve(workers=STREAMS_MAX + 1).listen) as channel:
        yield channel


def ask(channel: grpc.Channel) -> bytes:
    stub = dispatcher_pb2_grpc.DispatcherStub(channel)  # type: ignore[no-untyped-call]
    answer: bytes = stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S).json
    return answer


def open_stream(channel: grpc.Channel, stack: ExitStack) -> Iterator[object]:
    """A reflection call that has asked once, been answered, and asks no more."""
    questions: queue.SimpleQueue[object] = queue.SimpleQueue()
    questions.put(reflection_pb2.ServerReflectionRequest(list_services="*"))
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    call = stub.ServerReflectionInfo(iter(questions.get, None), timeout=TIMEOUT_S)
    stack.callback(questions.put, None)
    stack.callback(call.cancel)
    next(call)
    return call  # type: ignore[no-any-return]


def test_a_call_that_is_meant_for_another_run_is_refused(serve) -> None:  # type: ignore[no-untyped-def]
    """The port of a process that ended is soon another one's."""
    server = serve(network=Network(run="a"))
    for network in (Network(run="a"), LOOPBACK, Network(via={"of-old:1": server.listen})):
        with network.open(server.listen) as channel:
            assert ask(channel) == b'{"answers": true}'
    for listen in (server.listen, serve().listen):
        with Network(run="b").open(listen) as channel:
            with pytest.raises(grpc.RpcError, match="another run's") as caught:
                ask(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with ExitStack() as stack, pytest.raises(grpc.RpcError, match="another run's"):
                open_stream(channel, stack)


def test_streams_that_nobody_ends_leave_threads_for_others(channel: grpc.Channel) -> None:
    with ExitStack() as stack:
        for _ in range(STREAMS_MAX):
            open_stream(channel, stack)
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                open_stream(channel, stack)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ask(channel) == b'{"answers": true}'


def test_a_stream_ends_in_time_and_makes_room(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "STREAM_S_MAX", 0.2)
    with ExitStack() as stack:
        for _ in range(2 * STREAMS_MAX):
            call = open_stream(channel, stack)
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_a_stream_that_its_caller_ends_makes_room(channel: grpc.Channel) -> None:
    for _ in range(3 * STREAMS_MAX):
        with ExitStack() as stack:

            def opens(stack: ExitStack = stack) -> bool:
                try:
                    return bool(open_stream(channel, stack))
                except grpc.RpcError:  # the server has not heard yet that the one before has ended
                    return False

            wait_until(opens)


def test_bytes_that_are_no_request_are_told_in_a_line_and_answered_with_a_status(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    call = channel.unary_unary(
        "/photon.dispatcher.v1.Dispatcher/Status", request_serializer=bytes, response_deserializer=bytes
    )
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff\xff", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage().startswith(
        "/photon.dispatcher.v1.Dispatcher/Status: 3 bytes that are no request"
    )
    assert ask(channel) == b'{"answers": true}'


def test_complaints_are_few_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    at = [0.0]
    complaints = Complaints(logging.getLogger("photon.test"), lambda: at[0])
    for _ in range(1000):
        complaints.tell("again")
    assert len(caplog.records) == 10
    at[0] = 61.0
    complaints.tell("later")
    assert caplog.records[-1].getMessage() == "later"
