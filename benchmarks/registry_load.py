"""Load from outside client processes on a cluster, measured: what came through, how fast, at what cost."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from benchmarks.registry_cluster import Cluster
from benchmarks.registry_processes import Child, percentiles

WARM_S = 0.7


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one load, for `seconds`. `cores`: how many each kind of process kept busy."""

    seconds: float
    ids: int
    latencies_ms: list[float]
    ends: list[float]
    commits: int
    failures: dict[str, int]
    cores: dict[str, float]

    @property
    def ids_per_s(self) -> int:
        return round(self.ids / self.seconds)

    @property
    def calls_per_s(self) -> float:
        return len(self.latencies_ms) / self.seconds

    def row(self) -> dict[str, Any]:
        """The columns that all tables share."""
        return {
            "ids_per_s": self.ids_per_s,
            **percentiles(self.latencies_ms),
            "failures": sum(self.failures.values()),
            **{f"{who}_cores": round(value, 2) for who, value in self.cores.items()},
        }


class Clients:
    """Client processes, each with its connections. Each prefers another replica for its lookups."""

    def __init__(self, addresses: Sequence[str], processes: int) -> None:
        self._addresses = list(addresses)
        self._count = processes
        self._children: list[Child] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for n in range(self._count):
            turned = self._addresses[n % len(self._addresses) :] + self._addresses[: n % len(self._addresses)]
            child = Child("benchmarks.registry_client", {"addresses": turned})
            self._children.append(self._stack.enter_context(child))
        for child in self._children:
            child.hear()  # it runs: a load's time would pass before it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stack.close()

    def begin(
        self,
        seconds: float,
        call: str = "commit",
        ids: int | tuple[int, int] = 1,
        in_flight: int = 1,
        calls_per_s: float | None = None,
        keep_times: bool = False,
    ) -> tuple[float, float]:
        """Start a load of `in_flight` calls under way in all; (begin, end) of the measured time."""
        low, high = (ids, ids) if isinstance(ids, int) else ids
        threads = _spread(in_flight, len(self._children))
        busy = sum(1 for n in threads if n)
        begin = time.monotonic() + WARM_S
        for child, count in zip(self._children, threads, strict=True):
            child.tell(
                {
                    "call": call,
                    "ids_min": low,
                    "ids_max": high,
                    "threads": count,
                    "begin": begin,
                    "end": begin + seconds,
                    "rate": None if calls_per_s is None or not count else calls_per_s / busy,
                    "keep_times": keep_times,
                }
            )
        return begin, begin + seconds

    def finish(self) -> list[dict[str, Any]]:
        """What each process saw."""
        return [child.hear() for child in self._children]


def measure(cluster: Cluster, clients: Clients, seconds: float, **load: Any) -> Measured:
    """One load, from its warm-up to the end of its last call."""
    leader = cluster.leader()
    begin, end = clients.begin(seconds, **load)
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu, commits = cluster.cpu(leader), cluster.commit_index(leader)
    time.sleep(max(0.0, end - time.monotonic()))
    cpu_then, commits = cluster.cpu(leader), cluster.commit_index(leader) - commits
    seen = clients.finish()
    used = [(who, value - cpu[who]) for who, value in cpu_then.items() if who in cpu]
    return Measured(
        seconds=seconds,
        ids=sum(one["ids"] for one in seen),
        latencies_ms=[ms for one in seen for ms in one["latencies_ms"]],
        ends=sorted(at for one in seen for at in one["ends"]),
        commits=commits,
        failures=dict(sum((Counter(one["failures"]) for one in seen), Counter())),
        cores={
            "leader": sum(value for who, value in used if who == "leader") / seconds,
            "followers": sum(value for who, value in used if who.startswith("follower")) / seconds,
            "clients": sum(one["cpu_s"] for one in seen) / seconds,
            **{who: value / seconds for who, value in used if who == "proxy"},
        },
    )


def _spread(total: int, over: int) -> list[int]:
    """As even as can be; the first get one more."""
    return [total // over + (n < total % over) for n in range(over)]
