"""The registry thread of Fig. 3 over a fake log: queue, batches (2.2.1), answers; collection (2.3)."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idregistry.rules.commands import (
    Adopt,
    Boundary,
    Commit,
    Fence,
    Found,
    Hold,
    Propose,
    Trim,
    decode,
    encode,
)
from idregistry.rules.directory import DirectoryState, group_of
from idregistry.rules.packing import BATCH_BYTES_MAX, BUCKET_US, NO_BOUNDARY, request_bytes
from idregistry.rules.sharding import BEGINNING
from idregistry.rules.steward import DAY_US, LEAP_EVERY_S, boundary_due, majority_time_us, reached_us
from idregistry.shard import (
    Answer,
    Ask,
    Line,
    Overloaded,
    Settled,
    Shard,
    barrier,
    together,
)
from photon.core.clock import ManualClock
from photon.core.ids import TOKEN_BYTES_MAX
from photon.core.settings import BATCH_IDS_MAX, Registry
from photon.raft.port import Refusal, Refused
from tests.idregistry.fake_log import FakeLog
from tests.idregistry.kit import DUPLICATE, NOW_US, OWN, ROWS, WON, directory, event_ids, same_times

SECOND_US = 1_000_000


class Bench:
    """A shard, its log, and the answers in the order in which they came."""

    def __init__(self, **settings: float) -> None:
        self.clock = ManualClock(NOW_US)
        self.woken = 0
        self.directory = directory(Found(NOW_US, 1, ROWS[:1], bytes(16)))
        self.shard = Shard(
            1,
            Registry(**settings),  # type: ignore[arg-type]
            self.clock,
            self._wake,
            self.directory,
            lambda: self.reached_us if self.reached_us is not None else self.clock.now_us(),
        )
        self.reached_us: int | None = None
        self.shard.log = self.log = FakeLog(self.shard.state)
        self.tick()
        assert self.shard.state.configuration is not None
        self.log.proposed.clear()
        self.answers: dict[str, Answer] = {}

    def offer(self, name: str, numbers: list[int], time_us: int = NOW_US) -> Answer | None:
        ids = event_ids(*numbers)
        times = same_times(len(numbers), time_us)
        commit = Commit(0, [name.encode()], [len(numbers)], ids, times, [OWN])
        request = Ask(commit, self.clock.monotonic() + 10.0, self._answer(name))
        return self.shard.queue.offer(request)

    def tick(self) -> None:
        self.shard.on_tick(self.log)

    def _answer(self, name: str) -> Callable[[Answer], None]:
        def answer(what: Answer) -> None:
            assert name not in self.answers, "answered twice"
            self.answers[name] = what

        return answer

    def _wake(self) -> None:
        self.woken += 1


def test_requests_that_wait_go_into_one_command_and_each_gets_its_own_answer() -> None:
    """2.2.1: "dequeues multiple requests and batches them into a single PaxosDB transaction"."""
    bench = Bench()
    for name, numbers in (("a", [1, 2]), ("b", [2, 3]), ("c", [])):
        assert bench.offer(name, numbers) is None
    assert bench.woken == 3
    assert not bench.answers
    bench.tick()
    assert len(bench.log.proposed) == 1
    assert bench.answers == {
        "a": Settled(bytes([WON, WON])),
        "b": Settled(bytes([DUPLICATE, WON])),
        "c": Settled(b""),
    }
    status = bench.shard.status()
    assert (status["commits"], status["committed_ids"]) == (1, 4)


def test_while_commands_are_in_flight_requests_gather_into_the_next() -> None:
    bench = Bench(batches_in_flight_max=2)
    bench.log.held = True
    for n in range(5):
        bench.offer(f"request {n}", [n])
        bench.tick()
    assert len(bench.log.proposed) == 2
    bench.log.apply_held()
    bench.tick()
    bench.log.apply_held()
    assert len(bench.log.proposed) == 3
    assert len(bench.answers) == 5


def test_releases_go_by_themselves_in_the_order_of_arrival() -> None:
    """One that only went when no commit waits might never go, and the other way round."""
    bench = Bench(batches_in_flight_max=1)
    bench.log.held = True
    for n in range(3):
        bench.offer(f"request {2 * n}", [2 * n])
        bench.offer(f"request {2 * n + 1}", [2 * n + 1])
        bench.shard.queue.offer(barrier(bench.clock.monotonic() + 10.0, bench._answer(f"release {n}")))
    for _ in range(8):
        bench.tick()
        bench.log.apply_held()
    assert [name.split()[0] for name in bench.answers] == ["request", "request", "release"] * 3
    assert len(bench.log.proposed) == 6


def test_a_batch_stops_at_batch_ids_max() -> None:
    bench = Bench(batch_ids_max=4)
    for n in range(5):
        bench.offer(f"request {n}", [2 * n, 2 * n + 1])
    bench.tick()
    assert len(bench.log.proposed) == 3


def test_who_asks_a_follower_is_sent_to_the_leader() -> None:
    bench = Bench()
    bench.offer("a", [1])
    bench.log.lose_leadership("r2")
    bench.tick()
    assert bench.answers == {"a": Refused(Refusal.NOT_LEADER, "r2")}
    assert bench.shard.state.ids == 0


def test_a_request_past_its_deadline_is_not_proposed() -> None:
    bench = Bench()
    bench.offer("a", [1])
    bench.clock.advance(11.0)
    bench.offer("b", [2])
    bench.tick()
    assert isinstance(bench.answers["a"], Overloaded)
    assert bench.answers["b"] == Settled(bytes([WON]))
    assert bench.shard.state.ids == 1


def test_a_closed_shard_sends_everybody_elsewhere() -> None:
    bench = Bench()
    bench.offer("a", [1])
    bench.shard.queue.close()
    assert bench.answers == {"a": Refused(Refusal.NOT_LEADER, None)}
    assert bench.offer("b", [1]) == Refused(Refusal.NOT_LEADER, None)


# --- garbage collection (2.3)


def test_without_retention_everything_is_kept() -> None:
    bench = Bench(retention_days=0.0)
    bench.offer("a", [1], time_us=-(1 << 62))
    bench.tick()
    bench.clock.advance(1e9)
    bench.tick()
    assert bench.shard.state.boundary_us == NO_BOUNDARY
    assert len(bench.log.proposed) == 1


def test_the_leader_moves_the_boundary_and_collects_what_is_older() -> None:
    bench = Bench(retention_days=1.0)
    bench.offer("a", [1, 2])
    bench.tick()
    assert bench.shard.state.boundary_us == NOW_US - DAY_US
    for _ in range(2):
        bench.clock.advance(13 * BUCKET_US / SECOND_US)
        bench.tick()
    assert bench.shard.state.ids == 0
    assert bench.shard.state.boundary_us == NOW_US + 2 * BUCKET_US


def test_a_follower_never_moves_the_boundary() -> None:
    """2.3: "The garbage collection thread runs only at the master"."""
    bench = Bench(retention_days=1.0)
    bench.log.lose_leadership("r1")
    bench.tick()
    assert not bench.log.proposed


def test_a_new_leader_whose_clock_is_behind_leaves_the_boundary_where_it_is() -> None:
    """2.3: "To guard against time differences ... when the master changes, we store the ... boundary"."""
    bench = Bench(retention_days=1.0)
    bench.tick()
    before = bench.shard.state.boundary_us
    bench.clock.advance(-3600)
    bench.tick()
    assert bench.shard.state.boundary_us == before


def test_one_step_of_housekeeping_is_in_flight_at_a_time_and_an_unknown_outcome_does_not_end_it() -> None:
    bench = Bench(retention_days=1.0)
    bench.log.held = True
    for _ in range(3):
        bench.tick()
    assert len(bench.log.proposed) == 1
    bench.log.forget_held()
    bench.log.held = False
    bench.tick()
    assert bench.shard.state.boundary_us == NOW_US - DAY_US


@pytest.mark.parametrize(
    ("days", "behind_s", "due"),
    [(0.0, 1e9, False), (1.0, 86.3, False), (1.0, 86.4, True), (0.001, 9.9, False), (0.001, 10.0, True)],
)
def test_the_boundary_moves_by_a_thousandth_of_the_retention_or_ten_seconds(
    days: float, behind_s: float, due: bool
) -> None:
    wanted = NOW_US - round(days * DAY_US)
    boundary = boundary_due(NOW_US, wanted - round(behind_s * SECOND_US), days, 0.0)
    assert boundary == (wanted if due else None)


@pytest.mark.parametrize(
    ("clocks", "newest", "reached"),
    [(None, 5, None), (9, BEGINNING, None), (9, 5, 5), (5, 9, 5), (5, 1 << 62, 5)],
)
def test_neither_clocks_that_are_wrong_together_nor_an_event_of_the_future_move_the_boundary(
    clocks: int | None, newest: int, reached: int | None
) -> None:
    assert reached_us(FakeLog(DirectoryState()), clocks, newest) == reached


def test_no_boundary_moves_by_an_old_directory_which_may_lack_a_hold() -> None:
    assert reached_us(FakeLog(DirectoryState()), 5, 9) == 5
    assert reached_us(FakeLog(DirectoryState(), entries_behind=1), 5, 9) is None
    assert reached_us(FakeLog(DirectoryState(), _leader=None), 5, 9) is None


def test_a_new_shard_begins_where_the_others_have_come_to() -> None:
    """Else one that comes while clocks and events are wrong would let a year expire at once."""
    ahead_us, other_us = NOW_US + 365 * DAY_US, NOW_US - 5 * DAY_US
    assert boundary_due(ahead_us, NO_BOUNDARY, 3.0, 0.0, None, other_us) == other_us
    assert boundary_due(ahead_us, NO_BOUNDARY, 3.0, 0.0) == ahead_us - 3 * DAY_US
    assert boundary_due(NOW_US, NO_BOUNDARY, 3.0, 0.0, None, NOW_US) == NOW_US - 3 * DAY_US


@pytest.mark.parametrize("days", [1.0, 3.0])
def test_clocks_and_events_that_are_a_year_ahead_together_move_the_boundary_a_day_every_half_day(
    days: float,
) -> None:
    """2.3. Every clock and an event are wrong: a person has days, and what the status says, to see it."""
    bench = Bench(retention_days=days)
    bench.tick()
    first_us = bench.shard.state.boundary_us
    bench.reached_us = NOW_US + 365 * DAY_US
    for half_days in range(1, 8):
        for _ in range(100):
            bench.clock.advance(LEAP_EVERY_S / 100)
            bench.tick()
        moved_us = bench.shard.state.boundary_us - first_us
        assert half_days * DAY_US - DAY_US <= moved_us <= half_days * DAY_US
    bench.clock.advance(365 * 86_400)
    held_s = bench.shard.status()["boundary_held_s"]
    assert isinstance(held_s, float)
    assert held_s > 7 * 86_400, "the alarm of deploy/alerts.yml"


def test_after_clocks_were_wrong_the_boundary_waits_for_them_and_goes_on() -> None:
    bench = Bench(retention_days=1.0)
    bench.tick()
    bench.reached_us = NOW_US + 365 * DAY_US
    bench.clock.advance(LEAP_EVERY_S - 1.0)
    bench.tick()
    assert bench.shard.state.boundary_us == NOW_US - DAY_US, "mended before it moved"
    bench.reached_us = None
    bench.tick()
    assert bench.shard.state.boundary_us == bench.clock.now_us() - DAY_US


def test_a_new_leader_leaps_no_sooner_than_the_one_before() -> None:
    bench = Bench(retention_days=1.0)
    bench.shard.state.apply(encode(Boundary(NOW_US, NOW_US - 100 * DAY_US)))
    for due in (False, False, True):
        before = bench.shard.state.boundary_us
        bench.tick()
        assert bench.shard.state.boundary_us == before + (DAY_US if due else 0)
        bench.clock.advance(LEAP_EVERY_S / 2)


def test_the_boundary_waits_for_the_oldest_event_of_every_dispatcher() -> None:
    bench = Bench(retention_days=1.0)
    bench.tick()
    held_us = NOW_US - DAY_US + 3_600 * SECOND_US
    for name, oldest_us in (("east", held_us + SECOND_US), ("west", held_us)):
        bench.directory.apply(encode(Hold(NOW_US, name, oldest_us)))
    bench.clock.advance(7_200.0)
    bench.tick()
    assert bench.shard.state.boundary_us == held_us
    bench.directory.apply(encode(Hold(NOW_US, "east", None)))
    bench.directory.apply(encode(Hold(NOW_US, "west", None)))
    bench.tick()
    assert bench.shard.state.boundary_us == bench.clock.now_us() - DAY_US


@pytest.mark.parametrize(
    ("offsets", "replicas", "reached"),
    [
        ([], 1, 0),
        ([], 3, None),
        ([5], 3, 0),
        ([-3600], 3, -3600),
        ([-3600, -3590], 3, -3590),
        ([3600, 1], 3, 1),
        ([-50, -60], 5, -60),
        ([-50], 5, None),
        ([-50, -60, -70, -80], 5, -60),
    ],
)
def test_the_majoritys_time_is_what_most_clocks_have_reached(
    offsets: list[int], replicas: int, reached: int | None
) -> None:
    found = majority_time_us([NOW_US, *(NOW_US + offset for offset in offsets)], replicas)
    assert found == (None if reached is None else NOW_US + reached)


def request(
    count: int,
    deadline: float = 10.0,
    answer: Callable[[Answer], object] = lambda _answer: None,
    token: bytes = b"t",
) -> Ask[Commit]:
    commit = Commit(0, [token], [count], event_ids(*range(count)), same_times(count), [OWN])
    return Ask(commit, deadline, answer)


def line(ids_max: int) -> Line[Commit]:
    return Line(ids_max, lambda: None, "{} wait", "late")


def test_no_minimum_batch() -> None:
    """2.2.1: "We do not enforce a minimum batch size, hence there is no tradeoff on latency"."""
    queue = line(100)
    alone = request(1)
    assert queue.offer(alone) is None
    assert queue.take(0.0, 1000, BATCH_BYTES_MAX) == [alone]


def test_a_full_queue_refuses_but_an_empty_one_takes_any_request() -> None:
    queue = line(10)
    assert queue.offer(request(50)) is None
    assert queue.offer(request(1)) == Overloaded("50 wait")
    queue.take(0.0, 10, BATCH_BYTES_MAX)
    assert queue.offer(request(9)) is None
    assert queue.offer(request(1)) is None
    assert queue.offer(request(1)) == Overloaded("10 wait")


def test_many_small_requests_with_long_tokens_stay_within_the_logs_bound() -> None:
    queue = line(1_000_000)
    for _ in range(3000):
        queue.offer(request(1, token=bytes(TOKEN_BYTES_MAX)))
    batch = queue.take(0.0, 1_000_000, BATCH_BYTES_MAX)
    assert 1 < len(batch) < 3000
    assert len(encode(together([one.what for one in batch], NOW_US))) < 2 << 20


def test_the_largest_request_fits_a_command() -> None:
    assert request_bytes(bytes(16 * BATCH_IDS_MAX), bytes(TOKEN_BYTES_MAX)) < BATCH_BYTES_MAX


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0, 5.0])), max_size=30),
    st.integers(1, 20),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_no_request_is_lost_doubled_or_overtaken(sizes, ids_max, queue_max, rng) -> None:  # type: ignore[no-untyped-def]
    queue = line(queue_max)
    put: list[Ask[Commit]] = []
    out: list[Ask[Commit]] = []
    late: list[Ask[Commit]] = []
    for count, deadline in [*sizes, (0, 9.0)]:
        new = request(count, deadline, lambda _answer: late.append(put[-1]))
        put.append(new)
        if queue.offer(new) is not None:
            put.pop()
        if rng.random() < 0.3:
            batch = queue.take(1.0, ids_max, BATCH_BYTES_MAX)
            assert all(r.deadline > 1.0 for r in batch)
            assert len(batch) <= 1 or sum(r.weight for r in batch) <= ids_max
            out += batch
    while len(queue):  # a request larger than a batch still goes
        out += queue.take(1.0, ids_max, BATCH_BYTES_MAX)
    assert [id(r) for r in out] == [id(r) for r in put if r.deadline > 1.0]
    assert len(late) == sum(r.deadline <= 1.0 for r in put)
    assert (len(queue), queue.weight) == (0, 0)


FIRST_US, SECOND_START_US = NOW_US + 10 * SECOND_US, NOW_US + 20 * SECOND_US
REBORN = 3
"""A shard that is retired, and then comes again."""
HISTORY = [
    Found(NOW_US, 4, ROWS, bytes(16)),
    Propose(NOW_US, 2, FIRST_US, 0),
    Adopt(NOW_US, 2),
    Trim(NOW_US, 2, FIRST_US),
    Fence(NOW_US, 77, 0),
    Propose(NOW_US, 4, SECOND_START_US, 0),
    Adopt(NOW_US, 4),
]


@pytest.mark.parametrize("read", range(len(HISTORY)))
def test_a_shard_that_comes_again_is_given_nothing_that_was_said_of_its_first_life(read: int) -> None:
    """A replica that starts may lead the new group before it has read the directory to its end (it found
    the group on its disk). By the first table, which gave the shard a quarter of all events of all times,
    an id would be won there that another shard has granted; and by a token that is fenced since."""
    now = directory(*HISTORY)
    group = now.view.group(REBORN)
    assert group != group_of(REBORN, 0)
    behind = directory(*HISTORY[:read])
    shard = Shard(group, Registry(), ManualClock(NOW_US), lambda: None, behind, lambda: None)
    log = FakeLog(shard.state)
    for _ in range(5):
        shard.on_tick(log)
    if behind.view.group(REBORN) != group or REBORN not in behind.view.founders:
        assert not log.proposed and shard.state.configuration is None
    for command in HISTORY[read:]:
        behind.apply(encode(command))
    for _ in range(5):
        shard.on_tick(log)
    assert shard.state.configuration == now.view.configuration and shard.state.fences == 1
    kinds = [type(decode(command)).__name__ for command in log.proposed]
    assert kinds[0] == "Fences"
