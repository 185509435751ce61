"""The real Kafka broker of tests; where it can't be had they are skipped, in CI they fail."""

import contextlib
import os

import pytest

from benchmarks.kafka_broker import Broker, lacking
from tests.ports import paired_ports
from tests.waiting import wait_until


def start_broker(directory, behind=lambda address: address):
    if lack := lacking("java", "mvn"):
        why = f"{lack} on PATH to run a Kafka broker with: install it"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    (port,) = paired_ports(1)
    return Broker(directory, (port, port + 1), behind)


def made_anew(broker, name, partitions=1):
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.delete_topics([name])[name].result(30)

    def made():
        with contextlib.suppress(KafkaException):
            admin.create_topics([NewTopic(name, partitions)])[name].result(30)
            return True

    wait_until(made, 30)
    wait_until(lambda: len(admin.list_topics(name).topics[name].partitions) == partitions)
