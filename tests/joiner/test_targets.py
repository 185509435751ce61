"""Which gRPC targets reach all joiners (joiner/client.py)."""

import json

from joiner.client import OPTIONS, addresses_of, targets
from joiner.server import SERVICE_NAME


def test_literals_of_one_family_share_a_channel_so_that_grpc_takes_turns_among_them():
    assert targets(["127.0.0.1:1", "10.0.0.7:2"], True) == ["ipv4:127.0.0.1:1,10.0.0.7:2"]
    assert targets(["[::1]:1", "[fe80::2]:2"], True) == ["ipv6:[::1]:1,[fe80::2]:2"]
    assert targets(["127.0.0.1:1"], True) == ["ipv4:127.0.0.1:1"]


def test_a_name_has_a_channel_of_its_own_for_it_may_stand_for_several_joiners():
    assert targets(["joiner:1"], True) == ["dns:///joiner:1"]
    assert targets(["one:1", "two:1", "localhost:3"], True) == [
        "dns:///one:1",
        "dns:///two:1",
        "dns:///localhost:3",
    ]


def test_each_kind_has_its_own_channels():
    addresses = ["127.0.0.1:1", "joiner:1", "[::1]:1", "127.0.0.1:2"]
    assert targets(addresses, True) == ["ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1", "dns:///joiner:1"]


def test_where_host_names_are_checked_no_two_share_a_channel():
    assert targets(["127.0.0.1:1", "127.0.0.1:2"], False) == ["ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"]


def test_an_address_that_is_named_twice_gets_no_second_share():
    assert targets(["127.0.0.1:1", "127.0.0.1:1", "j:1", "j:1"], True) == ["ipv4:127.0.0.1:1", "dns:///j:1"]


def test_health_is_asked_of_the_service_that_joiners_serve():
    config = json.loads(dict(OPTIONS)["grpc.service_config"])
    assert config["healthCheckConfig"]["serviceName"] == SERVICE_NAME


def test_a_target_tells_which_addresses_it_stands_for():
    addresses = ["10.0.0.1:1", "10.0.0.2:1", "[::1]:1", "joiner:1"]
    assert [addresses_of(target) for target in targets(addresses, True)] == [
        ["10.0.0.1:1", "10.0.0.2:1"],
        ["[::1]:1"],
        ["joiner:1"],
    ]
