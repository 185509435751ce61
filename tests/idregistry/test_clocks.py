"""How far the others' clocks are from ours: asked over real gRPC (paper 2.3)."""

import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from idregistry.peers import HURRY_S, Peers
from idregistry.rules.commands import Boundary, Row, encode
from idregistry.rules.directory import View
from idregistry.rules.steward import DAY_US, boundary_due, command_due
from photon.core.clock import ManualClock
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryServicer, add_IdRegistryServicer_to_server
from tests.idregistry.kit import NOW_US, new_state
from tests.waiting import wait_until


class Other(IdRegistryServicer):
    """A replica that tells the time; `open` lets it answer."""

    def __init__(self, ahead_us: int) -> None:
        self.ahead_us = ahead_us
        self.asked = 0
        self.open = threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(1))
        add_IdRegistryServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Now(self, request: pb.NowRequest, context: grpc.ServicerContext) -> pb.NowResponse:
        self.asked += 1
        self.open.wait(5.0)
        return pb.NowResponse(now_us=NOW_US + self.ahead_us)


class SteppedClock(ManualClock):
    """Whose wall time can be set while its monotonic time goes on."""

    def step(self, seconds: float) -> None:
        self._now_us += round(seconds * 1_000_000)


class Watched:
    """r0, and five replicas whose clocks are 10, 20, ... s ahead."""

    def __init__(self) -> None:
        self.others = {f"r{n}": Other(n * 10_000_000) for n in range(1, 6)}
        rows = {name: Row(name, "h", 1, other.address) for name, other in self.others.items()}
        self.rows: dict[str, Row] = {"r0": Row("r0", "h", 1, "h:1"), **rows}
        self.clock = SteppedClock(NOW_US)
        self.watch = Peers("r0", lambda: self.rows, self.clock)

    def ahead_s(self) -> float | None:
        trusted_us = self.watch.trusted_us()
        return None if trusted_us is None else (trusted_us - NOW_US) / 1e6

    def start(self) -> None:
        """All are heard."""
        for other in self.others.values():
            other.open.set()
        self.watch.start()
        self.wait_for(20.0)

    def wait_for(self, ahead_s: float) -> None:
        wait_until(lambda: self.ahead_s() == ahead_s, what=lambda: str(self.ahead_s()))


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    for other in made.others.values():
        other.open.set()
    made.watch.stop()
    for other in made.others.values():
        other.server.stop(0.0)


@pytest.mark.long
def test_the_time_is_what_a_majority_has_reached_and_unknown_until_then(watched: Watched) -> None:
    for name in ("r1", "r2"):
        watched.others[name].open.set()
    assert watched.ahead_s() is None
    watched.watch.start()
    watched.others["r3"].open.set()
    watched.wait_for(0.0)  # of six, four: r0 itself is the last of them
    watched.others["r4"].open.set()
    watched.others["r5"].open.set()
    watched.wait_for(20.0)
    watched.clock.advance(3600.0)
    assert watched.ahead_s() is None, "what was found an hour ago says nothing"


def test_however_often_somebody_is_in_a_hurry_the_others_are_asked_five_times_a_second(
    watched: Watched,
) -> None:
    watched.start()
    other = watched.others["r1"]
    before, began = other.asked, time.monotonic()
    while other.asked < before + 3:
        watched.watch.hurry()
        time.sleep(0.002)
    assert other.asked - before <= (time.monotonic() - began) / HURRY_S + 2


def test_an_answer_that_comes_while_the_time_is_reckoned_does_not_disturb_it(watched: Watched) -> None:
    """The raft thread reckons it: an error there would end the replica."""

    class Slow(dict[str, Row]):
        def __contains__(self, name: object) -> bool:
            for other in watched.others.values():
                other.open.set()
            wait_until(lambda: len(watched.watch._answers) == 5)
            return super().__contains__(name)

    watched.others["r1"].open.set()
    watched.watch.start()
    wait_until(lambda: watched.watch._answers)
    watched.rows = Slow(watched.rows)
    watched.watch.trusted_us()
    watched.wait_for(20.0)


@pytest.mark.parametrize("step_s", [72 * 3600.0, -72 * 3600.0])
def test_a_step_of_the_own_clock_does_not_take_the_others_along(watched: Watched, step_s: float) -> None:
    """One step of a leader's clock would else expire all that is registered."""
    watched.start()
    watched.clock.step(step_s)
    own_is_counted_ahead_s = 30.0 if step_s > 0 else 20.0
    assert watched.ahead_s() == own_is_counted_ahead_s
    watched.clock.advance(30.0)
    assert watched.ahead_s() == own_is_counted_ahead_s + 30.0, "their clocks go on meanwhile"


def test_nobody_goes_by_a_stepped_clock_when_the_others_fall_silent(watched: Watched) -> None:
    watched.start()
    for other in watched.others.values():
        other.server.stop(0.0).wait()
    watched.clock.step(72 * 3600.0)
    for _ in range(6):
        watched.clock.advance(10.0)
        reached_s = watched.ahead_s()
        assert reached_s is None or reached_s <= 30.0 + 60.0
    assert watched.ahead_s() is None


def test_a_boundary_does_not_move_with_the_leaders_clock(watched: Watched) -> None:
    """A shard's housekeeping, with what the watch trusts."""
    watched.start()
    state = new_state()
    wanted_us = NOW_US - DAY_US

    def due() -> object:
        trusted_us = watched.watch.trusted_us()
        due_us = None if trusted_us is None else boundary_due(trusted_us, state.boundary_us, 1.0, 0.0)
        return command_due(state, View(), (), watched.clock.now_us(), due_us)

    command = due()
    assert command == Boundary(NOW_US, wanted_us + 20_000_000)
    assert isinstance(command, Boundary)
    state.apply(encode(command))
    watched.clock.step(72 * 3600.0)
    assert due() is None
    watched.clock.advance(50.0)
    assert due() is None, "50 s and the 10 s to the next clock are less than a step of 86.4 s"
    watched.clock.advance(72 * 3600.0)
    assert due() is None, "nobody has been heard for so long"
