"""MillWheel on what sources have: from Kafka's partitions and from tables, as processes that are killed."""

import gzip
import json
import os
import random
import signal
import time

import pytest

from tests.connect.test_kafka import delete_before
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
SECOND = 1_000_000


def windows(text, *more):
    """Words of a run that counts the records of each user by second."""
    fields = ("--key", "user", "--time", "ts", "--window", "1s")
    return ("windows", "--input", text, *fields, "--work", "work", "--out", "out/windows", "--json", *more)


def counts(system):
    """(user, window) -> how many, and no line twice."""
    lines = system.sink("windows")
    found = {(line["key"], line["end_us"]): line["count"] for line in lines}
    assert len(found) == len(lines)
    return found


def wanted(events):
    found = {}
    for user, at in events:
        key = user, at // SECOND * SECOND + SECOND
        found[key] = found.get(key, 0) + 1
    return found


def test_each_record_of_kafka_counts_once_and_none_is_late_whoever_is_killed(broker, topic, system):
    from confluent_kafka import Producer

    name, events, rng = topic(3), [], random.Random(5)
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})

    def send(many):
        for _ in range(many):
            user, now = f"u{rng.randrange(20)}", time.time_ns() // 1_000
            events.append((user, now))
            producer.produce(name, json.dumps({"user": user, "ts": now}), partition=rng.randrange(3))
        producer.flush()

    def start():
        source = f"kafka://{broker.address}/{name}"
        return system.start_as(*windows(source, "--follow", "--workers", "2", "--lateness", "1s"))

    send(20_000)  # a backlog
    start()
    wait_until(system.is_up)
    for turn in range(12):
        send(500)
        seen = len(counts(system))
        wait_until(lambda seen=seen: len(counts(system)) > seen)
        if turn in (2, 7):
            for pid in system.workers(b"receiver"):
                os.kill(pid, signal.SIGKILL)
        if turn == 4:
            os.kill(rng.choice(system.workers()), signal.SIGKILL)
        if turn == 9:
            system.kill()
            wait_until(lambda: not list(system.processes()))
            start()
    wait_until(lambda: sum(counts(system).values()) == len(events))
    assert counts(system) == wanted(events)
    summary = system.stop()
    assert (summary["counts"]["count"].get("late", 0), summary["dead_letters"]) == (0, 0)


def test_records_that_retention_took_are_in_the_summary_and_the_exit_status(broker, topic, system):
    from confluent_kafka import Producer

    name, found = topic(), []
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
    for turn, deleted in enumerate((0, 15, 0)):
        for n in range(10):
            producer.produce(name, json.dumps({"user": "u", "ts": (10 * turn + n) * SECOND}))
        producer.flush()
        if deleted:
            delete_before(broker, name, deleted)
        run = system.start_as(*windows(f"kafka://{broker.address}/{name}"))
        summary = json.loads(run.communicate(timeout=100)[0])
        assert summary["ended"]
        found.append((run.returncode, summary["lost_records"]))
    assert found == [(0, 0), (1, 5), (1, 5)]
    assert sum(counts(system).values()) == 25


def test_tables_and_packed_ones_are_worked_off_and_a_second_run_takes_what_came(system):
    events = [(f"u{n % 7}", 10 * SECOND + n * 1_000) for n in range(5_000)]

    def write(name, some):
        lines = "user,ts\n" + "".join(f"{user},{at}\n" for user, at in some)
        with gzip.open(system.directory / name, "wt") as file:
            file.write(lines)

    write("a.csv.gz", events[:3_000])
    assert json.loads(system.ask(*windows("*.csv.gz")))["ended"]
    assert counts(system) == wanted(events[:3_000])
    write("b.csv.gz", [(user, at + 60 * SECOND) for user, at in events[3_000:]])
    assert json.loads(system.ask(*windows("*.csv.gz")))["ended"]
    assert sum(line["count"] for line in system.sink("windows")) == 5_000


def test_a_source_that_can_not_be_read_ends_the_run_with_its_reason(system):
    assert "no file matches" in system.refused(*windows("nothing-*.csv"))
    (system.directory / "a.csv").write_text("user;ts\na;1\n")
    system.refused(*windows("kafka://h:1/t?grp=a"))
    assert "delimiter=;" in system.refused(*windows("a.csv"))
