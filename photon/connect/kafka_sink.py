"""Kafka as a sink: a joined line a record, each batch in a transaction with the place that it has in the log.

Exactly once does not rest on Kafka's word for how a transaction ended. The registry has decided which lines
there are; what remains is to know which of them are in the topic. Each transaction also writes the place that
it goes up to into a compacted topic, `<topic>.photon`. After any error the producer is thrown away: a new one
of the same transactional id has a greater epoch, so whatever was under way is ended, and what of it still
comes is refused; then the place is read, and writing goes on from there.

A broker that was killed while it ended a transaction may forget to end it: partitions that have no leader yet
when it starts are "likely deleted already and hence can be skipped" (Kafka 4.4), and nobody reads behind it
any more. What ends it is the end of a later transaction of the same producer in the same partitions.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from photon.connect.kafka_client import ASK_S, client_settings, in_words, made, topic_of
from photon.connect.keys import keys_by
from photon.connect.ports import Guarantee
from photon.connect.uris import Uri
from photon.core.columns import split_lines
from photon.core.errors import UnavailableError, UsageError
from photon.logs.writer import LogPosition

TRANSACTION_S: Final = 20.0
"""A transaction of somebody who is gone ends after so long."""
_FORGOTTEN_S: Final = 3
"""Those who live have ended theirs after so long; other transactions are of who is gone, or forgotten."""
_PLACES: Final = ".photon"
_CREATE_S: Final = 15.0


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

    def open(self) -> LogPosition | None:
        self.close()
        try:
            self._make_places()
            self._producer = made(self._uri, Producer, self._producing)
            self._producer.init_transactions(ASK_S + TRANSACTION_S)
            return self._last_place()
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        producer, topic = self._producer, self._topic
        if producer is None:
            raise UnavailableError(f"{self._uri.shown}: not open")
        split = split_lines(lines)
        keys: Sequence[bytes | None] = [None] * len(split) if self._keys is None else self._keys(lines)
        try:
            producer.begin_transaction()
            for line, key in zip(split, keys, strict=True):
                self._produce(topic, line, key)
            self._produce(topic + _PLACES, msgspec.json.encode(end), self._writer.encode())
            producer.commit_transaction(TRANSACTION_S)
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def _produce(self, topic: str, value: bytes, key: bytes | None) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key)
                return
            except BufferError:  # as much is under way as may be
                self._producer.poll(1.0)

    def _end_forgotten(self) -> None:
        """By a transaction in all partitions, which is aborted."""
        admin = made(self._uri, AdminClient, self._given)
        self._producer.begin_transaction()
        for topic in (self._topic, self._topic + _PLACES):
            for partition in admin.list_topics(topic, ASK_S).topics[topic].partitions:
                self._producer.produce(topic, b"", self._writer.encode(), partition)
        self._producer.flush(TRANSACTION_S)
        self._producer.abort_transaction(TRANSACTION_S)

    def close(self) -> None:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.purge()
            self._producer = None

    def _make_places(self) -> None:
        """The topic of the places; that of the joined lines must be there: how many partitions it has is not
        ours to say."""
        admin = made(self._uri, AdminClient, self._given)
        topics = admin.list_topics(timeout=ASK_S).topics
        if self._topic not in topics:
            raise UnavailableError(f"{self._uri.shown}: there is no such topic; make it, or mend its name")
        if self._topic + _PLACES in topics:
            return
        new = NewTopic(self._topic + _PLACES, 1, -1, config={"cleanup.policy": "compact"})
        for future in admin.create_topics([new], operation_timeout=_CREATE_S).values():
            try:
                future.result(_CREATE_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def _last_place(self) -> LogPosition | None:
        """What the last transaction of this writer that was committed says.

        Others write there, too, and what they have not committed yet hides what comes behind it. So it is
        read until the end that there is by now, uncommitted records included: they end with TRANSACTION_S.
        """
        settings = {
            **self._given,
            "group.id": f"photon.{self._writer}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
        at = TopicPartition(self._topic + _PLACES, 0)
        anything = made(self._uri, Consumer, {**settings, "isolation.level": "read_uncommitted"})
        try:
            low, end = anything.get_watermark_offsets(at, ASK_S)
        finally:
            anything.close()
        committed = made(self._uri, Consumer, {**settings, "isolation.level": "read_committed"})
        found: LogPosition | None = None
        try:
            at.offset = low
            committed.assign([at])
            reached = low
            waited = 0
            while reached < end:
                record = committed.poll(1.0)
                if record is None:
                    waited += 1
                    if waited == _FORGOTTEN_S:
                        self._end_forgotten()
                    if waited > ASK_S + TRANSACTION_S:
                        raise UnavailableError(
                            f"{self._uri.shown}: a transaction of another writer does not end; tried again"
                        )
                elif record.error() is None:
                    reached = record.offset() + 1
                    if record.key() == self._writer.encode():
                        found = self._parsed(record.value())
                elif record.error().code() == KafkaError._PARTITION_EOF:
                    reached = record.offset()
                else:
                    raise in_words(self._uri, record.error())
        finally:
            committed.close()
        return found

    def _parsed(self, value: bytes) -> LogPosition:
        try:
            return msgspec.json.decode(value, type=LogPosition)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{self._uri.shown}: {self._topic}{_PLACES} holds what is no place of Photon's ({error}); "
                "use another topic"
            ) from error
