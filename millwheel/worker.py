"""A worker process: one thread that reads, computes and sends; one that makes commits durable; a heartbeat.

While a commit is on its way to the disk the next one grows: under load commits become large, and when little
happens they hold single records.
"""

import contextlib
import gc
import os
import selectors
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from millwheel import links
from millwheel.computation import BEFORE, NEVER
from millwheel.disk import Disk
from millwheel.engine.calls import ID_BYTES, Calls, shown
from millwheel.engine.lateness import Lateness
from millwheel.engine.logged import LoggedStore
from millwheel.engine.plan import NUMBERS_ROW, Plan, unpack_numbers
from millwheel.engine.records import SLOTS, Frame, decode_frame, encode_frame
from millwheel.engine.shares import Work, slots_of
from millwheel.engine.store import keeper, lateness_row, sink_row
from millwheel.engine.wheel import Lines, Wheel
from millwheel.errors import ZombieError
from millwheel.links import CONTROL, Link, LostError, Ways, pack
from millwheel.sinks import SinkFiles, begin, end_publishing, is_elsewhere, published
from millwheel.sources import LogSource, position_rows
from millwheel.topology import DEAD_LETTERS, LogSink, Topology, dead_letters
from photon.connect.copies import drop_copy
from photon.core.clock import Clock
from photon.core.errors import UsageError
from photon.core.status import Notices
from photon.core.suspects import Suspects
from photon.logs.writer import LogPosition

if TYPE_CHECKING:
    from millwheel.postgresql import PostgresqlStore

UNACKED_BYTES_MAX: Final = 64 << 20
"""Of records that other workers have not acknowledged: beyond it nothing more is read. The log is the buffer.
"""
_CHUNKS_MAX: Final = 4
"""That are taken in while a commit is under way."""
_TICK_S: Final = 0.02
_IDLE_TICK_S: Final = 0.25
_SYNC_S: Final = 1.0
_STATUS_S: Final = 0.5
_CONNECT_S: Final = 0.05
_CONNECT_S_MAX: Final = 5.0
_Waiting = tuple[str, int, SinkFiles, list[int], LogPosition]
"""Sink, lane, files, the numbers of their lines, and where they end."""
_Synced = tuple[str, int, list[int], bytes]
"""Sink, lane, those numbers, and the place that the store is to note."""
BEAT_S: Final = 0.5


class Worker:
    """`me` of a round (millwheel.machines) of a run, of which `owners` are the workers of the slots. `drain`:
    the logs grow no more."""

    def __init__(
        self,
        ways: Ways,
        topology: Topology,
        me: int,
        owners: Sequence[int],
        drain: bool,
        clock: Clock,
        store: LoggedStore,
        reign: int = 0,
    ) -> None:
        """`reign`: as of LogSource. StorageError, UsageError; ConnectionError if there is no run."""
        self._ways, self._work, self._me, self._clock, self._drain = ways, ways.work, me, clock, drain
        self._workers = workers = max(owners) + 1
        self._round, self._reign = (ways.holder, ways.number), reign
        self._store = store
        self._plan = Plan(topology, unpack_numbers(self._store.numbers(NUMBERS_ROW)))
        slots = slots_of(owners, me)
        self._sequencer = self._store.claim(slots, me, workers)
        self._suspects = Suspects(self._work, f"worker-{me}", ID_BYTES)
        self._tell_found()
        calls = Calls(self._suspects.mark, self._suspects.deaths, self._suspects.clear)
        self._wheel = Wheel(self._plan, self._store, me, owners, self._sequencer, calls)
        self._spent = np.zeros(SLOTS)
        """Seconds, for each slot: to read its logs, and by its records and timers of the rest."""
        self._reading = self._worked = 0.0
        """Seconds: in this turn, and in all so far."""
        self._selector = selectors.DefaultSelector()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._news, selectors.EVENT_READ)
        self._notices = Notices("millwheel")
        self._sources = [self._source(name, set(slots), drain) for name in topology.injectors]
        self._sinks: dict[tuple[str, int], SinkFiles] | None = None
        """None until it may write to them."""
        self._thread = ThreadPoolExecutor(1, "commit")
        self._committing: Future[None] | None = None
        self._syncing: Future[list[_Synced]] | None = None
        self._places: list[tuple[str, int, bytes]] = []
        """Of sinks, in the next commit, and in the one under way."""
        self._places_committing: list[tuple[str, int, bytes]] = []
        self._read_up: list[Path] = []
        """Files that nobody needs once the commit under way is durable."""
        self._may_until = 0.0
        """As the run on this machine tells: by then it renews this, or others go on from here."""
        self._next_sync = self._next_status = self._next_connect = 0.0
        self._reported: dict[str, int] = {}
        self._chunks = 0
        self._stopping = self._in_order = self._finished = False
        """`_in_order`: the run waits until it has ended."""
        self._asked = self._answered = 0
        """Whether all is done: the numbers of the last such question, and of the one answered last."""
        self._ending = False
        """The sync under way is the last one."""
        self._in: dict[int, Link] = {}
        self._out: dict[int, Link] = {}
        self._dialed: dict[int, Link] = {}
        self._listener = ways.listen(me)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._control: Link | None = None
        self._report()
        threading.Thread(target=self._beat, daemon=True).start()

    def run(self) -> None:
        """Until it is told to stop, or the run is gone. StorageError, ZombieError."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop(in_order=True))
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 50)
        try:
            while not self._stopping:
                self._poll()
                if self._may_go_on:
                    began = self._clock.monotonic()
                    if self._sinks is None:
                        self._sinks = self._open_sinks()
                    self._look()
                    self._commit()
                    self._tell()
                    self._account(self._clock.monotonic() - began)
            if self._in_order and self._sinks is not None and self._may_go_on:
                self._note_sinks()
                self._send(self._control, links.STATUS, pack([self._me, self._status()]))
        finally:
            end_publishing(self._sinks or {}, self._clock)
            self._thread.shutdown(wait=True)
            for source in self._sources:
                source.close()

    def _account(self, seconds: float) -> None:
        """Of a turn, for who says which worker has which slots."""
        work = self._wheel.work()
        if (all_work := int(work.sum())) > 0:
            self._spent += work * ((seconds - self._reading) / all_work)
        self._worked += seconds
        self._reading = 0.0

    def _stop(self, in_order: bool = False) -> None:
        self._stopping, self._in_order = True, in_order
        self._suspects.forgive()
        self._wake()

    def _wake(self, *_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._news, 1)

    def _beat(self) -> None:
        """The run on this machine knows a process that stands still from one whose user code takes long, and
        says until when it may go on."""
        try:
            with selectors.DefaultSelector() as selector:
                link = links.connect(self._work, CONTROL)
                selector.register(link, selectors.EVENT_READ)
                while True:
                    link.send(links.BEAT, pack([self._me, os.getpid()]))
                    next_beat = self._clock.monotonic() + BEAT_S
                    while (wait := next_beat - self._clock.monotonic()) > 0:
                        if selector.select(wait):
                            for kind, payload in link.receive():
                                self._may_until = links.read(kind, payload)
                            self._wake()
        except (LostError, OSError):
            self._stop()  # the run is gone

    # What comes in

    def _poll(self) -> None:
        wait = 0.0 if self._busy and self._may_go_on else self._patience()
        for key, events in self._selector.select(wait):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news)
            else:
                key.data(key.fileobj, events)
        self._connect()

    @property
    def _may_go_on(self) -> bool:
        return self._clock.monotonic() < self._may_until

    @property
    def _busy(self) -> bool:
        committed = self._committing is not None and self._committing.done()
        return self._wheel.due or (self._more and self._may_read) or committed

    _more = True
    """A log has more, as of the last look."""
    _drained = False
    """Logs are read no more: what they get from now on is for the next run."""

    @property
    def _may_read(self) -> bool:
        return self._chunks < _CHUNKS_MAX and self._wheel.unacked_bytes < UNACKED_BYTES_MAX

    @property
    def _has_ended(self) -> bool:
        """By all that it reported."""
        return min(self._reported.values(), default=BEFORE) >= NEVER

    @property
    def _is_idle(self) -> bool:
        """It has nothing to do or to hand on."""
        busy = self._committing is not None or self._wheel.due or self._wheel.unacked_bytes or self._more
        return not busy and self._has_ended

    def _patience(self) -> float:
        wait = _TICK_S if any(len(stage.due) for stage in self._wheel.stages.values()) else _IDLE_TICK_S
        timer = self._wheel.next_wall_timer
        if timer is not None:
            wait = min(wait, max(0.0, (timer - self._clock.now_us()) / 1e6))
        return min([wait, *(max(0.001, source.patience_s) for source in self._sources)])

    def _look(self) -> None:
        """Read what the logs have, and take it through the stages."""
        began, left = self._clock.monotonic(), False
        self._more = False
        self._drained |= self._asked > 0 and self._has_ended
        for source in () if self._drained else self._sources:
            positions = source.look()
            if positions:
                self._wheel.inject(source.name, {}, positions)
            if self._may_read:
                left |= self._read(source)
            else:
                self._more = True
        self._wheel.turn(self._clock.now_us())
        self._wheel.pace.took(self._clock.monotonic() - began, left or self._wheel.due)
        self._hand_on(*self._wheel.early())
        for source in () if self._drained else self._sources:
            self._wheel.bound(source.name, source.bound())

    def _read(self, source: LogSource) -> bool:
        """A turn's share of what is unread, of many files where they are small. Whether that was not all."""
        whole, began = self._wheel.pace.share, self._clock.monotonic()
        share = whole
        while share > 0 and (found := source.read(share)) is not None:
            self._wheel.inject(source.name, found.records, found.positions, found.letters)
            share -= found.share
            took = self._clock.monotonic() - began
            began += took
            self._spent[found.slot] += took
            self._reading += took
        if share < whole:
            self._more = True
            self._chunks += 1
        return share <= 0

    def _accept(self, listener: Any, _: int) -> None:
        with contextlib.suppress(OSError):
            self._watch(self._ways.accept(listener), self._from_peer)

    def _watch(self, link: Link, on_news: Any) -> None:
        def news(_: object, events: int) -> None:
            try:
                if events & selectors.EVENT_WRITE:
                    link.flush()
                if events & selectors.EVENT_READ:
                    for kind, payload in link.receive():
                        on_news(link, kind, payload)
                links.watch(self._selector, link)
                self._begin(link)
            except LostError:
                self._lost(link)

        self._selector.register(link, link.events, news)

    def _send(self, link: Link | None, kind: int, payload: bytes) -> None:
        if link is None:
            return  # who leads is not there just now
        try:
            link.send(kind, payload)
        except LostError:
            self._lost(link)
            return
        links.watch(self._selector, link)

    def _lost(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        link.close()
        for peers in (self._in, self._out, self._dialed):
            for worker in [worker for worker, known in peers.items() if known is link]:
                del peers[worker]
        if link is self._control:
            self._control = None
            if not self._ways.lead:
                self._stopping = True  # the run is gone

    def _connect(self) -> None:
        """To who leads and to workers that were not there yet or were lost."""
        began = self._clock.monotonic()
        connected = self._control is not None and len(self._out) + len(self._dialed) == self._workers - 1
        if connected or began < self._next_connect:
            return
        if self._control is None and not self._stopping:
            with contextlib.suppress(OSError):
                self._report()
        for worker in range(self._workers):
            if worker == self._me or worker in self._out or worker in self._dialed:
                continue
            with contextlib.suppress(OSError):
                link = self._dialed[worker] = self._ways.to_worker(worker)
                self._watch(link, self._from_peer)
                self._begin(link)
        now = self._clock.monotonic()
        # A name may take long to be found.
        self._next_connect = now + min(max(_CONNECT_S, 10 * (now - began)), _CONNECT_S_MAX)

    def _begin(self, link: Link) -> None:
        """A worker that was dialed is there: it gets what it did not acknowledge, before what is new."""
        for worker in [worker for worker, known in self._dialed.items() if known is link]:
            if not link.established:
                return
            self._out[worker] = self._dialed.pop(worker)
            self._send(link, links.HELLO, pack([*self._round, self._me]))
            for frame in self._wheel.frames_for(worker):
                if self._out.get(worker) is link:
                    self._send(link, links.FRAME, encode_frame(frame))

    def _report(self) -> None:
        """To who leads, from now on. OSError."""
        self._control = self._ways.to_lead()
        self._watch(self._control, self._from_control)
        self._reported, self._asked, self._answered = {}, 0, 0
        begins = [*self._round, self._me, self._sequencer, self._wheel.marks]
        self._send(self._control, links.BEGINS, pack(begins))

    def _from_peer(self, link: Link, kind: int, payload: bytes) -> None:
        if kind == links.HELLO:
            *of_round, worker = links.read(kind, payload)
            if tuple(of_round) != self._round:  # it has other key intervals in mind
                raise LostError
            link.known = True
            self._in[worker] = link
        elif kind == links.FRAME:
            if not link.known:
                raise LostError
            try:
                self._wheel.receive(decode_frame(payload))
            except links.UNREADABLE as error:
                raise LostError(str(error)) from error
        elif kind == links.ACK:
            for worker, known in list(self._out.items()):
                if known is link:
                    for lane, number in links.read(kind, payload).items():
                        self._wheel.acked(worker, lane, number)

    def _from_control(self, _: Link, kind: int, payload: bytes) -> None:
        if kind == links.MARKS:
            self._wheel.told(links.read(kind, payload))
        elif kind == links.LATENESS:
            allowed: dict[str, int] = links.read(kind, payload)
            for source in self._sources:
                if source.name in allowed:
                    source.allow(allowed[source.name])
        elif kind == links.FINISH:
            self._asked = links.read(kind, payload)

    # What goes out

    def _commit(self) -> None:
        if self._committing is not None and self._committing.done():
            self._committing.result()
            self._committing = None
            self._let_out()
        if self._syncing is not None and self._syncing.done():
            for sink, lane, numbers, place in self._syncing.result():
                self._wheel.stored(sink, lane, numbers, place)
                self._places.append((sink, lane, place))
            self._syncing = None
            self._finished = self._ending and not self._wheel.due
        if self._committing is None:
            changes = self._wheel.begin_commit()
            self._hand_on(*self._wheel.early())
            self._read_up = [path for source in self._sources for path in source.spent()]
            self._places_committing, self._places = self._places, []
            self._chunks = 0
            if changes:
                self._committing = self._thread.submit(self._store.commit, changes)
                self._committing.add_done_callback(self._wake)
            else:
                self._let_out()
        self._sync()

    def _let_out(self) -> None:
        release = self._wheel.committed()
        for path in self._read_up:
            drop_copy(path)
        self._hand_on(release.frames, release.lines)
        acks: dict[int, dict[int, int]] = {}
        for lane, number in release.acks.items():
            acks.setdefault(keeper(lane, self._workers), {})[lane] = number
        for worker, of_worker in acks.items():
            if worker in self._in:
                self._send(self._in[worker], links.ACK, pack(of_worker))
        for sink, lane, place in self._places_committing:
            self._files()[sink, lane].noted(place)
        self._places_committing = []
        if release.lows != self._reported:
            self._reported = release.lows
            self._send(self._control, links.REPORT, pack([self._me, self._sequencer, release.lows]))

    def _hand_on(self, frames: list[tuple[int, Frame]], lines: list[Lines]) -> None:
        for worker, frame in frames:
            if worker == self._me:
                self._wheel.receive(frame)
            elif worker in self._out:
                self._send(self._out[worker], links.FRAME, encode_frame(frame))
        for of_sink in lines:
            self._files()[of_sink.sink, self._me].append(of_sink)

    def _sync(self) -> None:
        """Files of sinks, once a second: then their lines may leave the store."""
        now = self._clock.monotonic()
        if self._syncing is not None or self._finished or not self._may_go_on:
            return
        end = self._asked > self._answered and self._is_idle
        if not end and now < self._next_sync:
            return
        self._next_sync = now + _SYNC_S
        if waiting := self._waiting(end):
            self._ending = end
            self._syncing = self._thread.submit(_synced, waiting)
            self._syncing.add_done_callback(self._wake)

    def _waiting(self, end: bool = False) -> list[_Waiting]:
        """What is to be synced."""
        return [
            (*key, files, *files.begin_sync(end))
            for key, files in self._files().items()
            if files.waiting or end
        ]

    def _note_sinks(self) -> None:
        """At its end: how far their files are, so that none of their lines comes again, wherever they have
        their files next."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None
            self._let_out()
        synced = [] if self._syncing is None else self._syncing.result()
        for sink, lane, numbers, place in [*synced, *_synced(self._waiting())]:
            self._wheel.stored(sink, lane, numbers, place)
        if changes := self._wheel.begin_commit():
            self._store.commit(changes)

    def _tell(self) -> None:
        now = self._clock.monotonic()
        if self._finished and self._committing is None and not self._places_committing and not self._places:
            if self._is_idle:
                self._send(self._control, links.FINISHED, pack([self._me, self._status(), self._asked]))
                self._answered = self._asked
            self._finished = False
        elif now >= self._next_status:
            self._next_status = now + _STATUS_S
            for link in links.strangers(self._selector):
                self._lost(link)
            self._send(self._control, links.STATUS, pack([self._me, self._status()]))

    def _status(self) -> dict[str, Any]:
        why = {name: self._wheel.why(name) for name in self._plan.sources}
        for source in self._sources:
            if why[source.name]["held_by"] == "injector":
                why[source.name] |= source.why()
        late = {source.name: late for source in self._sources if (late := source.late()) is not None}
        told = {"why": why, "late": late, "pid": os.getpid(), "sequencer": self._sequencer}
        told["expects"] = self._wheel.next_wall_timer is not None or any(
            source.settling for source in self._sources
        )
        for name in sorted(self._wheel.buried):
            self._notices.tell(f"records that were under way to a former input of '{name}' are dead letters")
        told["sinks"] = published(self._sinks or {})
        told["work"] = Work(self._clock.monotonic(), self._worked, self._spent.tolist())
        return {**self._wheel.status(), **told, "notices": self._notices.lines()}

    # At the start

    def _tell_found(self) -> None:
        if self._suspects.found is not None:
            number, time = shown(self._suspects.found)
            of = next((name for name, known in self._plan.nodes.items() if known == number), "a computation")
            print(f"photon: the worker ended while '{of}' was called at {time} us", flush=True)

    def _source(self, name: str, slots: set[int], drain: bool) -> LogSource:
        number = self._plan.injectors[name]
        inputs = {read: self._plan.inputs[read][1] for read in self._plan.readers[name]}
        injector = self._plan.topology.injectors[name]
        row, counted = lateness_row(number, self._me), None
        if injector.percentile is not None:
            counted = row, Lateness(injector.percentile, self._store.read([row])[0])
        return LogSource(
            name,
            number,
            injector.within(injector.received(self._work, name)),
            inputs,
            list(self._store.scan(position_rows(number))),
            slots.__contains__,
            self._sequencer << 20,
            drain,
            self._work / f"unpacked-{self._me}-{number}",
            self._clock,
            self._wake,
            self._notices.tell,
            counted,
            injector.imported,
            self._reign if injector.copies else 0,
        )

    def _files(self) -> dict[tuple[str, int], SinkFiles]:
        """To be written to now. ZombieError where a turn took so long that others may be at them."""
        if self._sinks is None or not self._may_go_on:
            raise ZombieError("this machine could not be renewed in time")
        return self._sinks

    def _open_sinks(self) -> dict[tuple[str, int], SinkFiles]:
        """What they have too much is cut: of this worker's claim alone, to which a commit is the test.
        ZombieError."""
        places: dict[tuple[str, int], bytes] = {}
        begun: dict[bytes, bytes | None] = {}
        for name, number in self._plan.sinks.items():
            for lane in self._wheel.lanes:
                row = sink_row(number, lane)
                place = self._store.read([row])[0]
                own = name in self._plan.topology.sinks  # the rest is where the work directory is
                moved = place is not None and own and is_elsewhere(place, self._sink(name), name, lane)
                if moved or (place is None and lane == self._me):
                    place = begun[row] = begin(self._sink(name), name, lane)
                if place is not None:
                    places[name, lane] = place
        left = {
            (name, lane): list(self._wheel.unwritten(self._plan.sinks[name], lane)) for name, lane in places
        }
        self._store.commit(begun)
        if not self._may_go_on:
            raise ZombieError("this machine could not be renewed in time")
        opened = {
            (name, lane): SinkFiles(self._sink(name), name, lane, place, left[name, lane])
            for (name, lane), place in places.items()
        }
        for files in opened.values():
            files.publish(self._clock, self._drain, self._notices.tell)
        return opened

    def _sink(self, name: str) -> LogSink:
        topology = self._plan.topology
        return dead_letters(topology, self._work) if name == DEAD_LETTERS else topology.sinks[name]


def store_of(work: Path, uri: str, number: int) -> LoggedStore:
    """The run's, in this round: on this machine, or where the URI says. StorageError, UsageError."""
    return shared_store(uri, number=number) if uri else Disk(work)


def shared_store(uri: str, **given: Any) -> "PostgresqlStore":
    """As millwheel.postgresql.PostgresqlStore, to which `given` goes."""
    if not uri.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            f"--store {uri}: give postgresql://USER@HOST/DATABASE, or none for this machine's disk"
        )
    try:
        from millwheel.postgresql import PostgresqlStore
    except ImportError as error:
        raise UsageError("--store needs psycopg: pip install 'photon-joiner[postgresql]'") from error
    return PostgresqlStore(uri, **given)


def _synced(waiting: Sequence[_Waiting]) -> list[_Synced]:
    """From any thread. StorageError."""
    return [(sink, lane, numbers, files.sync(at)) for sink, lane, files, numbers, at in waiting]
