"""One process's replicas, of many groups, over one listening port and in one thread (the "raft thread").

Each turn: wait for sockets, a wake-up or the next deadline; deliver what came; sync the journals it went to
and let the acknowledgements out; then tick the replicas (apply, `on_tick`, send), write, and sync what the
ticks have added. A follower acknowledges before it applies, so that its leader need not wait for that.
"""

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from photon.raft.addresses import Address, Endpoint
from photon.raft.core import now
from photon.raft.port import RaftLimits, RaftTiming, ReplicatedLog, StateMachine
from photon.raft.replica import NodeContext, Replica
from photon.raft.store import IDENTITY_BYTES, Home, delete
from photon.raft.transport import Transport

_log = logging.getLogger(__name__)

# The longest sleep, though no deadline is near.
_SLEEP_S_MAX = 1.0
_JOIN_S = 10.0


class BackgroundJobs:
    """Work beside the raft thread: one piece at a time, in one thread (never a forked process)."""

    def __init__(self, finished: Callable[[], None]) -> None:
        """`finished`: called from the thread when a piece ends."""
        self._finished = finished
        self._executor = ThreadPoolExecutor(1, "raft-snapshot")
        self._running: Future[None] | None = None

    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def start(self, work: Callable[[], None]) -> Future[None]:
        assert not self.busy()
        self._running = self._executor.submit(work)
        self._running.add_done_callback(lambda _: self._finished())
        return self._running

    def stop(self, seconds: float) -> None:
        """Start no more, and wait for the running piece to end."""
        self._executor.shutdown(wait=False)
        if self._running is not None:
            wait([self._running], seconds)


class _GroupWire:
    """One group's share of the connections."""

    def __init__(self, transport: Transport, group: int) -> None:
        self._transport = transport
        self._group = group

    def send(self, peer: str, data: bytes) -> None:
        self._transport.send(peer, self._group, data)

    def room(self, peer: str) -> int:
        return self._transport.room(peer)


class RaftHost:
    """Make one, `add_group` each group that is there, `start`, and in the end `stop`.

    Groups, and peers, may come and go in the raft thread while it runs.

    The first error of a disk or a state machine stops all replicas of the host and is given to `on_fatal`,
    in the raft thread: nothing was acknowledged that is not on disk, and a restart goes on from there.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peers: Mapping[str, Address],
        directory: Path,
        timing: RaftTiming,
        limits: RaftLimits,
        rng: random.Random,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`peers`: the OTHER nodes, by id, with their addresses.

        CorruptStateError where something is missing that was in `directory`; LockedError, StorageError.
        """
        self._node = endpoint.node
        self._on_fatal = on_fatal
        self._home = Home(directory)
        try:
            self._transport = Transport(endpoint, self._home.life, peers, self, timing, limits, rng)
        except BaseException:
            self._home.close()
            raise
        self._jobs = BackgroundJobs(self.wake)
        self._context = NodeContext(self._node, self._jobs, timing, limits, rng, self._home.has_met)
        self._replicas: dict[int, Replica] = {}
        self._leaving: dict[int, Replica | None] = {}  # until the end of the turn
        self._buried: deque[Path] = deque()  # to be deleted beside the raft thread
        self._connected: set[str] = set()
        self._lives: dict[str, bytes] = {}  # of peers that have come to the end of a handshake, or near it
        self._touched: set[int] = set()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._woken = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._unknown_group_told = False

    def groups_on_disk(self) -> list[int]:
        """The groups that this host has a replica of: each must be added before `start`."""
        return self._home.groups()

    def add_group(
        self,
        group: int,
        machine: StateMachine,
        on_tick: Callable[[ReplicatedLog], None],
        founders: Sequence[str] | None,
    ) -> ReplicatedLog:
        """Open this node's replica of a group; restores `machine` from its snapshot.

        Before `start`, or in the raft thread. `founders`: the nodes that found the group, this one among
        them, the same on each and in the same order; it begins once they have all met, now or ever before,
        and the first of them leads it without waiting for an election timeout. None where this one
        joins a group that has founders already: it belongs to nothing until a leader adds it. Ignored where
        the group is on disk. `on_tick` is called in the raft thread each turn: propose there what waits.
        Raises CorruptStateError, LockedError, StorageError.
        """
        wire = _GroupWire(self._transport, group)
        directory = self._home.group(group)
        replica = Replica(self._context, group, directory, machine, on_tick, wire, founders)
        try:
            self._home.added(group)
        except BaseException:
            replica.abandon()
            raise
        self._replicas[group] = replica
        for peer in self._connected:
            replica.peer_up(peer)
        self._touched.add(group)
        return replica

    def remove_group(self, group: int) -> None:
        """Stop this node's replica of a group, where there is one, and delete what it has on disk.

        Before `start`, or in the raft thread: at the end of the turn then, so that a group may remove itself
        from its own `on_tick`. The files go whole or not at all. Raises StorageError.
        """
        replica = self._replicas.pop(group, None)
        if replica is not None or group in self._home.groups():
            self._leaving[group] = replica
        if self._thread is None:
            self._bury()

    def set_peers(self, addresses: Mapping[str, Address]) -> None:
        """Who may be spoken to from now on, and where; this node is left out. Raft thread only.

        Who is not named any more is disconnected and refused.
        """
        others = {peer: address for peer, address in addresses.items() if peer != self._node}
        self._transport.set_peers(others)

    @property
    def versions(self) -> dict[str, int]:
        """Peer that is connected -> the newest protocol version that it knows. Raft thread only."""
        return self._transport.versions

    def start(self) -> Address:
        """Listen and run; returns the address listened on. Raises AddressInUseError, UsageError."""
        address = self._transport.listen()
        self._transport.watch(self._wake_fd)
        self._touched.update(self._replicas)
        self._thread = threading.Thread(target=self._run, name=f"raft-{self._node}", daemon=True)
        self._thread.start()
        return address

    def stop(self) -> None:
        """Hand leadership over, sync, close, and wait for the thread.

        Again, or before `start`, it does no harm.
        """
        self._stopping = True
        self.wake()
        if self._thread is None:
            self._end(Replica.stop)
        elif self._thread is not threading.current_thread():
            self._thread.join()
        self._jobs.stop(_JOIN_S)

    def wake(self) -> None:
        """Have every group's `on_tick` called soon. Any thread; cheap, and once is as good as often."""
        if self._woken:
            return
        with self._wake_lock:
            if self._wake_fd >= 0:
                self._woken = True
                os.eventfd_write(self._wake_fd, 1)

    # -- the raft thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            for replica in self._replicas.values():
                replica.hand_over()
            self._transport.flush()
            self._end(Replica.stop)
        except BaseException as error:  # fail-stop: whatever it was, nothing more is acknowledged
            self._end(Replica.abandon)
            self._on_fatal(error)

    def _turn(self) -> None:
        self._transport.poll(self._sleep_s())
        self._transport.tick(now())
        self._sync([replica for group, replica in self._replicas.items() if group in self._touched])
        due = self._due()
        for replica in due:
            if not self._is_gone(replica):  # another's on_tick may have removed it
                replica.tick()
        self._bury()
        # A leader's entries are on their way while its own disk works.
        self._transport.flush()
        self._sync([replica for replica in due if not self._is_gone(replica)])

    def _sync(self, replicas: Iterable[Replica]) -> None:
        """What they have taken in is on disk, and on its way is what may be said because of it."""
        for replica in replicas:
            replica.sync()
        self._transport.flush()

    def _due(self) -> list[Replica]:
        """The replicas that something has happened to, or whose time has come."""
        if self._woken:
            with self._wake_lock:
                os.eventfd_read(self._wake_fd)
                # Cleared before on_tick is called: what is queued from here on wakes the next turn.
                self._woken = False
            self._touched.update(self._replicas)
        touched, self._touched = self._touched, set()
        at = now()
        return [
            replica
            for group, replica in self._replicas.items()
            if group in touched or replica.deadline() <= at
        ]

    def _is_gone(self, replica: Replica) -> bool:
        return self._replicas.get(replica.group) is not replica

    def _bury(self) -> None:
        """The removed groups' replicas are stopped and their files deleted."""
        while self._leaving:
            group, replica = self._leaving.popitem()
            if replica is not None:
                replica.abandon()
            self._buried.append(self._home.remove(group))
        if self._buried and not self._jobs.busy():
            self._jobs.start(partial(delete, self._buried.popleft()))

    def _sleep_s(self) -> float:
        if self._woken or self._touched:
            return 0.0
        first = min((replica.deadline() for replica in self._replicas.values()), default=now() + _SLEEP_S_MAX)
        return min(_SLEEP_S_MAX, min(first, self._transport.deadline()) - now())

    def _end(self, how: Callable[[Replica], None]) -> None:
        """Stop or abandon all replicas; where one can't be stopped, abandon the others."""
        self._transport.close()
        self._close_wake()
        left = [*self._replicas.values(), *filter(None, self._leaving.values())]
        self._replicas = {}
        try:
            while left:
                how(left.pop())
        except BaseException:
            for replica in left:
                replica.abandon()
            raise
        finally:
            self._home.close()

    def _close_wake(self) -> None:
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    # -- what the transport tells (transport.Receiver) --------------------------------------------------

    def last_life(self, peer: str) -> bytes:
        return self._home.last_life(peer)

    def life_seen(self, peer: str, life: bytes, last_life: bytes) -> str | None:
        self._home.check_life(peer, last_life)
        self._lives[peer] = life
        return self._home.identity_seen(peer, life[:IDENTITY_BYTES])

    def peer_up(self, peer: str) -> None:
        self._home.met(peer, self._lives[peer])
        self._connected.add(peer)
        for replica in self._replicas.values():
            replica.peer_up(peer)
        self._touched.update(self._replicas)

    def peer_down(self, peer: str) -> None:
        self._connected.discard(peer)
        for replica in self._replicas.values():
            replica.peer_down(peer)
        self._touched.update(self._replicas)

    def frame(self, peer: str, group: int, message: bytes) -> None:
        replica = self._replicas.get(group)
        if replica is not None:
            if replica.receive(peer, message):
                self._touched.add(group)
        elif not self._unknown_group_told:
            self._unknown_group_told = True
            _log.warning("raft %s: %s speaks of group %d, which is not hosted here", self._node, peer, group)
