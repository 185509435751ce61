"""An injector that is pushed to, over gRPC (paper 5.2), and the client that pushes.

Batches of a producer have ascending numbers, so that one that comes again, because its acknowledgement was
lost, is known (paper 6.1.1). Lines and numbers are durable in one transaction before they are acknowledged,
one for all that waits; then the lines go to log files, which the workers read as any others. After a crash
the files get from the store what they lack.
"""

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from io import BufferedReader
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Self

import grpc
import lmdb
import msgspec

from millwheel.engine.wheel import Lines
from millwheel.sinks import SinkFiles, begin
from millwheel.topology import PUSHED, LogSink
from photon.core.clock import Attempts, Backoff, Clock
from photon.core.disk import LmdbFile
from photon.core.errors import OverloadedError, PhotonError, UnavailableError, UsageError
from photon.rpc import millwheel_pb2, millwheel_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server, to_photon_error

BATCH_BYTES_MAX: Final = 4 << 20
PRODUCERS_MAX: Final = 100_000
"""That are remembered; one that was silent for FORGET_S makes room for a new one."""
FORGET_S: Final = 7 * 86_400.0
_PRODUCER_BYTES_MAX: Final = 200
_CALLS: Final = 16
_CALLS_MAX: Final = 64
_GROUP_MAX: Final = 64
_WAITING_BYTES_MAX: Final = 1 << 30
FILE_BYTES_MAX: Final = 64 << 20
_SYNC_S: Final = 1.0
_SERVICE: Final = millwheel_pb2.DESCRIPTOR.services_by_name["Injector"].full_name
_PLACE: Final = b"place"
_encode: Final = msgspec.msgpack.encode
_RETRIES: Final = Backoff(0.05, 2.0)
_CALL_S: Final = 10.0
_SILENT_S: Final = 1.0
"""A call that failed for longer says that it waits."""


class GapError(UsageError):
    """A batch before this one was never taken."""


class _Last(msgspec.Struct, frozen=True, array_like=True):
    """A producer's last batch, when it came, and its lines' checksum, without the newline at their end."""

    number: int = 0
    at_us: int = 0
    size: int = 0
    checksum: int = 0


_producer: Final = msgspec.msgpack.Decoder(_Last).decode


class _Batch(NamedTuple):
    producer: str
    after: int
    number: int
    lines: bytes
    done: "Future[_Last]"


class PushedLogs:
    """The store and the log files of one injector, in a directory of their own. One thread writes."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        """StorageError, UsageError."""
        self._clock = clock
        self._file = LmdbFile(
            directory / "state",
            "what was pushed",
            "millwheel.push._WAITING_BYTES_MAX",
            "move the directory away: what stands in its log files was read, or is for you to push again",
        )
        self._env: lmdb.Environment = self._file.open(_WAITING_BYTES_MAX, metasync=True)
        with self._file.errors():
            self._producers = self._env.open_db(b"producers")
            self._lines = self._env.open_db(b"lines")
            self._meta = self._env.open_db(b"meta")
            sink = LogSink(str(directory), file_bytes_max=FILE_BYTES_MAX)
            with self._env.begin(write=True) as txn:
                place = txn.get(_PLACE, db=self._meta)
                if place is None:
                    place = begin(sink, PUSHED, 0)
                    txn.put(_PLACE, place, db=self._meta)
                left = [(int.from_bytes(key, "big"), bytes(data)) for key, data in txn.cursor(self._lines)]
            self._files = SinkFiles(sink, PUSHED, 0, bytes(place), left)
        self._next = left[-1][0] + 1 if left else 0
        self._next_sync = 0.0

    def take(self, batches: list[_Batch]) -> None:
        """Make them durable, in order, and tell each its producer's last number. StorageError: nothing is."""
        known: dict[str, _Last] = {}
        refused: dict[str, PhotonError] = {}
        fresh = []
        with self._file.errors(), self._env.begin(write=True) as txn:
            for batch in batches:
                last = known.get(batch.producer)
                if last is None:
                    last = self._last(txn, batch.producer)
                if last.number == 0 and not batch.after and batch.number and not self._has_room(txn):
                    refused[batch.producer] = OverloadedError(
                        f"{PRODUCERS_MAX} producers are known, and none was silent for a week"
                    )
                elif batch.after == last.number < batch.number:
                    size = len(batch.lines) - 1
                    checksum = zlib.crc32(memoryview(batch.lines)[:size])
                    last = _Last(batch.number, self._clock.now_us(), size, checksum)
                    fresh.append(batch.lines)
                    txn.put(batch.producer.encode(), _encode(last), db=self._producers)
                known[batch.producer] = last
            data = b"".join(fresh)
            if fresh:
                txn.put(self._next.to_bytes(8, "big"), data, db=self._lines)
        if fresh:
            self._files.append(Lines(PUSHED, self._next, data))
            self._next += 1
        for batch in batches:
            last = known[batch.producer]
            if batch.number <= last.number:
                batch.done.set_result(last)
            else:
                batch.done.set_exception(
                    refused.get(batch.producer)
                    or GapError(
                        f"producer '{batch.producer}': a batch that follows {batch.after}, but the last one "
                        f"known is {last.number}: two go by this name, or it was forgotten"
                    )
                )

    def tidy(self) -> None:
        """Now and then: lines that the files have durably leave the store. StorageError."""
        now = self._clock.monotonic()
        if not self._files.waiting or now < self._next_sync:
            return
        self._next_sync = now + _SYNC_S
        numbers, position = self._files.begin_sync()
        place = self._files.sync(position)
        with self._file.errors(), self._env.begin(write=True) as txn:
            for number in numbers:
                txn.delete(number.to_bytes(8, "big"), db=self._lines)
            txn.put(_PLACE, place, db=self._meta)
        self._files.noted(place)

    @property
    def untidy(self) -> bool:
        return self._files.waiting

    def close(self) -> None:
        self._files.close()
        self._env.close()

    def _last(self, txn: lmdb.Transaction, producer: str) -> _Last:
        packed = txn.get(producer.encode(), db=self._producers)
        return _Last() if packed is None else _producer(packed)

    def _has_room(self, txn: lmdb.Transaction) -> bool:
        """For a new producer."""
        if txn.stat(self._producers)["entries"] < PRODUCERS_MAX:
            return True
        silent_since = self._clock.now_us() - round(FORGET_S * 1e6)
        with txn.cursor(self._producers) as cursor:
            silent = [bytes(key) for key, packed in cursor if _producer(packed).at_us < silent_since]
        for key in silent:
            txn.delete(key, db=self._producers)
        return bool(silent)


class PushServer(millwheel_pb2_grpc.InjectorServicer):
    """Serves one injector on an address (millwheel.proto)."""

    def __init__(self, logs: PushedLogs, listen: str, network: Network) -> None:
        """UsageError for an address beyond loopback without TLS."""
        self._logs = logs
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._stopped = False
        self._server = Server(listen, _CALLS, _CALLS_MAX, network, BATCH_BYTES_MAX + (1 << 10))
        self._server.add(millwheel_pb2_grpc.add_InjectorServicer_to_server, self, _SERVICE)

    @property
    def listen(self) -> str:
        return self._server.listen

    def run(self) -> None:
        """Until `stop`. AddressInUseError, StorageError."""
        self._server.start()
        batches: list[_Batch] = []
        try:
            while (batches := self._waiting()) or not self._stopped:
                if batches:
                    self._logs.take(batches)
                self._logs.tidy()
        finally:
            self._stopped = True
            threading.Thread(target=self._server.stop, daemon=True).start()
            for batch in (*batches, *self._waiting()):
                if not batch.done.done():
                    batch.done.set_exception(UnavailableError("the injector stops"))
            self._logs.close()

    def stop(self) -> None:
        self._stopped = True
        self._queue.put(None)

    def Push(
        self, request: millwheel_pb2.PushRequest, context: grpc.ServicerContext
    ) -> millwheel_pb2.PushResponse:
        done: Future[_Last] = Future()
        try:
            _check(request)
            if self._stopped:
                raise UnavailableError("the injector stops")
            self._queue.put(_Batch(request.producer, request.after, request.number, request.lines, done))
            last = done.result(context.time_remaining())
            return millwheel_pb2.PushResponse(number=last.number, size=last.size, checksum=last.checksum)
        except GapError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except UsageError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OverloadedError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except (UnavailableError, FutureTimeoutError) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "not durable in time")
        raise AssertionError("abort raises")

    def _waiting(self) -> list[_Batch]:
        """What waits to be made durable; if nothing does, what comes in while the files need nothing."""
        batches = []
        with contextlib.suppress(Empty):
            first = self._queue.get(timeout=0 if self._stopped else _SYNC_S if self._logs.untidy else None)
            batches += [first] if first is not None else []
            while len(batches) < _GROUP_MAX:
                more = self._queue.get_nowait()
                batches += [more] if more is not None else []
        return batches


class Pusher:
    """Pushes batches of lines as one producer, each until it is durable. For one thread.

    Batches have ascending numbers. `number` is that of the last one that is durable over there: who numbers
    by the offset in his log at which a batch ends knows by it where to go on after a crash. With TLS:
    `network=Network(load_tls(cert, key, ca, "photon"))`, both of photon.rpc.network.
    """

    def __init__(
        self,
        address: str,
        producer: str,
        network: Network = LOOPBACK,
        timeout_s: float = 60.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`notice` is told, once a call, that it waits. UnavailableError if nobody answers in time;
        UsageError for a name that is none.
        """
        self._address, self._producer, self._timeout_s = address, producer, timeout_s
        self._notice = notice
        self.bytes = self.too_long = 0
        """Bytes that were pushed, and lines that were passed over."""
        self._channel = network.open(address)
        self._stub = millwheel_pb2_grpc.InjectorStub(self._channel)  # type: ignore[no-untyped-call]
        self._last = self._call(millwheel_pb2.PushRequest(producer=producer))

    @property
    def number(self) -> int:
        return self._last.number

    def push(self, lines: bytes, number: int | None = None) -> None:
        """Whole lines of JSON, at most BATCH_BYTES_MAX; `number`: else the next one.

        UnavailableError after `timeout_s`: push the same lines again. GapError if the other side has
        forgotten this producer, or another one goes by its name.
        """
        number = self.number + 1 if number is None else number
        if number <= self.number:
            raise UsageError(f"batch {number} after {self.number}: numbers ascend")
        self._last = self._call(
            millwheel_pb2.PushRequest(producer=self._producer, after=self.number, number=number, lines=lines)
        )
        self.bytes += len(lines)

    def go_on(self, file: BufferedReader) -> bool:
        """Seek to `number`, an offset in it. False if what was pushed last does not stand before that."""
        if not self.number:
            file.seek(0)
            return True
        file.seek(self.number - 1)
        at = file.read(2).find(b"\n")  # what a pipe ended with may have been given one
        file.seek(max(0, self.number - 1 + at - self._last.size))
        same = zlib.crc32(file.read(self._last.size)) == self._last.checksum
        file.seek(self.number)
        return at >= 0 and same

    def push_all(self, lines: BufferedReader, grows: bool = False) -> int:
        """To the end, numbered by offset, the first byte's being `number`; the bytes that were left.

        A last line without a newline is whole, but for a log that `grows`: there it is left. A line that is
        longer than a batch may be is passed over: `notice` is told, and `too_long` counts it.
        """
        begun, passed = b"", 0
        while block := lines.read1(BATCH_BYTES_MAX - len(begun)):
            whole, newline, begun = (begun + block).rpartition(b"\n")
            if newline:
                self.push(whole + newline, self.number + passed + len(whole) + 1)
                passed = 0
            elif len(begun) == BATCH_BYTES_MAX:
                start, begun = self.number + passed, b""
                passed += BATCH_BYTES_MAX + _pass_over_line(lines)
                self.too_long += 1
                most = f"longer than {BATCH_BYTES_MAX >> 20} MiB"
                self._notice(f"the line at byte {start} is {most}, and is passed over: shorten it")
        if begun and not grows:
            self.push(begun + b"\n", self.number + passed + len(begun))
        return len(begun) if grows else 0

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, request: millwheel_pb2.PushRequest) -> _Last:
        failure = UnavailableError(f"{self._address}: no time to ask")
        attempts = Attempts(_RETRIES, self._timeout_s, time.monotonic, time.sleep, random.uniform)
        noticed = False
        for left_s in attempts:
            try:
                last = self._stub.Push(request, timeout=min(left_s, _CALL_S))
                return _Last(last.number, 0, last.size, last.checksum)
            except grpc.RpcError as error:
                match error.code():
                    case grpc.StatusCode.FAILED_PRECONDITION:
                        raise GapError(error.details()) from error
                    case grpc.StatusCode.INVALID_ARGUMENT:
                        raise UsageError(error.details()) from error
                failure = to_photon_error(error, self._address)
                if not noticed and attempts.left_s < self._timeout_s - _SILENT_S:
                    noticed = True
                    self._notice(f"waits for {self._address}, up to {self._timeout_s:g} s: is its run up?")
        raise failure


def _pass_over_line(lines: BufferedReader) -> int:
    """The bytes that were left of the line."""
    size = 0
    while block := lines.readline(BATCH_BYTES_MAX):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _check(request: millwheel_pb2.PushRequest) -> None:
    if not request.producer or len(request.producer.encode()) > _PRODUCER_BYTES_MAX:
        raise UsageError(f"a producer has a name, of at most {_PRODUCER_BYTES_MAX} bytes")
    if len(request.lines) > BATCH_BYTES_MAX:
        raise UsageError(f"a batch has at most {BATCH_BYTES_MAX >> 20} MiB")
    if request.number and not request.lines.endswith(b"\n"):
        raise UsageError("a batch is whole lines, each closed by a newline")
