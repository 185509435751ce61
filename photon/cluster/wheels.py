"""A run of MillWheel on this machine: worker processes, and who asks after them.

Of one machine alone, or of several (millwheel.machines), one of which leads. A worker that ends is started
again; one whose heartbeat stops is killed first, so that nobody waits for what it holds. Workers are forks of
a process that has imported what is ours. New code is tried by a process of its own, then loaded in place of
what is loaded.
"""

import contextlib
import json
import operator
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from millwheel import code, links
from millwheel.engine.plan import shape
from millwheel.engine.records import SLOTS
from millwheel.errors import ZombieError
from millwheel.links import CONTROL, Link, LostError, Ways, pack
from millwheel.machines import (
    LEASE_S,
    Alone,
    Machine,
    Machines,
    Round,
    holder_of,
    next_round,
    stopping,
    unlike,
)
from millwheel.push import PushedLogs
from millwheel.topology import dead_letters
from millwheel.worker import shared_store
from photon.cluster.begun import Begun
from photon.cluster.master import Master
from photon.cluster.nursery import WHEEL, Nursery
from photon.cluster.supervisor import FreshLauncher, Process, Supervisor, last_message
from photon.cluster.wheel_start import check_start, network_among
from photon.connect.copies import forget_known, known_to
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors, write_file
from photon.core.errors import PhotonError, StorageError, UsageError
from photon.core.settings import load_settings
from photon.rpc.network import network_of

SILENCE_S_MAX: Final = 5.0
"""Of a worker that began: then it is killed."""
_POLL_S: Final = 0.05
_STOP_S: Final = 10.0
_MOVE_S: Final = 2.0
"""The same while others wait for their part: a worker may be killed at any time."""
TRIAL_S: Final = 60.0
"""In which new code is to be loaded."""
DEPLOY_S: Final = TRIAL_S + 10.0
"""In which a run answers a deploy."""
Tell = Callable[[str], None]


class WheelRun:
    """A machine of a run (millwheel.machines): its workers, and if it leads what all workers report to.

    `name`: MODULE:TOPOLOGY. `follow`: the logs grow; else the run ends when all of them is worked off.
    """

    def __init__(
        self,
        name: str,
        work: Path,
        workers: int,
        follow: bool,
        tell: Tell,
        stores: Sequence[str] = (),
        history: Path | None = None,
        machine: str = "",
        config: Path | None = None,
    ) -> None:
        """`stores`, `history`: as of Begun. `machine`: where the other machines of the run reach this one, as
        [tls] of `config` says. UsageError, TopologyError, LockedError, StorageError."""
        if not 1 <= workers <= SLOTS:
            raise UsageError(f"--workers {workers}: give 1 to {SLOTS}")
        self._name, self._work, self._follow, self._tell = name, work, follow, tell
        self._begun, self._config = Begun(name, work, tuple(stores), history), config
        self._topology, self._code = code.load(name)
        self._ways = Ways(work, network=network_among(machine, workers, bool(stores), config, self._topology))
        with storage_errors(work):
            make_directory(work)
        begins = not (stores or machine or history or (work / "state").exists())
        check_start(self._topology, follow, begins)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._master: Master | None = None
        """If this machine leads."""
        self._beats: dict[int, float] = {}
        self._computes = False
        """Its workers of the round are started."""
        self._stop = self._anew = False
        """It ends; workers start again, by new code."""
        self._deploys = 0
        """Up to the code that it has: as of a round."""
        self.stalled: dict[str, Any] | None = None
        """Why it gave up, as `why` tells it."""
        self._wrong = ""
        """With the store, as it was told."""
        self._trial: Trial | None = None
        self._began = time.monotonic()
        self._machines: Machines | Alone = Alone(workers)
        self._lock = DirectoryLock(work)
        self._nursery = Nursery(WHEEL)
        self._supervisor = Supervisor(work / "logs", self._nursery)
        try:
            self._begun.check_place()
            if machine:
                self._listeners.append(self._bind(machine))
            if stores:
                shown, made = f"{socket.gethostname()}:{work.absolute()}", shape(self._topology)
                me = Machine(holder_of(work), shown, machine, workers, made)
                for uri in stores[1:]:
                    shared_store(uri).close()  # it can be used
                store = shared_store(stores[0], again_s=LEASE_S)
                self._machines = Machines(store, me, SystemClock(), len(stores))
                self._machines.enter()
            while self._machines.view.leads and self._master is None:
                if not self._agree():
                    time.sleep(_POLL_S)  # others are still to stop
        except BaseException:
            self._let_go()
            raise

    def run(self) -> dict[str, Any]:
        """Until the logs are worked off, or somebody stops it. The summary."""
        with contextlib.ExitStack() as held:
            held.callback(self._let_go)
            self._listeners.append(links.listen(self._work, CONTROL))
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
            for number in (signal.SIGTERM, signal.SIGINT):
                held.callback(signal.signal, number, signal.signal(number, self._on_stop))
            try:
                while not self._stop and not self._is_over and self.stalled is None:
                    self._turn()
                self._supervisor.stop(list(self._supervisor.children), _STOP_S)
                while self._listen(0.0):  # to the last words of workers
                    pass
            finally:
                self._supervisor.kill()
                if self._trial is not None:
                    self._trial.kill()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        now = self._machines.view.round
        told = now.summary if self._master is None else self._master.summary()
        copies = [
            known_to(one, now.reign if injector.copies and self._begun.stores else 0)
            for name, injector in self._topology.injectors.items()
            for one in injector.copied_to(injector.received(self._work, name))
        ]
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "workers": len(now.workers),
            "ended": False,
            "restarts": self._supervisor.restarts(),
            "dead_letters": 0,
            "lost_records": sum(known.lost for known in copies),
            "timers": 0,
            "counts": {},
            "sinks": [],
            **told,
        }

    @property
    def dead_letters(self) -> str:
        """The directory of their files."""
        return dead_letters(self._topology, self._work).directory

    def _let_go(self) -> None:
        self._nursery.close()
        self._machines.end()
        for listener in self._listeners:
            listener.close()
        self._lock.release()

    def _bind(self, address: str) -> socket.socket:
        try:
            return self._ways.bind(address)
        except OSError as error:
            raise UsageError(f"--machine {address}: it can't be listened on ({error.strerror})") from error

    # Rounds

    @property
    def _is_over(self) -> bool:
        return self._computes and self._machines.view.round.stage == "ended"

    def _agree(self) -> bool:
        """Workers stop if they are of a former round. Who leads begins the next one when it is time. Whether
        anything was to be done. PhotonError, StorageError, UsageError."""
        view, me = self._machines.view, self._machines.me
        if view.round.number != self._machines.at:
            self._stop_workers(_MOVE_S if me.address else _STOP_S)
            if self._machines.at and view.round.deploys != self._deploys and (wrong := self._reload()):
                self._tell(f"the code that was deployed can't be had here, the former one stays: {wrong}")
            self._deploys = view.round.deploys
            self._machines.stopped(view.round.number, shape(self._topology))
            return True
        if not view.leads:
            if not me.address:
                raise PhotonError("another run has this now")
            if view.lead is not None and (differs := unlike(me, view)):
                raise UsageError(
                    f"{view.lead.shown} runs another topology (here {differs}): bring the same code to all "
                    "machines, then `photon millwheel deploy`"
                )
            self._master = None
            return False
        knows = 0 if self._master is None else self._master.number
        following = next_round(me, self._machines.at, knows, view, self._machines.stores)
        if self._anew and view.round.stage == "running":
            following = stopping(view.round, me)
        elif self._master is not None and self._master.finished and knows == view.round.number:
            following = msgspec.structs.replace(view.round, stage="ended", summary=self._master.summary())
        elif following is None and self._master is not None and view.round.stage == "running":
            shares = self._master.better()
            following = None if shares is None else stopping(view.round, me, shares)
        if following is None or self._is_over:
            return False
        if self._anew and following.stage == "stopping":
            following = msgspec.structs.replace(following, deploys=view.round.deploys + 1)
        self._publish(view.round, following)
        return True

    def _publish(self, former: Round, following: Round) -> None:
        """StorageError, UsageError."""
        self._machines.turned = None  # a large store takes its time
        try:
            if following.stage == "running":
                plan = self._begun.number(self._topology, following.number)
                reign = following.number if self._master is None else self._master.reign
                following = msgspec.structs.replace(following, reign=reign)
                master = Master(plan, following, self._send)
                if self._master is not None:
                    master.authority.restore(self._master.authority.marks)
                self._master = master
                if len(following.machines) > 1:
                    self._tell(f"computed by {', '.join(machine.shown for machine in following.machines)}")
                others = [one.machine for one in self._machines.view.members]
                for other in [one.shown for one in others if one.shape != self._machines.me.shape]:
                    self._tell(f"{other} runs another topology, and has no part before it has the same code")
            self._machines.publish(former, following)
            if following.deploys != former.deploys:
                self._deploys, self._anew = following.deploys, False
            if following.stage == "stopping" and following.shares != former.shares:
                moved = sum(map(operator.ne, former.shares.owners, following.shares.owners))
                self._tell(f"the load is uneven: {moved} of {SLOTS} key intervals move to other workers")
        except ZombieError:
            self._master = None
            self._machines.deposed()

    def _reload(self) -> str:
        """The code as it is now. What is wrong with it, if anything: then the former stays."""
        self._machines.turned = None  # it may take long
        number = self._machines.view.round.number
        try:
            self._topology, self._code = code.load(self._name, lambda new: self._begun.check(new, number))
        except PhotonError as error:  # such as state that it does not read
            return str(error)
        return ""

    def _start_workers(self, now: Round) -> None:
        me, stores = self._machines.me, self._begun.stores
        if now.stores != (here := self._machines.stores):
            raise UsageError(
                f"{here} of --store here, {now.stores} in this run: give the same on all machines"
            )
        self._computes = True
        with storage_errors(self._work):
            write_file(self._work / code.FILE, self._code)
        self._start_receivers(now)
        lead = next(machine.address for machine in now.machines if machine.holder == now.lead)
        given = {
            "owners": now.shares.owners,
            "round": now.number,
            "holder": now.lead,
            "lead": lead,
            "addresses": now.addresses,
            "config": self._config and str(self._config),
            "drain": not self._follow,
            "reign": now.reign if stores else 0,
        }
        for worker, machine in enumerate(now.workers):
            if machine.holder == me.holder:
                store = stores[worker % len(stores)] if stores else ""
                own = json.dumps({**given, "worker": worker, "store": store})
                arguments = ["millwheel", "worker", "--work", str(self._work), self._name, own]
                self._supervisor.start(f"worker-{worker}", arguments)

    def _start_receivers(self, now: Round) -> None:
        """Those that are still to be started. Of shared copies who leads has them, and nobody else."""
        me, stores, children = self._machines.me, self._begun.stores, self._supervisor.children
        shared = {name for name, injector in self._topology.injectors.items() if injector.copies and stores}
        arguments = ["millwheel", "receiver", self._name, "--work", str(self._work)]
        arguments += [] if self._follow else ["--drain"]
        arguments += ["--config", str(self._config)] if self._config else []
        for name, injector in self._topology.injectors.items():
            own = ["--injector", name]
            if name in shared:
                own += ["--shared", stores[0], str(now.reign)]
            child = children.get(f"receiver-{name}")
            if child is not None and name in shared and child.arguments != [*arguments, *own]:
                self._supervisor.stop([child.name], _MOVE_S)  # it has led before
            elif child is not None:
                continue
            received = injector.received(self._work, name)
            for copies in () if name in shared else injector.copied_to(received):
                forget_known(copies)
            if injector.listen:
                # Before anybody looks: what was pushed in time must not come late because of a crash.
                PushedLogs(received, SystemClock()).close()
            leads = name not in shared or now.lead == me.holder
            if leads and (injector.imported or (injector.listen and self._follow)):
                self._supervisor.start(f"receiver-{name}", [*arguments, *own])

    def _stop_workers(self, grace_s: float) -> None:
        """Receivers go on: who pushes does not wait for a round."""
        workers = [name for name in self._supervisor.children if name.startswith("worker-")]
        self._supervisor.stop(workers, grace_s)
        self._beats.clear()
        self._computes = False

    def _on_stop(self, *_: object) -> None:
        self._stop = True

    # What it hears

    def _turn(self) -> None:
        try:
            self._agree()
        except StorageError as error:
            if not self._begun.stores:
                raise
            self._tell(str(error))  # it is tried again
        self._machines.turned = time.monotonic()
        now = self._machines.view.round
        if now.stage == "running" and now.number == self._machines.at and not self._computes:
            self._start_workers(now)
        if self._machines.wrong != self._wrong:
            self._wrong = self._machines.wrong
            self._tell(f"workers wait: {self._wrong}" if self._wrong else "workers go on")
        self._supervisor.poll()
        for notices in (self._supervisor.notices, *([self._master.notices] if self._master else ())):
            while notices:
                self._tell(notices.pop(0))
        before = time.monotonic()
        self._listen(_POLL_S)
        for stranger in links.strangers(self._selector):
            self._lost(stranger)
        self._watch(before)
        self._end_trial()
        if self._master is not None and not self._follow:
            self.stalled = self._master.stalled()

    def _listen(self, wait_s: float) -> bool:
        """Whether there was anything."""
        found = self._selector.select(wait_s)
        for key, events in found:
            if key.data is None:
                with contextlib.suppress(OSError):
                    link = self._ways.accept(key.fileobj)  # type: ignore[arg-type]
                    self._selector.register(link, link.events, link)
            else:
                self._hear(key.data, events)
        return bool(found)

    def _hear(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for kind, payload in link.receive():
                    self._on(link, kind, links.read(kind, payload))
            link.flush()
            links.watch(self._selector, link)
        except LostError:
            self._lost(link)

    def _lost(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        link.close()
        if self._master is not None:
            self._master.lost(link)

    def _on(self, link: Link, kind: int, said: Any) -> None:
        """LostError for who is of no use here."""
        if kind == links.BEAT:
            child = self._supervisor.children.get(f"worker-{said[0]}")
            if child is None or child.process is None or child.process.pid != said[1]:
                raise LostError  # it was stopped since
            link.known = True
            self._beats[said[0]] = time.monotonic()
            link.send(links.LEASE, pack(self._machines.until))
        elif kind == links.ASK:
            link.known = True
            if self._master is None:
                link.send(links.ANSWER, pack(self._elsewhere()))
            elif said == ["deploy"]:
                self._try(link)
            else:
                link.send(links.ANSWER, pack(self._answer(said)))
        elif self._master is None:
            raise LostError
        else:
            self._master.hear(link, kind, said)

    def _elsewhere(self) -> dict[str, Any]:
        """Whom to ask."""
        now = self._machines.view.round
        for machine in now.machines:
            if machine.holder == now.lead and machine.address and not self._machines.view.leads:
                config = None if self._config is None else str(self._config.absolute())
                return {"lead": machine.address, "config": config}
        return {"error": "the machines are about to agree on who leads: ask again"}

    def _answer(self, said: Any) -> Any:
        master = self._master
        assert master is not None
        match said:
            case ["status"]:
                machines = [machine.shown for machine in self._machines.view.round.machines]
                told = {**self.summary(), "topology": self._name, "machines": machines}
                return {**told, **master.status()}
            case ["why", str(name)]:
                return master.why(name)
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

    def _send(self, link: Link, kind: int, payload: bytes) -> None:
        with contextlib.suppress(LostError):  # it is, once what it has said is read
            link.send(kind, payload)
            links.watch(self._selector, link)

    def _watch(self, before: float) -> None:
        """Kill whose heartbeat stopped; time in which this process stood still itself does not count."""
        now = time.monotonic()
        still = now - before
        if still > 1.0 and self._master is not None:
            self._master.stood_still(still)
        for worker, beat in list(self._beats.items()):
            process = self._supervisor.children[f"worker-{worker}"].process
            if process is None:  # the next one under this name has its own time to start
                del self._beats[worker]
            elif still > 1.0:
                self._beats[worker] = beat + still
            elif now - beat > SILENCE_S_MAX:
                del self._beats[worker]
                self._tell(f"worker-{worker} stands still for {SILENCE_S_MAX:g} s; it is killed")
                process.kill()

    def _try(self, asker: Link) -> None:
        """Load new code where nothing is loaded yet, as workers will; meanwhile the run goes on."""
        if self._trial is not None:
            self._tell_asker(asker, "another deploy is under way")
            return
        try:
            self._trial = Trial.begin(self._name, self._work / "logs" / "deploy.log", asker)
        except OSError as error:
            self._tell_asker(asker, f"the new code can't be tried: {error}")

    def _end_trial(self) -> None:
        trial = self._trial
        wrong = None if trial is None else trial.outcome()
        if trial is None or wrong is None:
            return
        self._trial = None
        wrong = wrong or self._reload()
        self._tell_asker(trial.asker, wrong)
        if not wrong:
            self._tell("new code: the workers start again")
            receivers = [name for name in self._supervisor.children if name.startswith("receiver-")]
            self._supervisor.stop(receivers, _STOP_S)
            self._anew = True

    def _tell_asker(self, asker: Link, wrong: str) -> None:
        """Of a deploy."""
        answer = {"error": f"not deployed, the run goes on as it was: {wrong}"} if wrong else {"ok": True}
        with contextlib.suppress(LostError):
            asker.send(links.ANSWER, pack(answer))


class Trial(NamedTuple):
    """New code, loaded and looked at by a process of its own, and who waits for the outcome."""

    process: Process
    log: Path
    asker: Link
    until: float

    @classmethod
    def begin(cls, name: str, log: Path, asker: Link) -> "Trial":
        """OSError."""
        log.unlink(missing_ok=True)
        process = FreshLauncher().launch(["millwheel", "check", name], log)
        return cls(process, log, asker, time.monotonic() + TRIAL_S)

    def outcome(self) -> str | None:
        """What is wrong with it; "" for nothing, None while that is not known."""
        status = self.process.poll()
        if status is None:
            if time.monotonic() < self.until:
                return None
            self.kill()
            return f"it was not loaded within {TRIAL_S:g} s"
        return "" if status == 0 else last_message(self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(work: Path, *question: str, timeout_s: float = 10.0) -> Any:
    """A question to the run in this directory. PhotonError if there is none, or for its own error."""
    try:
        answer = links.ask(links.connect(work, CONTROL), question, timeout_s)
        if "lead" in answer:
            config = answer["config"]
            network = network_of(load_settings(None if config is None else Path(config)))
            answer = links.ask(Ways(work, network=network).dial(answer["lead"]), question, timeout_s)
    except (OSError, ConnectionError) as error:
        raise PhotonError(
            f"{work}: no run of MillWheel answers here; `photon millwheel run` starts one"
        ) from error
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer
