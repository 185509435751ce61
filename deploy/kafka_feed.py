"""Makes the topics `queries`, `clicks` and `joined`, and fills the first two, at so many events a second.

Events are numbered, so a start after a kill goes on behind the last that got into `clicks`.
"""

import argparse
import json
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

_PARTITIONS = 4
_CLICKS_A_QUERY = 5  # every so manieth query is clicked
_WAIT_S = 120


def _make_topics(brokers: str) -> None:
    admin = AdminClient({"bootstrap.servers": brokers})
    there = admin.list_topics(timeout=_WAIT_S).topics
    new = [NewTopic(name, _PARTITIONS, 1) for name in ("queries", "clicks", "joined") if name not in there]
    for future in admin.create_topics(new).values() if new else ():
        future.result(_WAIT_S)


def _done(brokers: str) -> int:
    """Clicks that there are."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "feed"})
    ends = [
        consumer.get_watermark_offsets(TopicPartition("clicks", n), _WAIT_S)[1] for n in range(_PARTITIONS)
    ]
    consumer.close()
    return sum(ends)


def feed(brokers: str, queries: int, rate: float) -> None:
    _make_topics(brokers)
    producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True})

    def send(topic: str, event: dict[str, Any]) -> None:
        producer.produce(topic, json.dumps(event).encode())
        producer.poll(0)

    first, began = _done(brokers) * _CLICKS_A_QUERY, time.monotonic()
    for number in range(first, queries):
        time.sleep(max(0.0, began + (number - first) / rate - time.monotonic()))
        now_us = time.time_ns() // 1_000
        send("queries", {"id": f"q{number}", "ts_us": now_us, "text": f"words of {number}"})
        if number % _CLICKS_A_QUERY == 0:
            send("clicks", {"id": f"c{number}", "primary_id": f"q{number}", "ts_us": now_us})
    producer.flush(_WAIT_S)
    print(f"fed {queries} queries")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--queries", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    given = parser.parse_args()
    feed(given.brokers, given.queries, given.rate)
