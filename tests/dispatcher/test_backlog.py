"""Datacenters that read one backlog at once (rules/backlog): alone, and in a model of several."""

import heapq
import random

import numpy as np
import pytest

from dispatcher.rules.backlog import LOOK_S, NEAR, STALLED_S, Backlog, Found, Look

ROWS = 10
"""Of each home, in each batch of the model."""
ROOM, SENDERS = 40, 2
SEEN_S = 0.05
"""From a commit until the others see it."""


def found(registered=(), left=()) -> Found:
    return Found(np.array(registered, np.intp), np.array(left, np.intp))


def backlog(batches: int, idle: bool = False) -> Backlog[str]:
    made = Backlog[str](20, 1)
    made.idle(idle, 0.0)
    for number in range(batches):
        made.put(f"batch {number}", 10, -1.0)
    return made


def test_what_its_home_has_registered_is_done_and_the_next_ones_are_looked_for_at_once():
    left = backlog(5)
    look = left.next(0.0)
    assert look == Look(["batch 0", "batch 1"])
    assert left.next(0.0) is None, "one look at a time"
    assert left.looked(look, [found([0, 9]), found([0, 10])], 0.1) == ["batch 0", "batch 1"]
    assert left.next(0.1) == Look(["batch 2", "batch 3"])


def test_where_a_home_is_at_work_it_is_looked_again_and_when_it_has_passed_the_rest_is_joined():
    left = backlog(3)
    look = left.next(0.0)
    assert left.looked(look, [found([0, 4], [0, 6]), found((), [0, 10])], 0.0) == []
    assert left.next(LOOK_S / 2) is None
    assert left.due() == LOOK_S
    look = left.next(LOOK_S)
    assert look.batches == ["batch 0", "batch 1"]
    assert left.looked(look, [found([0, 5], [0, 1]), found([0, 9], [0, 1])], LOOK_S) == []
    look = left.next(LOOK_S)
    assert look == Look(["batch 2"]), "it is looked beyond where the home is"
    left.looked(look, [found((), [0, 10])], LOOK_S)
    look = left.next(2 * LOOK_S)
    left.looked(look, [found((), [0, 1]), found((), [0, 1])], 2 * LOOK_S)
    rest = left.next(2 * LOOK_S)
    assert rest == Look(["batch 0"], frozenset({1}), True)
    assert left.looked(rest, [found((), ())], 2 * LOOK_S) == ["batch 0"]
    assert left.next(2 * LOOK_S) == Look(["batch 1"], frozenset({1}), True)


def test_nobody_who_has_something_to_do_joins_what_its_home_has_yet_to_come_to():
    left = backlog(30)
    for now in np.arange(0.0, 2 * STALLED_S, 2 * LOOK_S).tolist():
        look = left.next(now)
        assert look == Look(["batch 0", "batch 1"])
        left.looked(look, [found((), [0, 10])] * 2, now)
        assert left.next(now) is None


def test_who_has_nothing_to_do_joins_the_newest_and_keeps_away_from_where_the_home_may_be():
    left = backlog(8, idle=True)
    look = left.next(0.0)
    left.looked(look, [found((), [0, 10])] * 2, 0.0)
    for number in range(7, NEAR - 1, -1):
        look = left.next(0.0)
        assert look == Look([f"batch {number}"], frozenset({1}))
        assert left.looked(look, [found((), ())], 0.04) == [f"batch {number}"]
    assert left.next(0.0) is None and left.due() == LOOK_S


def test_a_home_that_stands_still_is_waited_for_no_longer():
    left = backlog(1, idle=True)
    now = 0.0
    while not (look := left.next(now)).joins:
        left.looked(look, [found((), [0, 10])], now)
        now += 2 * LOOK_S
    assert look == Look(["batch 0"], frozenset({1}), True)
    assert STALLED_S - 1.0 < now < STALLED_S - 1.0 + 5 * LOOK_S
    left.looked(look, [found((), ())], now)
    left.put("batch 1", 10, now)
    now += 2 * LOOK_S
    left.looked(left.next(now), [found((), [0, 10])], now)
    assert left.next(now) is None, "after a pause it may be at work again"


def test_what_a_home_registers_behind_a_batch_that_it_has_yet_to_come_to_is_no_sign_of_life():
    """Or one event that nobody can join would keep all behind it for ever."""
    left = backlog(1, idle=True)
    for step in range(200):
        now = 0.05 * step
        left.put(f"new {step}", 1, now)
        if (look := left.next(now)) is None:
            continue
        if look.joins:
            break
        left.looked(
            look,
            [
                found((), [0, 1] if key == "batch 0" else ()) if key == "batch 0" else found([0, 1])
                for key in look.batches
            ],
            now,
        )
    assert look == Look(["batch 0"], frozenset({1}), True)
    assert now < STALLED_S + 5 * LOOK_S


def test_what_one_of_three_registers_of_a_batch_hides_nobody_who_stands_still_there():
    """Looks that leave the batch out, for it is not time, know who had yet to come to it."""
    left = backlog(1, idle=True)
    left.looked(left.next(0.0), [found([0, 0, 5], [0, 1])], 0.0)
    for step in range(1, 2000):
        now = 0.02 * step
        left.put(f"new {step}", 1, now)
        left.idle(True, now)
        while (look := left.next(now)) and not (look.joins and "batch 0" in look.batches):
            some = [found((), [0, 1]) if key == "batch 0" else found([0, 1]) for key in look.batches]
            left.looked(look, some, now)
        if look:
            break
    assert look == Look(["batch 0"], frozenset({1}), True)
    assert now < STALLED_S + 5 * LOOK_S


def test_where_nobody_answers_nothing_is_known_of_the_homes():
    left = backlog(2, idle=True)
    left.looked(left.next(0.0), [found([0, 5], [0, 5]), found((), [0, 10])], 0.0)
    for now in (2.0, 5.0, 8.0):
        look = left.next(now)
        assert look.batches == ["batch 0", "batch 1"] and not look.joins
        left.unanswered(look, now)
        assert left.next(now) is None
    look = left.next(8.2)
    left.looked(look, [found([0, 5]), found((), [0, 10])], 8.2)
    assert left.next(8.25) is None, "it may be at work"
    left.looked(left.next(8.4), [found((), [0, 10])], 8.2 + STALLED_S)
    rest = left.next(11.0)
    assert rest.joins
    left.unanswered(rest, 11.0)
    assert left.next(11.0) is None, "nor is it tried without a pause"
    assert left.due() == 11.0 + LOOK_S


def test_what_has_come_to_be_this_datacenters_own_is_joined_at_once():
    left = backlog(1)
    left.looked(left.next(0.0), [found((), [3, 7])], 0.0)
    own = left.next(0.0)
    assert own.joins == {0}
    assert left.looked(own, [found((), [0, 7])], 0.0) == []
    assert left.next(LOOK_S) == Look(["batch 0"])


def test_what_is_cleared_is_no_more_looked_for_and_what_is_being_looked_for_stays():
    left = backlog(4)
    look = left.next(0.0)
    assert left.clear() == ["batch 2", "batch 3"]
    left.looked(look, [found([0, 10]), found((), [0, 10])], 0.0)
    assert left.clear() == ["batch 1"] and len(left) == 0


class Center:
    """A datacenter of the model, at work from `begins_s` to `ends_s`. `batch_s`: what it takes to join the
    events of a batch that have one home."""

    def __init__(self, number: int, batch_s: float, begins_s: float = 0.0, ends_s: float = 1e9) -> None:
        self.number, self.batch_s, self.begins_s, self.ends_s = number, batch_s, begins_s, ends_s
        self.left = Backlog[int](2 * ROWS, SENDERS)
        self.read = self.busy = self.recorded = 0
        self.wakes_at = 0.0
        self.open: dict[tuple[int, int], list[int]] = {}
        """(batch, home) -> events that can be joined and those that can't, without a verdict here."""


class World:
    """Datacenters read the same batches and ask, join and commit, in a time of their own."""

    def __init__(self, batches: int, centers: list[Center], seed: int) -> None:
        self.batches, self.centers = batches, centers
        self.rng = random.Random(seed)
        self.unjoinable = [[self.rng.choice((0, 0, 1, 3)) for _ in centers] for _ in range(batches)]
        self.joined: dict[tuple[int, int], float] = {}
        self.wasted, self.now = 0, 0.0
        self._ends: list[tuple[float, float, object]] = []

    def run(self) -> float:
        """Until all is done; how long it took."""
        for center in self.centers:
            self._after(center.begins_s, lambda: None)
        while self._ends:
            self.now, _, end = heapq.heappop(self._ends)
            end()
            for center in self.centers:
                while center.begins_s <= self.now < center.ends_s and center.busy < SENDERS:
                    if not self._begin(center):
                        break
        for center in self.centers:
            assert self.now > center.ends_s or (center.read, len(center.left)) == (self.batches, 0)
        assert len(self.joined) == self.batches * len(self.centers)
        return self.now

    @property
    def wasted_share(self) -> float:
        return self.wasted / (self.batches * ROWS * len(self.centers))

    def _after(self, seconds: float, end) -> None:
        heapq.heappush(self._ends, (self.now + seconds, self.rng.random(), end))

    def _begin(self, center: Center) -> bool:
        while center.recorded < center.read and not any(
            sum(center.open[center.recorded, home]) for home in self._from(center)
        ):
            center.recorded += 1
        has_room = center.read - center.recorded < ROOM
        if center.read < self.batches and has_room:
            batch = center.read
            center.read += 1
            center.left.idle(False, self.now)
            for home in range(len(self.centers)):
                dead = self.unjoinable[batch][home]
                center.open[batch, home] = [ROWS - dead, dead]
            put = lambda: center.left.put(batch, ROWS * len(self.centers), self.now)  # noqa: E731
            self._work(center, [batch], {center.number}, lambda _: put(), {center.number})
            return True
        center.left.idle(True, self.now)
        look = center.left.next(self.now)
        if look is None:
            due = max(center.left.due(), self.now + 0.05)
            if len(center.left) and not center.wakes_at > self.now:
                center.wakes_at = min(due, self.now + 0.25)
                self._after(center.wakes_at - self.now, lambda: None)
            return False
        joins = {
            home
            for number, home in enumerate(self._from(center))
            if number in look.joins and (look.missed or self._heir(look.batches[0], home) == center.number)
        }
        self._work(center, look.batches, joins, lambda told: center.left.looked(look, told, self.now))
        return True

    def _work(self, center: Center, batches: list[int], joins: set[int], then, asked=None) -> None:
        """Ask for what has no verdict, then join what nobody had registered when it was asked for."""
        center.busy += 1
        told, sent = [], []
        for batch in batches:
            registered = np.zeros(len(self.centers), np.intp)
            for home in asked or self._from(center):
                whose = center.open[batch, home]
                if whose[0] and self.joined.get((batch, home), 1e9) + SEEN_S <= self.now:
                    registered[(home - center.number) % len(self.centers)] = whose[0]
                    whose[0] = 0
                if home in joins:
                    sent += [(batch, home)] * (whose[0] > 0)
                    whose[1] = 0
            told.append(registered)

        def end() -> None:
            center.busy -= 1
            for place in sent:
                center.open[place][0] = 0
                if self.joined.setdefault(place, self.now) != self.now:
                    self.wasted += ROWS
            then(
                [
                    Found(
                        registered, np.array([sum(center.open[batch, home]) for home in self._from(center)])
                    )
                    for batch, registered in zip(batches, told, strict=True)
                ]
            )

        self._after(0.005 + center.batch_s * len(sent) * self.rng.uniform(0.5, 1.5), end)

    def _heir(self, batch: int, home: int) -> int:
        """Of several thieves, the one that may steal it."""
        return (home + 1 + batch % (len(self.centers) - 1)) % len(self.centers)

    def _from(self, center: Center) -> list[int]:
        """Homes by their numbers there."""
        return [(center.number + number) % len(self.centers) for number in range(len(self.centers))]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("speeds", "wasted_max", "of_the_fastest"),
    [
        ((1, 1), 0.01, 0.75),
        ((1, 2), 0.01, 0.9),
        ((1, 4), 0.01, 1.1),
        ((1, 8), 0.02, 1.4),
        ((1, 30), 0.05, 1.6),
        ((1, 1, 1), 0.01, 0.6),
        ((1, 2, 7), 0.02, 1.5),
    ],
)
def test_datacenters_share_a_backlog_and_hardly_ever_join_what_another_has_joined(
    speeds, wasted_max, of_the_fastest, seed
):
    """How long they need together, of what the fastest needs alone. Who is far slower than another holds it
    back a little: nobody knows how slow it is but by waiting."""
    rng = random.Random(seed)
    batch_s = 0.06
    centers = [
        Center(number, batch_s * max(speeds) / speed, rng.choice((0.0, 0.3, 1.7)))
        for number, speed in enumerate(speeds)
    ]
    world = World(600, centers, seed)
    world.run()
    assert world.wasted_share <= wasted_max
    alone_s = 600 * len(speeds) * batch_s / SENDERS
    assert max(world.joined.values()) <= of_the_fastest * alone_s


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 3])
def test_a_backlog_is_done_when_a_datacenter_stands_still_in_the_midst_of_it(count, seed):
    centers = [Center(number, 0.1, ends_s=1e9 if number else 3.0) for number in range(count)]
    world = World(200, centers, seed)
    world.run()
    assert max(world.joined.values()) < 3 * 200 * 0.1 / SENDERS * count


def test_three_datacenters_are_done_when_one_has_never_begun():
    world = World(40, [Center(0, 0.1), Center(1, 0.1), Center(2, 0.1, begins_s=1e8, ends_s=0.0)], 1)
    world.run()
