"""Every field of every call of every role, mutated: the answer is a status that says whose fault it was."""

import os
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from photon.rpc import idregistry_pb2
from tests.fuzz.mutating import SERVICES, corners, requests
from tests.fuzz.site import ROLES, Site

SEED = int(os.environ.get("PHOTON_FUZZ_SEED", "1"))
EXAMPLES = int(os.environ.get("PHOTON_FUZZ_EXAMPLES", "200"))
TIMEOUT_S = 60.0

CALLS = [(role, method) for role, service in SERVICES.items() for method in service.methods]
NAMES = [f"{role}-{method.name}" for role, method in CALLS]

# Nothing to be mended by the server itself: UNKNOWN is an exception that nobody expected, INTERNAL as well.
STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
}

pytestmark = pytest.mark.cluster


def status_of(channel: grpc.Channel, method: MethodDescriptor, request: Message) -> grpc.StatusCode:
    """Of the call; of a stream once it was read to its end."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=type(request).SerializeToString, response_deserializer=bytes)
    try:
        answer = call(request, timeout=TIMEOUT_S)
        if method.server_streaming:
            for _ in answer:
                pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        assert code in STATUSES, f"{code}: {error.details()}"
        return code
    return grpc.StatusCode.OK


@pytest.mark.long
def test_odd_values_of_every_field_are_answered_with_a_status(plain: Site) -> None:
    before, kept = plain.sizes(), kept_of(plain)
    for role, method in CALLS:
        with plain.network.open(plain.address(role)) as channel:
            for request in corners(role, method):
                status_of(channel, method, request)
    plain.check_unharmed(before)
    assert kept_of(plain) == kept


@pytest.mark.parametrize("role", ROLES)
def test_calls_in_order_are_answered(plain: Site, role: str) -> None:
    """Else the odd ones are refused at the door, and nothing behind it is tried."""
    with plain.network.open(plain.address(role)) as channel:
        for method in SERVICES[role].methods:
            if method.name not in ("Reshard", "Replace", "Set"):
                request = next(corners(role, method))
                assert status_of(channel, method, request) is grpc.StatusCode.OK, method.name


def test_a_request_beyond_the_bound_of_its_room_is_refused(plain: Site) -> None:
    with plain.network.open(plain.address("registry")) as channel:
        lookup = SERVICES["registry"].methods_by_name["Lookup"]
        request = idregistry_pb2.LookupRequest(ids=bytes(5 << 20))
        assert status_of(channel, lookup, request) is grpc.StatusCode.RESOURCE_EXHAUSTED


def kept_of(site: Site) -> dict[str, Any]:
    """What no caller but an administrator changes."""
    facts = site.facts()
    return {name: facts[name] for name in ("members", "stores", "version")}


def mutate(site: Site, role: str, method: MethodDescriptor, examples: int) -> None:
    before, kept = site.sizes(), kept_of(site)
    with site.network.open(site.address(role)) as channel:

        @seed(SEED)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            print_blob=False,
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            status_of(channel, method, data.draw(requests(role, method)))

        run()
    site.check_unharmed(before)
    assert kept_of(site) == kept


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("role", "method"), CALLS, ids=NAMES)
def test_mutated_requests_for_long(plain: Site, role: str, method: MethodDescriptor) -> None:
    mutate(plain, role, method, EXAMPLES)
