"""What the directory's leader decides: reshardings, the table's past, leases."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from idregistry.coordinator import Coordinator, Look, Wanted
from idregistry.peers import TELLS_S_MAX, Fact
from idregistry.rules.commands import (
    AddSet,
    Boundary,
    Cancel,
    Commit,
    Configure,
    Fence,
    Fences,
    Found,
    KeepAlive,
    Prepare,
    Propose,
    Rejected,
    Replace,
    Row,
    Standing,
    encode,
)
from idregistry.rules.directory import DirectoryState, Proposal
from idregistry.rules.names import iso_utc
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.rules.sharding import Configuration
from idregistry.rules.state import ShardState
from idregistry.rules.steward import FENCES_A_STEP, command_due
from idregistry.shard import Answer, Ask, Overloaded, Settled
from photon.core.clock import ManualClock
from photon.core.settings import Registry
from photon.raft.port import Members, Refusal, Refused
from tests.idregistry.fake_log import FakeLog
from tests.idregistry.kit import NOW_US, OWN, ROWS, event_ids, row, same_times

IDENTITY = bytes(range(16))
MEMBERS = Members(("r0", "r1", "r2"))
SECOND_US = 1_000_000


class Bench:
    """A directory led by r0, and its shards, which do as it says when `follow` is called."""

    def __init__(self, shards: int = 2, peers: Any = None) -> None:
        self.clock = ManualClock(NOW_US)
        self.state = DirectoryState()
        self.hosting: Any = SimpleNamespace(shards={}, follow=lambda view: False, behind=False)
        founding = Found(0, shards, ROWS, IDENTITY)
        settings = Registry(clock_skew_s=1.0)
        self.coordinator = Coordinator(
            self.state,
            founding,
            settings,
            self.clock,
            lambda: None,
            self.hosting,
            lambda: None,
            peers=peers,
        )
        self.log = FakeLog(self.state, of_group=MEMBERS)
        self.tick()
        self.follow()

    def tick(self) -> None:
        self.coordinator.on_tick(self.log)

    def follow(self, *only: int) -> None:
        """Shards appear, and apply what their leaders would put into their logs."""
        for number in self.state.view.founders:
            if number not in self.hosted:
                log = SimpleNamespace(committed_members=MEMBERS)
                self.hosted[number] = SimpleNamespace(
                    state=ShardState(number), log=log, group=self.state.view.group(number)
                )
        self.hosting.shards = {n: one for n, one in self.hosted.items() if n in self.state.view.founders}
        for number in only or tuple(self.hosted):
            self.catch_up(self.state_of(number))

    def catch_up(self, state: ShardState) -> list[type]:
        """Which commands a shard's leader put into its log, until nothing was due."""
        kinds = []
        now_us = self.clock.now_us()
        while command := command_due(state, self.state.view, self.state.fences, now_us, None):
            state.apply(encode(command))
            kinds.append(type(command))
        return kinds

    def ask(self, what: Wanted, seconds: float = 10.0) -> Answer:
        answers: list[Answer] = []
        refused = self.coordinator.asks.offer(Ask(what, self.clock.monotonic() + seconds, answers.append))
        if refused is not None:
            return refused
        self.tick()
        self.tick()  # a renewal is seen in the turn after it was applied
        (answer,) = answers
        return answer

    def decided(self, what: Wanted) -> Any:
        """What the directory answered."""
        answer = self.ask(what)
        assert isinstance(answer, Settled)
        return answer.result

    def reshard(self, shards: int, start_us: int = 0) -> Proposal:
        proposal = self.decided(Propose(0, shards, start_us, 0))
        assert isinstance(proposal, Proposal)
        return proposal

    def fence_fails(self, incarnation: int = 7) -> float:
        """For how long its lease may run yet."""
        standing = self.decided(Fence(0, incarnation, 0))
        assert standing == Standing(False, standing.expires_in_s)
        return float(standing.expires_in_s)

    def keep(self, lease_us: int = 10 * SECOND_US, incarnation: int = 7) -> object:
        return self.decided(KeepAlive(0, incarnation, "j:1", lease_us))

    @property
    def hosted(self) -> dict[int, Any]:
        shards: dict[int, Any] = self.hosting.shards
        return shards

    def state_of(self, shard: int) -> ShardState:
        state: ShardState = self.hosted[shard].state
        return state

    @property
    def configuration(self) -> Configuration:
        assert self.state.view.configuration is not None
        return self.state.view.configuration


def commit(state: ShardState, *numbers: int, time_us: int = NOW_US) -> bytes:
    ids = event_ids(*numbers)
    command = Commit(NOW_US, [b"t"], [len(numbers)], ids, same_times(len(numbers), time_us), [OWN])
    outcomes = state.apply(encode(command))
    assert isinstance(outcomes, bytes)
    return outcomes


def test_the_first_leader_founds_the_registry_from_its_settings_and_the_next_leaves_it() -> None:
    bench = Bench(shards=3)
    view = bench.state.view
    assert (bench.configuration.shards, view.identity, set(view.replicas)) == (
        (0, 1, 2),
        IDENTITY,
        {"r0", "r1", "r2"},
    )
    another = Found(0, 2, ROWS, bytes(16))
    proposed = len(bench.log.proposed)
    next_one = Coordinator(
        bench.state, another, Registry(), bench.clock, lambda: None, bench.hosting, lambda: None
    )
    next_one.on_tick(bench.log)
    assert (len(bench.log.proposed), bench.state.view) == (proposed, view)


def test_a_resharding_is_adopted_when_the_last_shard_has_prepared() -> None:
    bench = Bench()
    proposal = bench.reshard(4)
    assert proposal.start_us > NOW_US + SECOND_US, "later than now by more than the skew"
    bench.follow(0)
    bench.tick()
    assert bench.state.view.proposal == proposal
    bench.follow(1)
    bench.tick()
    assert [len(i.shards) for i in bench.configuration.intervals] == [2, 4]
    bench.follow()
    assert {one.state.configuration for one in bench.hosted.values()} == {bench.configuration}


def test_a_shard_that_holds_a_later_event_makes_it_void_and_the_reason_is_told() -> None:
    bench = Bench(shards=1)
    proposal = bench.reshard(2)
    commit(bench.state_of(0), 1, time_us=proposal.start_us + 5)
    bench.follow()
    bench.tick()
    assert [len(i.shards) for i in bench.configuration.intervals] == [1]
    assert bench.state.view.abandoned[0] == proposal.version
    why = bench.state.view.abandoned[1]
    assert f"shard 0 holds an event of {iso_utc(proposal.start_us + 5)}, " in why
    assert f"before the new start, {iso_utc(proposal.start_us)}. " in why
    assert "While such an event is kept, no number of shards can begin before its time" in why
    bench.follow()
    assert bench.state_of(0).prepared is None, "it takes such events again"


def test_a_shard_that_does_not_prepare_until_the_start_makes_it_void() -> None:
    bench = Bench()
    proposal = bench.reshard(4)
    bench.follow(0)
    bench.clock.advance((proposal.start_us - NOW_US) / 1e6 - 0.1)
    bench.tick()
    assert bench.state.view.proposal is not None
    bench.clock.advance(0.2)
    bench.tick()
    assert "shard 1 did not prepare in time" in bench.state.view.abandoned[1]


def test_nothing_is_decided_while_a_shard_is_not_open_here_yet() -> None:
    """What the others say is not what all say."""
    bench = Bench()
    bench.reshard(4)
    bench.follow()
    one = bench.hosted.pop(1)
    bench.tick()
    assert bench.state.view.proposal is not None
    bench.hosted[1] = one
    bench.tick()
    assert bench.state.view.proposal is None


def test_a_resharding_is_given_up_at_its_start_though_nobody_tells_of_a_shard() -> None:
    """The others are closed from there on."""
    bench = Bench()
    proposal = bench.reshard(4)
    bench.follow()
    del bench.hosted[1]
    bench.clock.advance((proposal.start_us - NOW_US) / 1e6)
    bench.tick()
    assert bench.state.view.abandoned == (
        proposal.version,
        "shard 1 did not prepare in time: is there a majority of it?",
    )


class OtherSet:
    """The replicas of the set b, as the directory's leader hears of them; `members` at the time `at`."""

    def __init__(self) -> None:
        self.group = -1
        self.members = Members(("b0", "b1", "b2"))
        self.at = 0.0
        self.hurried = 0

    def facts(self, members_from: float = 0.0) -> list[Fact]:
        members = self.members if self.at >= members_from else None
        return [Fact(self.group, NOW_US, NO_BOUNDARY, 0, None, members)] if self.group > 0 else []

    def hurry(self) -> None:
        self.hurried += 1


def test_members_of_another_set_count_only_where_they_were_told_after_the_replacement_began() -> None:
    """A replacement that was turned round has the members from before it as its aim."""
    others = OtherSet()
    bench = Bench(1, peers=others)
    rows = tuple(Row(f"b{n}", "h", n, f"b{n}:1", "b") for n in range(3))
    assert bench.decided(AddSet(0, rows)) is True
    view = bench.state.view
    bench.state.view = replace(
        view, homes={0: "main", 1: "b"}, founders={**view.founders, 1: ("b0", "b1", "b2")}
    )
    bench.log.of_group = Members(("r0", "r1", "r2"), ("b0", "b1", "b2"))
    others.group, others.at = bench.state.view.group(1), bench.clock.monotonic()
    assert bench.decided(Replace(0, "b1", row("b9"))) is True
    assert bench.decided(Cancel(0, "b9")) is True
    bench.clock.advance(1.0)
    bench.tick()
    assert bench.state.view.leaving == ("b9", "b1"), "that is what was so before"
    others.at = bench.clock.monotonic() + TELLS_S_MAX
    bench.tick()
    assert bench.state.view.leaving is None and others.hurried > 0


def test_a_leader_with_an_old_directory_proposes_nothing_that_its_shard_knows_better() -> None:
    """It would do so in each turn, as long as it is behind."""
    bench = Bench()
    bench.reshard(4)
    old = bench.state.view
    bench.follow()
    state = bench.state_of(0)
    assert command_due(state, old, [], NOW_US, None) is None, "it is prepared"
    bench.tick()
    bench.follow()
    assert state.configuration == bench.configuration
    assert command_due(state, old, [], NOW_US, None) is None, "it is decided"


def test_an_interval_goes_when_the_last_boundary_passes_it() -> None:
    bench = Bench(shards=3)
    start_us = bench.reshard(1).start_us
    bench.follow()
    bench.tick()
    bench.follow()
    for number, boundary_us in ((0, start_us + 9), (1, start_us), (2, start_us - 1)):
        bench.state_of(number).apply(encode(Boundary(NOW_US, boundary_us)))
    bench.tick()
    assert len(bench.configuration.intervals) == 2
    bench.state_of(2).apply(encode(Boundary(NOW_US, start_us)))
    bench.tick()
    assert [len(i.shards) for i in bench.configuration.intervals] == [1]
    assert list(bench.state.view.founders) == [0]


def test_a_replaced_replica_is_gone_when_every_group_has_committed_it() -> None:
    bench = Bench()
    assert bench.ask(Replace(0, "r1", row("r3"))) == Settled(True)
    bench.tick()
    assert "r1" in bench.state.view.replicas
    after = Members(("r0", "r2", "r3"))
    bench.log.of_group = after
    bench.log.of_group_committed = MEMBERS
    bench.hosted[0].log.committed_members = after
    bench.tick()
    assert "r1" in bench.state.view.replicas
    bench.hosted[1].log.committed_members = after
    bench.tick()
    assert "r1" in bench.state.view.replicas, "the directory's own list may be undone"
    bench.log.of_group_committed = None
    bench.tick()
    assert "r1" not in bench.state.view.replicas


def test_a_cancelled_replacement_is_over_when_no_group_has_the_new_one_any_more() -> None:
    bench = Bench()
    bench.ask(Replace(0, "r1", row("r3")))
    learning = Members(("r0", "r1", "r2"), ("r3",))
    bench.log.of_group = learning
    assert bench.ask(Cancel(0, "r3")) == Settled(True)
    bench.tick()
    assert "r3" in bench.state.view.replicas
    bench.log.of_group = MEMBERS
    bench.tick()
    assert set(bench.state.view.replicas) == {"r0", "r1", "r2"}
    assert bench.state.view.leaving is None


def test_a_start_in_the_far_future_is_refused() -> None:
    """A typo in the year would stand in the way of every later change."""
    bench = Bench()
    year_us = 366 * 86_400 * SECOND_US
    rejected = bench.decided(Propose(0, 3, NOW_US + year_us + 1, 0))
    assert isinstance(rejected, Rejected)
    assert f"{iso_utc(NOW_US + year_us + 1)} is more than 366 days ahead" in rejected.why
    assert bench.state.view.proposal is None
    assert bench.reshard(3, NOW_US + year_us)


# --- leases


def test_an_incarnation_is_not_fenced_while_its_lease_may_run() -> None:
    bench = Bench()
    assert bench.keep() is True
    bench.clock.advance(9.9)
    assert 0 < bench.fence_fails() < 1
    bench.keep()
    bench.clock.advance(5.0)
    assert bench.fence_fails(), "it was renewed"
    bench.clock.advance(6.0)
    assert bench.ask(Fence(0, 7, 0)) == Settled(True)
    assert bench.keep() is False


def test_how_incarnations_stand_can_be_asked_without_changing_anything() -> None:
    bench = Bench()
    for incarnation in (7, 8):
        bench.ask(KeepAlive(0, incarnation, "a:1", 10 * SECOND_US))
    bench.clock.advance(20.0)
    bench.ask(KeepAlive(0, 8, "a:1", 10 * SECOND_US))
    assert bench.ask(Fence(0, 7, 0)) == Settled(True)
    proposed = len(bench.log.proposed)
    fenced, alive, unknown = bench.decided(Look((7, 8, 9)))
    assert (fenced, unknown) == (Standing(True, 0.0), Standing(False, 0.0))
    assert (alive.fenced, 9.0 < alive.expires_in_s < 10.5) == (False, True)
    assert len(bench.log.proposed) == proposed


def test_every_replica_knows_whose_leases_run_by_the_renewals_it_has_applied() -> None:
    bench = Bench()
    for incarnation, address in ((7, "j:1"), (8, "j:2"), (9, "j:2")):
        bench.ask(KeepAlive(0, incarnation, address, 10 * SECOND_US))
    assert bench.coordinator.holders() == ["j:1", "j:2"]
    bench.log.lose_leadership("r2")
    bench.clock.advance(9.0)
    bench.state.apply(encode(KeepAlive(0, 9, "j:2", 10 * SECOND_US)))
    bench.tick()
    bench.clock.advance(9.0)
    assert bench.coordinator.holders() == ["j:2"]
    bench.state.apply(encode(Fence(0, 9, bench.state.leases[9].grant)))
    assert bench.coordinator.holders() == []


def test_no_wall_clock_ends_a_lease() -> None:
    bench = Bench()
    bench.keep()
    bench.clock._now_us += 3600 * SECOND_US  # somebody set it
    assert bench.fence_fails()


def test_a_restarted_leader_gives_every_lease_its_full_time_again() -> None:
    bench = Bench()
    bench.keep()
    bench.clock.advance(9.0)
    bench.state.prepare(list(bench.state.freeze()))()
    bench.tick()
    bench.clock.advance(9.0)
    assert bench.fence_fails()


def test_a_fence_that_crosses_a_renewal_fails() -> None:
    bench = Bench()
    bench.keep(SECOND_US)
    bench.clock.advance(2.0)
    bench.log.held = True
    answers: list[Answer] = []
    for what in (KeepAlive(0, 7, "j:1", SECOND_US), Fence(0, 7, 0)):
        bench.coordinator.asks.offer(Ask(what, bench.clock.monotonic() + 5, answers.append))
    bench.tick()
    bench.log.apply_held()
    assert answers == [Settled(True), Settled(False)]


def test_a_lease_of_long_ago_is_forgotten() -> None:
    """However long it was: else ten thousand leases of a day would keep all others out for a hundred days."""
    bench = Bench()
    bench.keep(86_400 * SECOND_US)
    bench.clock.advance(87_399.0)
    bench.tick()
    assert 7 in bench.state.leases
    bench.clock.advance(2.0)
    bench.tick()
    assert 7 not in bench.state.leases


# --- the queue


def test_who_asks_too_late_or_elsewhere_is_told_so() -> None:
    bench = Bench()
    assert isinstance(bench.ask(Fence(0, 7, 0), seconds=0.0), Overloaded)
    bench.log.lose_leadership("r2")
    assert bench.ask(Fence(0, 7, 0)) == Refused(Refusal.NOT_LEADER, "r2")
    bench.coordinator.asks.close()
    assert bench.ask(Fence(0, 7, 0)) == Refused(Refusal.NOT_LEADER, None)
    assert bench.state.fences == []


# --- what a shard's leader does with it


def test_a_new_shard_hears_of_the_fences_before_it_may_take_anything() -> None:
    bench = Bench()
    for incarnation in range(FENCES_A_STEP + 5):
        bench.ask(Fence(0, incarnation, 0))
    state = ShardState(0)
    assert bench.catch_up(state) == [Fences, Fences, Configure]
    assert state.fences == FENCES_A_STEP + 5


def test_a_shard_takes_a_table_before_it_prepares_for_the_next() -> None:
    """Else what the table has closed for it would be open again until it came."""
    bench = Bench(shards=1)
    bench.reshard(2)
    bench.follow()
    bench.tick()
    assert bench.state.view.version == 2
    bench.reshard(3, start_us=NOW_US + 60 * SECOND_US)
    assert bench.catch_up(bench.state_of(0)) == [Configure, Prepare]


def test_more_shards_than_a_replica_can_have_open_are_refused() -> None:
    bench = Bench()
    bench.coordinator._shards_max = 5
    rejected = bench.decided(Propose(0, 6, 0, 0))
    assert isinstance(rejected, Rejected)
    assert "a replica can have 5 open" in rejected.why
    assert bench.reshard(5)
