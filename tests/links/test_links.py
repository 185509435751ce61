"""A running system of three regions, all of whose links pass proxies, under every toxic there is.

Registry to registry (Raft), and joiner and dispatcher to registry (gRPC). One system for all tests, with live
logs all the time: each test spoils links, sees that this is felt, and that events are joined again once they
are mended. What comes out of it all is checked in the end, and along the way.
"""

import time

import grpc
import psutil
import pytest

from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryStub
from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for

pytestmark = [pytest.mark.links, pytest.mark.timeout(300)]

CLICKS_PER_S = 120
LEADER, HOME, AWAY = "r0", "east", "west"
"""Who leads, where that is, and a datacenter with a pipeline that is elsewhere."""
ALL = (
    "registry-r0",
    "registry-r1",
    "registry-r2",
    "joiner-east",
    "joiner-west",
    "dispatcher-east",
    "dispatcher-west",
)
SETTINGS = {
    "registry": {
        "shards": 1,
        "leaders": [LEADER],
        "lease_s": 4.0,
        "request_timeout_s": 3.0,
    },
    "joiner": {"unjoinable_age_s": 6.0},
}


@pytest.fixture(scope="module")
def system(request, tmp_path_factory, nursery):
    seed = seed_for("tests/links")
    feed = Feed(seed, clicks=LONG, clicks_per_s=CLICKS_PER_S, orphans=0.005)
    failed_before = request.session.testsfailed
    with FaultSystem(
        tmp_path_factory.mktemp("links"), seed, feed, settings=SETTINGS, proxies=True, launcher=nursery
    ) as made:
        made.until_joined(1)
        yield made
        made.failed = request.session.testsfailed > failed_before


@pytest.fixture(autouse=True)
def mended(system):
    """After each test the links are good, events are joined, and the output holds what it may."""
    led_by_r0(system)
    yield
    if not system.feeder.is_done:
        system.proxies.heal()
        goes_on(system)
    system.check_now()


def led_by_r0(system):
    """Else the leader that a test sees go might have been handed over on its way home."""
    system.until(lambda: system.leader_of() == system.leader_of(None) == LEADER, f"{LEADER} to lead")


def goes_on(system, events=CLICKS_PER_S // 2):
    system.until_joined(system.watch.joined + events)


def stands_still(system, seconds=2.0):
    """Whether nothing at all was joined for so long."""
    before = system.watch.joined
    system.run_for(seconds)
    return system.watch.joined == before


def stands_still_while_logs_are_read(system, seconds=1.0):
    """The event stores need nobody elsewhere: where they go on, the machine had time for work."""
    before = queries_read(system)
    stood = stands_still(system, seconds)
    now = queries_read(system)
    read = sum(now[name] - before[name] for name in now.keys() & before.keys())
    return stood and read > CLICKS_PER_S * seconds / 4


def queries_read(system):
    """By event store."""
    return {name: status["primary_events"] for name, status in system.statuses(("eventstore-",)).items()}


def joined_in(system, datacenter):
    return system.watch.by_datacenter().get(datacenter, 0)


def peers_of(system, process):
    """Ports of this machine that a process has connections to."""
    connections = psutil.Process(system.dev.pid_of(process)).net_connections("tcp")
    return {c.raddr.port for c in connections if c.status == psutil.CONN_ESTABLISHED and c.raddr}


def elsewhere(system):
    """Datacenter -> the replicas that are not in it."""
    replicas = system.topology.replicas
    return {r.datacenter: [o for o in replicas if o.datacenter != r.datacenter] for r in replicas}


def datacenter_of(system, process):
    name = process.partition("-")[2]
    return next((r.datacenter for r in system.topology.replicas if r.name == name), name)


def round_trips(system, datacenter, calls):
    """Seconds of calls from a datacenter to the leader; RpcError."""
    with system.topology.network(datacenter).open(system.topology.replica(LEADER).grpc) as channel:
        stub = IdRegistryStub(channel)
        for _ in range(calls):
            began = time.monotonic()
            stub.Now(pb.NowRequest(), timeout=1.0)
            yield time.monotonic() - began


def quickest(system, datacenter, calls=5):
    """Seconds; None if the leader did not answer in time."""
    try:
        return min(round_trips(system, datacenter, calls))
    except grpc.RpcError:
        return None


def answers(system, datacenter):
    """Whether the leader does, asked from there."""
    return quickest(system, datacenter, 1) is not None


def only_away_hears_nothing(system):
    """Whether the leader answers elsewhere at the same time: else it is the machine that is busy."""
    return not answers(system, AWAY) and answers(system, HOME)


def port(address):
    return int(address.rpartition(":")[2])


def test_nobody_reaches_another_datacenter_but_through_its_proxy(system):
    """Replicas each other, a joiner the leader, a dispatcher a replica elsewhere when its own is away."""
    via = {name: set(map(port, there.values())) for name, there in system.topology.settings.via.items()}
    proxies = set().union(*via.values())
    local = next(r.name for r in system.topology.replicas if r.datacenter == AWAY)

    def dialed(process):
        return peers_of(system, process) & proxies

    for process in ("registry-r0", "registry-r1", f"joiner-{AWAY}"):
        system.until(lambda: dialed(process), f"a connection of {process} to a proxy")
    system.dev.supervisor.hold_down([f"registry-{local}"])
    system.until(lambda: dialed(f"dispatcher-{AWAY}"), "the dispatcher to ask elsewhere")
    assert_not_straight(system, via, proxies)
    system.dev.supervisor.let_up([f"registry-{local}"])
    system.until(lambda: system.status(f"registry-{local}"), f"{local} to be back")
    assert_not_straight(system, via, proxies)


def assert_not_straight(system, via, proxies):
    for process in ALL:
        if system.dev.pid_of(process) is None:
            continue
        mine = datacenter_of(system, process)
        peers = peers_of(system, process)
        assert peers & proxies <= via[mine], f"{process} dials the proxy of another datacenter"
        for replica in elsewhere(system)[mine]:
            straight = {port(replica.raft), port(replica.grpc)} & peers
            assert not straight, f"{process} has a connection to {replica.name} past its proxy"


def test_a_link_that_is_down_is_felt_by_those_behind_it_alone(system):
    """The links of one datacenter's joiner and dispatcher to the registry; then those between replicas."""
    proxies = system.proxies
    before = proxies.traffic()
    proxies.down(proxies.links(AWAY, kind="grpc", replica=LEADER))
    system.until(lambda: stands_still_in(system, AWAY), f"{AWAY} to miss the leader")
    assert not answers(system, AWAY)
    system.until(lambda: answers(system, "central"), "an answer elsewhere")
    there = joined_in(system, HOME)
    system.until(lambda: joined_in(system, HOME) > there + 30, f"{HOME} to go on without {AWAY}")
    assert (proxies.traffic() - before)[f"grpc:{AWAY}>{LEADER}"] > 1_000
    proxies.heal()
    proxies.down(proxies.links(kind="raft"))
    system.until(lambda: system.leader_of() is None, "no quorum")
    assert stands_still(system)
    assert all((proxies.traffic() - before)[link.name] > 100 for link in proxies.links(kind="raft"))


def stands_still_in(system, datacenter, seconds=1.5):
    """Whether nothing was joined there for so long, and something elsewhere: the machine had time."""
    before, all_before = joined_in(system, datacenter), system.watch.joined
    system.run_for(seconds)
    return joined_in(system, datacenter) == before and system.watch.joined > all_before


def test_a_leader_whose_words_are_lost_is_replaced_though_it_hears_all(system):
    """One direction alone."""
    system.proxies.isolate(HOME, "to", kind="raft")
    system.until(lambda: system.leader_of() not in (None, LEADER), "another leader")
    goes_on(system)


def test_a_leader_that_hears_nothing_gives_up(system):
    """The other direction alone."""
    system.proxies.isolate(HOME, "from", kind="raft")
    system.until(lambda: system.leader_of() not in (None, LEADER), "another leader")
    goes_on(system)


def test_a_datacenter_that_is_cut_off_goes_on_when_it_is_back(system):
    system.proxies.isolate(AWAY)
    system.until(lambda: stands_still_in(system, AWAY), f"{AWAY} to stand still")
    goes_on(system)
    system.proxies.heal()
    before = joined_in(system, AWAY)
    system.until(lambda: joined_in(system, AWAY) > before, f"{AWAY} to join again")


def test_what_was_sent_long_ago_and_comes_now_does_no_harm(system):
    """Commits, leases, votes and entries of a time before; their senders have long given up on them."""
    system.proxies.freeze()
    system.until(lambda: system.leader_of() is None, "no quorum")
    system.run_for(SETTINGS["registry"]["lease_s"] + 1.0)
    system.proxies.thaw()
    goes_on(system)


def test_a_hundred_milliseconds_of_round_trip_only_delay(system):
    """As between the regions of the paper (section 4), with jitter."""
    system.proxies.latency(system.topology.regions, 100, jitter_ms=15)
    assert system.until(lambda: quickest(system, AWAY), f"answers to {AWAY}") > 0.07
    goes_on(system)
    system.until(lambda: joined_per_s(system) > CLICKS_PER_S / 4, "a quarter of the rate")


def joined_per_s(system, seconds=3.0):
    began, before = time.monotonic(), system.watch.joined
    system.run_for(seconds)
    return (system.watch.joined - before) / (time.monotonic() - began)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda proxies: proxies.bandwidth(proxies.links(), 40), id="bandwidth"),
        pytest.param(lambda proxies: proxies.slicer(proxies.links(), 64, 20), id="slicer"),
    ],
)
def test_links_that_are_slow_or_sliced_carry_all_the_same(system, spoil):
    spoil(system.proxies)
    goes_on(system, CLICKS_PER_S)


def test_links_that_break_after_some_bytes_carry_all_the_same(system):
    """Each connection ends in the middle of a message, again and again; in between some get through."""
    links = system.proxies.links()
    system.proxies.limit_data(links, 40_000)
    before = system.proxies.traffic()
    system.until(lambda: (system.proxies.traffic() - before).total() > 200_000, "connections to break")
    goes_on(system, CLICKS_PER_S)


@pytest.mark.parametrize("kind", ["raft", "grpc"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda proxies, links: proxies.reset_peer(links, 50), id="reset_peer"),
        pytest.param(lambda proxies, links: proxies.timeout(links, 200), id="timeout"),
        pytest.param(lambda proxies, links: proxies.limit_data(links, 300), id="limit_data"),
        pytest.param(
            lambda proxies, links: proxies.toxic(links, "timeout", ["upstream"], timeout=0), id="upstream"
        ),
        pytest.param(
            lambda proxies, links: proxies.toxic(links, "timeout", ["downstream"], timeout=0), id="downstream"
        ),
    ],
)
def test_links_that_break_over_and_over_lose_nothing(system, spoil, kind):
    """All of a kind at once: between replicas nothing can be committed; from elsewhere the leader is out of
    reach."""
    proxies = system.proxies
    spoil(proxies, proxies.links(kind=kind))
    if kind == "raft":
        system.until(lambda: stands_still_while_logs_are_read(system), "nothing to be committed")
    else:
        system.until(lambda: only_away_hears_nothing(system), f"the leader not to answer {AWAY} alone")
        system.until(lambda: stands_still_in(system, AWAY), f"{AWAY} to miss the leader")


def test_after_all_of_this_every_event_has_come_out_once(system):
    cut_short(system.feeder)
    report = system.finish()
    assert report.joined == len(system.feeder.truth.pairs)
