"""What a user writes: computations (paper 4.1), their state, timers and productions (paper 4.4 to 4.6).

    class Pages(Computation[dict[int, int]]):  # of a user, by the minute
        state = dict[int, int]

        def process_record(self, record: Record, ctx: Context[dict[int, int]]) -> None:
            minute = record.time // 60_000_000
            ctx.state[minute] = ctx.state.get(minute, 0) + 1
            ctx.set_timer(minute, (minute + 1) * 60_000_000)

        def process_timer(self, timer: Timer, ctx: Context[dict[int, int]]) -> None:
            ctx.produce("pages", {"user": ctx.key, "pages": ctx.state.pop(timer.tag)})
            if not ctx.state:
                ctx.forget()

Times are microseconds since the epoch. A call sees one key, and calls of one key never overlap. What a call
does to state, timers and productions counts whole and once, or not at all; effects elsewhere (HTTP, files)
may happen more than once. Timers of a key fire by increasing time. The order of records is not promised.
"""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

S = TypeVar("S")
T = TypeVar("T")
Tag = int | str
Clock = Literal["watermark", "wall"]
Codes = npt.NDArray[np.int64]
Times = npt.NDArray[np.int64]
Values = npt.NDArray[Any] | list[Any] | None

NEVER: Final = 1 << 62
"""A time after all others: the low watermark of what has ended."""
BEFORE: Final = -(1 << 62)
"""A time before all others: the low watermark of what has not begun."""


@dataclass(frozen=True, init=False)
class Stream(Generic[T]):
    """A stream that a computation declares: its name and the type of its values, which msgspec can encode.

    A computation may produce to it by name. By the stream itself (`VISITS = Stream("visits", Visit)`,
    `ctx.produce(VISITS, ...)`) a type checker looks at the value too.
    """

    name: str
    type: Any

    @overload
    def __init__(self, name: str, type: builtins.type[T]) -> None: ...

    @overload
    def __init__(self: "Stream[Any]", name: str, type: Any = Any) -> None: ...

    def __init__(self, name: str, type: Any = Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "type", type)


class Record:
    """A record as a computation gets it, valid during the call.

    `value` is of the stream's type; `late`: it came behind the low watermark.
    """

    __slots__ = ("key", "late", "stream", "time", "value")

    key: str
    value: Any
    time: int
    stream: str
    late: bool


class Timer:
    """A timer that fires, valid during the call. `time`: when it was to fire, which may be long ago."""

    __slots__ = ("clock", "key", "tag", "time")

    key: str
    tag: Any
    time: int
    clock: Clock


class Context(Protocol[S]):
    """What a call may do, all of it for its own key."""

    key: str
    time: int
    """Of the record, or of the timer."""

    @property
    def low_watermark(self) -> int:
        """No record that is not late comes from below (paper 4.5)."""
        ...

    @property
    def now(self) -> int:
        """The wall clock."""
        ...

    @property
    def state(self) -> S:
        """The key's persistent state, to be changed in place or set; a new one where there is none.

        A call fails that leaves what would come back from the store as another value: of another type than
        the declared one, or with a set or a tuple where no type says so.
        """
        ...

    @state.setter
    def state(self, state: S) -> None: ...

    def forget(self) -> None:
        """Keep no state of this key. Its timers and its hold stay: `drop_timer`, `release`."""

    def set_timer(self, tag: Tag, time: int, clock: Clock = "watermark") -> None:
        """Call `process_timer` once the clock has reached the time; the same tag and clock replace a timer.

        A timer on the low watermark holds the low watermark of what the computation produces (paper 4.6).
        """

    def drop_timer(self, tag: Tag, clock: Clock = "watermark") -> None: ...

    def hold(self, time: int) -> None:
        """Until `release`, this key may still produce records from `time` on (paper 5.2)."""

    def release(self) -> None: ...

    @overload
    def produce(
        self, stream: Stream[T], value: T, time: int | None = None, key: str | None = None
    ) -> None: ...

    @overload
    def produce(self, stream: str, value: Any, time: int | None = None, key: str | None = None) -> None:
        """A record for a stream that the computation declares. `key`: for consumers that take it as it is;
        by default that of the call.

        `time`: by default that of the call. ValueError for one that the low watermark has been promised to be
        past: before that of the call and before `hold`. KeyError for a stream that it does not declare.
        """


class Computation(Generic[S]):
    """A record at a time. `state`: the type of a key's state; `state()` is a new one.

    A call that raises, or that hands over what can't be encoded, is undone, tried again and given up alone.
    """

    state: ClassVar[Any] = dict
    asks_outside: ClassVar[bool] = False
    """It asks, or tells, something outside. It gets no record that may be another one after a crash, and
    can't be computed again from logs (spark.history). A PhotonError of it, such as UnavailableError, ends its
    worker, which starts again and asks again."""

    def process_record(self, record: Record, ctx: Context[S]) -> None:
        raise NotImplementedError

    def process_timer(self, timer: Timer, ctx: Context[S]) -> None:
        raise NotImplementedError(f"{type(self).__name__} sets timers and has no process_timer")


@dataclass(eq=False, slots=True)
class Batch:
    """N records of one stream. `names`: the distinct keys; `codes` (N,): rows of `names`; `late` (N,)."""

    stream: str
    names: list[str]
    codes: Codes
    times: Times
    values: Values
    late: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(eq=False, slots=True)
class Fired:
    """N timers by time. `names`: their keys (N, with repetitions); `tags` and `times` (N,)."""

    names: list[str]
    tags: list[Any]
    times: Times

    def __len__(self) -> int:
        return len(self.names)


class BatchContext(Protocol):
    """What a call may do for the keys of its batch. State of a key: numbers by cell, a whole number each."""

    @property
    def low_watermark(self) -> int: ...

    @property
    def now(self) -> int: ...

    def add(
        self,
        names: Sequence[str],
        codes: Codes,
        cells: npt.NDArray[np.int64],
        amounts: npt.NDArray[Any] | int = 1,
    ) -> tuple[list[str], list[int]]:
        """Add amounts (N,) to the cells (N,) of keys (N rows of `names`). Names and cells of those that are
        new.
        """
        ...

    def take(self, names: Sequence[str], cells: Sequence[int]) -> list[Any]:
        """What stands in these cells, which are empty (0) from now on."""
        ...

    def set_timers(self, names: Sequence[str], tags: Sequence[Tag], times: Sequence[int]) -> None:
        """On the low watermark, as Context.set_timer."""

    def produce(
        self, stream: str | Stream[Any], names: list[str], values: Values, times: Times | Sequence[int]
    ) -> None:
        """N records, whose keys are `names`. ValueError for a time before the first of the call's.
        KeyError as Context.produce.
        """


class BatchComputation:
    """Many records at a time, in columns: no Python statement runs for each.

    An exception undoes the batch; it is tried in halves until the record that is its cause stands alone.
    `asks_outside`: as of Computation.
    """

    asks_outside: ClassVar[bool] = False

    def process_batch(self, batch: Batch, ctx: BatchContext) -> None:
        raise NotImplementedError

    def process_timers(self, fired: Fired, ctx: BatchContext) -> None:
        raise NotImplementedError(f"{type(self).__name__} sets timers and has no process_timers")
