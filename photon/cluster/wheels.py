"""A run of MillWheel on this machine: worker processes, the authority of low watermarks, and who asks after
them.

The authority is in this process (paper 4.5): reports of workers come in, marks go out. A worker that ends is
started again; one whose heartbeat stops is killed first, so that nobody waits for what it holds.
"""

import contextlib
import importlib
import json
import selectors
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from millwheel import history, links
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lateness import Stragglers
from millwheel.engine.logged import LoggedStore
from millwheel.engine.plan import NUMBERS_ROW, Plan, check_states, numbered, pack_numbers, unpack_numbers
from millwheel.engine.store import GIVEN, TAKEN_UP
from millwheel.engine.watermarks import Authority
from millwheel.engine.wheel import summed
from millwheel.errors import ReplacedError
from millwheel.lease import LEASE_S, Lease
from millwheel.links import Link, LostError, pack, unpack
from millwheel.push import PushedLogs
from millwheel.topology import Topology, load_topology
from millwheel.worker import CONTROL, pushed_logs, shared_store, store_of
from photon.cluster.supervisor import FreshLauncher, Process, Supervisor, last_message
from photon.connect.uris import parse_uri
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors, write_file
from photon.core.errors import PhotonError, UsageError
from photon.logs.shares import SLOTS

READY: Final = "millwheel.ready.topologies:"
"""What names of ready-made topologies begin with."""
SILENCE_S_MAX: Final = 5.0
"""Of a worker that began: then it is killed."""
_POLL_S: Final = 0.05
_STOP_S: Final = 10.0
_TRIAL_S: Final = 60.0
"""In which new code is to be loaded."""
DEPLOY_S: Final = _TRIAL_S + 10.0
"""In which a run answers a deploy."""
_OURS: Final = frozenset(loaded.partition(".")[0] for loaded in sys.modules)
"""What is loaded before any topology is: never loaded again."""
_HOME: Final = Path(__file__).parents[2]
"""A current directory that has us, too, has more that is ours."""
Tell = Callable[[str], None]


class _Trial(NamedTuple):
    """New code, loaded and looked at by a process of its own, and who waits for the outcome."""

    process: Process
    log: Path
    asker: Link
    until: float

    def outcome(self) -> str | None:
        """What is wrong with it; "" for nothing, None while that is not known."""
        status = self.process.poll()
        if status is None:
            if time.monotonic() < self.until:
                return None
            self.kill()
            return f"it was not loaded within {_TRIAL_S:g} s"
        return "" if status == 0 else last_message(self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


ELSEWHERE: Final = "store"
"""Says where the state of a run is, if not in its work directory."""


class WheelRun:
    """`name`: MODULE:TOPOLOGY. `follow`: the logs grow; else the run ends when all of them is worked off."""

    def __init__(
        self,
        name: str,
        work: Path,
        workers: int,
        follow: bool,
        tell: Tell,
        store: str = "",
        history: Path | None = None,
        standby: bool = False,
    ) -> None:
        """`history`: what a run that has not begun takes up first (millwheel.history). `standby`: as long as
        another run has the store, it waits. UsageError, TopologyError, LockedError, StorageError."""
        if not 1 <= workers <= SLOTS:
            raise UsageError(f"--workers {workers}: give 1 to {SLOTS}")
        self._name, self._work, self._workers, self._follow, self._tell = name, work, workers, follow, tell
        self._store, self._history = store, history
        topology = load_topology(name)
        with storage_errors(work):
            make_directory(work)
        if standby and not store:
            raise UsageError("--standby waits for what is in a --store that several machines reach: name one")
        self._lock = DirectoryLock(work)
        self._lease: Lease | None = None
        try:
            self._same_store()
            if store:
                self._lease = Lease(shared_store(store, again_s=LEASE_S), work, SystemClock())
                self._lease.take(standby, tell)
            self._plan = self._number(topology)
        except BaseException:
            self._let_go()
            raise
        self._authority = Authority(self._plan.sources, workers)
        self._stragglers = Stragglers(topology.injectors)
        self._supervisor = Supervisor(work / "logs")
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._statuses: dict[int, dict[str, Any]] = {}
        self._beats: dict[int, float] = {}
        self._finished: set[int] = set()
        self._ended = False
        self._stop = False
        self._trial: _Trial | None = None
        self._restarts = 0
        """Of workers that were stopped since."""
        self._may_until = float("inf") if self._lease is None else self._lease.until
        """Workers go on as long."""
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Until the logs are worked off, or somebody stops it. The summary."""
        with contextlib.ExitStack() as held:
            held.callback(self._let_go)
            listener = held.enter_context(links.listen(self._work, CONTROL))
            self._selector.register(listener, selectors.EVENT_READ)
            for number in (signal.SIGTERM, signal.SIGINT):
                held.callback(signal.signal, number, signal.signal(number, self._on_stop))
            try:
                self._start()
                while not self._stop and len(self._finished) < self._workers:
                    self._turn()
                self._restarts += self._supervisor.restarts()
                self._supervisor.stop(list(self._supervisor.children), _STOP_S)
            finally:
                self._supervisor.kill()
                if self._trial is not None:
                    self._trial.kill()
        return self.summary()

    def _let_go(self) -> None:
        if self._lease is not None:
            self._lease.end()
        self._lock.release()

    def summary(self) -> dict[str, Any]:
        counts = summed([status["counts"] for status in self._statuses.values()])
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "workers": self._workers,
            "ended": len(self._finished) == self._workers,
            "restarts": self._restarts + self._supervisor.restarts(),
            "dead_letters": sum(count["dead_letters"] for count in counts.values()),
            "counts": counts,
        }

    def status(self) -> dict[str, Any]:
        """As `photon millwheel status` tells it."""
        now = time.time_ns() // 1_000
        marks: dict[str, dict[str, Any]] = {}
        for name, mark in self._authority.marks.items():
            state = "not begun" if mark <= BEFORE else "ended" if mark >= NEVER else "moving"
            marks[name] = {"low_watermark_us": None, "state": state, "lag_s": None}
            if state == "moving":
                marks[name] |= {"low_watermark_us": mark, "lag_s": round((now - mark) / 1e6, 3)}
        for name, lateness in self._stragglers.lateness_us.items():
            marks[name]["lateness_s"] = lateness / 1e6
        workers = {
            worker: {key: status[key] for key in ("pid", "sequencer", "timers", "unacked_bytes")}
            for worker, status in sorted(self._statuses.items())
        }
        told = {"topology": self._name, "low_watermarks": marks, "processes": workers}
        return {**self.summary(), **told, "graph": self._plan.graph}

    def why(self, name: str) -> dict[str, Any]:
        """What holds a low watermark, from the computation up to what does hold it."""
        if name not in self._authority.marks:
            return {"error": f"'{name}' has no low watermark; there are {', '.join(self._authority.marks)}"}
        chain = []
        while True:
            worker = self._authority.holder(name)
            status = self._statuses.get(worker)
            held: dict[str, Any] = {"held_by": "worker"}
            if status is not None:
                held = status["why"].get(name, held)
            chain.append(
                {"name": name, "worker": worker, "low_watermark_us": self._authority.marks[name], **held}
            )
            if held.get("held_by") != "input":
                return {"chain": chain}
            name = held["input"]

    def _number(self, topology: Topology) -> Plan:
        """Before workers start, whose number may be another: what former ones left is for all to see, and
        none of them commits any more."""
        store = store_of(self._work, self._store)
        try:
            if self._store:
                with storage_errors(self._work):
                    write_file(self._work / ELSEWHERE, parse_uri(self._store).shown.encode())
            self._go_on(store)
            store.claim(range(SLOTS), 0, 1)
            known = unpack_numbers(store.numbers(NUMBERS_ROW)) or self._take_up(store)
            if self._history is not None and store.numbers(TAKEN_UP) is None:
                raise UsageError(f"{self._work} has begun without a history: give it a --work of its own")
            numbers = numbered(topology, known)
            plan = Plan(topology, numbers)
            check_states(plan, store.scan)
            store.numbers(NUMBERS_ROW, pack_numbers(numbers))
        finally:
            store.close()
        return plan

    def _same_store(self) -> None:
        """A run whose state is on this machine's disk would begin anew elsewhere, and the other way round."""
        begun = (self._work / "state").exists()
        marked = self._work / ELSEWHERE
        if self._store and begun:
            raise UsageError(
                f"{self._work} has its state on this disk: leave --store out, or take another --work"
            )
        if not self._store and marked.exists():
            raise UsageError(f"{self._work} has its state in {marked.read_text()}: name it by --store")

    def _take_up(self, store: LoggedStore) -> dict[str, int]:
        """The history, into a store that has not begun, or in which that was cut off. The numbers that its
        rows go by. UsageError."""
        cut_off = store.numbers(TAKEN_UP)
        given = None if self._history is None else str(self._history.absolute()).encode()
        if cut_off is not None and cut_off != given:
            raise UsageError(f"{self._work} has a part of {cut_off.decode()}: name it by --history once more")
        if self._history is None or given is None:
            return {}
        left = history.load(self._history)
        if left.topology != self._name:
            raise UsageError(f"{self._history} is of {left.topology}, and not of {self._name}")
        store.numbers(TAKEN_UP, given)
        history.take_up(store, self._history, left)
        store.claim(range(SLOTS), 0, 1)  # for all to see
        return left.numbers

    def _go_on(self, disk: LoggedStore) -> None:
        """What is ready-made goes on with its own state, which is of its arguments. UsageError."""
        topology, _, given = self._name.partition(" ")
        if not topology.startswith(READY):
            return
        began = disk.numbers(GIVEN)
        if began is None:
            disk.numbers(GIVEN, self._name.encode())
            return
        former, _, arguments = began.decode().partition(" ")
        if former != topology:
            raise UsageError(f"{self._work} was begun by another command: give this one a --work of its own")
        old, new = json.loads(arguments), json.loads(given)
        changed = [f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name]]
        if changed:
            raise UsageError(
                f"{self._work} was begun with {'; '.join(changed)}: what it holds is of that. Give the same "
                "again, or another --work"
            )

    def _on_stop(self, *_: object) -> None:
        self._stop = True

    def _start(self) -> None:
        for name, injector in self._plan.topology.injectors.items():
            if injector.listen:
                # Before anybody looks: what was pushed in time must not come late because of a crash.
                PushedLogs(pushed_logs(self._work, name), SystemClock()).close()
                if self._follow:
                    arguments = ["millwheel", "receiver", self._name, "--work", str(self._work)]
                    self._supervisor.start(f"receiver-{name}", [*arguments, "--injector", name])
        for worker in range(self._workers):
            arguments = ["millwheel", "worker", self._name, "--work", str(self._work)]
            arguments += ["--worker", str(worker), "--workers", str(self._workers)]
            arguments += ["--store", self._store] if self._store else []
            self._supervisor.start(f"worker-{worker}", arguments + ([] if self._follow else ["--drain"]))

    def _turn(self) -> None:
        if self._lease is not None and self._lease.until != self._may_until:
            self._may_until = self._lease.until
            self._send_all(links.LEASE, pack(self._may_until))
        if self._lease is not None and self._lease.lost_to:
            raise ReplacedError(f"{self._lease.lost_to} runs this now")
        self._supervisor.poll()
        for notice in self._supervisor.notices:
            self._tell(notice)
        self._supervisor.notices.clear()
        before = time.monotonic()
        for key, _ in self._selector.select(_POLL_S):
            if key.data is None:
                with contextlib.suppress(OSError):
                    connection, _address = key.fileobj.accept()  # type: ignore[union-attr]
                    self._selector.register(link := Link(connection), selectors.EVENT_READ, link)
            else:
                self._hear(key.data)
        self._watch(before)
        self._end_trial()

    def _hear(self, link: Link) -> None:
        try:
            for kind, payload in link.receive():
                self._on(link, kind, unpack(payload))
            link.flush()
        except LostError:
            self._lost(link)

    def _lost(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        link.close()
        for worker in [worker for worker, known in self._links.items() if known is link]:
            del self._links[worker]

    def _on(self, link: Link, kind: int, said: Any) -> None:
        if kind == links.BEGINS:
            worker, sequencer, marks = said
            self._authority.begins(worker, sequencer)
            self._links[worker] = link
            self._beats[worker] = time.monotonic()
            self._authority.restore(marks)
            self._send_all(links.MARKS, pack(self._authority.marks))
            self._send(worker, links.LATENESS, pack(self._stragglers.lateness_us))
            self._send(worker, links.LEASE, pack(self._may_until))
            if self._ended:
                self._send(worker, links.FINISH, b"")
        elif kind == links.REPORT:
            if self._authority.report(*said):
                self._send_all(links.MARKS, pack(self._authority.marks))
            if self._authority.ended and not self._ended:
                self._ended = True
                self._send_all(links.FINISH, b"")
        elif kind in (links.STATUS, links.FINISHED):
            self._statuses[said[0]] = said[1]
            if self._stragglers.report(said[0], said[1]["late"]):
                self._send_all(links.LATENESS, pack(self._stragglers.lateness_us))
            if kind == links.FINISHED:
                self._finished.add(said[0])
        elif kind == links.BEAT:
            self._beats[said[0]] = time.monotonic()
        elif kind == links.ASK:
            if said == ["deploy"]:
                self._try(link)
            else:
                link.send(links.ANSWER, pack(self._answer(said)))

    def _answer(self, said: Any) -> Any:
        match said:
            case ["status"]:
                return self.status()
            case ["why", str(name)]:
                return self.why(name)
            case ["kill", str(worker)]:
                return self._kill(worker)
        return {"error": f"a question that this run does not know: {said!r}"}

    def _kill(self, worker: str) -> dict[str, Any]:
        """SIGKILL, to see that nothing comes of it."""
        child = self._supervisor.children.get(f"worker-{worker}")
        if child is None or child.process is None:
            there = ", ".join(name.removeprefix("worker-") for name in self._supervisor.children)
            return {"error": f"no worker '{worker}' runs; there are {there}"}
        child.process.kill()
        return {"told": f"worker {worker} is killed"}

    def _send_all(self, kind: int, payload: bytes) -> None:
        for worker in list(self._links):  # who is lost by it leaves them
            self._send(worker, kind, payload)

    def _send(self, worker: int, kind: int, payload: bytes) -> None:
        link = self._links.get(worker)
        if link is None:
            return  # lost just now
        try:
            link.send(kind, payload)
        except LostError:
            self._lost(link)

    def _watch(self, before: float) -> None:
        """Kill whose heartbeat stopped; time in which this process stood still itself does not count."""
        now = time.monotonic()
        still = now - before
        for worker, beat in list(self._beats.items()):
            if still > 1.0:
                self._beats[worker] = beat + still
            elif now - beat > SILENCE_S_MAX:
                del self._beats[worker]
                child = self._supervisor.children[f"worker-{worker}"]
                if child.process is not None:
                    self._tell(f"worker-{worker} stands still for {SILENCE_S_MAX:g} s; it is killed")
                    child.process.kill()

    def _try(self, asker: Link) -> None:
        """Load new code where nothing is loaded yet, as workers will; meanwhile the run goes on."""
        if self._trial is not None:
            self._tell_asker(asker, "another deploy is under way")
            return
        log = self._work / "logs" / "deploy.log"
        try:
            log.unlink(missing_ok=True)
            process = FreshLauncher().launch(["millwheel", "check", self._name], log)
        except OSError as error:
            self._tell_asker(asker, f"the new code can't be tried: {error}")
            return
        self._trial = _Trial(process, log, asker, time.monotonic() + _TRIAL_S)

    def _end_trial(self) -> None:
        trial = self._trial
        wrong = None if trial is None else trial.outcome()
        if trial is None or wrong is None:
            return
        self._trial = None
        topology = None
        if not wrong:
            try:
                topology = _fresh(self._name)
            except PhotonError as error:  # it has become another one meanwhile
                wrong = str(error)
        self._tell_asker(trial.asker, wrong)
        if topology is not None:
            self._begin_anew(topology)

    def _tell_asker(self, asker: Link, wrong: str) -> None:
        """Of a deploy."""
        answer = {"error": f"not deployed, the run goes on as it was: {wrong}"} if wrong else {"ok": True}
        with contextlib.suppress(LostError):
            asker.send(links.ANSWER, pack(answer))

    def _begin_anew(self, topology: Topology) -> None:
        """New code, by workers that import it."""
        self._tell("new code: the workers start again")
        self._restarts += self._supervisor.restarts()
        self._supervisor.stop(list(self._supervisor.children), _STOP_S)
        marks = self._authority.marks
        self._plan = self._number(topology)
        self._authority = Authority(self._plan.sources, self._workers)
        self._authority.restore(marks)
        self._stragglers = Stragglers(self._plan.topology.injectors)
        self._beats.clear()
        self._finished.clear()
        self._ended = False
        self._start()


def _fresh(name: str) -> Topology:
    """The topology as its modules are now: its own, its package's, and others of the current directory."""
    module = name.partition(":")[0]
    importlib.invalidate_caches()
    for loaded in list(sys.modules):
        if loaded == module or loaded.startswith(f"{module}.") or _is_users(loaded, module):
            del sys.modules[loaded]
    return load_topology(name)


def _is_users(loaded: str, module: str) -> bool:
    top = loaded.partition(".")[0]
    if top in _OURS:
        return False
    here = Path.cwd()
    return top == module.partition(".")[0] or (here != _HOME and _found_in(top) == here)


def _found_in(top: str) -> Path | None:
    """The directory in which a module, or a package, was found."""
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec is not None and spec.has_location else None


def ask(work: Path, *question: str, timeout_s: float = 10.0) -> Any:
    """A question to the run in this directory. PhotonError if there is none, or for its own error."""
    try:
        answer = links.ask(work, CONTROL, list(question), timeout_s)
    except (OSError, ConnectionError) as error:
        raise PhotonError(
            f"{work}: no run of MillWheel answers here; `photon millwheel run` starts one"
        ) from error
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer
