"""The directory's rules (paper 2.2.2, 3.3.3): what may change, and that no id's shard ever does."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules.commands import (
    Abandon,
    Adopt,
    Boundary,
    Cancel,
    CommandError,
    Commit,
    DirectoryCommand,
    Dismiss,
    EndLease,
    Fence,
    Found,
    Gone,
    KeepAlive,
    Mismatched,
    Propose,
    Raise,
    Rejected,
    Replace,
    Trim,
    decode_directory,
    encode,
)
from idregistry.rules.directory import DirectoryState, Proposal, View, group_of, shard_of_group
from idregistry.rules.sharding import BEGINNING, HORIZON, Configuration
from idregistry.rules.state import ShardState
from idregistry.rules.steward import command_due
from photon.core import protocol
from photon.core.columns import pack_times, take_ids, take_times
from photon.core.errors import CorruptStateError
from photon.core.fates import Committed, Registered
from photon.core.protocol import NEWEST
from tests.idregistry.kit import NOW_US, OWN, ROWS, row

SKEW_US = 1_000_000
IDENTITY = b"i" * 16


class Directory:
    """A state machine whose commands go through their bytes."""

    def __init__(self, shards: int | None = 2, spread_us: int = 0) -> None:
        self.state = DirectoryState()
        self.now_us = NOW_US
        if shards is not None:
            assert self.put(Found(NOW_US, shards, ROWS, IDENTITY, spread_us)) is True

    def put(self, command: DirectoryCommand) -> object:
        return self.state.apply(encode(command))

    def propose(self, shards: int, start_us: int) -> object:
        return self.put(Propose(self.now_us, shards, start_us, self.now_us + SKEW_US))

    def rejected(self, command: DirectoryCommand) -> Rejected:
        answer = self.put(command)
        assert isinstance(answer, Rejected)
        return answer

    @property
    def view(self) -> View:
        return self.state.view

    @property
    def configuration(self) -> Configuration:
        assert self.view.configuration is not None
        return self.view.configuration


def test_it_is_founded_once() -> None:
    directory = Directory(3)
    assert directory.put(Found(NOW_US, 5, ROWS[:1], bytes(16))) is False
    assert directory.configuration.shards == (0, 1, 2)
    assert directory.view.founders == dict.fromkeys(range(3), ("r0", "r1", "r2"))
    assert [directory.view.group(n) for n in range(3)] == [1, 2, 3]
    assert directory.view.identity == IDENTITY


def test_a_new_number_holds_only_once_it_is_adopted_and_then_there_are_its_shards() -> None:
    directory = Directory(2)
    start_us = NOW_US + 2 * SKEW_US
    assert directory.propose(6, start_us) == Proposal(2, start_us, dict.fromkeys(range(6), "main"))
    assert (directory.view.version, len(directory.view.founders)) == (1, 2)
    assert directory.put(Adopt(NOW_US, 3)) is False, "another version's"
    assert directory.put(Adopt(NOW_US, 2)) is True
    assert [(i.start_us, len(i.shards)) for i in directory.configuration.intervals] == [
        (BEGINNING, 2),
        (start_us, 6),
    ]
    assert sorted(directory.view.founders) == list(range(6))
    assert directory.view.version == 2


def test_an_abandoned_proposal_changes_nothing_but_the_version_and_says_why() -> None:
    directory = Directory(2)
    directory.propose(6, NOW_US + 2 * SKEW_US)
    assert directory.put(Abandon(NOW_US, 2, "shard 1 is away")) is True
    assert directory.view.abandoned == (2, "shard 1 is away")
    assert [len(i.shards) for i in directory.configuration.intervals] == [2]
    assert directory.view.version == 2
    assert directory.put(Adopt(NOW_US, 2)) is False
    assert isinstance(directory.propose(6, NOW_US + 2 * SKEW_US), Proposal)


@pytest.mark.parametrize(
    ("shards", "start_us", "why"),
    [
        (3, NOW_US, "in the future"),
        (3, NOW_US + SKEW_US - 1, "in the future"),
        (3, HORIZON, "in the future"),
        (2, NOW_US + 2 * SKEW_US, "already"),
        (0, NOW_US + 2 * SKEW_US, "1 to 4096"),
        (5000, NOW_US + 2 * SKEW_US, "1 to 4096"),
    ],
)
def test_what_could_change_a_mapping_or_makes_no_sense_is_rejected(
    shards: int, start_us: int, why: str
) -> None:
    directory = Directory(2)
    rejected = directory.propose(shards, start_us)
    assert isinstance(rejected, Rejected)
    assert why in rejected.why
    assert not rejected.busy
    assert directory.view.proposal is None


def test_reshardings_and_replacements_go_one_at_a_time() -> None:
    directory = Directory(2)
    directory.propose(3, NOW_US + 2 * SKEW_US)
    for command in (
        Propose(NOW_US, 4, NOW_US + 9 * SKEW_US, NOW_US),
        Replace(NOW_US, "r1", row("r3")),
    ):
        assert directory.rejected(command).busy
    directory.put(Adopt(NOW_US, 2))
    assert directory.put(Replace(NOW_US, "r1", row("r3"))) is True
    assert isinstance(directory.propose(4, NOW_US + 9 * SKEW_US), Rejected)


def test_an_interval_goes_when_every_boundary_has_passed_it_and_its_shards_with_it() -> None:
    directory = Directory(6)
    start_us = NOW_US + 2 * SKEW_US
    directory.propose(3, start_us)
    directory.put(Adopt(NOW_US, 2))
    assert directory.put(Trim(NOW_US, 2, start_us - 1)) is False
    assert directory.put(Trim(NOW_US, 1, start_us)) is False, "found true for an older table"
    assert directory.put(Trim(NOW_US, 2, start_us)) is True
    assert [(i.start_us, len(i.shards)) for i in directory.configuration.intervals] == [(BEGINNING, 3)]
    assert sorted(directory.view.founders) == [0, 1, 2]
    assert [directory.view.is_retired(group) for group in range(1, 8)] == [False] * 3 + [True] * 3 + [False]


def test_an_interval_goes_once_no_copy_can_come_that_it_guards() -> None:
    directory = Directory(2, spread_us=7)
    start_us = NOW_US + 2 * SKEW_US
    directory.propose(3, start_us)
    directory.put(Adopt(NOW_US, 2))
    assert directory.put(Trim(NOW_US, 2, start_us + 6)) is False
    assert directory.put(Trim(NOW_US, 2, start_us + 7)) is True


def test_a_shard_that_comes_again_is_another_group() -> None:
    directory = Directory(2)
    for number, shards in enumerate((1, 2, 1, 2)):
        start_us = NOW_US + (2 + number) * SKEW_US
        directory.propose(shards, start_us)
        directory.put(Adopt(NOW_US, directory.view.version + 1))
        directory.put(Trim(NOW_US, directory.view.version, start_us))
    assert directory.view.group(1) == group_of(1, 2)
    assert shard_of_group(group_of(1, 2)) == (1, 2)
    assert [directory.view.is_retired(group_of(1, life)) for life in range(4)] == [True, True, False, False]


# --- replicas


def test_a_replica_is_replaced_and_its_name_is_never_taken_again() -> None:
    directory = Directory()
    new = row("r3")
    assert directory.put(Replace(NOW_US, "r1", new)) is True
    assert directory.put(Replace(NOW_US, "r1", new)) is True, "asked again"
    assert directory.view.staying("main") == ("r0", "r2", "r3")
    assert set(directory.view.replicas) == {"r0", "r1", "r2", "r3"}, "the old one still counts in its groups"
    assert directory.put(Gone(NOW_US, "r0")) is False
    assert directory.put(Gone(NOW_US, "r1")) is True
    assert set(directory.view.replicas) == {"r0", "r2", "r3"}
    for name in ("r1", "r3", "r0"):
        assert "never used before" in directory.rejected(Replace(NOW_US, "r2", row(name))).why


def test_a_cancelled_replacement_is_turned_round_and_then_another_may_begin() -> None:
    """The new one is needed for majorities until no group has it any more; then its name is used up."""
    directory = Directory()
    new = row("r3")
    for name in ("r3", "r1", ""):
        rejected = directory.rejected(Cancel(NOW_US, name))
        assert not rejected.busy
        assert "under way" in rejected.why
    directory.put(Replace(NOW_US, "r1", new))
    assert isinstance(directory.put(Cancel(NOW_US, "r1")), Rejected), "that is the old one"
    assert directory.put(Cancel(NOW_US, "r3")) is True
    assert directory.put(Cancel(NOW_US, "r3")) is True, "asked again"
    assert directory.view.staying("main") == ("r0", "r1", "r2")
    assert isinstance(directory.put(Replace(NOW_US, "r1", row("r4"))), Rejected)
    assert directory.put(Gone(NOW_US, "r1")) is False
    assert directory.put(Gone(NOW_US, "r3")) is True
    assert directory.put(Cancel(NOW_US, "r3")) is True, "asked again"
    assert set(directory.view.replicas) == {"r0", "r1", "r2"}
    assert directory.view.removed == ("r3",)
    assert isinstance(directory.put(Replace(NOW_US, "r1", new)), Rejected), "its name is used up"
    assert directory.put(Replace(NOW_US, "r1", row("r4"))) is True


def test_a_cancelled_replacement_can_be_gone_on_with() -> None:
    """Where the old one turns out never to come back."""
    directory = Directory()
    directory.put(Replace(NOW_US, "r1", row("r3")))
    directory.put(Cancel(NOW_US, "r3"))
    assert directory.put(Cancel(NOW_US, "r1")) is True
    assert directory.view.leaving == ("r1", "r3")


def test_times_are_told_in_utc() -> None:
    rejected = Directory(2).propose(3, 1_769_860_800_000_000 - 10**15)
    assert isinstance(rejected, Rejected)
    assert rejected.why.startswith("1994-05-25T10:13:20+00:00 is not from ")
    assert isinstance(Directory(2).propose(3, BEGINNING), Rejected)


def test_new_shards_are_founded_by_those_who_stay() -> None:
    directory = Directory(1)
    directory.put(Replace(NOW_US, "r1", row("r3")))
    directory.put(Gone(NOW_US, "r1"))
    directory.propose(2, NOW_US + 2 * SKEW_US)
    directory.put(Adopt(NOW_US, 2))
    assert directory.view.founders == {0: ("r0", "r1", "r2"), 1: ("r0", "r2", "r3")}


# --- leases and fences


def test_a_lease_that_was_forgotten_and_comes_again_is_not_taken_for_the_old_one() -> None:
    """Who judged the old one's end may have its fence on the way meanwhile."""
    directory = Directory()
    directory.put(KeepAlive(NOW_US, 7, "j:1", 10**6))
    old = directory.state.leases[7].grant
    directory.put(EndLease(NOW_US, 7, old))
    copy = DirectoryState()
    copy.prepare(list(directory.state.freeze()))()
    for state in (directory.state, copy):
        assert state.apply(encode(KeepAlive(NOW_US, 7, "j:1", 10**6))) is True
        assert state.apply(encode(Fence(NOW_US, 7, old))) is False
        assert state.apply(encode(EndLease(NOW_US, 7, old))) is False


def test_whose_lease_ran_out_is_missed_until_it_is_back_or_fenced_or_nothing_of_it_is_lost() -> None:
    directory = Directory()
    for incarnation, end in (
        (7, KeepAlive(NOW_US, 7, "j:1", 1)),
        (8, Fence(NOW_US, 8, 0)),
        (9, Dismiss(NOW_US, (1, 9))),
    ):
        directory.put(KeepAlive(NOW_US, incarnation, "j:1", 1))
        assert directory.state.vanished == {}
        directory.put(EndLease(NOW_US, incarnation, directory.state.leases[incarnation].grant))
        assert directory.state.vanished == {incarnation: "j:1"}
        directory.put(end)
        assert directory.state.vanished == {}


def test_who_is_dismissed_keeps_its_lease_and_is_missed_no_more_unless_it_renews_it() -> None:
    directory = Directory()
    for renewed in (False, True):
        directory.put(KeepAlive(NOW_US, 7, "j:1", 1))
        directory.put(Dismiss(NOW_US, (7,)))
        if renewed:
            directory.put(KeepAlive(NOW_US, 7, "j:1", 1))
        grant = directory.state.leases[7].grant
        assert directory.put(Fence(NOW_US, 7, grant - 1)) is False
        assert directory.put(EndLease(NOW_US, 7, grant)) is True
        assert directory.state.vanished == ({7: "j:1"} if renewed else {})


def test_so_many_are_missed_and_no_more_the_first_of_them_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idregistry.rules.directory.LEASES_MAX", 2)
    directory = Directory()
    for incarnation in (7, 8, 9):
        directory.put(KeepAlive(NOW_US, incarnation, "j:1", 1))
        directory.put(EndLease(NOW_US, incarnation, directory.state.leases[incarnation].grant))
    assert [*directory.state.vanished] == [8, 9]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("kfe"), st.integers(0, 2), st.integers(0, 5)), max_size=40))
def test_a_fence_holds_for_ever_and_comes_only_after_the_last_renewal(
    steps: list[tuple[str, int, int]],
) -> None:
    directory = Directory()
    given_out = 0
    grants = [0, 0, 0]
    fenced: list[int] = []
    for step, incarnation, seen in steps:
        if step == "k":
            alive = directory.put(KeepAlive(NOW_US, incarnation, "j:1", 10**6))
            assert alive is (incarnation not in fenced)
            if alive:
                given_out += 1
                grants[incarnation] = given_out
        elif step == "f":
            was = incarnation in fenced
            done = directory.put(Fence(NOW_US, incarnation, seen))
            assert done is (was or seen == grants[incarnation])
            if done and not was:
                fenced.append(incarnation)
                grants[incarnation] = 0
        else:
            ended = directory.put(EndLease(NOW_US, incarnation, seen))
            assert ended is (grants[incarnation] in (0, seen))
            grants[incarnation] = 0 if ended else grants[incarnation]
        assert directory.state.fences == fenced
        assert sorted(directory.state.leases) == [n for n in range(3) if grants[n]]


# --- the settings by which joiners make ids of events: where they differ, an event would be joined twice

OURS, OTHERS = b"a" * 16, b"b" * 16


def keep(incarnation: int, settings: bytes = b"") -> KeepAlive:
    return KeepAlive(NOW_US, incarnation, "j:1", 10**6, settings)


def test_who_is_refused_holds_no_lease_and_founds_nothing() -> None:
    directory = Directory()
    directory.put(Fence(NOW_US, 7, 0))
    assert directory.put(keep(7, b"f" * 16)) is False, "fenced"
    assert directory.state.settings == b""
    directory.put(keep(2, OURS))
    grants = directory.state.leases[2].grant
    directory.put(keep(3, OTHERS))
    assert list(directory.state.leases) == [2]
    directory.put(keep(2, OURS))
    assert directory.state.leases[2].grant == grants + 1


def test_the_settings_stay_when_no_joiner_is_left_and_in_snapshots() -> None:
    directory = Directory()
    directory.put(keep(2, OURS))
    assert directory.put(EndLease(NOW_US, 2, directory.state.leases[2].grant)) is True
    copy = DirectoryState()
    copy.prepare(list(directory.state.freeze()))()
    for state in (directory.state, copy):
        assert state.leases == {}
        assert state.apply(encode(keep(3, OTHERS))) == Mismatched()
        assert state.apply(encode(keep(3, OURS))) is True


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"", OURS, OTHERS])), max_size=20),
    st.integers(0, 20),
)
def test_all_replicas_refuse_the_same_whether_they_replay_or_restore(
    asked: list[tuple[int, bytes]], restored_at: int
) -> None:
    leader, follower = Directory(), Directory()
    answers = []
    for number, (incarnation, told) in enumerate(asked):
        if number == restored_at:
            fresh = DirectoryState()
            fresh.prepare(list(leader.state.freeze()))()
            follower.state = fresh
        answers.append(leader.put(keep(incarnation, told)))
        assert follower.put(keep(incarnation, told)) == answers[-1]
    first = next((told for _, told in asked if told), b"")
    assert leader.state.settings == first
    assert answers == [True if told in (b"", first) else Mismatched() for _, told in asked]
    assert list(leader.state.freeze()) == list(follower.state.freeze())


# --- any sequence


class Sharding:
    """Shards that follow the directory late and in any order; clients with tables as old as they come."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = Directory(self.rng.randint(1, 3))
        self.tables = [self.directory.configuration]
        self.shards: dict[int, ShardState] = {n: ShardState(n) for n in self.directory.view.founders}
        self.registered: list[tuple[bytes, int, int]] = []
        """(id, time, shard it was registered in)."""

    def run(self, steps: int) -> None:
        weighted = {
            self.commit: 6,
            self.propose: 3,
            self.keep_up: 10,
            self.decide: 4,
            self.give_up: 1,
            self.raise_boundary: 3,
            self.trim: 2,
            self.time_passes: 3,
        }
        for step in self.rng.choices(list(weighted), list(weighted.values()), k=steps):
            step()

    def some(self) -> list[ShardState]:
        """Shards that do their work now: often all, often not."""
        every = list(self.shards.values())
        return every if self.rng.random() < 0.5 else self.rng.sample(every, self.rng.randint(0, len(every)))

    def propose(self) -> None:
        self.directory.propose(
            self.rng.randint(1, 5), self.directory.now_us + self.rng.randint(-1, 4) * SKEW_US
        )

    def keep_up(self) -> None:
        for state in self.some():
            command = command_due(state, self.directory.view, (), self.directory.now_us, None)
            if command is not None:
                state.apply(encode(command))

    def decide(self) -> None:
        proposal = self.directory.view.proposal
        prepared = [state.prepared for state in self.shards.values()]
        if proposal is None or any(one is None or one.version != proposal.version for one in prepared):
            return
        if all(one is not None and one.fits for one in prepared):
            self.directory.put(Adopt(self.directory.now_us, proposal.version))
        else:
            self.directory.put(Abandon(self.directory.now_us, proposal.version, "an id stands in the way"))
        self._follow()

    def give_up(self) -> None:
        proposal = self.directory.view.proposal
        if proposal is not None:
            self.directory.put(Abandon(self.directory.now_us, proposal.version, "late"))
            self._follow()

    def raise_boundary(self) -> None:
        for state in self.some():
            wanted_us = self.directory.now_us + self.rng.randint(-4, 1) * SKEW_US
            state.apply(encode(Boundary(NOW_US, wanted_us)))

    def trim(self) -> None:
        lowest = min(state.boundary_us for state in self.shards.values())
        self.directory.put(Trim(self.directory.now_us, self.directory.view.version, lowest))
        self._follow()

    def time_passes(self) -> None:
        self.directory.now_us += self.rng.randint(1, 3) * SKEW_US

    def commit(self) -> None:
        """By any table a client may have; what the shard itself knows decides."""
        events = [self.rng.randbytes(16) for _ in range(10)]
        now_us = self.directory.now_us
        times_us = [
            HORIZON + 5 if self.rng.random() < 0.05 else now_us + self.rng.randint(-6, 6) * SKEW_US
            for _ in events
        ]
        ids, times = b"".join(events), pack_times(times_us)
        shards = self.rng.choice(self.tables[-4:]).shard_of(ids, times)
        for shard, state in self.shards.items():
            rows = np.flatnonzero(shards == shard)
            part = Commit(NOW_US, [b"t"], [len(rows)], take_ids(ids, rows), take_times(times, rows), [OWN])
            outcomes = state.apply(encode(part))
            assert isinstance(outcomes, bytes)
            won = (
                row for row, outcome in zip(rows.tolist(), outcomes, strict=True) if outcome == Committed.WON
            )
            self.registered += ((events[row], times_us[row], shard) for row in won)

    def _follow(self) -> None:
        view = self.directory.view
        assert view.version >= self.tables[-1].version, "versions grow"
        if view.version == self.tables[-1].version:
            return
        self.tables.append(self.directory.configuration)
        self.shards = {n: self.shards.get(n) or ShardState(n) for n in view.founders}
        for event, time_us, shard in self.registered:
            self._check(event, pack_times([time_us]), shard)
        copy = DirectoryState()
        copy.prepare(self.directory.state.freeze())()
        assert copy.view == view

    def _check(self, event: bytes, times: bytes, shard: int) -> None:
        """Its shard is the same, or it is expired wherever it would go now."""
        number = int(self.directory.configuration.shard_of(event, times)[0])
        if number != shard:
            outcome = self.shards[number].lookup(event, times)
            assert outcome == bytes([Registered.EXPIRED]), "an id could be registered in two shards"


@settings(max_examples=40, deadline=None)
@given(st.integers())
def test_the_shard_of_an_id_that_is_registered_never_changes(seed: int) -> None:
    """2.2.2: "preserving mapping of existing event_ids across shards"."""
    Sharding(seed).run(120)


# --- bytes


def test_a_snapshot_holds_everything() -> None:
    directory = Directory(3)
    directory.put(Replace(NOW_US, "r1", row("r3")))
    directory.put(Cancel(NOW_US, "r3"))
    directory.put(KeepAlive(NOW_US + 5, 7, "j:1", 10**6))
    directory.put(Fence(NOW_US, 1 << 63, 0))
    directory.put(KeepAlive(NOW_US, 8, "j:3", 10**6))
    directory.put(EndLease(NOW_US, 8, 2))
    copy = DirectoryState()
    copy.prepare(list(directory.state.freeze()))()
    assert copy.view == directory.view
    assert copy.view.identity == IDENTITY
    assert copy.vanished == directory.state.vanished == {8: "j:3"}
    assert (copy.leases, copy.fences) == (directory.state.leases, [1 << 63])
    assert copy.time_us == NOW_US + 5
    assert copy.renewed == {7}, "whoever restores takes every lease for renewed just now"
    assert copy.apply(encode(KeepAlive(NOW_US, 1 << 63, "j:2", 1))) is False


def test_any_number_of_incarnations_can_be_fenced_and_no_chunk_of_a_snapshot_grows_with_them() -> None:
    """Ones that are all alike in size: some restarts of each joiner, for years."""
    state = DirectoryState()
    fenced = [(1 << 63) + number for number in range(250_000)]
    state.fences = list(fenced)
    state._fenced = set(fenced)
    assert state.apply(encode(Fence(NOW_US, 7, 0))) is True
    chunks = list(state.freeze())
    assert len(chunks) > 1
    assert max(map(len, chunks)) <= 1 << 20
    copy = DirectoryState()
    copy.prepare(chunks)()
    assert copy.fences == [*fenced, 7]


def test_what_is_no_snapshot_and_no_command_stops_the_replica() -> None:
    for chunks in ([], [b"\x03abc"], [b"\x02\xc1"]):
        with pytest.raises(CorruptStateError):
            DirectoryState().prepare(chunks)()
    for data in (b"", b"\x09", b"\x92\x03\x90", encode(Gone(1, "r1"))[:-1], encode(Gone(1, "r1")) + b"x"):
        with pytest.raises(CommandError):
            decode_directory(data)


def test_a_protocol_version_that_this_build_lacks_stops_the_replica_and_an_older_one_is_not_gone_back_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = DirectoryState()
    with pytest.raises(CommandError, match=f"protocol version {NEWEST + 1}, and this build reads"):
        state.apply(encode(Raise(NOW_US, NEWEST + 1)))
    monkeypatch.setattr(protocol, "NEWEST", NEWEST + 1)
    assert state.apply(encode(Raise(NOW_US, NEWEST + 1))) is True
    assert state.apply(encode(Raise(NOW_US, NEWEST))) is False
    assert state.view.protocol == NEWEST + 1
    copy = DirectoryState()
    copy.prepare(state.freeze())()
    assert copy.view.protocol == NEWEST + 1
    monkeypatch.undo()
    with pytest.raises(CorruptStateError, match=f"protocol version {NEWEST + 1}, and this build reads"):
        DirectoryState().prepare(state.freeze())()
