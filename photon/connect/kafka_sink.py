"""Kafka as a sink: a joined line a record, each batch in a transaction with the place that it has in the log.

Exactly once does not rest on Kafka's word for how a transaction ended. The registry has decided which lines
there are; what remains is to know which of them are in the topic. Each transaction also writes the place that
it goes up to into a compacted topic, `<topic>.photon`. After any error the producer is thrown away: a new one
of the same transactional id has a greater epoch, so whatever was under way is ended, and what of it still
comes is refused; then the place is read, and writing goes on from there.

Nor does it rest on a transaction's being whole. A broker that was killed while it ended one forgets some of
it: partitions that have no leader yet when it starts are "likely deleted already and hence can be skipped"
(Kafka 4.4). There it stays open, nobody reads behind it, and what ends it, either way, is this producer's
next transaction in that partition. So a place also says at which offsets its lines stand. No transaction
begins before readers have all of the last one; if they do not get it, a new producer aborts what is open
and looks for the lines of the last place. If some of them are there, the others are read from where they
were aborted, and written again.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from photon.connect.kafka_client import ASK_S, client_settings, id_of, in_words, made, runs_of, topic_of
from photon.connect.keys import keys_by
from photon.connect.ports import Guarantee
from photon.connect.uris import Uri
from photon.core.clock import Attempts, Backoff
from photon.core.columns import split_lines
from photon.core.errors import UnavailableError, UsageError
from photon.logs.writer import LogPosition

TRANSACTION_S: Final = 20.0
"""The transaction of a writer that is gone stays open at most this long."""
_PATIENCE: Final = Backoff(TRANSACTION_S + 25.0, 1800.0)
"""How long an end is waited for. Coordinators look every ten seconds, so after the first time it is another
application's transaction."""
_PLACES: Final = ".photon"
_CREATE_S: Final = 15.0
_LOOKS: Final = Backoff(0.005, 0.2)
"""At whether a transaction has ended."""
_NEAR: Final = 20_000
"""A writer's last place is mostly among so many."""
_Runs = list[tuple[int, int]]
"""Offsets in a partition, the first and the last of each run."""
_Offsets = Mapping[tuple[str, int], int]
"""One in each of these partitions of topics."""


class _Noted(msgspec.Struct):
    """A record of the topic of places: all lines before `place` are written, the last batch of them at the
    offsets `lines` of each partition. `topic`: the id of that one; "" where brokers know none."""

    place: LogPosition
    lines: dict[int, _Runs]
    topic: str = ""


class KafkaSink:
    """photon.connect.ports.Sink of `kafka://HOST:PORT/TOPIC`. Options: `key`, the field, or fields, whose
    value is the record's key; `config`; librdkafka's settings."""

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
        made(uri, Producer, self._producing)  # so that what can't be is told before anything begins
        self._producer: Any = None
        self._admin: Any = None
        self._id = ""
        """The topic's, when this was opened."""
        self._told_anew = ""
        """The id of a topic of which it was told that it was made anew."""
        self._held_up = 0
        """So often in a row a transaction did not end."""

    def open(self) -> LogPosition | None:
        self.close()
        try:
            self._admin = made(self._uri, AdminClient, self._given)
            self._make_places()
            self._id = id_of(self._uri, self._admin)
            self._begin()
            ends = self._end_forgotten()
            self._begin()  # of an epoch in which none was aborted
            return self._last_place(ends)
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def _made_anew(self) -> UnavailableError:
        return UnavailableError(
            f"{self._uri.shown}: the topic was made anew; all that stands in .jsonl files is published again"
        )

    def _begin(self) -> None:
        self._producer = made(self._uri, Producer, self._producing)
        self._producer.init_transactions(ASK_S + TRANSACTION_S)

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        if self._producer is None:
            raise UnavailableError(f"{self._uri.shown}: not open")
        split = split_lines(lines)
        keys: Sequence[bytes | None] = [None] * len(split) if self._keys is None else self._keys(lines)
        try:
            self._transact(((line, key, -1) for line, key in zip(split, keys, strict=True)), end, {})
        except KafkaException as error:
            raise in_words(self._uri, error) from error

    def _transact(
        self,
        records: Iterable[tuple[bytes, bytes | None, int]],
        place: LogPosition,
        there: Mapping[int, Sequence[int]],
    ) -> None:
        """Write these (value, key, partition) up to the place, of which those `there` (partition -> offsets)
        stand already. Partition -1: by the key."""
        places = self._topic + _PLACES
        self._producer.begin_transaction()
        lines = self._send(self._topic, records)
        if id_of(self._uri, self._admin) != self._id:  # in which they may stand
            raise self._made_anew()
        runs = {p: runs_of([*there.get(p, ()), *lines.get(p, ())]) for p in {**there, **lines}}
        noted = _Noted(place, runs, self._id)
        (at,) = self._send(places, [(msgspec.json.encode(noted), self._writer.encode(), 0)])[0]
        self._producer.commit_transaction(TRANSACTION_S)
        self._await_end({(self._topic, p): offsets[-1] for p, offsets in lines.items()} | {(places, 0): at})

    def _send(self, topic: str, records: Iterable[tuple[bytes, bytes | None, int]]) -> dict[int, list[int]]:
        """Partition -> the offsets at which these (value, key, partition) stand. UnavailableError,
        KafkaException."""
        producer, sent, failed = self._producer, 0, []
        offsets: defaultdict[int, list[int]] = defaultdict(list)

        def told(error: KafkaError | None, record: Any) -> None:
            if error is None:
                offsets[record.partition()].append(record.offset())
            else:
                failed.append(error)

        try:
            for value, key, partition in records:
                while True:
                    try:
                        producer.produce(topic, value, key, partition, on_delivery=told)
                        break
                    except BufferError:  # as much is under way as may be
                        producer.poll(1.0)
                sent += 1
            producer.flush(TRANSACTION_S)
        except SystemError as error:  # raised for both what is fatal and what it calls back to tell
            raise UnavailableError(f"{self._uri.shown}: fenced by a newer writer; tried again") from error
        if failed:
            raise KafkaException(failed[0])
        # Sent once more, the offset may not be known.
        if sum(map(len, offsets.values())) < sent or any(min(some) < 0 for some in offsets.values()):
            raise UnavailableError(f"{self._uri.shown}: not all lines are known to be there; tried again")
        return offsets

    def _end_forgotten(self) -> _Offsets:
        """Abort a transaction in every partition, which also ends what was forgotten. Where it stands."""
        stands: dict[tuple[str, int], int] = {}
        self._producer.begin_transaction()
        for topic in (self._topic, self._topic + _PLACES):
            known = self._admin.list_topics(topic, ASK_S).topics[topic]
            if known.error is not None or not known.partitions:
                raise UnavailableError(f"{self._uri.shown}: its partitions are not known; tried again")
            empty = [(b"", self._writer.encode(), partition) for partition in known.partitions]
            stands |= {(topic, partition): at for partition, (at,) in self._send(topic, empty).items()}
        self._producer.abort_transaction(TRANSACTION_S)
        self._await_end(stands)
        return stands

    def _await_end(self, stands: _Offsets) -> None:
        """Return when readers of what is committed are past these offsets. UnavailableError."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(*place): latest for place in stands}
        committed, patience_s = IsolationLevel.READ_COMMITTED, _PATIENCE.delay_s(self._held_up + 1)
        for _ in Attempts(_LOOKS, patience_s, time.monotonic, time.sleep):
            ends = self._admin.list_offsets(asked, isolation_level=committed, request_timeout=ASK_S)
            if all(one.result().offset > stands[at.topic, at.partition] for at, one in ends.items()):
                self._held_up = 0
                return
        self._held_up += 1
        raise UnavailableError(
            f"{self._uri.shown}: a transaction does not end, of this writer or another; tried again"
        )

    def close(self) -> None:
        if self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.purge()
        self._producer = self._admin = None

    def _make_places(self) -> None:
        """The topic of the places; that of the joined lines must be there: how many partitions it has is not
        ours to say."""
        topics = self._admin.list_topics(timeout=ASK_S).topics
        if self._topic not in topics:
            raise UnavailableError(f"{self._uri.shown}: there is no such topic; make it, or mend its name")
        if self._topic + _PLACES in topics:
            return
        new = NewTopic(self._topic + _PLACES, 1, -1, config={"cleanup.policy": "compact"})
        for future in self._admin.create_topics([new], request_timeout=_CREATE_S).values():
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def _last_place(self, ends: _Offsets) -> LogPosition | None:
        """Up to where all lines of this writer are there, once those are written that a transaction lost that
        was ended in part. `ends`: of the partitions, up to where they are read."""
        end = ends[self._topic + _PLACES, 0]
        committed, at = self._last_noted(max(0, end - _NEAR), ends, IsolationLevel.READ_COMMITTED)
        if committed is None and end > _NEAR:
            committed, at = self._last_noted(0, ends, IsolationLevel.READ_COMMITTED)
        noted, _ = self._last_noted(at, ends, IsolationLevel.READ_UNCOMMITTED)
        standing = set() if noted is None else self._standing(noted.lines, ends)
        if noted != committed and not standing:
            noted = committed
            standing = set() if noted is None else self._standing(noted.lines, ends)
        if noted is None:
            return None
        lacking = [
            (record.value(), record.key(), record.partition())
            for record in self._at(noted.lines, ends, IsolationLevel.READ_UNCOMMITTED)
            if record.value() and (record.partition(), record.offset()) not in standing
        ]
        if lacking or noted != committed:
            there = defaultdict(list)
            for partition, offset in sorted(standing):
                there[partition].append(offset)
            self._transact(lacking, noted.place, there)
        return noted.place

    def _last_noted(self, start: int, ends: _Offsets, isolation: IsolationLevel) -> tuple[_Noted | None, int]:
        """Of this writer, from this offset on, and its offset; none where that is of a former topic, which is
        told once: UnavailableError."""
        place = (self._topic + _PLACES, 0)
        found: tuple[_Noted | None, int] = None, start
        for record in self._records({place: [(start, ends[place])]}, isolation):
            if record.key() == self._writer.encode() and record.value():
                found = self._parsed(record.value()), record.offset()
        noted, at = found
        if noted is None or noted.topic == self._id or "" in (noted.topic, self._id):
            return found
        if self._told_anew != self._id:
            self._told_anew = self._id
            raise self._made_anew()
        return None, at

    def _standing(self, lines: Mapping[int, _Runs], ends: _Offsets) -> set[tuple[int, int]]:
        """Those of these lines, as (partition, offset), that readers of what is committed see."""
        committed = self._at(lines, ends, IsolationLevel.READ_COMMITTED)
        return {(record.partition(), record.offset()) for record in committed}

    def _at(self, lines: Mapping[int, _Runs], ends: _Offsets, isolation: IsolationLevel) -> Iterator[Any]:
        """The records of these lines; of a topic that was made anew there are none."""
        places = {(self._topic, partition): runs for partition, runs in lines.items() if runs}
        if places.keys() - ends:
            raise UnavailableError(
                f"{self._uri.shown}: has fewer partitions than lines were written to; tried again (if it was "
                f"made anew, delete {self._topic}{_PLACES}, too)"
            )
        there = {place: runs for place, runs in places.items() if runs[-1][1] < ends[place]}
        return self._records(there, isolation)

    def _records(self, places: Mapping[tuple[str, int], _Runs], isolation: IsolationLevel) -> Iterator[Any]:
        """The records at these offsets of partitions, which have ended; not those that are deleted."""
        settings = {
            **self._given,
            "group.id": f"photon.{self._writer}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation.name.lower(),
            "fetch.wait.max.ms": 10,
            "client.rack": "",  # a follower may not have all yet
        }
        if not places:
            return
        wanted, silent_s = dict(places), 0
        consumer = made(self._uri, Consumer, settings)
        try:
            consumer.assign([TopicPartition(*place, runs[0][0]) for place, runs in places.items()])
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
                # An end that a new leader tells may be an early one.
                if runs and at >= runs[-1][1] + (error is not None):
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
