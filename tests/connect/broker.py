"""The real Kafka broker of tests; where it can't be had they are skipped, in CI they fail."""

import os

import pytest

from benchmarks.kafka_broker import Broker, lacking
from tests.ports import paired_ports


def start_broker(directory, behind=lambda address: address):
    if lack := lacking("java", "mvn"):
        why = f"{lack} on PATH to run a Kafka broker with: install it"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    (port,) = paired_ports(1)
    return Broker(directory, (port, port + 1), behind)
