"""Kafka as a source: each partition of a topic, from where it was left; only what was committed.

Where to go on is told by what is on disk here (photon.connect.copies), not by the consumer group. The group
is told, so that others' tools show how far this is; nobody relies on it.

A topic is known by its id, where the brokers give it one: offsets of one that was made anew mean other
records, so it is read from its start.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from photon.connect.kafka_client import ASK_S, client_settings, id_of, in_words, made, runs_of, topic_of
from photon.connect.ports import Batch, Fields, Loss, State, shown
from photon.connect.uris import Uri
from photon.core.errors import PhotonError, UnavailableError, UsageError

RECORDS_MAX: Final = 10_000
BYTES_MAX: Final = 8 << 20
"""Of one read, about."""
PARTITIONS_EVERY_S: Final = 30.0
"""Between two looks for new partitions."""
ENDS_EVERY_S: Final = 0.25
"""Between two questions where the partitions end."""
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
        self._given = given
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
        self._id: str | None = None
        """The topic's; "" where the brokers know none."""
        self._places: dict[int, tuple[str, int]] = {}
        """Partition -> the topic that it is of, and up to which record it is read."""
        self._amiss = False
        """A record could not be read, or the topic is another: all begins anew at the places."""
        self._error: PhotonError | None = None
        self._admin: Any = None
        self._asked: dict[TopicPartition, Any] = {}
        """Where partitions end: answers that are to come, of a question at `_asked_us`."""
        self._asked_us, self._asked_s = 0, float("-inf")
        self._described: Any = None
        """Which partitions there are: the same."""
        self._all_us = 0
        """When there were no other partitions than those that are read."""
        self._promised: dict[int, tuple[int, int]] = {}
        """Partition -> a time, and where it ended then, while it is not read to there."""
        self._known: dict[int, int] = {}
        """Partition -> up to when all is read, microseconds since 1970."""
        self._next: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        """Where each partition ended at the last look; where `drain`, when this was opened: that is all."""
        self._drain = False
        self._losses: list[Loss] = []
        self._looked_s = 0.0
        self._more = False
        self._records_max = 100

    def open(self, after: Mapping[str, int], drain: bool) -> None:
        self._drain, self._error = drain, None
        self._places = {_partition(name): (name.partition("\0")[2], after[name]) for name in after}
        self._begin()

    def _begin(self) -> None:
        """At the places. UnavailableError: again, later."""
        self._amiss = True
        if not self._fresh:
            self.close()
            self._consumer = made(self._uri, Consumer, self._settings)
        self._fresh = False
        self._id, self._next, self._ends = None, {}, {}
        self._promised, self._known = {}, {}
        self._take_partitions()
        self._amiss = False

    def _take_partitions(self) -> None:
        """Begin with those that are new; all of them, where the topic was made anew.

        UnavailableError: again, later; UsageError: what is there can't be read, or nothing is."""
        self._looked_s, self._all_us = time.monotonic(), time.time_ns() // 1_000
        try:
            topic = self._consumer.list_topics(self._topic, ASK_S).topics[self._topic]
            if topic.error is not None and topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                lacking = f"{self._uri.shown}: there is no such topic; make it, or mend its name"
                raise UsageError(lacking) if self._drain else UnavailableError(lacking)
            if topic.error is not None:
                raise in_words(self._uri, topic.error)
        except KafkaException as error:
            raise in_words(self._uri, error) from error
        found = id_of(self._uri, self._asks)
        if self._id not in (None, found):
            return self._begin()
        self._id = found
        for partition in sorted(topic.partitions.keys() - self._next.keys()):
            low, end = self._bounds(partition)
            known_by, number = self._places.get(partition, ("", low - 1))
            start = number + 1 if known_by in ("", found) else low
            if start > end:
                raise UsageError(
                    f"{self._uri.shown}: partition {partition} ends before record {start}, up to which it "
                    "was read: its brokers have lost records, or the topic was made anew; read it with "
                    "another --out, or by another name"
                )
            if start < low:
                self._losses.append(Loss(self._name(partition), start, low - start))
                start = low
            self._consumer.incremental_assign([TopicPartition(self._topic, partition, start)])
            self._next[partition], self._ends[partition] = start, end
            self._places[partition] = found, start - 1

    @property
    def _asks(self) -> Any:
        if self._admin is None:
            # Else it logs each setting that is a consumer's.
            self._admin = made(self._uri, AdminClient, {**self._given, "log_level": 3})
        return self._admin

    def _bounds(self, partition: int) -> tuple[int, int]:
        try:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), ASK_S)
        except KafkaException as error:
            raise in_words(self._uri, error) from error
        return low, high

    def read(self, wait_s: float) -> Sequence[Batch]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._amiss:
            self._begin()
        elif not self._drain and time.monotonic() - self._looked_s > PARTITIONS_EVERY_S:
            self._take_partitions()
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
            elif record.error().code() == _EOF:
                at = record.partition()
                self._next[at] = self._ends[at] = max(self._next[at], record.offset())
            else:  # those before it are kept, and those behind it read once more
                self._amiss = True
                if record.error().code() != _GONE:
                    self._error = in_words(self._uri, record.error())
                break
        if records and self._id:
            # The client goes on at its offset in a topic that was made anew; records don't say which it is.
            amiss, self._amiss = self._amiss, True
            if id_of(self._uri, self._asks) != self._id:
                return []
            self._amiss = amiss
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
        # Its end may stand in the same answer, behind marks of transactions.
        self._next[partition] = max(self._next[partition], numbers[-1] + 1)
        self._places[partition] = self._id or "", numbers[-1]
        kind, at_ms = records[-1].timestamp()
        if kind != TIMESTAMP_NOT_AVAILABLE and at_ms <= time.time_ns() // 1_000_000:  # else a clock was wrong
            self._known[partition] = max(self._known.get(partition, 0), at_ms * 1_000)
        runs = tuple((first, last - first + 1) for first, last in runs_of(numbers))
        return Batch(self._name(partition), lines + b"\n", runs)

    def state(self) -> State:
        if self._drain and not self._amiss and all(self._next[at] >= end for at, end in self._ends.items()):
            return State.FINISHED
        return State.ACTIVE if self._more else State.IDLE

    def losses(self) -> Sequence[Loss]:
        found, self._losses = self._losses, []
        return found

    def behind(self) -> int | None:
        for partition in () if self._drain else self._next:
            with contextlib.suppress(KafkaException):
                _, high = self._consumer.get_watermark_offsets(
                    TopicPartition(self._topic, partition), cached=True
                )
                self._ends[partition] = max(self._ends[partition], high)
        return sum(max(0, end - self._next[partition]) for partition, end in self._ends.items())

    def known_to(self) -> int:
        """Of a partition that is read to its end, when this was asked for; else as its records' timestamps
        say. While there may be others, not beyond the time at which there were none."""
        now_s = time.monotonic()
        if self._asked and all(answer.done() for answer in (*self._asked.values(), self._described)):
            for asked, answer in self._asked.items():
                with contextlib.suppress(KafkaException):
                    self._promised.setdefault(asked.partition, (self._asked_us, answer.result().offset))
            with contextlib.suppress(KafkaException):
                if all(partition.id in self._next for partition in self._described.result().partitions):
                    self._all_us = max(self._all_us, self._asked_us)
                else:
                    self._looked_s = float("-inf")
            self._asked = {}
        if not self._asked and now_s - self._asked_s >= ENDS_EVERY_S and self._next:
            self._asked_us, self._asked_s = time.time_ns() // 1_000, now_s
            partitions = [TopicPartition(self._topic, partition) for partition in self._next]
            ends = dict.fromkeys(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
            topics = TopicCollection([self._topic])
            self._asked = self._asks.list_offsets(ends, request_timeout=ASK_S)
            self._described = self._asks.describe_topics(topics, request_timeout=ASK_S)[self._topic]
        for partition, (at_us, end) in list(self._promised.items()):
            if self._next.get(partition, -1) >= end:
                self._known[partition] = max(self._known.get(partition, 0), at_us)
                del self._promised[partition]
        return min((self._all_us, *(self._known.get(partition, 0) for partition in self._next)))

    def kept(self, upto: Mapping[str, int]) -> None:
        places = [TopicPartition(self._topic, _partition(name), number + 1) for name, number in upto.items()]
        with contextlib.suppress(KafkaException):  # for others to look at
            self._consumer.commit(offsets=places, asynchronous=True)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = self._admin = None

    def _name(self, partition: int) -> str:
        return f"{self._topic}-{partition}" + (f"\0{self._id}" if self._id else "")


def _partition(name: str) -> int:
    return int(shown(name).rpartition("-")[2])


def _splicing(uri: Uri, own: Mapping[str, str], fields: Fields) -> Callable[[Any], bytes]:
    """A record -> its line: the value, before whose fields those stand that the URI takes from elsewhere, in
    place of the value's own of these names."""
    added: dict[str, Callable[[Any], object]] = {}
    for name, field in own.items():
        kind, _, header = name.partition(".")
        if kind == "key":
            added[field] = lambda record: _text(record.key())
        elif kind == "timestamp":
            added[field] = _time_in(fields.time_unit, uri)
        elif kind == "header":
            if not header:
                raise UsageError(f"{uri.shown}: write header.NAME=FIELD, not header=FIELD")
            added[field] = partial(_header, header)
    if not added:
        return lambda record: record.value() or _NO_VALUE
    encode, decode = msgspec.json.encode, msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    names = [encode(name) for name in added]

    def line(record: Any) -> bytes:
        value = (record.value() or _NO_VALUE).strip()
        if value[:1] != b"{":
            return value
        found = {name: of(record) for name, of in added.items()}
        if b"\\u" in value or any(name in value for name in names):  # of its own, maybe
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                event = decode(value)
                if not event.keys().isdisjoint(found):
                    there = {name: one for name, one in found.items() if one is not None}
                    return encode({**found, **event, **there})
        rest = value[1:].lstrip()
        return encode(found)[:-1] + (b"" if rest == b"}" else b",") + rest

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
