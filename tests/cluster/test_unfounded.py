"""A run that is killed while its registry is being founded: the next one founds it, and never a second time."""

import itertools
import json
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from photon.cluster.registry_replicas import Trace, clear_unfounded, members_of, never_founded, trace_of
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError
from photon.raft.rules.members import command_of, founding
from photon.raft.store import Home, ReplicaStore
from tests.system import join_arguments, joined_pairs, photon, start_photon, write_logs

FOUNDERS = ("r0", "r1", "r2")
MAJORITY = 2


# -- the whole state space of three founders ------------------------------------------------------------


@dataclass(frozen=True)
class Founder:
    """How far one has come: no directory, one without an identity, born (with its group), begun."""

    stage: str
    remembers: frozenset[str] = frozenset()

    def trace(self, name: str) -> Trace:
        """`name` + "'" is the identity of a directory that came after the first was lost."""
        identity = "" if self.stage == "cut" else name
        return Trace(identity, {peer: peer for peer in self.remembers}, self.stage == "begun")


State = Mapping[str, Founder]


def states() -> Iterator[State]:
    """Each that a kill can leave: who was met was born; who has begun, everybody else has met."""
    for stages in itertools.product(("none", "cut", "born", "begun"), repeat=3):
        alive = [name for name, stage in zip(FOUNDERS, stages, strict=True) if stage in ("born", "begun")]
        if "begun" in stages and len(alive) < len(FOUNDERS):
            continue
        for known in itertools.product(*(subsets([n for n in alive if n != me]) for me in alive)):
            memory = dict(zip(alive, known, strict=True))
            state = {
                name: Founder(stage, memory.get(name, frozenset()))
                for name, stage in zip(FOUNDERS, stages, strict=True)
            }
            if all(
                len(state[name].remembers) == 2
                and all(name in state[o].remembers for o in alive if o != name)
                for name in alive
                if state[name].stage == "begun"
            ):
                yield state


def subsets(names: list[str]) -> list[frozenset[str]]:
    return [frozenset(c) for size in range(len(names) + 1) for c in itertools.combinations(names, size)]


def traces(state: State) -> dict[str, Trace]:
    return {name: founder.trace(name) for name, founder in state.items() if founder.stage != "none"}


def decided(state: State) -> bool:
    """Whether the registry may have been founded."""
    return sum(founder.stage == "begun" for founder in state.values()) >= MAJORITY


def test_what_a_kill_leaves_is_founded_from_nothing_until_the_first_has_promised_anything() -> None:
    table = list(states())
    assert len(table) > 100
    for state in table:
        begun = any(founder.stage == "begun" for founder in state.values())
        assert never_founded(traces(state), 3) is not begun, state
        # Then all of them have a directory, and go on in it.
        assert not begun or {founder.stage for founder in state.values()} <= {"born", "begun"}


def test_what_may_have_been_founded_is_never_founded_anew_whoever_lost_a_disk() -> None:
    """All may have lost it, but somebody: then there is nobody who remembers anything."""
    for state in states():
        for lost in subsets(list(FOUNDERS)):
            if len(lost) == len(FOUNDERS):
                continue
            for back in ("gone", "another"):
                left = {name: trace for name, trace in traces(state).items() if name not in lost}
                if back == "another":
                    left |= {name: Trace(name + "'", {}, promised=False) for name in lost}
                    # And those that have not met it may meet the new one.
                    left = meeting(left, lost)
                anew = never_founded(left, 3)
                assert not (anew and decided(state)), (state, lost, back)
                # One disk lost, and nobody began: nothing gets stuck.
                begun = any(state[name].stage == "begun" for name in FOUNDERS)
                assert anew or begun or len(lost) > 1, (state, lost, back)


def meeting(left: Mapping[str, Trace], lost: frozenset[str]) -> dict[str, Trace]:
    return {
        name: trace
        if name in lost
        else replace(trace, peers={**{new: f"{new}'" for new in lost}, **trace.peers})
        for name, trace in left.items()
    }


# -- the same of real directories -----------------------------------------------------------------------


def start_founder(work: Path, name: str, until: str, founders: tuple[str, ...] = FOUNDERS) -> None:
    """As a replica makes its directory, killed at some moment."""
    directory = work / "registry" / name
    if until == "locked":
        DirectoryLock(directory).release()
        return
    home = Home(directory)
    if until in ("group", "cut"):
        (home.group(0)).mkdir(exist_ok=True)
    if until in ("cut", "hard_state", "listed", "promised", "lost its hard state"):
        store = ReplicaStore(home.group(0), name, 0, 1 << 20, command_of(founding(founders)))
        if until == "promised":
            store.hard_state.store(1, name)
        store.close()
    if until == "cut":
        (home.group(0) / "hard_state").unlink()
    if until in ("listed", "promised", "lost its hard state"):
        home.added(0)
    if until == "lost its hard state":
        (home.group(0) / "hard_state").unlink()
    home.close()


UNFOUNDED = ("none", "locked", "identity", "group", "cut", "hard_state", "listed")


@pytest.mark.long
@pytest.mark.soak
def test_whatever_founders_left_before_they_began_is_cleared(tmp_path: Path) -> None:
    for stages in itertools.combinations_with_replacement(UNFOUNDED, 3):
        work = tmp_path / "-".join(stages)
        work.mkdir()
        for name, stage in zip(FOUNDERS, stages, strict=True):
            if stage != "none":
                start_founder(work, name, stage)
        clear_unfounded(work, 3)
        assert [path.name for path in work.iterdir()] == []
        members = members_of(work, 3)
        assert (members.names, members.joining, members.lost) == (["r0", "r1", "r2"], frozenset(), [])


@pytest.mark.parametrize("of_last", ["promised", "lost its hard state", "damaged", "table", "shard"])
def test_what_may_have_decided_something_is_left_as_it_is(tmp_path: Path, of_last: str) -> None:
    for name in FOUNDERS:
        start_founder(tmp_path, name, "listed")
    last = tmp_path / "registry" / "r2"
    if of_last == "damaged":
        (last / "group-0000" / "hard_state").write_bytes(b"")
    elif of_last == "table":
        (last / "replicas.json").write_text("{}")
    elif of_last == "shard":
        (last / "group-0001").mkdir()
    else:
        start_founder(tmp_path, "r2", of_last)
    clear_unfounded(tmp_path, 3)
    assert {path.name for path in (tmp_path / "registry").iterdir()} == {*FOUNDERS}


def test_what_one_replica_tells_is_read_from_its_directory(tmp_path: Path) -> None:
    start_founder(tmp_path, "r0", "listed")
    home = Home(tmp_path / "registry" / "r0")
    home.identity_seen("r1", b"one")
    home.close()
    assert trace_of(home.directory) == Trace(home.identity.hex(), {"r1": b"one".hex()}, promised=False)
    start_founder(tmp_path, "r0", "promised")
    assert trace_of(home.directory).promised


def test_two_that_are_gone_may_have_decided_without_the_third(tmp_path: Path) -> None:
    start_founder(tmp_path, "r0", "listed")
    home = Home(tmp_path / "registry" / "r0")
    home.identity_seen("r1", b"one")
    home.identity_seen("r2", b"two")
    home.close()
    clear_unfounded(tmp_path, 3)
    assert (tmp_path / "registry" / "r0").exists()
    assert members_of(tmp_path, 3).mostly_lost


def test_clearing_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    start_founder(tmp_path, "r0", "listed")
    (tmp_path / "registry").rename(tmp_path / "registry.unfounded")
    start_founder(tmp_path, "r1", "identity")
    clear_unfounded(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


def test_who_still_runs_is_waited_for_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon.cluster.registry_replicas.ENDING_S", 0.1)
    start_founder(tmp_path, "r0", "listed")
    with DirectoryLock(tmp_path / "registry" / "r0"), pytest.raises(LockedError):
        clear_unfounded(tmp_path, 3)
    assert (tmp_path / "registry" / "r0" / "group-0000" / "hard_state").exists()
    clear_unfounded(tmp_path, 3)
    assert not (tmp_path / "registry").exists()


# -- and of real runs -----------------------------------------------------------------------------------


PAIRS = 50


@dataclass(frozen=True)
class Holding:
    """The moment when so many replicas have such a file."""

    pattern: str
    count: int

    def is_now(self, work: Path, _seconds: float) -> bool:
        found = (work / "registry").glob(f"*/{self.pattern}")
        return len({path.relative_to(work).parts[1] for path in found}) >= self.count


@dataclass(frozen=True)
class After:
    seconds: float

    def is_now(self, _work: Path, seconds: float) -> bool:
        return seconds >= self.seconds


Moment = Holding | After
HELD: list[Moment] = [
    *(Holding(pattern, count) for pattern in ("identity", "group-*/*") for count in (1, 2)),
    *(Holding("group-*/hard_state", count) for count in (1, 2, 3)),
    Holding("replicas.json", 1),
    Holding("group-0001/*", 1),
]
OFTEN = HELD[1], HELD[3], HELD[5]
MOMENTS = [
    [After(0.2 + 0.1 * n) for n in range(9)],
    *([held] for held in OFTEN),
    *(pytest.param([held], marks=pytest.mark.soak) for held in HELD if held not in OFTEN),
]


def start_and_kill(logs: Path, out: Path, moment: Moment) -> None:
    process = start_photon(*join_arguments(logs, out, "--follow"))
    began = time.monotonic()
    while not moment.is_now(out / ".photon", time.monotonic() - began):
        assert time.monotonic() - began < 30.0
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=100)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("moments", MOMENTS, ids=lambda moments: f"{moments[0]}")
def test_a_run_that_is_killed_in_its_first_second_goes_on_when_it_is_run_again(
    tmp_path: Path, moments: list[Moment]
) -> None:
    logs, out = write_logs(tmp_path / "logs", PAIRS), tmp_path / "out"
    for moment in moments:
        start_and_kill(logs, out, moment)
    done = photon(*join_arguments(logs, out), timeout=60.0)
    assert done.returncode == 0, done.stderr
    assert "takes its place" not in done.stderr
    assert joined_pairs(out) == {(f"q{n}", f"c{n}"): 1 for n in range(PAIRS)}
    assert json.loads(done.stdout)["joined"] == PAIRS
    names = sorted(path.name for path in (out / ".photon" / "registry").iterdir())
    assert names == ["r0", "r1", "r2"]
