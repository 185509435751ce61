"""The profile `kafka` of docker-compose.yml: two topics joined into a third while its containers are killed.

The broker's image is made here of Maven Central's jars, as no registry of images is asked; it takes the same
file of settings.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kafka_broker import BROKER, jars, lacking
from tests.compose.deployed import Deployed
from tests.compose.engine import Engine
from tests.compose.images import BASE

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

IMAGE = "photon-compose-test-kafka"
QUERIES = 20_000
SERVICES = ("kafka", "kafka-feed", "kafka-join")
DOCKERFILE = """ARG BASE
FROM ${BASE}
RUN useradd --system --uid 1000 kafka && install -d -o kafka /var/lib/kafka/data
COPY jre /jre
COPY jars /jars
COPY start.sh /start.sh
USER kafka
ENTRYPOINT ["sh", "/start.sh"]
"""
START = """set -e
settings=/mnt/shared/config/server.properties
set -- -Xmx384m -XX:+UseSerialGC -cp "/jars/*"
/jre/bin/java "$@" kafka.tools.StorageTool format --ignore-formatted -t cGhvdG9uLXRlc3RzLTEyMw -c $settings
exec /jre/bin/java "$@" kafka.Kafka $settings
"""
READ = """
import collections, json, sys
from confluent_kafka import Consumer, TopicPartition
settings = {"bootstrap.servers": "kafka:9092", "group.id": "r", "isolation.level": "read_committed"}
consumer = Consumer({**settings, "enable.partition.eof": True})
consumer.assign([TopicPartition("joined", n, 0) for n in range(4)])
ended, found = set(), collections.Counter()
while len(ended) < 4:
    for record in consumer.consume(1000, 1.0):
        if record.error() is None:
            pair = json.loads(record.value())
            assert pair["primary"]["id"] == pair["primary_id"] and record.key() == pair["id"].encode()
            found[pair["id"]] += 1
        else:
            ended.add(record.partition())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def with_kafka(
    engine: Engine, staged: Path, deployed: Deployed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """A project of its own, of the images that `deployed` has built."""
    if lack := lacking("java", "mvn"):
        if os.environ.get("CI"):
            pytest.fail(f"CI must run these tests: {lack}")
        pytest.skip(lack)
    context = tmp_path_factory.mktemp("kafka") / "context"
    shutil.copytree(jars(*BROKER), context / "jars")
    java = Path(shutil.which("java") or "").resolve().parents[1]
    shutil.copytree(java, context / "jre", ignore=shutil.ignore_patterns("src.zip", "jmods", "demo"))
    (context / "Dockerfile").write_text(DOCKERFILE)
    (context / "start.sh").write_text(START)
    engine.docker("build", "--quiet", f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", context)
    system = Deployed(engine, staged, f"photonkafka{os.getpid()}", {})
    system.environment |= {"KAFKA_IMAGE": IMAGE, "KAFKA_QUERIES": str(QUERIES), "KAFKA_RATE": "200"}
    try:
        system.compose("--profile", "kafka", "up", "--detach", "--no-build", *SERVICES)
        yield system
    finally:
        system.compose("--profile", "kafka", "down", "--volumes", "--timeout", "5")
        if not engine.own:
            engine.docker("rmi", "--force", IMAGE)


def joined(system: Deployed) -> dict[str, int]:
    """Click id -> how often it is in the topic."""
    read = ("run", "--rm", "-T", "--no-deps", "--entrypoint=/opt/photon/bin/python", "kafka-feed", "-c", READ)
    return dict(json.loads(system.compose("--profile", "kafka", *read).splitlines()[-1]))


def test_each_click_is_in_the_topic_once_whatever_is_killed(with_kafka: Deployed) -> None:
    system = with_kafka
    clicks = {f"c{number}" for number in range(0, QUERIES, 5)}
    system.wait("the first are joined", lambda: len(joined(system)) > 200)
    for service in ("kafka-join", "kafka", "kafka-join"):
        wanted = min(len(joined(system)) + 200, len(clicks))
        system.compose("--profile", "kafka", "kill", service)
        system.compose("--profile", "kafka", "start", service)
        system.wait(f"joining goes on after a kill of {service}", lambda n=wanted: len(joined(system)) >= n)
    system.wait("all are joined", lambda: len(joined(system)) >= len(clicks))
    assert joined(system) == dict.fromkeys(clicks, 1)
