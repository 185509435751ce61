"""Making photon ids: unique, strictly increasing, and true to the time within a bound (paper 3.1).

Time runs on the monotonic clock from the last answer of a trusted time source, which is asked every S
seconds; the machine's wall clock, which steps and drifts, is never copied into an id.
"""

import ctypes
import ipaddress
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

from photon.core.clock import Background, Clock
from photon.core.disk import open_alone, storage_errors
from photon.core.errors import SkewError, StorageError, UsageError

DRIFT_PPM: Final = 200
"""What a quartz clock may be wrong by, in us a second; the figure TrueTime counts with."""

_TIME_US_MAX: Final = 10**18 - 1  # so much an id's text holds
_POLLS_A_PERIOD: Final = 10
_NOT_SYNCHRONISED: Final = 5  # adjtimex's TIME_ERROR
_NANOSECONDS: Final = 0x2000  # its STA_NANO


class TimeReading(NamedTuple):
    """What a time source says: microseconds since the epoch, and how far from the truth they may be."""

    us: int
    error_us: int = 0


TimeSource = Callable[[], TimeReading]


class _Timex(ctypes.Structure):
    """`struct timex` of Linux, adjtimex(2), as far as it is read."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        *[(name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")],
        ("status", ctypes.c_int),
        *[(name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction")],
        ("rest", ctypes.c_byte * 256),
    ]


def system_time() -> TimeReading:
    """The system's clock with the error bound that its NTP client gives the kernel (adjtimex(2)).

    SkewError where no client keeps the clock: the time may then be anything.
    """
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        raise SkewError(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    if state == _NOT_SYNCHRONISED:
        raise SkewError("no NTP client keeps this machine's clock; run chrony, and see `chronyc tracking`")
    fraction_us = timex.fraction // 1000 if timex.status & _NANOSECONDS else timex.fraction
    return TimeReading(timex.seconds * 1_000_000 + fraction_us, timex.maxerror)


class Mark(Protocol):
    """Remembers, over restarts, a time that no id handed out has passed."""

    def load(self) -> int: ...

    def store(self, us: int) -> None: ...


class FileMark:
    """A Mark in a file of its own, durable before an id is handed out; held by one process at a time.

    LockedError while another process holds it, StorageError if the file can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_alone(path, "another process makes ids with this mark; give each its own")

    def load(self) -> int:
        text = os.pread(self._fd, 64, 0)
        if text and not text.strip().isdigit():
            raise StorageError(f"{self._path}: holds no time; delete it once its last ids are in the past")
        return int(text or b"0")

    def store(self, us: int) -> None:
        # A fixed width: a write that is cut off can't leave a shorter, smaller number that looks whole.
        with storage_errors(self._path):
            os.pwrite(self._fd, b"%020d\n" % us, 0)
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class EventIdGenerator:
    """Ids of one server process. Thread-safe; ids are strictly increasing whatever any clock does.

    Every id's time is within `max_skew_s` (S) of the source's, or SkewError is raised instead of an id:
    when the source has been unreachable for so long that drift could exceed S, or when ids would have to
    run ahead of the time by more than S to stay increasing. Then wait, slow down, or mend the source.

    `time_source` is asked for the time and its error (TrueTime in the paper): `system_time`, or a function
    of yours that asks a server. `with generator:` asks every S seconds in a thread; or call
    `synchronise_if_due` yourself.
    `mark` keeps ids unique when a process starts again with the same address and process id within S of its
    end (in a container it is always process 1); without one, give each incarnation its own process id.
    `notice` is told, in a line, of answers that failed or made no sense: the last correction stays.
    """

    def __init__(
        self,
        server: str,
        process_id: int,
        clock: Clock,
        time_source: TimeSource = system_time,
        max_skew_s: float = 1.0,
        mark: Mark | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """UsageError: no id can hold this address or process id. SkewError: the source has no answer."""
        if not max_skew_s > 0:
            raise UsageError(f"the bound of the skew must be more than 0 s, not {max_skew_s:g}")
        self.head = _head(server, process_id)
        """`ip:pid`, of all its ids."""
        self._clock = clock
        self._source = time_source
        self._period_s = max_skew_s
        self._bound_us = round(max_skew_s * 1_000_000)
        self._mark = mark
        self._notice = notice
        self._lock = threading.Lock()
        self._asking: Background | None = None
        self._anchor: _Anchor | None = None
        self._marked = self._last = mark.load() if mark else -1
        self._next_ask = clock.monotonic()
        if (why := self._ask()) is not None:
            raise SkewError(f"no id can be made: the time source {why}")

    def next_id(self) -> str:
        """The next id as text, `ip:pid:timestamp`."""
        return f"{self.head}:{self._take(1)}"

    def next_times(self, count: int) -> range:
        """The times of the next ids, which follow each other by the microsecond; `head` comes before each."""
        first = self._take(count)
        return range(first, first + count)

    @property
    def uncertainty_us(self) -> int:
        """How far the corrected clock may be from the source's now."""
        anchor = self._anchor
        assert anchor is not None
        return anchor.uncertainty_us(self._clock.monotonic())

    def synchronise_if_due(self) -> bool:
        """Ask the source if S seconds have passed since it was last asked, or if the clocks disagree.

        False if it was due and failed.
        """
        return self.synchronise() if self._due() else True

    def synchronise(self) -> bool:
        """Ask the source now; whether it gave an answer that can be trusted."""
        why = self._ask()
        if why is not None:
            self._notice(f"time source {why}; the last correction stays")
        return why is None

    def _ask(self) -> str | None:
        """Ask the source and go by its answer; why not, if it can't be trusted."""
        asked = self._clock.monotonic()
        self._next_ask = asked + self._period_s
        try:
            answer = self._source()
        except SkewError as error:
            return f"failed: {error}"
        except Exception as error:  # the source is foreign code: whatever it raises, ids go on
            return f"failed: {error!r}"
        now, wall = self._clock.monotonic(), self._clock.now_us()
        half_us = round((now - asked) * 500_000)
        if not _makes_sense(answer):
            return f"answered {answer!r}, which is no time with its error"
        error_us = half_us + answer.error_us
        if error_us >= self._bound_us:
            return (
                f"answered in {now - asked:.3f} s what may be {answer.error_us / 1e6:.3f} s wrong: "
                f"too far off for ids that are true to {self._period_s:g} s"
            )
        fresh = _Anchor(answer.us + half_us, now, wall, error_us)
        if self._anchor and not self._anchor.allows(fresh, self._bound_us):
            off_s = (fresh.source_us - self._anchor.now_us(now)) / 1_000_000
            return f"is off by {off_s:+.3f} s from its earlier answers"
        self._anchor = fresh
        return None

    def __enter__(self) -> Self:
        self._asking = Background("time-source", self._ask_in_time)
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._asking:
            self._asking.stop(self._period_s)

    def _ask_in_time(self) -> float:
        self.synchronise_if_due()
        return self._period_s / _POLLS_A_PERIOD

    def _due(self) -> bool:
        now, anchor = self._clock.monotonic(), self._anchor
        assert anchor is not None
        # A suspended machine's monotonic clock stands still and its wall clock does not: ask who is right.
        return (
            now >= self._next_ask or anchor.clocks_apart_us(now, self._clock.now_us()) > self._bound_us // 2
        )

    def _take(self, count: int) -> int:
        """Reserve `count` times that follow each other; the first of them."""
        if count < 1:
            raise UsageError(f"the number of ids must be 1 or more, not {count}")
        with self._lock:
            anchor, monotonic = self._anchor, self._clock.monotonic()
            assert anchor is not None
            now = anchor.now_us(monotonic)
            first = max(now, self._last + 1)
            last = first + count - 1
            self._check_bound(last - now, anchor.uncertainty_us(monotonic))
            if self._mark and last > self._marked:
                reserved = last + self._bound_us // 4
                self._mark.store(reserved)
                self._marked = reserved
            self._last = last
            return first

    def _check_bound(self, ahead_us: int, uncertainty_us: int) -> None:
        if uncertainty_us > self._bound_us:
            raise SkewError(
                f"the clock may be off by {uncertainty_us / 1e6:.3f} s, more than {self._period_s:g} s: "
                "the time source has not answered for too long; mend it and ids go on"
            )
        if ahead_us + uncertainty_us > self._bound_us:
            raise SkewError(
                f"ids would run {ahead_us / 1e6:.3f} s ahead of the time, beyond {self._period_s:g} s: "
                "ask for fewer at once, or wait that long"
            )


@dataclass(frozen=True, slots=True)
class _Anchor:
    """An answer of the time source, and where our own clocks stood when it came."""

    source_us: int
    monotonic: float
    wall_us: int
    error_us: int

    def now_us(self, monotonic: float) -> int:
        return self.source_us + round((monotonic - self.monotonic) * 1_000_000)

    def uncertainty_us(self, monotonic: float) -> int:
        return self.error_us + round(abs(monotonic - self.monotonic) * DRIFT_PPM)

    def clocks_apart_us(self, monotonic: float, wall_us: int) -> int:
        return abs(wall_us - self.wall_us - round((monotonic - self.monotonic) * 1_000_000))

    def allows(self, fresh: "_Anchor", bound_us: int) -> bool:
        """Whether a later answer agrees with this one: by the monotonic clock, or, if that stood still
        (a suspended machine), ahead of it and by the wall clock."""
        ahead = fresh.source_us - self.now_us(fresh.monotonic)
        slack = bound_us + self.uncertainty_us(fresh.monotonic) + fresh.error_us
        if abs(ahead) <= slack:
            return True
        by_wall = fresh.source_us - self.source_us - (fresh.wall_us - self.wall_us)
        return ahead > 0 and abs(by_wall) <= slack


def _makes_sense(answer: object) -> bool:
    return (
        isinstance(answer, TimeReading)
        and type(answer.us) is type(answer.error_us) is int
        and 0 <= answer.us <= _TIME_US_MAX
        and answer.error_us >= 0
    )


def _head(server: str, process_id: int) -> str:
    """`ip:pid` in the one form that packs as a photon id."""
    try:
        address = ipaddress.ip_address(server)
    except ValueError as error:
        raise UsageError(
            f"'{server}' is not an IP address; give the server's IPv4 or IPv6 address"
        ) from error
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if isinstance(address, ipaddress.IPv4Address) and address.packed[0] >= 224:
        raise UsageError(f"{address} is a multicast or reserved address, which no server has; give its own")
    if getattr(address, "scope_id", None):
        raise UsageError(f"{address} holds only on one machine's link; give a global address")
    if not 0 <= process_id < 1 << 32:
        raise UsageError(f"a process id is from 0 to {(1 << 32) - 1}, not {process_id}")
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{process_id}"
