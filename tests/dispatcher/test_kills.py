"""A dispatcher process killed again and again: every line at least once, and the ledger always adds up."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from dispatcher.ledger import Ledger
from dispatcher.workers import worker_directories
from idregistry.rules.sharding import BEGINNING, Configuration, Interval
from joiner.client import ForeignColumns
from photon.core.fates import Fate, Joined
from photon.rpc import idregistry_pb2, idregistry_pb2_grpc, joiner_pb2, joiner_pb2_grpc
from photon.rpc.servers import Server
from tests.dispatcher import child
from tests.dispatcher.fakes import FakeJoiner, FakeRegistry, Site, Writer, click_number, clicks
from tests.forked import Child
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

FILES = 3
KILLS = 6


class Backends(joiner_pb2_grpc.JoinerServicer, idregistry_pb2_grpc.IdRegistryServicer):
    """The fakes of the tests, over real gRPC."""

    def __init__(self, joiner: FakeJoiner, registry: FakeRegistry) -> None:
        self.joiner, self.registry = joiner, registry

    def Join(self, request, context):
        said = self.joiner.join(
            ForeignColumns(
                request.ids,
                request.primary_ids,
                request.times,
                request.events,
                request.tries,
                request.ages,
            )
        )
        return joiner_pb2.JoinResponse(
            outcomes=said.outcomes, reason_rows=list(said.reasons), reasons=list(said.reasons.values())
        )

    def GetDirectory(self, request, context):
        one_shard = Configuration(1, (Interval(BEGINNING, (0,)),))
        identity = bytes.fromhex(self.registry.founded)
        return idregistry_pb2.DirectoryResponse(
            configuration=msgspec.msgpack.encode(one_shard), led=True, identity=identity
        )

    def Lookup(self, request, context):
        outcomes = self.registry.lookup(request.ids, request.times, request.tell_pending)
        return idregistry_pb2.OutcomesResponse(outcomes=outcomes)


@pytest.fixture
def backends():
    """Serves a joiner and a registry that remember, with a mind of their own about each line."""
    rng = random.Random(11)
    registry = FakeRegistry()

    def answer(line, _tries):
        if rng.random() < 0.3:
            return Joined.RETRY_ABSENT, None
        return (Joined.FILTERED if click_number(line) % 7 == 0 else Joined.JOINED), "a robot"

    def before(_events):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.03)  # so that batches finish out of order

    joiner = FakeJoiner(answer, before, registry)
    server = Server("127.0.0.1:0", 8)
    servicer = Backends(joiner, registry)
    server.add(joiner_pb2_grpc.add_JoinerServicer_to_server, servicer, "photon.joiner.v1.Joiner")
    server.add(
        idregistry_pb2_grpc.add_IdRegistryServicer_to_server, servicer, "photon.idregistry.v1.IdRegistry"
    )
    server.start()
    yield joiner, server.listen
    server.stop(0.1)


def check_ledger(site: Site) -> int:
    """Counted are exactly the lines before the recorded offsets; each has a fate or waits. Their number."""
    events = kept = 0
    for worker, place in worker_directories(site.root / "state").items():
        ledger = Ledger(place, site.dead_letters, 1 << 30, worker)
        passed = sum(Path(f.path).read_bytes()[: f.offset].count(b"\n") for f in ledger.files())
        waiting = len([*ledger.waiting()])
        totals = ledger.totals
        ledger.close()
        assert totals.foreign_events == passed == sum(totals.fates.values()) + waiting
        events += passed
        kept += totals.fates[Fate.FILTERED] + totals.fates[Fate.MALFORMED]
    assert len(site.letters()) == kept
    return events


def check_all(site: Site, writer: Writer) -> None:
    """Every line was handed over and counted, joined ones once, and each dead letter is there once."""
    total, joiner = writer.written * 20, site.joiner
    assert check_ledger(site) == total + writer.bad
    assert {click_number(line) for line in joiner.handed} == set(range(total))
    assert set(joiner.joined.values()) == {1}
    assert {click_number(line) for line in joiner.joined} == {n for n in range(total) if n % 7}
    letters = Counter((letter["fate"], letter["file"], letter["offset"]) for letter in site.letters())
    assert set(letters.values()) == {1}
    assert Counter(fate for fate, _, _ in letters) == {
        "filtered": len(range(0, total, 7)),
        "malformed": writer.bad,
    }


@pytest.mark.long
def test_killed_at_any_moment_every_line_is_handed_over_and_counted_once(tmp_path, backends):
    joiner, address = backends
    site = Site(tmp_path)
    site.joiner, rng = joiner, random.Random(5)
    writer = Writer(site.logs, FILES, bad_every=5, pause_s=0.004)
    writer.start()
    try:
        passed = 0
        for kill in range(KILLS):
            process = Child(child.main, site.root, address, kill)
            handed = sum(joiner.handed.values())
            wait_until(lambda handed=handed: sum(joiner.handed.values()) > handed)
            time.sleep(rng.random() * 0.25)
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            before, passed = passed, check_ledger(site)
            assert passed >= before
    finally:
        writer.stopping.set()
        writer.join()
    assert Child(child.main, site.root, address, 99, True).wait() == 0
    check_all(site, writer)


def test_a_terminated_dispatcher_records_what_is_under_way_and_exits_with_status_0(tmp_path, backends):
    joiner, address = backends
    site = Site(tmp_path)
    (site.logs / "0.jsonl").write_bytes(clicks(0, 6_000))
    process = Child(child.main, site.root, address, 1)
    wait_until(lambda: joiner.handed)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    passed = check_ledger(site)
    assert 0 < passed < 6_000
    assert Child(child.main, site.root, address, 2, True).wait() == 0
    assert set(Counter(line for line in joiner.joined).values()) == {1}
    assert check_ledger(site) == 6_000
