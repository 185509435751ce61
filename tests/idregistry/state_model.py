"""A shard's rules in plain Python: one dict, one scan. And the commands to try them with."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from idregistry.rules.commands import Boundary, Command, Commit, Configure, Fences, Prepare, Release
from idregistry.rules.packing import BUCKET_US, NO_BOUNDARY, bucket_of, unhash_ids
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration, Interval, Prepared, Route
from photon.core.accounts import HOURS_A_DAY, NOTHING, Sum
from photon.core.columns import hash_ids, pack_times, split_ids, unpack_times
from photon.core.fates import Committed, Registered, Released
from photon.core.ids import Token, opaque_mask, parse_token
from tests.idregistry.kit import NOW_US, event_ids, one_shard, opaque_id


@dataclass
class Model:
    """Everything a shard knows. An id whose bucket lies wholly before the boundary, by more than the spread,
    is not there. `held`: by which token, of which hour, and whether as a guard.
    """

    shard: int
    held: dict[bytes, tuple[bytes, int, bool]] = field(default_factory=dict)
    boundary_us: int = NO_BOUNDARY
    latest_us: int = BEGINNING
    configuration: Configuration | None = None
    prepared: Prepared | None = None
    fences: list[int] = field(default_factory=list)
    former: set[int] = field(default_factory=set)
    """Starts of intervals that are no more: who guarded what came soon after may be gone."""

    def apply(self, command: Command) -> object:
        match command:
            case Commit():
                return self.commit(command)
            case Release():
                return self.release(command)
            case Boundary(_, boundary_us):
                self.boundary_us = max(self.boundary_us, boundary_us)
                return self.boundary_us
            case Fences(_, first, incarnations):
                if first <= len(self.fences):
                    self.fences += incarnations[len(self.fences) - first :]
                return len(self.fences)
            case Prepare(_, version, start_us):
                known = 0 if self.configuration is None else self.configuration.version
                if version == known + 1 and self.prepared is None:
                    self.prepared = Prepared(version, start_us, self.latest_us < start_us)
                return self.prepared
            case Configure(_, configuration):
                if self.configuration is None or configuration.version > self.configuration.version:
                    if self.configuration is not None:
                        self.former |= {interval.start_us for interval in self.configuration.intervals}
                    self.former -= {interval.start_us for interval in configuration.intervals} | {BEGINNING}
                    self.configuration = configuration
                if self.prepared is not None and self.configuration.version >= self.prepared.version:
                    self.prepared = None
                return self.configuration.version

    def commit(self, command: Commit) -> bytes:
        rows = list(zip(split_ids(command.ids), unpack_times(command.times).tolist(), strict=True))
        outcomes, given_up, all_won = [], set(), set()
        before = set(self.held)
        for token, count, route in zip(command.tokens, command.counts, command.routes, strict=True):
            won: set[bytes] = set()
            for _ in range(count):
                key, time_us = rows.pop(0)
                outcome = self.commit_one(token, key, time_us, route, won)
                won |= {key} if outcome == Committed.WON else set()
                if outcome == Committed.EXPIRED and self.holds(token, key, route):
                    given_up.add(key)
                outcomes.append(outcome)
            all_won |= won
        for key in given_up & before - all_won:
            del self.held[key]
        return bytes(outcomes)

    def holds(self, token: bytes, key: bytes, route: Route) -> bool:
        held = self.get(key)
        return held is not None and (held[0], held[2]) == (token, route.guard)

    def commit_one(self, token: bytes, key: bytes, time_us: int, route: Route, won: set[bytes]) -> Committed:
        if self.misrouted(key, time_us, route):
            return Committed.MISROUTED
        if self.fenced(token):
            return Committed.FENCED
        if key in won:
            return Committed.DUPLICATE
        held = self.get(key)
        half = self.expired(time_us) and self.unguarded(key, time_us)
        if self.holds(token, key, route) and not half:
            return Committed.WON
        if self.expired(time_us):
            return Committed.EXPIRED
        if held is not None:
            return Committed.DUPLICATE
        self.held[key] = token, bucket_of(time_us), route.guard
        if time_us < HORIZON:
            self.latest_us = max(self.latest_us, time_us)
        return Committed.WON

    def release(self, command: Release) -> bytes:
        rows = list(zip(split_ids(command.ids), unpack_times(command.times).tolist(), strict=True))
        outcomes = []
        for token, count, route in zip(command.tokens, command.counts, command.routes, strict=True):
            for key, time_us in [rows.pop(0) for _ in range(count)]:
                held = self.get(key)
                if self.misrouted(key, time_us, route):
                    outcomes.append(Released.MISROUTED)
                elif not (command.given_back or self.fenced(token)):
                    outcomes.append(Released.NOT_FENCED)
                elif held is None:
                    outcomes.append(Released.ABSENT)
                elif (held[0], held[2]) != (token, route.guard):
                    outcomes.append(Released.OTHER)
                else:
                    del self.held[key]
                    outcomes.append(Released.RELEASED)
        return bytes(outcomes)

    def lookup(self, ids: bytes, times: bytes) -> bytes:
        return bytes(
            Registered.EXPIRED
            if self.expired(time_us)
            else Registered.ABSENT
            if self.get(key) is None
            else Registered.PRESENT
            for key, time_us in zip(split_ids(ids), unpack_times(times).tolist(), strict=True)
        )

    def get(self, key: bytes) -> tuple[bytes, int, bool] | None:
        held = self.held.get(key)
        spread_us = 0 if self.configuration is None else self.configuration.spread_us
        if held is None or (held[1] + 1) * BUCKET_US <= self.boundary_us - spread_us:
            return None
        return held

    def unguarded(self, key: bytes, time_us: int) -> bool:
        spread_us = 0 if self.configuration is None else self.configuration.spread_us
        return bool(opaque_mask(key)[0]) and any(0 <= time_us - start < spread_us for start in self.former)

    def expired(self, time_us: int) -> bool:
        return self.boundary_us != NO_BOUNDARY and (time_us < self.boundary_us or time_us >= HORIZON)

    def fenced(self, token: bytes) -> bool:
        return incarnation_of(token) in self.fences

    def misrouted(self, key: bytes, time_us: int, route: Route) -> bool:
        if self.configuration is None:
            return True
        if self.prepared is not None and self.prepared.start_us <= time_us < HORIZON:
            return True
        number, intervals = int(hash_ids(key)[0]), self.configuration.intervals
        known = [one for one in intervals if one.start_us <= time_us] if time_us < HORIZON else [intervals[0]]
        if time_us < HORIZON and known[-1].start_us > route.known_us:
            return True
        own = number % len(known[-1].shards)
        if not route.guard:
            return own != self.shard
        guards = {
            number % len(earlier.shards)
            for earlier, following in pairwise(known)
            if time_us < following.start_us + self.configuration.spread_us
        }
        return key[0] >> 4 != 0xE or self.shard not in guards - {own}

    @property
    def ids(self) -> int:
        """Those that are only guarded here left out."""
        return sum(not self.held[key][2] for key in self.contents())

    def contents(self) -> dict[bytes, bytes]:
        return {key: held[0] for key, held in self.held.items() if self.get(key) is not None}

    def days(self) -> dict[tuple[int, int], Sum]:
        """What each incarnation holds of each day; what is no joiner's has none."""
        found: dict[tuple[int, int], Sum] = {}
        for key in self.contents():
            token, bucket, guard = self.held[key]
            incarnation = incarnation_of(token)
            if guard or incarnation is None:
                continue
            place = incarnation, bucket // HOURS_A_DAY
            events, sum_ = found.get(place, NOTHING)
            found[place] = events + 1, (sum_ + int(hash_ids(key)[0])) % (1 << 64)  # not by what is tested
        return found


def incarnation_of(token: bytes) -> int | None:
    try:
        return parse_token(token).incarnation
    except ValueError:
        return None


def crafted(*halves: tuple[int, int]) -> bytes:
    """Ids of given hash and second half."""
    hashes, tails = (np.array(column, np.uint64) for column in zip(*halves, strict=True))
    return unhash_ids(hashes, tails)


END = (1 << 64) - 1
POOL = split_ids(
    event_ids(*range(6))
    + b"".join(map(opaque_id, range(6, 12)))
    + crafted((1 << 60, 1), (1 << 60, 2), (1 << 60, 3))  # of one hash
    + crafted((0x11 << 56 | 77, 5), (0x12 << 56 | 77, 5))  # of one key in two sub-dicts
    + crafted((0, 0), (0, END), (END, 0), (END, 7), (END, END))
)
"""Few, so that they meet; and those for which the rows' order and ends matter."""

EVENT_TIMES = (
    st.integers(-5 * BUCKET_US, 5 * BUCKET_US)
    | st.sampled_from([-(1 << 63), -6_816_000_000_000_000, HORIZON - 1, HORIZON, (1 << 63) - 1])
    | st.just(3 * BUCKET_US)
)
KNOWN = st.sampled_from([BEGINNING, 0, HORIZON, HORIZON])
INCARNATIONS = st.sampled_from([0, 1, 2, END])
TOKENS = st.builds(Token, st.sampled_from(["a:1", "b:2"]), INCARNATIONS, st.integers(-1, 1)).map(
    Token.pack
) | st.sampled_from([b"a", b"\0a", b"\1a", b"x" * 30, b"\2" + Token("a:1", 1, 0).pack()[1:]])
IDS = st.lists(st.sampled_from(POOL), max_size=6)
GUARDS = st.sampled_from([False, False, False, True])


@st.composite
def of_segments(
    draw: st.DrawFn,
    kind: type[Commit | Release],
    tokens: st.SearchStrategy[bytes] = TOKENS,
    ids: st.SearchStrategy[list[bytes]] = IDS,
    times: st.SearchStrategy[int] = EVENT_TIMES,
    known: st.SearchStrategy[int] = KNOWN,
    most: int = 4,
) -> Commit | Release:
    """Each id at a time of its own, or all at one."""
    segments = draw(st.lists(st.tuples(tokens, ids), min_size=1 if most == 1 else 0, max_size=most))
    keys = [key for _, of_segment in segments for key in of_segment]
    same = draw(st.none() | times)
    return kind(
        NOW_US,
        [token for token, _ in segments],
        [len(of_segment) for _, of_segment in segments],
        b"".join(keys),
        pack_times([draw(times) if same is None else same for _ in keys]),
        [Route(draw(known), draw(GUARDS)) for _ in segments],
        *([draw(st.booleans())] if kind is Release else []),
    )


@st.composite
def configures(draw: st.DrawFn) -> Configure:
    starts = draw(st.lists(st.integers(-6, 6), unique=True, max_size=2))
    shards = st.sampled_from([1, 1, 2])
    intervals = [Interval(start * BUCKET_US, tuple(range(draw(shards)))) for start in sorted(starts)]
    first = Interval(BEGINNING, tuple(range(draw(shards))))
    return Configure(NOW_US, Configuration(draw(st.integers(1, 5)), (first, *intervals), 2 * BUCKET_US))


COMMANDS = (
    of_segments(Commit)
    | of_segments(Commit)
    | of_segments(Release)
    | st.builds(Boundary, st.just(NOW_US), st.integers(-5 * BUCKET_US, 3 * BUCKET_US))
    | st.builds(Fences, st.just(NOW_US), st.integers(0, 3), st.lists(INCARNATIONS, max_size=2).map(tuple))
    | st.builds(Prepare, st.just(NOW_US), st.integers(1, 5), EVENT_TIMES)
    | configures()
)

_HOURS = st.sampled_from([-BUCKET_US, 0, 1, BUCKET_US, 2 * BUCKET_US, HORIZON])
_BOUNDARIES = st.builds(Boundary, st.just(NOW_US), st.sampled_from([0, 1, BUCKET_US, 2 * BUCKET_US]))
_FENCES = st.sampled_from([Fences(NOW_US, 0, (1,)), Fences(NOW_US, 1, (2,))])
_TOKENS_OF_TWO = st.builds(Token, st.just("a:1"), st.sampled_from([1, 2]), st.integers(-1, 1)).map(Token.pack)


def _of_two_joiners(pool: list[bytes], many: int) -> st.SearchStrategy[Command]:
    """They want the same ids, many at a time, give some back, and are fenced at some time."""
    ids = st.lists(st.sampled_from(pool), min_size=1, max_size=many)
    few = st.lists(st.sampled_from(pool), min_size=1, max_size=10)
    commits = of_segments(Commit, _TOKENS_OF_TWO, ids, _HOURS, st.just(HORIZON))
    releases = of_segments(Release, _TOKENS_OF_TWO, few, _HOURS, st.just(HORIZON), 1)
    return commits | commits | releases | releases | _BOUNDARIES | _FENCES


STORIES = {
    "anything": (COMMANDS, Configuration(1, one_shard().intervals, 2 * BUCKET_US)),  # which never changes
    "few ids": (_of_two_joiners(POOL[:6], 6), one_shard()),
    "batches": (_of_two_joiners(split_ids(event_ids(*range(40))), 25), one_shard()),
    "batches of two shards": (_of_two_joiners(split_ids(event_ids(*range(40))), 25), one_shard(2)),
}
"""What comes into the log of shard 0, and its first configuration."""
