"""What the workers of a run report to, on the machine that leads (paper 4.5, 7.1): the authority of low
watermarks, how far stragglers may be behind, what is told of the run."""

import time
from collections.abc import Callable
from typing import Any, Final

from millwheel import links
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lateness import Stragglers
from millwheel.engine.plan import Plan
from millwheel.engine.shares import Load, Shares, Work, slots_of
from millwheel.engine.watermarks import Authority
from millwheel.engine.wheel import summed
from millwheel.links import Link, LostError, pack
from millwheel.machines import Round

_OF_WORKERS: Final = (links.REPORT, links.STATUS, links.FINISHED)
"""Kinds, of those that have begun."""
STALL_S: Final = 120.0
"""Without anything moving: a run whose logs grow no more gives up."""
FRESH_S: Final = 3.0
Send = Callable[[Link, int, bytes], None]


class Master:
    """Of one round and its workers. For one thread. `send`: who is gone, `lost` is told of later."""

    def __init__(self, plan: Plan, following: Round, send: Send) -> None:
        self.plan, self._send = plan, send
        self.number, self.reign = following.number, following.reign
        self._machines, self._lead = following.workers, following.lead
        self._owners = following.shares.owners
        self._load = Load(following.shares, following.stores)
        self.authority = Authority(plan.sources, len(self._machines))
        self._stragglers = Stragglers(plan.topology.injectors)
        self._links: dict[int, Link] = {}
        self._statuses: dict[int, dict[str, Any]] = {}
        self._asked = 1
        """How often whether all is done, as FINISH and its answer say."""
        self._idle: dict[int, tuple[Any, ...]] = {}
        self._idle_before: dict[int, tuple[Any, ...]] = {}
        """What each worker that has nothing left to do had done: this time asked, and the time before."""
        self._worked_off = False
        """All, and written."""
        self._hot_told: set[tuple[int, str, str]] = set()
        self._ended = False
        self._heard: dict[int, float] = {}
        """When each worker that runs told how it is: not one that is starting."""
        self._moved = time.monotonic()
        self.notices: list[str] = []
        """Of workers, as of a log that was cut before it was read; who tells them takes them away."""

    def hear(self, link: Link, kind: int, said: Any) -> None:
        """LostError for who is of another round, or none of its workers."""
        if kind == links.BEGINS:
            lead, number, worker, sequencer, marks = said
            ours = (lead, number) == (self._lead, self.number)
            if not ours or not 0 <= worker < len(self._machines):
                raise LostError
            link.known = True
            self._moved = time.monotonic()
            self.authority.begins(worker, sequencer)
            self._load.begins(worker)
            self._links[worker] = link
            self._heard.pop(worker, None)
            self.authority.restore(marks)
            self._send_all(links.MARKS, pack(self.authority.marks))
            self._send(link, links.LATENESS, pack(self._stragglers.lateness_us))
            if self._ended:
                self._send(link, links.FINISH, pack(self._asked))
        elif kind not in _OF_WORKERS or self._links.get(said[0]) is not link:
            raise LostError
        elif kind == links.REPORT:
            if self.authority.report(*said):
                self._moved = time.monotonic()
                self._send_all(links.MARKS, pack(self.authority.marks))
            if self.authority.ended and not self._ended:
                self._ended = True
                self._send_all(links.FINISH, pack(self._asked))
        else:
            before = self._statuses.get(said[0], {})
            new = [line for line in said[1]["notices"] if line not in before.get("notices", ())]
            self.notices += [f"worker-{said[0]}: {line}" for line in new]
            self._heard[said[0]] = time.monotonic()
            if _progress(said[1]) != _progress(before):
                self._moved = self._heard[said[0]]
            self._statuses[said[0]] = said[1]
            self._load.report(said[0], Work(*said[1]["work"]))
            self._note_hot(said[0], said[1]["hot"])
            if self._stragglers.report(said[0], said[1]["late"]):
                self._send_all(links.LATENESS, pack(self._stragglers.lateness_us))
            if kind == links.FINISHED and said[2] == self._asked:
                self._idle[said[0]] = said[1]["sequencer"], said[1]["counts"]
                self._ask_again()

    def _ask_again(self) -> None:
        """Once all are idle. One that is idle may still be handed records, so the run has ended only when
        none did anything from one time to the next.
        """
        if len(self._idle) == len(self._machines):
            self._worked_off = self._idle == self._idle_before
            self._moved = time.monotonic()
            if not self._worked_off:
                self._idle_before, self._idle = self._idle, {}
                self._asked += 1
                self._send_all(links.FINISH, pack(self._asked))

    @property
    def finished(self) -> bool:
        """All is worked off, written, and published where it is to be."""
        return self._worked_off and not any(one["behind"] for one in self._sinks())

    def _sinks(self) -> list[dict[str, Any]]:
        """What each publishes to, all workers together."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for one in [one for status in self._statuses.values() for one in status.get("sinks", ())]:
            known = found.setdefault((one["stream"], one["sink"]), {**one, "published": 0, "refused": 0})
            known["published"] += one["published"]
            known["refused"] += one["refused"]
            known["behind"] |= one["behind"]
            known["trouble"] = known["trouble"] or one["trouble"]
        return [found[which] for which in sorted(found)]

    def better(self) -> Shares | None:
        """Where it pays to move slots, and there is more to do."""
        return None if self._ended else self._load.better()

    def stalled(self) -> dict[str, Any] | None:
        """If nothing moves, and nothing is to come, though all workers do look: what holds the low watermark
        that is least far, or what is not published. A worker says nothing within a call of user code, and
        while its machine can't be renewed."""
        now = time.monotonic()
        heard = [self._heard.get(worker, 0.0) for worker in range(len(self._machines))]
        if now - self._moved < STALL_S or now - min(heard) > FRESH_S:
            return None
        if self._ended:
            lacking = [one for one in self._sinks() if self._worked_off and one["behind"]]
            return {"held_by": "sink", "name": lacking[0]["stream"], **lacking[0]} if lacking else None
        if any(status["expects"] for status in self._statuses.values()):
            return None
        least = min(self.authority.marks, key=self.authority.marks.__getitem__)
        held: dict[str, Any] = self.why(least)["chain"][-1]
        return held

    def stood_still(self, seconds: float) -> None:
        """This process: meanwhile it heard of nothing."""
        self._moved += seconds

    def _note_hot(self, worker: int, hot: dict[str, Any] | None) -> None:
        """If it is overloaded, for a key that can't be shared: each once."""
        if hot is not None and worker in self._load.overloaded:
            which = worker, hot["computation"], hot["key"]
            if which not in self._hot_told:
                self._hot_told.add(which)
                self.notices.append(f"worker {worker} is overloaded: {shown_hot(hot)}")

    def lost(self, link: Link) -> None:
        for worker in [worker for worker, known in self._links.items() if known is link]:
            del self._links[worker]
            self._heard.pop(worker, None)

    def summary(self) -> dict[str, Any]:
        counts = summed([status["counts"] for status in self._statuses.values()])
        return {
            "workers": len(self._machines),
            "ended": self.finished,
            "dead_letters": sum(count["dead_letters"] for count in counts.values()),
            "timers": sum(sum(status["timers"].values()) for status in self._statuses.values()),
            "counts": counts,
            "sinks": self._sinks(),
        }

    def status(self) -> dict[str, Any]:
        """As `photon millwheel status` tells it, but for what only the machines know. Of a worker that is
        starting nothing is known but its place."""
        now = time.time_ns() // 1_000
        marks: dict[str, dict[str, Any]] = {}
        for name, mark in self.authority.marks.items():
            state = "not begun" if mark <= BEFORE else "ended" if mark >= NEVER else "moving"
            marks[name] = {"low_watermark_us": None, "state": state, "lag_s": None}
            if state == "moving":
                marks[name] |= {"low_watermark_us": mark, "lag_s": round((now - mark) / 1e6, 3)}
        for name, lateness in self._stragglers.lateness_us.items():
            marks[name]["lateness_s"] = lateness / 1e6
        own = ("pid", "sequencer", "timers", "unacked_bytes", "hot")
        workers = {
            worker: {
                "machine": self._machines[worker].shown,
                "slots": len(slots_of(self._owners, worker)),
                "busy": min(1.0, round(self._load.busy.get(worker, 0.0), 3))
                if worker in self._heard
                else None,
                **{key: status[key] if worker in self._heard else None for key in own},
            }
            for worker, status in sorted(self._statuses.items())
        }
        return {**self.summary(), "low_watermarks": marks, "processes": workers, "graph": self.plan.graph}

    def why(self, name: str) -> dict[str, Any]:
        """What holds a low watermark, from the computation, or the maker of a stream, up to what holds it."""
        made = self.plan.topology.computations
        if name not in self.authority.marks:
            name = next((maker for maker in made if name in {s.name for s in made[maker].streams}), name)
        if name not in self.authority.marks:
            return {"error": f"'{name}' has no low watermark; there are {', '.join(self.authority.marks)}"}
        chain = []
        while True:
            worker = self.authority.holder(name)
            held: dict[str, Any] = {"held_by": "worker"}
            if worker in self._heard:
                held = self._statuses[worker]["why"].get(name, held)
            chain.append(
                {"name": name, "worker": worker, "low_watermark_us": self.authority.marks[name], **held}
            )
            if held.get("held_by") != "input":
                return {"chain": chain}
            name = held["input"]

    def _send_all(self, kind: int, payload: bytes) -> None:
        for link in self._links.values():
            self._send(link, kind, payload)


def _progress(status: dict[str, Any]) -> list[Any]:
    """What is another where a worker has done anything."""
    published = [one["published"] for one in status.get("sinks", ())]
    return [published, *(status.get(what) for what in ("counts", "timers", "unacked_bytes"))]


def shown_hot(hot: dict[str, Any]) -> str:
    """A key with many of a worker's records, and what helps."""
    return (
        f"{hot['share']:.0%} of the records of '{hot['computation']}' there are of the key {hot['key']!r}, "
        "which no other worker can share; add up parts of it first (docs/millwheel.md, hot keys)"
    )
