"""MillWheel on several machines that share the copies of a source: one copies, whichever leads."""

import json
import os
import random
import signal
import time
import uuid

import pytest

from tests.millwheel.running import LOSES, Several, System
from tests.millwheel.topologies import expected
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
COPIED = "tests.millwheel.topologies:COPIED"


class Copying(Several):
    """Machines whose source is a topic of three partitions."""

    def __init__(self, system, uri, tmp_path, broker, topic):
        super().__init__(system, uri, tmp_path, 1, lines=1)
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
        self._topic, self.lines, self._rng = topic, [], random.Random(5)
        system.environment["SOURCE"] = f"kafka://{broker.address}/{topic}"
        system.environment["COPIES"] = str(tmp_path / "copies")

    def start(self, name, *words, **given):
        return super().start(name, *words, topology=COPIED, **given)

    def send(self, many):
        for _ in range(many):
            line = {"user": f"u{self._rng.randrange(20)}", "what": "x", "ts": time.time_ns() // 1_000}
            self.lines.append(line)
            self._producer.produce(self._topic, json.dumps(line), partition=self._rng.randrange(3))
        self._producer.flush()

    def counted(self):
        return sum(line["count"] for line in self.system.sink("counts"))

    def flow(self, turns):
        """Records come, and what came is counted."""
        for _ in range(turns):
            self.send(300)
            sent = len(self.lines)
            wait_until(lambda sent=sent: self.counted() >= sent, what=lambda: f"{self.counted()} of {sent}")

    def check(self, flow=1):
        self.flow(flow)
        counts = {(one["key"], one["second"]): one["count"] for one in self.system.sink("counts")}
        wanted = {(one["key"], one["second"]): one["count"] for one in expected(self.lines)["counts"]}
        assert counts == wanted and len(counts) == len(self.system.sink("counts"))
        assert self.system.sink("dead-letters") == []

    def told(self, name):
        return (self._directory / f"{name}.told").read_text()


@pytest.fixture
def system(tmp_path):
    one = System(tmp_path)
    yield one
    for name in ("one", "two", "three"):
        one.signal(name, signal.SIGCONT)
        one.signal(name, signal.SIGKILL)


@pytest.fixture
def copying(system, postgresql, tmp_path, broker, topic):
    uri = f"{postgresql.uri}?schema=s{uuid.uuid4().hex}&{LOSES}"
    return Copying(system, uri, tmp_path, broker, topic(3))


def copiers(copying):
    """Machines that have a receiver."""
    return [name for name in ("one", "two", "three") if copying.system.workers(b"receiver", name)]


def test_who_leads_copies_and_each_record_counts_once_whoever_is_killed_or_freezes(copying):
    system = copying.system
    copying.send(20_000)
    copying.start("one", "--follow")
    copying.computes("one")
    copying.start("two", "--follow")
    copying.computes("one", "two")
    copying.flow(3)
    assert copiers(copying) == ["one"]
    for pid in system.workers(b"receiver", "one"):
        os.kill(pid, signal.SIGKILL)
    copying.flow(2)
    system.signal("one", signal.SIGKILL)
    copying.send(500)
    copying.computes("two")
    copying.flow(2)
    copying.start("three", "--follow")
    copying.computes("two", "three")
    system.signal("two", signal.SIGSTOP)
    copying.send(500)
    copying.computes("three")
    copying.flow(2)
    system.signal("two", signal.SIGCONT)
    copying.computes("two", "three")
    wait_until(lambda: copiers(copying) == ["three"])
    copying.flow(2)
    copying.check()


def test_a_backlog_is_worked_off_though_who_copies_is_killed_and_another_run_takes_what_came(
    copying, tmp_path
):
    copying.send(30_000)
    runs = {name: copying.start(name) for name in ("one", "two")}
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("copies/*/*/*.jsonl")))
    (lead,) = copiers(copying)
    copying.system.signal(lead, signal.SIGKILL)
    runs.pop(lead)
    (left,) = runs.values()
    summary = json.loads(left.communicate(timeout=100)[0])
    copying.check(flow=0)
    assert summary["ended"] and summary["workers"] == 2
    copying.send(100)
    runs = [copying.start(name) for name in ("one", "two")]
    assert [json.loads(run.communicate(timeout=100)[0])["ended"] for run in runs] == [True, True]
    late = [letter["time"] for letter in copying.system.sink("dead-letters")]
    assert sorted(late) == sorted(line["ts"] for line in copying.lines[30_000:])  # windows had ended for good


def test_copies_stay_where_they_were_begun(copying, tmp_path):
    copying.send(10)
    copying.start("one").communicate(timeout=100)
    copying.check(flow=0)
    first, environment = copying.uris[0], copying.system.environment
    environment["COPIES"] = str(tmp_path / "elsewhere")
    assert copying.start("one").wait(100) == 2
    assert "the copies of this run are not there" in copying.told("one")
    environment["COPIES"] = ""
    assert copying.start("one").wait(100) == 2
    assert "give it a directory that all machines reach (copies=DIRECTORY)" in copying.told("one")
    alone = ["--work", "one", "--store", first]
    said = copying.system.refused("run", COPIED, *alone)
    assert "injector 'clicks' has shared copies: name their directory again (copies=...)" in said
