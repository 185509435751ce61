"""Kafka as a source: each partition of a topic, from where it was left; only what was committed.

Where to go on is told by what is on disk here (photon.connect.importer), not by the consumer group. The group
is told, so that others' tools show how far this is; nobody relies on it.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, TopicPartition

from photon.connect.kafka_client import ASK_S, client_settings, in_words, made, topic_of
from photon.connect.ports import Batch, Fields, Loss, Runs, State
from photon.connect.uris import Uri
from photon.core.errors import UnavailableError, UsageError

RECORDS_MAX: Final = 10_000
BYTES_MAX: Final = 8 << 20
"""Of one read, about."""
PARTITIONS_EVERY_S: Final = 30.0
"""Between two looks for new partitions."""
_NO_VALUE: Final = b"null"  # no event: malformed, so somebody is told
_PER_MS: Final = {"s": 0.001, "ms": 1, "us": 1_000, "ns": 1_000_000}
_EOF: Final = KafkaError._PARTITION_EOF
_GONE: Final = KafkaError._AUTO_OFFSET_RESET


class KafkaSource:
    """photon.connect.ports.Source of `kafka://HOST:PORT/TOPIC`. A record's number is its offset.

    Options: `group`; `key`, `timestamp` and `header.NAME`, each the name of the field that it is added to the
    event as; `config`; librdkafka's settings.
    """

    def __init__(self, uri: Uri, fields: Fields) -> None:
        self._uri, self._topic = uri, topic_of(uri)
        given, own = client_settings(uri, {"group", "key", "timestamp", "header"})
        self._settings: dict[str, Any] = {
            "group.id": own.get("group", "photon"),
            # Else each record of a live topic is an answer of its own.
            "fetch.min.bytes": 65_536,
            "fetch.wait.max.ms": 10,
            # By default whoever was slow for a moment gets nothing for a second.
            "fetch.queue.backoff.ms": 10,
            "queued.max.messages.kbytes": 65_536,
            **given,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
        self._value = _splicing(uri, own, fields)
        self._consumer: Any = made(uri, Consumer, self._settings)
        self._fresh = True
        self._next: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        """Where each partition ended when this was opened, or at the last look; where `drain`, that is
        all."""
        self._drain = False
        self._drained: set[int] = set()
        self._losses: list[Loss] = []
        self._looked_s = 0.0
        self._more = False
        self._records_max = 100

    def open(self, after: Mapping[str, int], drain: bool) -> None:
        if not self._fresh:
            self.close()
            self._consumer = made(self._uri, Consumer, self._settings)
        self._fresh = False
        self._drain = drain
        self._next, self._ends, self._drained = {}, {}, set()
        known = {int(partition.rpartition("-")[2]): number for partition, number in after.items()}
        self._take_partitions(known)

    def _take_partitions(self, after: Mapping[int, int]) -> None:
        """Begin with those that are new. UnavailableError."""
        self._looked_s = time.monotonic()
        try:
            topic = self._consumer.list_topics(self._topic, ASK_S).topics[self._topic]
        except KafkaException as error:
            raise in_words(self._uri, error) from error
        if topic.error is not None and topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise UnavailableError(f"{self._uri.shown}: there is no such topic; make it, or mend its name")
        if topic.error is not None:
            raise in_words(self._uri, topic.error)
        new = []
        for partition in sorted(topic.partitions.keys() - self._next.keys()):
            low, self._ends[partition] = self._bounds(partition)
            start = after.get(partition, low - 1) + 1
            if start > self._ends[partition]:
                raise self._made_anew(partition, start)
            if start < low:
                self._losses.append(Loss(self._name(partition), start, low - start))
                start = low
            self._next[partition] = start
            new.append(TopicPartition(self._topic, partition, start))
        if new:
            self._consumer.incremental_assign(new)

    def _bounds(self, partition: int) -> tuple[int, int]:
        try:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), ASK_S)
        except KafkaException as error:
            raise in_words(self._uri, error) from error
        return low, high

    def read(self, wait_s: float) -> Sequence[Batch]:
        if not self._drain and time.monotonic() - self._looked_s > PARTITIONS_EVERY_S:
            self._take_partitions({})
        records: dict[int, list[Any]] = defaultdict(list)
        try:
            # `consume` alone would wait until it has as many as it is asked for.
            first = self._consumer.poll(wait_s)
            found = [] if first is None else [first, *self._consumer.consume(self._records_max, 0)]
        except KafkaException as error:
            raise in_words(self._uri, error) from error
        self._more = bool(found)
        for record in found:
            if record.error() is None:
                records[record.partition()].append(record)
            else:
                self._told(record)
        batches = [self._batch(partition, of_it) for partition, of_it in records.items()]
        if batches:
            mean = sum(len(batch.lines) for batch in batches) / sum(map(len, records.values()))
            self._records_max = max(1, min(RECORDS_MAX, int(BYTES_MAX / mean)))
        return batches

    def _batch(self, partition: int, records: Sequence[Any]) -> Batch:
        value = self._value
        values = [value(record) for record in records]
        lines = b"\n".join(values)
        if lines.count(b"\n") >= len(values):
            # JSON has line ends between its parts only, where a space does as well.
            lines = b"\n".join([one.replace(b"\n", b" ") for one in values])
        numbers = [record.offset() for record in records]
        self._next[partition] = numbers[-1] + 1
        return Batch(self._name(partition), lines + b"\n", _runs(numbers))

    def _told(self, record: Any) -> None:
        error, partition = record.error(), record.partition()
        if error.code() == _EOF:
            self._drained.add(partition)
            self._next[partition] = max(self._next[partition], record.offset())
            self._ends[partition] = max(self._ends[partition], record.offset())
        elif error.code() == _GONE:
            low, _ = self._bounds(partition)
            start = self._next[partition]
            if low > start:
                self._losses.append(Loss(self._name(partition), start, low - start))
            elif low < start:
                raise self._made_anew(partition, start)
            self._next[partition] = low
            self._consumer.incremental_unassign([TopicPartition(self._topic, partition)])
            self._consumer.incremental_assign([TopicPartition(self._topic, partition, low)])
        else:
            raise in_words(self._uri, error)

    def _made_anew(self, partition: int, start: int) -> UsageError:
        return UsageError(
            f"{self._uri.shown}: partition {partition} ends before record {start}, up to which it was read: "
            "the topic was made anew; read it with another --out, or by another name"
        )

    def state(self) -> State:
        if self._drain and all(map(self._is_drained, self._ends)):
            return State.FINISHED
        return State.ACTIVE if self._more else State.IDLE

    def _is_drained(self, partition: int) -> bool:
        return partition in self._drained or self._next[partition] >= self._ends[partition]

    def losses(self) -> Sequence[Loss]:
        found, self._losses = self._losses, []
        return found

    def behind(self) -> int | None:
        for partition in self._next:
            with contextlib.suppress(KafkaException):
                _, high = self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, partition), cached=True
                )
                self._ends[partition] = max(self._ends[partition], high)
        return sum(max(0, end - self._next[partition]) for partition, end in self._ends.items())

    def kept(self, upto: Mapping[str, int]) -> None:
        places = [
            TopicPartition(self._topic, int(partition.rpartition("-")[2]), number + 1)
            for partition, number in upto.items()
        ]
        with contextlib.suppress(KafkaException):  # for others to look at
            self._consumer.commit(offsets=places, asynchronous=True)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _name(self, partition: int) -> str:
        return f"{self._topic}-{partition}"


def _runs(numbers: Sequence[int]) -> Runs:
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return ((first, len(numbers)),)
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return tuple(runs)


def _splicing(uri: Uri, own: Mapping[str, str], fields: Fields) -> Callable[[Any], bytes]:
    """A record -> its line: the value, before whose fields those stand that the URI takes from elsewhere."""
    added: list[tuple[bytes, Callable[[Any], object]]] = []
    for name, field in own.items():
        kind, _, header = name.partition(".")
        head = msgspec.json.encode(field) + b":"
        if kind == "key":
            added.append((head, lambda record: _text(record.key())))
        elif kind == "timestamp":
            added.append((head, _time_in(fields.time_unit, uri)))
        elif kind == "header":
            if not header:
                raise UsageError(f"{uri.shown}: write header.NAME=FIELD, not header=FIELD")
            added.append((head, partial(_header, header)))
    if not added:
        return lambda record: record.value() or _NO_VALUE
    encode = msgspec.json.encode

    def line(record: Any) -> bytes:
        value = (record.value() or _NO_VALUE).strip()
        if value[:1] != b"{":
            return value
        rest = value[1:].lstrip()
        head = b",".join([name + encode(of(record)) for name, of in added])
        return b"{" + head + (b"" if rest == b"}" else b",") + rest

    return line


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _header(name: str, record: Any) -> str | None:
    return next((_text(value) for key, value in reversed(record.headers() or ()) if key == name), None)


def _time_in(unit: str, uri: Uri) -> Callable[[Any], object]:
    if unit not in _PER_MS:
        raise UsageError(f"{uri.shown}: its timestamps are numbers, so 'time_unit' can't be {unit}")
    factor = _PER_MS[unit]

    def time_of(record: Any) -> object:
        kind, at_ms = record.timestamp()
        return None if kind == TIMESTAMP_NOT_AVAILABLE else at_ms * factor

    return time_of
