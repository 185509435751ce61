"""Kafka as a sink: a joined line a record, each batch in a transaction with the place that it has in the log.

Exactly once does not rest on Kafka's word for how a transaction ended. The registry has decided which lines
there are; what remains is to know which of them are in the topic. Each transaction also writes the place that
it goes up to into a compacted topic, `<topic>.photon`. After any error the producer is thrown away: a new one
of the same transactional id has a greater epoch, so whatever was under way is ended, and what of it still
comes is refused; then the place is read, and writing goes on from there.

Nor does it rest on a transaction's being whole. A broker that was killed while it ended one forgets some of
it: partitions that have no leader yet when it starts are "likely deleted already and hence can be skipped"
(Kafka 4.4). There it stays open, nobody reads behind it, and what ends it, either way, is the next
transaction of the same producer. So a place also says at which offsets its lines stand, and those of earlier
ones that nobody has seen end; a new producer aborts what is open and looks up what became of the last place.
If that is there in part, its other lines are read from where they were aborted, and written again.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from photon.connect.kafka_client import ASK_S, client_settings, in_words, made, topic_of
from photon.connect.keys import keys_by
from photon.connect.ports import Guarantee
from photon.connect.uris import Uri
from photon.core.columns import split_lines
from photon.core.errors import UnavailableError, UsageError
from photon.logs.writer import LogPosition

TRANSACTION_S: Final = 20.0
"""A transaction of somebody who is gone ends after so long."""
_PLACES: Final = ".photon"
_CREATE_S: Final = 15.0
_LOOK_S: Final = 0.005
"""Between two looks at whether a transaction has ended."""
_PLACES_SETTINGS: Final = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}
"""It is read whole when a sink is opened, and what is compacted is never the last segment."""

_Runs = list[tuple[int, int]]
"""Offsets in a partition, the first and the last of each run."""
_END: Final = 1 << 62
_MOST_UNENDED: Final = 1_000
"""Runs of lines that may wait for transactions of other writers to end."""


class _Noted(msgspec.Struct):
    """A record of the topic of places: all lines before `place` are written, the last of them at the offsets
    `lines` of each partition; those `before` were written earlier, and may not have ended."""

    place: LogPosition
    lines: dict[int, _Runs]
    before: dict[int, _Runs]


class KafkaSink:
    """photon.connect.ports.Sink of `kafka://HOST:PORT/TOPIC`. Options: `key`, the field whose value is the
    record's key; `config`; librdkafka's settings."""

    guarantee = Guarantee.ATOMIC
    batch_bytes = 1 << 20
    linger_s = 0.0

    def __init__(self, uri: Uri, writer: str) -> None:
        self._uri, self._topic, self._writer = uri, topic_of(uri), writer
        given, own = client_settings(uri, {"key"})
        self._given = given
        self._producing: dict[str, Any] = {
            "compression.type": "lz4",
            "queue.buffering.max.messages": 1_000_000,
            **given,
            "transactional.id": f"photon.{self._topic}.{writer}",
            "transaction.timeout.ms": round(TRANSACTION_S * 1000),
        }
        self._keys = keys_by(own["key"]) if own.get("key") else None
        self._producer: Any = None
        self._admin: Any = None
        self._unended: dict[int, _Runs] = {}

    def open(self) -> LogPosition | None:
        self.close()
        self._unended = {}
        try:
            self._admin = made(self._uri, AdminClient, self._given)
            self._make_places()
            self._producer = made(self._uri, Producer, self._producing)
            self._producer.init_transactions(ASK_S + TRANSACTION_S)
            self._end_forgotten()
            return self._last_place()
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        if self._producer is None:
            raise UnavailableError(f"{self._uri.shown}: not open")
        split = split_lines(lines)
        keys: Sequence[bytes | None] = [None] * len(split) if self._keys is None else self._keys(lines)
        try:
            self._transact(((line, key) for line, key in zip(split, keys, strict=True)), end, {})
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def _transact(
        self, records: Iterable[tuple[Any, ...]], place: LogPosition, there: Mapping[int, _Runs]
    ) -> None:
        """Writes these (value, key, perhaps partition) up to the place, of which the lines `there` stand
        already."""
        producer, stand = self._producer, _Stand()
        producer.begin_transaction()
        for record in records:
            self._produce(stand, self._topic, *record)
        self._flush(stand)
        self._see_ended()
        noted = _Noted(place, _both(there, stand.runs(self._topic)), self._unended)
        producer.produce(self._topic + _PLACES, msgspec.json.encode(noted), self._writer.encode())
        producer.commit_transaction(TRANSACTION_S)
        self._unended = _both(self._unended, noted.lines)

    def _produce(
        self, stand: "_Stand", topic: str, value: bytes, key: bytes | None, partition: int = -1
    ) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, partition, on_delivery=stand.told)
                break
            except BufferError:  # as much is under way as may be
                self._producer.poll(1.0)
        stand.sent += 1

    def _flush(self, stand: "_Stand") -> None:
        try:
            self._producer.flush(TRANSACTION_S)
        except SystemError as error:  # raised for both what is fatal and what it calls back to tell
            raise UnavailableError(f"{self._uri.shown}: fenced by a newer writer; tried again") from error
        if stand.arrived < stand.sent:
            why = stand.failed or f"no answer in {TRANSACTION_S:.0f} s"
            raise UnavailableError(f"{self._uri.shown}: {why}; tried again")

    def _end_forgotten(self) -> None:
        """By a transaction in all partitions, which is aborted."""
        stand = _Stand()
        self._producer.begin_transaction()
        for topic in (self._topic, self._topic + _PLACES):
            for partition in self._admin.list_topics(topic, ASK_S).topics[topic].partitions:
                self._produce(stand, topic, b"", self._writer.encode(), partition)
        self._flush(stand)
        self._producer.abort_transaction(TRANSACTION_S)
        until = time.monotonic() + ASK_S + TRANSACTION_S
        while any(end <= stand.offsets[where][-1] for where, end in self._ends(stand.offsets).items()):
            if time.monotonic() > until:
                raise self._held_up()
            time.sleep(_LOOK_S)

    def _see_ended(self) -> None:
        """Drops from what is not known to have ended what is known to by now."""
        ends = self._ends((self._topic, partition) for partition in self._unended)
        for (_, partition), end in ends.items():
            self._unended[partition] = [run for run in self._unended[partition] if run[1] >= end]
        self._unended = {partition: runs for partition, runs in self._unended.items() if runs}
        if sum(map(len, self._unended.values())) > _MOST_UNENDED:
            raise self._held_up()

    def _ends(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Before which offset all transactions of these partitions have ended."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = dict.fromkeys((TopicPartition(*place) for place in places), latest)
        if not asked:
            return {}
        committed = IsolationLevel.READ_COMMITTED
        told = self._admin.list_offsets(asked, isolation_level=committed, request_timeout=ASK_S)
        return {(at.topic, at.partition): one.result().offset for at, one in told.items()}

    def _held_up(self) -> UnavailableError:
        return UnavailableError(
            f"{self._uri.shown}: a transaction of another writer does not end; tried again"
        )

    def close(self) -> None:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.purge()
            self._producer = None

    def _make_places(self) -> None:
        """The topic of the places; that of the joined lines must be there: how many partitions it has is not
        ours to say."""
        topics = self._admin.list_topics(timeout=ASK_S).topics
        if self._topic not in topics:
            raise UnavailableError(f"{self._uri.shown}: there is no such topic; make it, or mend its name")
        if self._topic + _PLACES in topics:
            return
        new = NewTopic(self._topic + _PLACES, 1, -1, config=_PLACES_SETTINGS)
        for future in self._admin.create_topics([new], operation_timeout=_CREATE_S).values():
            try:
                future.result(_CREATE_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def _last_place(self) -> LogPosition | None:
        """Up to where this writer's lines stand, each of them; those that a transaction lacks are written."""
        committed, at = self._last_noted(0, IsolationLevel.READ_COMMITTED)
        noted, _ = self._last_noted(at, IsolationLevel.READ_UNCOMMITTED)
        if noted is not None and noted != committed and not self._standing(noted.lines):
            noted = committed
        if noted is None:
            return None
        lines = _both(noted.before, noted.lines)
        standing = self._standing(lines)
        lacking = [
            (record.value(), record.key(), record.partition())
            for record in self._at(lines, IsolationLevel.READ_UNCOMMITTED)
            if (record.partition(), record.offset()) not in standing
        ]
        if lacking or noted != committed:
            self._transact(lacking, noted.place, _those_with(standing, lines))
        return noted.place

    def _last_noted(self, start: int, isolation: IsolationLevel) -> tuple[_Noted | None, int]:
        """Of this writer, from this offset on, and its offset."""
        found: tuple[_Noted | None, int] = None, start
        for record in self._records({(self._topic + _PLACES, 0): [(start, _END)]}, isolation):
            if record.key() == self._writer.encode() and record.value():
                found = self._parsed(record.value()), record.offset()
        return found

    def _standing(self, lines: Mapping[int, _Runs]) -> set[tuple[int, int]]:
        """Those of these lines, as (partition, offset), that readers of what is committed see."""
        return {(one.partition(), one.offset()) for one in self._at(lines, IsolationLevel.READ_COMMITTED)}

    def _at(self, lines: Mapping[int, _Runs], isolation: IsolationLevel) -> Iterator[Any]:
        return self._records({(self._topic, partition): runs for partition, runs in lines.items()}, isolation)

    def _records(self, places: Mapping[tuple[str, int], _Runs], isolation: IsolationLevel) -> Iterator[Any]:
        """The records at these offsets of partitions, as far as there are any."""
        settings = {
            **self._given,
            "group.id": f"photon.{self._writer}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation.name.lower(),
            "fetch.wait.max.ms": 10,
        }
        wanted = {place: runs for place, runs in places.items() if runs}
        consumer = made(self._uri, Consumer, settings)
        try:
            consumer.assign([TopicPartition(*place, runs[0][0]) for place, runs in wanted.items()])
            silent_s = 0
            while wanted:
                record = consumer.poll(1.0)
                if record is None:
                    silent_s += 1
                    if silent_s > ASK_S + TRANSACTION_S:
                        raise UnavailableError(f"{self._uri.shown}: nothing is to be read; tried again")
                    continue
                error = record.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise in_words(self._uri, error)
                place, at = (record.topic(), record.partition()), record.offset()
                runs = wanted.get(place, ())
                if error is None and any(first <= at <= last for first, last in runs):
                    yield record
                if runs and (error is not None or at >= runs[-1][1]):
                    del wanted[place]
                    consumer.incremental_unassign([TopicPartition(*place)])
        finally:
            consumer.close()

    def _parsed(self, value: bytes) -> _Noted:
        try:
            return msgspec.json.decode(value, type=_Noted)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self._uri.shown}: {self._topic}{_PLACES} holds what is no place of Photon's ({error}); "
                "use another topic"
            ) from error


def _both(one: Mapping[int, _Runs], other: Mapping[int, _Runs]) -> dict[int, _Runs]:
    return {partition: [*one.get(partition, ()), *other.get(partition, ())] for partition in {**one, **other}}


def _those_with(offsets: set[tuple[int, int]], lines: Mapping[int, _Runs]) -> dict[int, _Runs]:
    """The runs of lines in which these (partition, offset) are."""
    return {
        partition: [
            run for run in runs if any((partition, at) in offsets for at in range(run[0], run[1] + 1))
        ]
        for partition, runs in lines.items()
    }


class _Stand:
    """Where the records of a transaction stand, as brokers tell: (topic, partition) -> offsets, ascending."""

    def __init__(self) -> None:
        self.sent = self.arrived = 0
        self.failed = ""
        self.offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)

    def told(self, error: Any, record: Any) -> None:
        if error is not None:
            self.failed = error.str()
        elif record.offset() < 0:  # sent again, and the first one arrived too long ago
            self.failed = "offsets are not known"
        else:
            self.arrived += 1
            self.offsets[record.topic(), record.partition()].append(record.offset())

    def runs(self, topic: str) -> dict[int, _Runs]:
        """partition -> its offsets."""
        found: dict[int, _Runs] = {}
        for (name, partition), offsets in self.offsets.items():
            if name == topic:
                jumps = [i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 1]
                firsts, lasts = [0, *jumps], [*jumps, len(offsets)]
                found[partition] = [(offsets[a], offsets[b - 1]) for a, b in zip(firsts, lasts, strict=True)]
        return found
