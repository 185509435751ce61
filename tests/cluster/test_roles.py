"""Each role alone by `photon <role> serve --config photon.toml`: started in any order, killed, drained.

One system of two datacenters and three registry replicas for all tests; each leaves it whole.
"""

import random
import shutil
import signal
import urllib.request
from collections import Counter

import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from photon.cluster.supervisor import CORRUPT_STATUS
from photon.rpc.network import LOOPBACK
from tests.cluster.roles_kit import METRICS_OFFSET, Roles, Truth
from tests.health import NOT_SERVING, SERVING, await_health, status_of
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

SERVICES = {
    "registry": "photon.idregistry.v1.IdRegistry",
    "eventstore": "photon.eventstore.v1.EventStore",
    "joiner": "photon.joiner.v1.Joiner",
    "dispatcher": "photon.dispatcher.v1.Dispatcher",
}
METRICS = {
    "registry": "photon_registry_shard_quorum",
    "eventstore": "photon_eventstore_",
    "joiner": "photon_joiner_lease_left_seconds",
    "dispatcher": "photon_dispatcher_pending_events",
}


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    made = Roles(tmp_path_factory.mktemp("system"))
    order = list(made.all)
    random.Random(5).shuffle(order)
    order.sort(key=lambda who: who[0] == "registry")  # that all others need comes last
    for who in order:
        made.start(who)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def truth(roles):
    return Truth(roles)


def test_processes_started_in_any_order_find_each_other_and_join_each_event_once(roles, truth):
    truth.write(300)
    roles.await_health(SERVING)
    truth.write(300)
    truth.await_all()


def test_each_process_answers_health_checks_reflection_and_prometheus(roles):
    for (role, name), address in roles.all.items():
        await_health(SERVING, address)
        await_health(SERVING, address, SERVICES[role])
        with LOOPBACK.open(address) as channel:
            assert SERVICES[role] in ProtoReflectionDescriptorDatabase(channel).get_services()
        host, _, port = address.rpartition(":")
        with urllib.request.urlopen(
            f"http://{host}:{int(port) + METRICS_OFFSET}/metrics", timeout=60
        ) as page:
            assert METRICS[role] in page.read().decode() or (role, name) == ("eventstore", "east/1")


@pytest.mark.parametrize("end", ["killed", "told to end"])
def test_processes_that_end_and_are_started_again_lose_and_double_nothing(roles, truth, end):
    here, there, replica = ("east", "west", "r0") if end == "killed" else ("west", "east", "r1")
    victims = [("dispatcher", here), ("joiner", here), ("registry", replica), ("eventstore", there)]
    truth.write(150)
    if end == "killed":
        roles.kill(*victims)
    else:
        assert roles.terminate(*victims) == [0] * len(victims)
    truth.write(150)
    roles.start(*victims)
    truth.await_all()
    roles.await_health(SERVING)


def test_without_a_majority_of_the_registry_those_that_need_it_say_so(roles, truth):
    others = [("registry", "r1"), ("registry", "r2")]
    roles.signal(signal.SIGSTOP, *others)
    try:
        roles.await_health(NOT_SERVING, ("registry", "r0"), ("joiner", "east"), ("joiner", "east/1"))
        assert roles.health("eventstore", "east") == roles.health("dispatcher", "east") == SERVING
        truth.write(50)
    finally:
        roles.signal(signal.SIGCONT, *others)
    roles.await_health(SERVING)
    truth.await_all()


def test_a_second_sigterm_ends_a_joiner_that_waits_for_calls_to_end(roles, truth):
    store, joiner = ("eventstore", "west"), ("joiner", "west")
    for _ in range(5):  # on a machine that is busy the calls may have ended when the second comes
        roles.signal(signal.SIGSTOP, store)
        truth.write(20)
        wait_until(lambda: status_of("joiner", roles.all[joiner])["in_flight"])
        roles.signal(signal.SIGTERM, joiner)
        wait_until(lambda: roles.health(*joiner) != SERVING)
        roles.signal(signal.SIGTERM, joiner)
        status = roles.ended(joiner)
        roles.signal(signal.SIGCONT, store)
        roles.start(joiner)
        roles.await_health(SERVING, joiner)
        if status:
            break
    assert status == -signal.SIGTERM
    truth.await_all()


OTHER_IDS = ['[ids]\nkey = "west"\n', '[foreign]\nid = "event"\n']


def start_with(roles, table, who):
    """On a machine with another photon.toml."""
    theirs = roles.config
    roles.config = roles.root / "other.toml"
    roles.config.write_text(theirs.read_text() + table)
    roles.start(who)
    roles.config = theirs


def refusal(roles, who):
    """The last word of a process that ends with status 2."""
    assert roles.ended(who) == 2
    told = [line for line in roles.said(who).splitlines() if line.startswith("photon: ")][-1]
    assert "ids.key and all of [foreign] must be the same on all machines" in told
    return told


@pytest.mark.long
def test_machines_that_make_other_ids_of_the_same_events_join_nothing_and_the_first_go_on(roles, truth):
    """With another key every click would have two ids; by another field every line would be malformed."""
    joiner, dispatcher = ("joiner", "west"), ("dispatcher", "west")
    roles.await_health(SERVING)
    life = status_of("joiner", roles.all["joiner", "east"])["lease"]["incarnation"]
    assert roles.terminate(dispatcher, joiner) == [0, 0]
    start_with(roles, OTHER_IDS[0], dispatcher)  # it waits for a joiner that has a lease
    truth.write(200)
    for table in OTHER_IDS:
        start_with(roles, table, joiner)
        assert "founded with others" in refusal(roles, joiner)
    roles.start(joiner)
    assert "give the client the joiner's photon.toml" in refusal(roles, dispatcher)
    truth.await_all("by the dispatcher of the east")
    start_with(roles, OTHER_IDS[1], dispatcher)  # an idle system refuses it, too
    assert "give the client the joiner's photon.toml" in refusal(roles, dispatcher)
    letters = list(roles.out.glob("dead-letters/west/foreign*"))
    assert not b"".join(path.read_bytes() for path in letters)
    roles.start(dispatcher)
    roles.await_health(SERVING)
    lines = sum(1 for _ in (roles.root / "logs-west" / "clicks" / "log.jsonl").open())
    wait_until(lambda: sum(status_of("dispatcher", roles.all[dispatcher])["fates"].values()) == lines)
    assert status_of("dispatcher", roles.all[dispatcher])["fates"]["malformed"] == 0
    assert status_of("joiner", roles.all["joiner", "east"])["lease"]["incarnation"] == life
    truth.await_all("by both")


@pytest.mark.long
def test_a_whole_system_that_was_drained_goes_on_where_it_was(roles, truth):
    roles.await_health(SERVING)
    truth.write(500)
    assert roles.terminate(*roles.all) == [0] * len(roles.all)
    truth.write(50)
    roles.start()
    truth.await_all()


@pytest.mark.long
def test_joiners_that_run_on_join_nothing_again_when_their_registry_is_founded_anew(roles, truth):
    """Nor is anything lost, once the replicas have their directories again."""
    replicas = [who for who in roles.all if who[0] == "registry"]
    registry, kept = roles.root / "work" / "registry", roles.root / "kept"
    roles.await_health(SERVING)
    truth.write(100)
    truth.await_all()
    roles.kill(*replicas)
    registry.rename(kept)
    for datacenter in roles.places:
        with (roles.root / f"logs-{datacenter}" / "clicks" / "log.jsonl").open("r+b") as clicks:
            clicks.write(clicks.read())
    truth.write(50)
    roles.start(*replicas)
    for who in [who for who in roles.all if who[0] == "joiner"]:
        assert roles.ended(who) == CORRUPT_STATUS
        assert "founded anew" in roles.said(who).splitlines()[-1]
    assert truth.joined() <= Counter(truth.pairs)
    roles.kill()
    shutil.rmtree(registry)
    kept.rename(registry)
    roles.start()
    truth.await_all()
    roles.await_health(SERVING)


@pytest.mark.long
def test_all_but_replicas_end_at_a_registry_that_was_founded_anew(roles, truth):
    """All replicas lost their disks, and somebody started them again: nothing is joined a second time."""
    replicas = [who for who in roles.all if who[0] == "registry"]
    roles.kill()
    before = truth.joined()
    shutil.rmtree(roles.root / "work" / "registry")
    shutil.rmtree(roles.root / "work" / "east" / "dispatcher")  # so its logs are read again
    roles.start()
    roles.await_health(SERVING, *replicas)
    cache = ("eventstore", "east/1")  # keeps nothing
    for who in {*roles.all} - {*replicas, ("dispatcher", "east"), cache}:
        assert roles.ended(who) == CORRUPT_STATUS
        assert "founded anew" in roles.said(who).splitlines()[-1]
    assert truth.joined() == before
