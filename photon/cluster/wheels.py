"""A run of MillWheel on this machine: worker processes, and who asks after them.

Of one machine alone, or of several (millwheel.machines), one of which leads. A worker that ends is started
again; one whose heartbeat stops is killed first, so that nobody waits for what it holds.
"""

import contextlib
import importlib
import json
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from millwheel import history, links
from millwheel.engine.logged import LoggedStore
from millwheel.engine.plan import NUMBERS_ROW, Plan, check_states, numbered, pack_numbers, unpack_numbers
from millwheel.engine.store import GIVEN, TAKEN_UP
from millwheel.errors import ReplacedError, ZombieError
from millwheel.links import CONTROL, Link, LostError, Ways, pack, unpack
from millwheel.machines import LEASE_S, Alone, Machine, Machines, Round, holder_of, next_round
from millwheel.push import PushedLogs
from millwheel.topology import DEAD_LETTERS, Topology, load_topology
from millwheel.worker import pushed_logs, shared_store, store_of
from photon.cluster.master import Master
from photon.cluster.supervisor import FreshLauncher, Process, Supervisor, last_message
from photon.cluster.topology import network_of
from photon.connect.uris import parse_uri
from photon.core.addresses import split_address
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock, make_directory, storage_errors, write_file
from photon.core.errors import PhotonError, StorageError, UsageError
from photon.core.settings import load_settings
from photon.logs.shares import SLOTS
from photon.rpc.network import Network

READY: Final = "millwheel.ready.topologies:"
"""What names of ready-made topologies begin with."""
SILENCE_S_MAX: Final = 5.0
"""Of a worker that began: then it is killed."""
_POLL_S: Final = 0.05
_STOP_S: Final = 10.0
_MOVE_S: Final = 2.0
"""The same while others wait for their part: a worker may be killed at any time."""
_PORT_MAX: Final = 65_535
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
        store: str = "",
        history: Path | None = None,
        machine: str = "",
        config: Path | None = None,
    ) -> None:
        """`history`: what a run that has not begun takes up first (millwheel.history). `machine`: where the
        other machines of the run reach this one, as [tls] of `config` says. UsageError, TopologyError,
        LockedError, StorageError."""
        if not 1 <= workers <= SLOTS:
            raise UsageError(f"--workers {workers}: give 1 to {SLOTS}")
        self._name, self._work, self._follow, self._tell = name, work, follow, tell
        self._store, self._history, self._config = store, history, config
        self._topology = load_topology(name)
        self._network = _network(machine, workers, store, config, self._topology)
        with storage_errors(work):
            make_directory(work)
        self._supervisor = Supervisor(work / "logs")
        self._selector = selectors.DefaultSelector()
        self._master: Master | None = None
        """If this machine leads."""
        self._beats: dict[int, float] = {}
        self._computes = False
        """Its workers of the round are started."""
        self._stop = False
        self._trial: _Trial | None = None
        self._restarts = 0
        """Of workers that were stopped since."""
        self._began = time.monotonic()
        self._machines: Machines | Alone = Alone(workers)
        self._lock = DirectoryLock(work)
        try:
            self._same_store()
            if store:
                me = Machine(holder_of(work), f"{socket.gethostname()}:{work.absolute()}", machine, workers)
                self._machines = Machines(shared_store(store, again_s=LEASE_S), me, SystemClock())
                self._machines.enter()
            while self._machines.view.leads and self._master is None:
                self._agree()
        except BaseException:
            self._let_go()
            raise

    def run(self) -> dict[str, Any]:
        """Until the logs are worked off, or somebody stops it. The summary."""
        me = self._machines.me
        with contextlib.ExitStack() as held:
            held.callback(self._let_go)
            listeners = [links.listen(self._work, CONTROL)]
            if me.address:
                listeners.append(self._bind(me.address))
            for listener in listeners:
                self._selector.register(held.enter_context(listener), selectors.EVENT_READ)
            for number in (signal.SIGTERM, signal.SIGINT):
                held.callback(signal.signal, number, signal.signal(number, self._on_stop))
            try:
                while not self._stop and not self._is_over:
                    self._turn()
                self._stop_workers(_STOP_S)
            finally:
                self._supervisor.kill()
                if self._trial is not None:
                    self._trial.kill()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        now = self._machines.view.round
        told = now.summary if self._master is None else self._master.summary()
        return {
            "seconds": round(time.monotonic() - self._began, 3),
            "workers": len(now.workers),
            "ended": False,
            "restarts": self._restarts + self._supervisor.restarts(),
            "dead_letters": 0,
            "counts": {},
            **told,
        }

    def _let_go(self) -> None:
        self._machines.end()
        self._lock.release()

    def _bind(self, address: str) -> socket.socket:
        try:
            return Ways(self._work, network=self._network).bind(address)
        except OSError as error:
            raise UsageError(f"--machine {address}: it can't be listened on ({error.strerror})") from error

    # Rounds

    @property
    def _is_over(self) -> bool:
        return self._computes and self._machines.view.round.stage == "ended"

    def _agree(self) -> None:
        """Workers stop if they are of a former round. Who leads begins the next one when it is time."""
        view = self._machines.view
        if view.round.number != self._machines.at:
            self._stop_workers(_MOVE_S)
            self._machines.stopped(view.round.number)
            return
        if not view.leads:
            if self._master is not None and not self._machines.me.address:
                raise ReplacedError("another run has this now")
            self._master = None
            return
        knows = 0 if self._master is None else self._master.number
        following = next_round(self._machines.me, self._machines.at, knows, view)
        if following is None:
            time.sleep(0 if self._computes else _POLL_S)  # others are still to stop
        elif not self._is_over:
            self._publish(following)

    def _publish(self, following: Round) -> None:
        try:
            if following.stage == "running":
                master = Master(self._number(following.number), following, self._send)
                if self._master is not None:
                    master.authority.restore(self._master.authority.marks)
                self._master = master
                if len(following.machines) > 1:
                    self._tell(f"computed by {', '.join(machine.shown for machine in following.machines)}")
            elif self._master is None and following.number > 1:
                self._topology = _fresh(self._name)  # who led before may have deployed another
            self._machines.publish(following)
        except ZombieError:
            self._master = None
            self._machines.deposed()

    def _start_workers(self) -> None:
        now, me = self._machines.view.round, self._machines.me
        self._computes = True
        for name, injector in self._topology.injectors.items():
            if injector.listen:
                # Before anybody looks: what was pushed in time must not come late because of a crash.
                PushedLogs(pushed_logs(self._work, name), SystemClock()).close()
                if self._follow:
                    arguments = ["millwheel", "receiver", self._name, "--work", str(self._work)]
                    self._supervisor.start(f"receiver-{name}", [*arguments, "--injector", name])
        lead = next(machine.address for machine in now.machines if machine.holder == now.lead)
        common = ["--work", str(self._work), "--workers", str(len(now.workers)), "--round", str(now.number)]
        common += ["--store", self._store] if self._store else []
        common += ["--lead", lead, "--addresses", ",".join(now.addresses)] if lead else []
        common += ["--config", str(self._config)] if self._config is not None else []
        common += [] if self._follow else ["--drain"]
        for worker, machine in enumerate(now.workers):
            if machine.holder == me.holder:
                arguments = ["millwheel", "worker", self._name, "--worker", str(worker), *common]
                self._supervisor.start(f"worker-{worker}", arguments)

    def _stop_workers(self, grace_s: float) -> None:
        self._restarts += self._supervisor.restarts()
        self._supervisor.stop(list(self._supervisor.children), grace_s)
        self._beats.clear()
        self._computes = False

    def _number(self, number: int) -> Plan:
        """Before workers start, whose number may be another: what former ones left is for all to see, and
        none of them commits any more."""
        topology = self._topology
        store = store_of(self._work, self._store, number)
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

    # What it hears

    def _turn(self) -> None:
        try:
            self._agree()
        except StorageError as error:
            if not self._store:
                raise
            self._tell(str(error))  # it is tried again
        if self._machines.view.round.stage == "running" and not self._computes:
            self._start_workers()
        self._supervisor.poll()
        for notice in self._supervisor.notices:
            self._tell(notice)
        self._supervisor.notices.clear()
        before = time.monotonic()
        for key, events in self._selector.select(_POLL_S):
            if key.data is None:
                with contextlib.suppress(OSError):
                    link = Ways(self._work, network=self._network).accept(key.fileobj)  # type: ignore[arg-type]
                    self._selector.register(link, link.events, link)
            else:
                self._hear(key.data, events)
        self._watch(before)
        self._end_trial()
        if self._master is not None and self._master.finished and not self._is_over:
            now = self._machines.view.round
            self._publish(msgspec.structs.replace(now, stage="ended", summary=self._master.summary()))

    def _hear(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for kind, payload in link.receive():
                    self._on(link, kind, unpack(payload))
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
            if f"worker-{said[0]}" not in self._supervisor.children:
                raise LostError  # it was stopped since
            self._beats[said[0]] = time.monotonic()
            link.send(links.LEASE, pack(self._machines.until))
        elif kind == links.ASK:
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
        try:
            link.send(kind, payload)
            links.watch(self._selector, link)
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
        self._topology = topology
        now = self._machines.view.round
        self._publish(Round(now.number + 1, self._machines.me.holder, "stopping"))


def _network(machine: str, workers: int, store: str, config: Path | None, topology: Topology) -> Network:
    """By which machines of a run reach each other. UsageError, SettingsError."""
    if not machine:
        return Network()
    _, port = split_address(machine, "--machine")
    network = network_of(load_settings(config))
    network.bound(machine)
    if not store:
        raise UsageError("--machine is for a run whose state all its machines reach: name it by --store")
    if port + workers > _PORT_MAX:
        raise UsageError(f"--machine {machine}: the next {workers} ports are its workers': give a lower one")
    for name, injector in topology.injectors.items():
        if injector.listen:
            raise UsageError(
                f"injector '{name}' is pushed to, and keeps that on one machine: leave --machine out"
            )
    if DEAD_LETTERS not in topology.sinks:
        raise UsageError(
            "dead letters of a run on several machines need a place that all of them reach: add to the "
            f'topology\'s sinks "{DEAD_LETTERS}": LogSink(DIRECTORY)'
        )
    return network


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
