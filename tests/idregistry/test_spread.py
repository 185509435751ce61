"""Copies of one event with different times: around the starts of intervals, too, one of them wins."""

import random
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from idregistry.client import RegistryClient
from idregistry.rules.commands import Boundary, Commit, Configure, Fences, Prepare, Release, encode
from idregistry.rules.sharding import BEGINNING, Configuration, Interval, Route
from idregistry.rules.state import ShardState
from photon.core.clock import ManualClock
from photon.core.columns import hash_ids, pack_times, split_ids
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Committed, Registered
from photon.core.ids import Token, parse_token
from tests.idregistry.kit import (
    DUPLICATE,
    EXPIRED,
    NOW_US,
    WON,
    RpcFailed,
    contents,
    event_id,
    opaque_id,
    token,
)

HOUR_US = 3_600_000_000
SPREAD_US = HOUR_US
START_US = NOW_US // HOUR_US * HOUR_US + 17
STORIES = [range(first, first + 25) for first in range(0, 325, 25)]  # a quarter of a minute each, at most


class Crashed(BaseException):
    """The process is gone."""


def lost_answer() -> RpcFailed:
    """What was asked for was done; nobody heard."""
    return RpcFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")


def overloaded() -> RpcFailed:
    """Nothing was done."""
    return RpcFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, "no answer")


class World:
    """Shards in memory and whoever speaks to them: one at a time, as the dice say."""

    def __init__(self, seed: int, *shards: int, spread_us: int = SPREAD_US) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.configuration = Configuration(1, (Interval(BEGINNING, tuple(range(shards[0]))),), spread_us)
        self.shards = {number: ShardState(number) for number in range(max(shards))}
        for number in range(shards[0]):
            self.apply(number, Configure(NOW_US, self.configuration))
        self.told = threading.Semaphore(0)
        self.actors: list[Actor] = []

    def apply(self, shard: int, command: Any) -> Any:
        return self.shards[shard].apply(encode(command))

    def run(self) -> None:
        """Until all are through."""
        for actor in self.actors:
            actor.start()
        while running := [actor for actor in self.actors if not actor.over]:
            self.rng.choice(running).go.release()
            self.told.acquire()

    def reshard(self, start_us: int, shards: int, turn: Any = lambda: None) -> bool:
        """As the coordinator does it; False where ids are registered there already."""
        now = self.configuration
        version = now.version + 1
        fits = []
        for number in now.shards:
            turn()
            self.apply(number, Prepare(NOW_US, version, start_us))
            prepared = self.shards[number].prepared
            assert prepared is not None
            fits.append(prepared.fits)
        added = (Interval(start_us, tuple(range(shards))),) if all(fits) else ()
        turn()
        self.configuration = Configuration(version, now.intervals + added, now.spread_us)
        numbers = list(self.configuration.shards)
        self.rng.shuffle(numbers)
        for number in numbers:
            turn()
            self.apply(number, Configure(NOW_US, self.configuration))
        return bool(added)

    def holders(self) -> dict[bytes, list[tuple[bytes, bool]]]:
        """id -> token and whether it is only guarded, in each shard that has it."""
        found = defaultdict(list)
        for state in self.shards.values():
            for piece in state.scan():
                for row in zip(split_ids(piece.ids), piece.tokens, piece.guarded.tolist(), strict=True):
                    found[row[0]].append(row[1:])
        return found


class Actor(threading.Thread):
    """Someone in a world, who gives way before each step."""

    def __init__(self, world: World, does: Any) -> None:
        super().__init__(daemon=True)
        self.world, self.does = world, does
        self.go = threading.Semaphore(0)
        self.crashes = self.over = False
        self.error: BaseException | None = None
        world.actors.append(self)

    def run(self) -> None:
        self.go.acquire()
        try:
            self.does(self)
        except BaseException as error:  # the story's end looks at it
            self.error = error
        self.over = True
        self.world.told.release()

    def turn(self) -> None:
        self.world.told.release()
        self.go.acquire()
        if self.crashes and self.world.rng.random() < 0.3:
            raise Crashed


def client_of(world: World, turn: Any = lambda: None, lossy: bool = False) -> RegistryClient:
    """The real one; its messages reach the shards without a network."""
    client = RegistryClient(["a:1"], 1e9, world.clock, random.Random(1))
    known = [world.configuration]

    def send(operation: Any, parts: Any, _targets: Any, _timeout_s: float) -> list[Any]:
        return [answer(operation.request(part)) for part in parts]

    def answer(request: Any) -> Any:
        turn()
        columns = request.ids, request.times
        count = len(request.ids) // 16
        version = world.configuration.version
        if request.DESCRIPTOR.name == "LookupRequest":
            outcomes = world.shards[request.shard].lookup(*columns)
            return SimpleNamespace(outcomes=outcomes, version=version)
        route = Route(request.route.known_us, request.route.guard)
        if request.DESCRIPTOR.name == "CommitRequest":
            command: Any = Commit(NOW_US, [request.token], [count], *columns, [route])
        else:
            tokens, counts = list(request.tokens), list(request.counts)
            command = Release(NOW_US, tokens, counts, *columns, [route] * len(counts), request.given_back)
        outcomes = world.apply(request.shard, command)
        if lossy and world.rng.random() < 0.1:
            return lost_answer()
        turn()
        return SimpleNamespace(outcomes=outcomes, version=version)

    def fetch(newer_than: int, _left_s: float, always: bool = False) -> Configuration:
        turn()
        known[0] = world.configuration
        return known[0]

    def wait(seconds: float) -> None:
        world.clock.advance(seconds)
        turn()

    rounds: Any = client._rounds
    rounds._send, rounds._wait = send, wait
    rounds._configuration = lambda _attempts: known[0]
    rounds.routes.fetch = fetch
    rounds.routes.ask_who = lambda _left_s: None
    return client


def commit(client: RegistryClient, key: bytes, time_us: int, name: str) -> int:
    return client.commit(key, pack_times([time_us]), token(name))[0]


def near_both_starts() -> list[tuple[int, int]]:
    before, after, later = START_US - 1, START_US, START_US + SPREAD_US - 1
    return [(before, after), (after, before), (before, later), (later, before), (after, later)]


@pytest.mark.parametrize("times", near_both_starts())
def test_of_two_copies_on_both_sides_of_a_resharding_one_wins(times: tuple[int, int]) -> None:
    world = World(1, 3, 5)
    assert world.reshard(START_US, 5)
    client = client_of(world)
    for number in range(40):
        key = opaque_id(number)
        first, second = f"first{number}", f"second{number}"
        assert commit(client, key, times[0], first) == WON
        assert commit(client, key, times[1], second) == DUPLICATE
        assert commit(client, key, times[0], first) == WON, "asked again"
        for time_us in times:
            assert client.lookup(key, pack_times([time_us])) == bytes([Registered.PRESENT])
    holders = world.holders()
    for number in range(40):
        assert {held for held, _ in holders[opaque_id(number)]} == {token(f"first{number}")}
    assert sum(state.ids for state in world.shards.values()) == 40, "what is guarded is not counted twice"


def test_ids_that_carry_their_time_are_held_in_one_shard() -> None:
    world = World(1, 3, 5)
    assert world.reshard(START_US, 5)
    client = client_of(world)
    for number in range(40):
        assert commit(client, bytes([0x10]) + event_id(number)[1:], START_US, "a") == WON
    assert all(len(rows) == 1 for rows in world.holders().values())


def test_what_may_be_done_is_not_called_undone_when_it_is_routed_anew() -> None:
    """An answer was lost, a newer table came, and then nobody takes more."""
    world = World(1, 1, 2)
    clock, client = world.clock, client_of(world)
    rounds: Any = client._rounds
    answers = iter([lost_answer, None])
    asks = rounds._send
    rounds._wait, rounds._timeout_s = clock.advance, 5.0

    def send(*arguments: Any) -> list[Any]:
        answer = next(answers, overloaded)
        if answer is lost_answer:
            assert world.reshard(START_US, 2)
        return asks(*arguments) if answer is None else [answer()]

    rounds._send = send
    with pytest.raises(UnavailableError, match="not known whether it was registered") as raised:
        commit(client, opaque_id(1), START_US, "a")
    assert not isinstance(raised.value, OverloadedError)


def test_copies_that_are_further_apart_than_the_spread_are_two_events() -> None:
    world = World(1, 3, 5)
    assert world.reshard(START_US, 5)
    client = client_of(world)
    outcomes = []
    for number in range(40):
        assert commit(client, opaque_id(number), START_US - 1, f"a{number}") == WON
        outcomes.append(commit(client, opaque_id(number), START_US + SPREAD_US, f"b{number}"))
    assert {WON, DUPLICATE} == set(outcomes), "those whose shard stays the same meet all the same"


def test_who_knows_an_older_table_is_routed_anew_and_meets_the_copy() -> None:
    for starts in [[START_US + 1], [START_US - SPREAD_US, START_US + 1]]:
        world = World(1, 3, 5)
        late = [client_of(world) for _ in range(40)]
        for start_us, shards in zip(starts, (5, 3), strict=False):
            assert world.reshard(start_us, shards)
        early = client_of(world)
        for number in range(40):
            assert commit(early, opaque_id(number), START_US, f"a{number}") == WON
            assert commit(late[number], opaque_id(number), START_US + 1, f"b{number}") == DUPLICATE


def test_an_id_is_kept_for_the_spread_longer_than_events_are_accepted() -> None:
    world = World(1, 1)
    client = client_of(world)
    times = [START_US - HOUR_US, START_US]
    assert commit(client, opaque_id(1), times[0], "a") == WON
    world.apply(0, Boundary(NOW_US, times[1] - 1))
    assert commit(client, opaque_id(1), times[1], "b") == DUPLICATE
    assert commit(client, opaque_id(1), times[0], "b") == Committed.EXPIRED
    world.apply(0, Boundary(NOW_US, times[1] + 2 * HOUR_US))
    assert contents(world.shards[0]) == {}


def test_what_a_crash_leaves_in_some_of_the_shards_is_found_and_released() -> None:
    world = World(1, 3, 5)
    assert world.reshard(START_US, 5)
    left = 0
    for number in range(40):
        key, lost, time_us = opaque_id(number), Token("a", 7, number).pack(), START_US + 1
        places = world.configuration.places(key, pack_times([time_us]))[0].tolist()
        route = Route(START_US, bool(places[0] & 1))
        one = Commit(NOW_US, [lost], [1], key, pack_times([time_us]), [route])
        assert world.apply(places[0] >> 1, one) == bytes([WON])
        left += len(places) > 1 and bool(places[0] & 1)
    assert left > 5, "guarded only"
    for shard in world.shards:
        world.apply(shard, Fences(NOW_US, 0, (7,)))
    recover(world, {opaque_id(number): [START_US + 1] for number in range(40)}, {7})
    assert not world.holders()


def recover(world: World, times: dict[bytes, list[int]], fenced: set[int]) -> None:
    """Take out what the fenced hold, as `photon recover` does: by id, token, and the times of its lines."""
    client = client_of(world)
    for key, rows in world.holders().items():
        for held in {held for held, _ in rows}:
            if parse_token(held).incarnation in fenced:
                count = len(times[key])
                client.release(key * count, pack_times(times[key]), [held], [count])


@pytest.mark.parametrize(
    "seeds", [STORIES[0], *(pytest.param(seeds, marks=pytest.mark.long) for seeds in STORIES[1:])], ids=str
)
def test_whatever_comes_between_each_event_is_won_once(seeds: range) -> None:
    """Copies, retries, reshardings and crashes, in any order."""
    seen: dict[str, int] = defaultdict(int)
    for seed in seeds:
        story(seed, seen)
    assert all(seen[what] > len(seeds) // 20 for what in ("crashes", "reshardings", "guarded")), dict(seen)


def story(seed: int, seen: dict[str, int]) -> None:
    rng = random.Random(seed)
    world = World(seed, *[rng.randint(1, 4) for _ in range(3)])
    starts = [START_US, START_US + rng.randint(1, SPREAD_US * 5 // 4)]
    times: dict[bytes, list[int]] = {}
    for number in range(3):
        base = START_US + rng.randint(-SPREAD_US, SPREAD_US * 2)
        times[opaque_id(seed * 10 + number)] = [base + rng.randint(0, SPREAD_US) for _ in range(3)]
    won: dict[bytes, list[bytes]] = defaultdict(list)
    tried: dict[int, list[bytes]] = {}
    fenced = set()

    def reshards(actor: Actor) -> None:
        for start_us in starts[before:]:
            seen["reshardings"] += world.reshard(start_us, rng.randint(1, 4), actor.turn)

    def joins(copy: int, actor: Actor) -> None:
        client = client_of(world, actor.turn, lossy=True)
        keys = tried[copy + 1] = rng.sample([*times], rng.randint(1, 3))
        mine = Token(f"j{copy}", copy + 1, 0).pack()
        column = pack_times([times[key][copy] for key in keys])
        for key, outcome in zip(keys, client.commit(b"".join(keys), column, mine), strict=True):
            if outcome == WON:
                won[key].append(mine)

    world.shards.update({number: ShardState(number) for number in range(len(world.shards), 4)})
    before = rng.randint(0, len(starts))
    for start_us in starts[:before]:
        assert world.reshard(start_us, rng.randint(1, 4))
    Actor(world, reshards)
    for copy in range(3):
        actor = Actor(world, lambda actor, copy=copy: joins(copy, actor))
        actor.crashes = rng.random() < 0.3
    world.run()
    for copy, actor in enumerate(world.actors[1:]):
        if isinstance(actor.error, Crashed):
            fenced.add(copy + 1)
            seen["crashes"] += 1
        elif actor.error is not None:
            raise actor.error
    assert world.actors[0].error is None
    doubtful = {key for incarnation in fenced for key in tried[incarnation]}
    for keys in tried.values():
        assert all(won[key] for key in keys if key not in doubtful), f"{seed}: each copy lost to another"
    seen["guarded"] += any(guard for rows in world.holders().values() for _, guard in rows)
    for shard in world.configuration.shards:
        world.apply(shard, Fences(NOW_US, 0, tuple(fenced)))
    recover(world, times, fenced)
    client = client_of(world)
    for number, (key, copies) in enumerate(times.items()):
        for copy, time_us in enumerate(copies):  # what was lost is read again; the rest are only copies
            mine = Token("again", 9, number * 10 + copy).pack()
            if client.commit(key, pack_times([time_us]), mine)[0] == WON:
                won[key].append(mine)
        rows = world.holders()[key]
        assert len(won[key]) == 1, (seed, won[key])
        assert {held for held, _ in rows} == set(won[key]), seed
        assert sum(not guard for _, guard in rows) == 1, seed
        assert client.lookup(key * 3, pack_times(copies)) == bytes([Registered.PRESENT]) * 3, seed
    assert np.sum([state.ids for state in world.shards.values()]) == len(times), seed


@pytest.mark.parametrize("restored", [False, True])
def test_what_may_be_won_by_half_is_not_won_once_its_guard_is_gone(restored: bool) -> None:
    """Its sender lost it in the other shard, was cut off before it gave it back, and asks again when the
    boundary has passed: the first interval is gone, and what stood there with it."""
    two = Interval(BEGINNING, (0, 1)), Interval(START_US, (0,))
    near, far, spread_us = START_US + 1, START_US + SPREAD_US, SPREAD_US
    state, token = ShardState(0), Token("a:1", 1, 5).pack()
    key = next(key for key in map(opaque_id, range(100)) if int(hash_ids(key)[0]) % 2 == 1)
    other = next(key for key in map(opaque_id, range(100, 200)) if int(hash_ids(key)[0]) % 2 == 1)

    def commit(key: bytes, time_us: int) -> int:
        route = [Route(START_US if len(state.configuration.intervals) > 1 else BEGINNING, False)]
        (outcome,) = state.apply(encode(Commit(NOW_US, [token], [1], key, pack_times([time_us]), route)))
        return outcome

    state.apply(encode(Configure(NOW_US, Configuration(1, two, spread_us))))
    assert (commit(key, near), commit(other, far)) == (WON, WON)
    state.apply(encode(Configure(NOW_US, Configuration(2, (Interval(BEGINNING, (0,)),), spread_us))))
    assert (commit(key, near), commit(other, far)) == (WON, WON), "nobody else can win it: it is not expired"
    state.apply(encode(Boundary(NOW_US, far + 1)))
    if restored:
        chunks, state = list(state.freeze()), ShardState(0)
        state.prepare(chunks)()
    assert state.ids == 2
    assert (commit(key, near), commit(other, far)) == (EXPIRED, WON)
    assert (contents(state).keys(), state.ids) == ({other}, 1), "who is told so does not have it"
