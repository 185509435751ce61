"""Ids are unique, increasing and true to the time within S, whatever the clocks do (paper 3.1)."""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.clock import ManualClock, SystemClock
from photon.core.errors import LockedError, SkewError, StorageError, UsageError
from photon.core.id_generator import DRIFT_PPM, EventIdGenerator, FileMark, TimeReading, system_time
from photon.core.ids import IdPacker, opaque_mask, timestamps_us

START_US = 1_700_000_000_000_000
BOUND_S = 1.0
BOUND_US = 1_000_000


class World:
    """True time, a wall clock that does what it likes, a monotonic clock that drifts, a source that lies."""

    def __init__(self) -> None:
        self.true_us = START_US
        self.wall_off_us = 0
        self.monotonic_s = 100.0
        self.answer: Callable[[], object] = lambda: self.true_us
        self.round_trip_s = 0.0
        self.error_us = 0
        self.asked = 0

    def now_us(self) -> int:
        return self.true_us + self.wall_off_us

    def monotonic(self) -> float:
        return self.monotonic_s

    def pass_time(self, seconds: float, drift_ppm: float = 0.0) -> None:
        self.true_us += round(seconds * 1_000_000)
        self.monotonic_s += seconds * (1 + drift_ppm / 1_000_000)

    def source(self) -> TimeReading:
        self.asked += 1
        self.pass_time(self.round_trip_s / 2)
        answer = self.answer()
        self.pass_time(self.round_trip_s / 2)
        return TimeReading(answer, self.error_us)  # type: ignore[arg-type]


def fail() -> object:
    raise ConnectionError("no route to the time server")


def generator(world: World, **more: object) -> EventIdGenerator:
    return EventIdGenerator("10.0.0.1", 7, world, world.source, BOUND_S, **more)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def ids(world: World, notices: list[str]) -> EventIdGenerator:
    return generator(world, notice=notices.append)


seconds = st.floats(0.0, 3.0)
steps = st.one_of(
    st.tuples(st.just("pass"), seconds, st.floats(-DRIFT_PPM * 0.99, DRIFT_PPM * 0.99)),
    st.tuples(st.just("wall jumps"), st.integers(-(10**13), 10**13)),
    st.tuples(st.just("ids"), st.integers(1, 400_000)),
    st.tuples(
        st.just("source fails"), st.sampled_from([fail, lambda: None, lambda: -5, lambda: 0, lambda: 1.5])
    ),
    st.tuples(st.just("source lies"), st.sampled_from([10**15, -(10**15), 10**18, -(3600 * 10**6)])),
    st.tuples(st.just("source answers")),
    st.tuples(st.just("round trip"), st.floats(0.0, 1.5)),
)


@given(st.lists(steps, max_size=60))
def test_ids_increase_and_stay_within_the_bound_or_are_refused(script: list[tuple]) -> None:
    world = World()
    ids = generator(world)
    last = -1
    for what, *args in script:
        match what:
            case "pass":
                world.pass_time(*args)
                ids.synchronise_if_due()
            case "wall jumps":
                world.wall_off_us += args[0]
            case "source fails":
                world.answer = args[0]
            case "source lies":
                world.answer = lambda lie=args[0]: world.true_us + lie
            case "source answers":
                world.answer = lambda: world.true_us
            case "round trip":
                world.round_trip_s = args[0]
            case "ids":
                try:
                    times = ids.next_times(args[0])
                except SkewError:
                    continue
                assert times[0] > last
                last = times[-1]
                assert abs(times[0] - world.true_us) <= BOUND_US + 5
                assert abs(last - world.true_us) <= BOUND_US + 5


def test_ids_follow_the_source_and_not_the_machines_clock() -> None:
    world = World()
    world.wall_off_us = -3_600_000_000
    ids = generator(world)
    world.pass_time(0.5)
    assert ids.next_id() == f"10.0.0.1:7:{START_US + 500_000}"


def test_half_of_the_round_trip_is_added_and_counts_as_uncertainty() -> None:
    world = World()
    world.round_trip_s = 0.5
    ids = generator(world)
    assert ids.next_times(1)[0] == world.true_us
    assert ids.uncertainty_us == 250_000


def test_the_error_that_the_source_admits_counts_as_uncertainty(world: World, notices: list[str]) -> None:
    world.error_us = 400_000
    ids = generator(world, notice=notices.append)
    assert ids.uncertainty_us == 400_000
    with pytest.raises(SkewError, match=r"ids would run 0\.700 s ahead"):
        ids.next_times(700_001)
    world.error_us = BOUND_US
    world.pass_time(1.0)
    assert not ids.synchronise_if_due()
    assert "may be 1.000 s wrong" in notices[0]
    assert ids.uncertainty_us == 400_000 + DRIFT_PPM


class Kernel:
    """adjtimex(2) of a machine: what it returns, and what it fills in."""

    def __init__(self, state: int, status: int = 0, fraction: int = 0) -> None:
        self._said = state, status, fraction

    def adjtimex(self, place: Any) -> int:
        state, place._obj.status, place._obj.fraction = self._said
        place._obj.seconds, place._obj.maxerror = 1_700_000_000, 23_456
        return state


@pytest.mark.parametrize(("status", "fraction"), [(0, 123_456), (0x2000, 123_456_789)])
def test_the_systems_time_comes_with_the_error_its_ntp_client_vouches_for(
    monkeypatch: pytest.MonkeyPatch, status: int, fraction: int
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Kernel(0, status, fraction))
    assert system_time() == TimeReading(1_700_000_000_123_456, 23_456)


def test_a_clock_that_nobody_keeps_makes_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Kernel(5))
    with pytest.raises(SkewError, match=r"no id can be made: .* no NTP client keeps this machine's clock"):
        EventIdGenerator("10.0.0.1", 1, SystemClock())


def test_the_kernel_of_this_machine_fills_in_what_is_read() -> None:
    """The time where an NTP client keeps the clock, else the refusal: never a wrong time."""
    try:
        now = system_time()
    except SkewError as error:
        assert "NTP" in str(error)
    else:
        assert abs(now.us - time.time_ns() // 1000) < 10_000_000 and 0 <= now.error_us < 16_000_000


def test_the_source_is_asked_every_s_seconds(world: World, ids: EventIdGenerator) -> None:
    """Paper 3.1: an RPC to one of the TrueTime servers every S seconds."""
    for _ in range(100):
        world.pass_time(0.125)
        ids.synchronise_if_due()
    assert world.asked == 1 + 12


def test_a_drifting_clock_is_corrected_without_an_id_going_back(world: World, ids: EventIdGenerator) -> None:
    last = -1
    for _ in range(200):
        world.pass_time(1.0, drift_ppm=150)
        ids.synchronise_if_due()
        now = ids.next_times(1)[0]
        assert last < now and abs(now - world.true_us) <= 200
        last = now


def test_a_source_that_fails_leaves_the_last_correction_and_says_so(
    world: World, ids: EventIdGenerator, notices: list[str]
) -> None:
    world.answer = fail
    world.pass_time(2.0)
    assert not ids.synchronise_if_due()
    assert ids.next_times(1)[0] == world.true_us
    assert notices == [
        "time source failed: ConnectionError('no route to the time server'); the last correction stays"
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: "12:30", "which is no time"),
        (lambda: -1, "which is no time"),
        (lambda: 10**18, "which is no time"),
        (lambda: True, "which is no time"),
        (lambda: 0, "off by -1"),
        (lambda: START_US + 3_600_000_000, "off by +35"),
    ],
)
def test_a_source_that_answers_nonsense_is_not_believed(
    world: World, ids: EventIdGenerator, notices: list[str], answer: Callable[[], object], said: str
) -> None:
    world.answer = answer
    world.pass_time(2.0)
    assert not ids.synchronise_if_due()
    assert said in notices[0]
    assert ids.next_times(1)[0] == world.true_us


def test_ids_are_refused_when_the_bound_can_no_longer_be_vouched_for(
    world: World, ids: EventIdGenerator
) -> None:
    world.answer = fail
    world.pass_time(BOUND_US / DRIFT_PPM - 1)
    ids.synchronise_if_due()
    ids.next_times(1)[0]
    world.pass_time(2)
    with pytest.raises(SkewError, match="has not answered for too long"):
        ids.next_times(1)[0]
    world.answer = lambda: world.true_us
    assert ids.synchronise_if_due()
    assert ids.next_times(1)[0] == world.true_us


def test_ids_never_run_ahead_of_the_time_by_more_than_the_bound(world: World, ids: EventIdGenerator) -> None:
    ids.next_times(900_000)
    with pytest.raises(SkewError, match="ask for fewer at once"):
        ids.next_times(200_000)
    assert ids.next_times(1)[0] == START_US + 900_000  # what was refused was not used up
    world.pass_time(1.0)
    ids.next_times(900_000)


def test_a_suspended_machine_asks_at_once_and_goes_on_in_the_present(
    world: World, ids: EventIdGenerator
) -> None:
    """Its monotonic clock stood still: the source and the wall clock agree that an hour has passed."""
    world.true_us += 3_600_000_000
    assert ids.synchronise_if_due() and world.asked == 2
    assert ids.next_times(1)[0] == world.true_us


def test_a_source_that_goes_back_together_with_the_machines_clock_is_not_believed(
    world: World, ids: EventIdGenerator
) -> None:
    """As when the source is the machine's own clock: no monotonic clock runs ahead by an hour."""
    world.answer = lambda: world.true_us - 3_600_000_000
    world.wall_off_us = -3_600_000_000
    assert not ids.synchronise_if_due() and world.asked == 2
    assert ids.next_times(1)[0] == world.true_us


def test_a_source_that_is_silent_from_the_start_makes_no_generator() -> None:
    world = World()
    world.answer = fail
    with pytest.raises(SkewError, match="no id can be made"):
        generator(world)


@pytest.mark.parametrize("server", ["10.1.2.3", "2001:db8::1", "2001:DB8:0::1", "::ffff:10.1.2.3"])
def test_ids_pack_as_photon_ids_of_their_times(server: str) -> None:
    clock = ManualClock(START_US)
    ids = EventIdGenerator(server, 4242, clock, lambda: TimeReading(clock.now_us()))
    packed = IdPacker().pack([ids.next_id() for _ in range(100)])
    assert not opaque_mask(packed).any()
    assert timestamps_us(packed).tolist() == list(range(START_US, START_US + 100))


@pytest.mark.parametrize(
    ("server", "process_id", "bound_s", "said"),
    [
        ("localhost", 1, 1.0, "not an IP address"),
        ("224.0.0.1", 1, 1.0, "multicast or reserved"),
        ("fe80::1%eth0", 1, 1.0, "one machine's link"),
        ("10.0.0.1", -1, 1.0, "process id is from 0"),
        ("10.0.0.1", 2**32, 1.0, "process id is from 0"),
        ("10.0.0.1", 1, 0.0, "more than 0 s"),
        ("10.0.0.1", 1, -1.0, "more than 0 s"),
        ("10.0.0.1", 1, float("nan"), "more than 0 s"),
    ],
)
def test_what_no_id_can_hold_and_no_bound_can_be_is_a_usage_error(
    server: str, process_id: int, bound_s: float, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        EventIdGenerator(server, process_id, ManualClock(), max_skew_s=bound_s)


def test_many_threads_never_get_the_same_id() -> None:
    ids = generator(World())
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda n: ids.next_times(n % 7 + 1), range(2000)))
    times = [time for batch in batches for time in batch]
    assert len(set(times)) == len(times)


def test_threads_that_wait_for_the_mark_together_get_ids_of_their_own() -> None:
    class SlowMark:
        def load(self) -> int:
            return 0

        def store(self, us: int) -> None:
            time.sleep(0.01)  # as a disk does, it lets the other threads run

    ids = generator(World(), mark=SlowMark())
    with ThreadPoolExecutor(8) as pool:
        times = list(pool.map(lambda _: ids.next_times(1)[0], range(8)))
    assert len(set(times)) == 8


def test_the_thread_asks_the_source_while_the_generator_is_open() -> None:
    world = World()
    asked_again = threading.Event()

    def answer() -> int:
        if world.asked > 1:
            asked_again.set()
        return world.true_us

    world.answer = answer
    with generator(world):
        world.pass_time(2.0)
        assert asked_again.wait(60)


def test_a_restart_within_the_same_microseconds_repeats_no_id(tmp_path: Path) -> None:
    world = World()
    seen: set[int] = set()
    for _ in range(3):  # the same address, process id and time again
        mark = FileMark(tmp_path / "mark")
        times = generator(world, mark=mark).next_times(1000)
        mark.close()
        assert seen.isdisjoint(times)
        seen.update(times)


def test_the_mark_is_on_disk_before_an_id_is_handed_out(tmp_path: Path) -> None:
    mark = FileMark(tmp_path / "mark")
    ids = generator(World(), mark=mark)
    assert ids.next_times(1)[0] <= int((tmp_path / "mark").read_text())
    assert ids.next_times(500_000)[-1] <= int((tmp_path / "mark").read_text())


def test_the_mark_is_written_a_few_times_a_second_and_not_for_every_id() -> None:
    class CountingMark:
        stores = 0

        def load(self) -> int:
            return 0

        def store(self, us: int) -> None:
            self.stores += 1

    world, mark = World(), CountingMark()
    ids = generator(world, mark=mark)
    for _ in range(1000):
        ids.next_times(1)[0]
        world.pass_time(0.001)
    assert 1 <= mark.stores <= 5


def test_nobody_else_can_hold_a_mark(tmp_path: Path) -> None:
    mark = FileMark(tmp_path / "mark")
    with pytest.raises(LockedError, match="another process"):
        FileMark(tmp_path / "mark")
    mark.close()
    FileMark(tmp_path / "mark").close()


def test_a_mark_that_holds_something_else_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("yesterday\n")
    with pytest.raises(StorageError, match="holds no time"):
        FileMark(tmp_path / "mark").load()
    with pytest.raises(StorageError, match="No such file"):
        FileMark(tmp_path / "nowhere" / "mark")


def test_asking_for_no_ids_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="1 or more"):
        generator(World()).next_times(0)
