"""What a run of `photon dev` is asked for while it goes on: outages of a datacenter, of a link, of a disk."""

import contextlib
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from photon.cluster.local_cluster import LocalCluster
from photon.core.errors import UnavailableError, UsageError
from photon.dev.links import Links

DOING_S_MAX: Final = 10.0
Asked = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outage:
    """Planned from the start, in seconds after all was up. `restore_after_s`: after the kill; None: it stays
    down."""

    datacenter: str
    after_s: float
    restore_after_s: float | None

    @property
    def ends_s(self) -> float:
        """When there is nothing more to do."""
        return self.after_s + (self.restore_after_s or 0.0)

    def acts(self) -> list[tuple[float, str, Asked]]:
        """When, and what is asked for then."""
        of = {"datacenter": self.datacenter}
        restored: list[tuple[float, str, Asked]] = [(self.ends_s, "restore", of)]
        return [(self.after_s, "kill", of), *(restored if self.restore_after_s is not None else ())]


class Doings:
    """Asked for from any thread, done by the run's own.

    Of a `datacenter`: `kill` (SIGKILL, and it is kept down), `freeze` (SIGSTOP), `fill` (none of its
    processes can write to a file), `restore`, which ends them. Of the link `between` two: `cut`, `delay` by
    so many `ms` a round trip, `mend`.
    """

    def __init__(self, outage: Outage | None = None) -> None:
        self.outage = outage
        self._planned = [] if outage is None else outage.acts()
        self._asked: SimpleQueue[tuple[str, Asked, Future[str] | None]] = SimpleQueue()
        self.down: dict[str, str] = {}
        """Datacenters that are out: "killed", "frozen" or "full"."""
        self.links: list[dict[str, Any]] = []
        """As photon.dev.links.Links.told."""

    def ask(self, what: str, asked: Asked) -> str:
        """What came of it. UsageError; UnavailableError if the run is at its end."""
        answer = Future[str]()
        self._asked.put((what, asked, answer))
        try:
            return answer.result(DOING_S_MAX)
        except TimeoutError as error:
            answer.cancel()
            raise UnavailableError("the run does nothing any more: it starts, or ends") from error

    def step(self, cluster: LocalCluster, links: Links, seconds: float) -> Iterator[str]:
        """Do what was asked for, and what was planned for so long after the start; what to tell of it."""
        while self._planned and seconds >= self._planned[0][0]:
            _, what, of = self._planned.pop(0)
            self._asked.put((what, of, None))
        while not self._asked.empty():
            what, asked, answer = self._asked.get()
            if answer and answer.done():
                continue
            try:
                told = self._do(cluster, links, what, asked)
            except UsageError as error:
                if answer:
                    answer.set_exception(error)
                else:
                    yield f"{what}, as was planned: {error}"
                continue
            if answer:
                answer.set_result(told)
            yield told
        for name, how in self.down.items():
            if how == "full":  # also for processes that were started anew
                _may_write(cluster, name, False)
        self.links = links.told()

    def _do(self, cluster: LocalCluster, links: Links, what: str, asked: Asked) -> str:
        if what in ("cut", "delay", "mend"):
            return _do_to_link(links, what, asked)
        name = str(asked.get("datacenter", ""))
        if what == "restore":
            self._restore(cluster, name)
            return f"datacenter {name} is restored"
        if name in self.down:
            raise UsageError(f"datacenter {name} is {self.down[name]} already; restore it first")
        does, how = _OUTAGES[what]
        does(cluster, name)
        self.down = {**self.down, name: how}
        return f"datacenter {name} is {how}"

    def _restore(self, cluster: LocalCluster, name: str) -> None:
        cluster.restore_datacenter(name)
        self.down = {known: how for known, how in self.down.items() if known != name}
        _may_write(cluster, name, True)

    @property
    def silent(self) -> list[str]:
        """Datacenters from which nothing is to be heard."""
        return [name for name, how in self.down.items() if how != "full"]

    def end(self, cluster: LocalCluster, links: Links) -> None:
        """What is frozen or can't write can't end; what is killed stays so."""
        for name, how in self.down.items():
            if how != "killed":
                self._restore(cluster, name)
        for link in links.told():
            if link["state"]:
                links.mend(link["between"])


_OUTAGES: Final[Mapping[str, tuple[Callable[[LocalCluster, str], object], str]]] = {
    "kill": (LocalCluster.kill_datacenter, "killed"),
    "freeze": (LocalCluster.freeze_datacenter, "frozen"),
    "fill": (LocalCluster.processes_of, "full"),  # if there are any; `step` does it, again and again
}
ACTIONS: Final = (*_OUTAGES, "restore", "cut", "delay", "mend")


def _do_to_link(links: Links, what: str, asked: Asked) -> str:
    between = asked.get("between")
    if not isinstance(between, list) or not all(isinstance(name, str) for name in between):
        raise UsageError("name two datacenters: between = [A, B]")
    if what == "delay":
        ms = asked.get("ms")
        if not isinstance(ms, int | float):
            raise UsageError("say by how much: ms = MILLISECONDS")
        return links.delay(between, ms)
    return links.cut(between) if what == "cut" else links.mend(between)


def _may_write(cluster: LocalCluster, datacenter: str, may: bool) -> None:
    """Whether its processes can write to files: if not, to them their disk is full."""
    for process in cluster.processes_of(datacenter):
        pid = cluster.pid_of(process)
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if may else 0, most))
