"""Kafka as a source, against a real broker."""

import contextlib
import itertools
import json
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaException

from photon.connect.ports import Fields, State, shown
from photon.connect.uris import make_source
from photon.core.errors import UnavailableError, UsageError
from tests.connect.broker import made_anew
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
FIELDS = Fields(("id",), "ts_us", "us")


@pytest.fixture
def produced(broker):
    """A function that produces values into a partition, in one transaction, which it commits or aborts.

    Whoever commits is answered before the partition is marked so, and readers see nothing until then.
    """
    from confluent_kafka import IsolationLevel, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    admin = AdminClient({"bootstrap.servers": broker.address})

    def end(place, isolation):
        (found,) = admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=isolation).values()
        return found.result(30).offset

    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "test", "linger.ms": 0})
    producer.init_transactions(60)

    def produce(topic, values, partition=0, commit=True, **more):
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=partition, **more)
        producer.flush()
        producer.commit_transaction() if commit else producer.abort_transaction()
        place = TopicPartition(topic, partition)
        written = end(place, IsolationLevel.READ_UNCOMMITTED)
        wait_until(lambda: end(place, IsolationLevel.READ_COMMITTED) >= written)

    return produce


@pytest.fixture
def source(broker):
    made = []

    def make(topic, options=""):
        made.append(make_source(f"kafka://{broker.address}/{topic}{options}", FIELDS))
        return made[-1]

    yield make
    for one in made:
        one.close()


def drained(source, after=None):
    """Partition -> its lines, and the numbers of its records."""
    source.open(after or {}, True)
    lines, numbers = {}, {}
    while source.state() is not State.FINISHED:
        for batch in source.read(0.5):
            lines.setdefault(shown(batch.partition), []).extend(batch.lines.splitlines())
            of_it = numbers.setdefault(shown(batch.partition), [])
            of_it += [number for first, count in batch.runs for number in range(first, first + count)]
    return lines, numbers


def test_what_was_committed_is_read_from_where_it_was_left(topic, produced, source):
    name = topic(2)
    produced(name, [b'{"n":0}', b'{"n":1}'])
    produced(name, [b'{"n":"aborted"}'] * 3, commit=False)
    produced(name, [b'{"n":2}'])
    produced(name, [b'{"n":3}'], partition=1)
    one = source(name)
    lines, numbers = drained(one)
    assert lines == {f"{name}-0": [b'{"n":0}', b'{"n":1}', b'{"n":2}'], f"{name}-1": [b'{"n":3}']}
    first, second, third = numbers[f"{name}-0"]
    assert (first, second, third > 5) == (0, 1, True)
    assert drained(one, {f"{name}-0": 0})[1] == {f"{name}-0": [1, third], f"{name}-1": [0]}
    assert drained(one, {f"{name}-0": third, f"{name}-1": 0})[1] == {}
    assert (one.losses(), one.behind()) == ([], 0)


def test_an_open_transaction_is_not_waited_for_nor_read(topic, broker, produced, source):
    from confluent_kafka import Producer

    name = topic()
    produced(name, [b'{"n":0}'])
    other = Producer({"bootstrap.servers": broker.address, "transactional.id": "open"})
    other.init_transactions(60)
    other.begin_transaction()
    other.produce(name, b'{"n":1}')
    other.flush()
    assert drained(source(name))[0] == {f"{name}-0": [b'{"n":0}']}
    other.abort_transaction()


def known_after(source, reads):
    """Up to when it knows all, in milliseconds, once `reads` says so of it."""
    known = []

    def knows():
        source.read(0.05)
        known.append(source.known_to() // 1_000)
        return reads(known[-1])

    wait_until(knows)
    return known[-1]


def now_ms():
    return time.time_ns() // 1_000_000


def test_what_is_read_to_its_end_is_known_up_to_now_and_an_open_transaction_holds_that(
    topic, broker, produced, source
):
    from confluent_kafka import Producer

    name, one, began = topic(2), None, now_ms()
    produced(name, [b'{"n":0}'], timestamp=1_000)
    one = source(name)
    one.open({}, False)
    assert one.known_to() == 0
    assert began <= known_after(one, lambda known: known > began) <= now_ms()
    other = Producer({"bootstrap.servers": broker.address, "transactional.id": "held"})
    other.init_transactions(60)
    other.begin_transaction()
    other.produce(name, b'{"n":1}', partition=1)
    other.flush()
    written, looks = now_ms(), []
    while len(looks) < 30:
        one.read(0.05)
        looks.append(one.known_to() // 1_000)
    assert max(looks) <= written  # its records may yet be committed, and are older than now
    other.commit_transaction()
    assert known_after(one, lambda known: known > written) <= now_ms()


def test_what_is_not_read_to_its_end_is_known_as_its_records_say(topic, produced, source):
    name, one = topic(2), None
    for second in range(3):
        produced(name, [b'{"n":0}'] * 300, timestamp=1_000 * second + 1)
    produced(name, [b'{"n":0}'], partition=1, timestamp=500_000)
    one = source(name)
    one.open({}, False)
    one._asked_s = float("inf")  # it never asks where they end
    known = []
    while one.behind():
        one.read(0.5)
        known.append(one.known_to() // 1_000)
    assert known == sorted(known)
    assert {0, 2_001} <= set(known) <= {0, 1, 1_001, 2_001}


def test_a_record_from_the_future_promises_nothing_of_those_behind_it(topic, produced, source):
    name, known = topic(), []
    produced(name, [b'{"n":0}'] * 300, timestamp=now_ms() + 600_000)
    produced(name, [b'{"n":0}'] * 400, timestamp=1_000)
    one = source(name)
    one.open({}, False)
    one._asked_s = float("inf")  # it never asks where they end
    while one.behind():
        one.read(0.5)
        known.append(one.known_to() // 1_000)
    assert {*known} <= {0, 1_000}


def test_a_value_is_one_line_whatever_it_is(topic, produced, source):
    name = topic()
    produced(name, [b'{\n "a": "b\\n"\n}', None, b"", b"no json"])
    (lines,) = drained(source(name))[0].values()
    assert lines == [b'{  "a": "b\\n" }', b"null", b"null", b"no json"]


def test_keys_times_and_headers_become_fields(topic, produced, source):
    name = topic()
    more = {"key": b"k1", "timestamp": 1_700_000_000_123, "headers": [("trace", b"old"), ("trace", b"t")]}
    produced(name, [b'{"a":1}', b"{}", b"[1]"], **more)
    (lines,) = drained(source(name, "?key=id&timestamp=ts_us&header.trace=trace"))[0].values()
    added = {"id": "k1", "ts_us": 1_700_000_000_123_000, "trace": "t"}
    assert [json.loads(line) for line in lines] == [{**added, "a": 1}, added, [1]]


class Record:
    def __init__(self, value, key):
        self.value, self.key = lambda: value, lambda: key
        self.timestamp = lambda: (0, -1)


@pytest.mark.parametrize(
    ("value", "key", "line"),
    [
        (b'{"a":{"k.l":1} }', b"K", b'{"k.l":"K","a":{"k.l":1} }'),
        (b'{"a":1.10, "k.l" :{"b":2}}', b"K", b'{"k.l":"K","a":1.10}'),
        (b'{"a":1.10, "\\u006b.l":2}', b"K", b'{"k.l":"K","a":1.10}'),
        (b'{"a":1.10, "k.l":2}', None, b'{"k.l":2,"a":1.10}'),
        (b'{"a":1.10}', None, b'{"k.l":null,"a":1.10}'),
        (b'{"k.l":2,', b"K", b'{"k.l":"K","k.l":2,'),
    ],
)
def test_a_field_that_the_event_has_already_is_replaced(value, key, line):
    one = make_source("kafka://127.0.0.1:1/t?key=k.l", FIELDS)
    one.close()
    assert one._value(Record(value, key)) == line


def test_an_end_that_comes_with_the_records_before_it_is_the_end():
    """Marks of transactions stand between them."""
    from confluent_kafka import KafkaError

    def record(offset, error=None):
        found = Record(b'{"id":"%d"}' % offset, None)
        found.offset, found.partition, found.error = (lambda: offset), (lambda: 0), lambda: error
        return found

    end = record(6, KafkaError(KafkaError._PARTITION_EOF))
    one = make_source("kafka://127.0.0.1:1/t", FIELDS)
    one.close()
    one._consumer = SimpleNamespace(
        poll=lambda _: record(3), consume=lambda *_: [record(4), end], close=lambda: None
    )
    one._drain, one._next, one._ends = True, {0: 3}, {0: 6}
    (batch,) = one.read(0.0)
    assert (batch.runs, one.state()) == (((3, 2),), State.FINISHED)


@pytest.mark.parametrize("drain", [True, False])
def test_records_of_a_topic_that_was_made_anew_meanwhile_are_not_taken_for_the_formers(drain, monkeypatch):
    def record(offset):
        found = Record(b'{"id":"%d"}' % offset, None)
        found.offset, found.partition, found.error = (lambda: offset), (lambda: 0), lambda: None
        return found

    ids, begun = iter(["former", KafkaException("no answer"), "another"]), []

    def id_now():
        if isinstance(answer := next(ids), KafkaException):
            raise answer
        return SimpleNamespace(topic_id=answer)

    one = make_source("kafka://127.0.0.1:1/t", FIELDS)
    one.close()
    at = itertools.count(3)
    one._consumer = SimpleNamespace(
        poll=lambda _: record(next(at)), consume=lambda *_: [], close=lambda: None
    )
    one._admin = SimpleNamespace(describe_topics=lambda *_, **__: {"t": SimpleNamespace(result=id_now)})
    monkeypatch.setattr(one, "_begin", lambda: begun.append(dict(one._places)))
    one._id, one._drain, one._looked_s = "former", drain, time.monotonic()
    one._next, one._ends = {0: 3}, {0: 6}
    (batch,) = one.read(0.0)
    assert (batch.partition, batch.runs) == ("t-0\0former", ((3, 1),))
    with pytest.raises(UnavailableError, match="no answer"):
        one.read(0.0)
    assert (one.read(0.0), one.state()) == ([], State.ACTIVE)
    assert begun == [{0: ("former", 3)}], "what was not handed out is read anew"
    assert (one._amiss, one._next) == (True, {0: 4})


def test_new_partitions_are_found_while_it_is_followed(topic, broker, produced, source, monkeypatch):
    from confluent_kafka.admin import AdminClient, NewPartitions

    monkeypatch.setattr("photon.connect.kafka.PARTITIONS_EVERY_S", 0.2)
    name = topic()
    one = source(name)
    one.open({}, False)
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_partitions([NewPartitions(name, 2)])[name].result(30)
    wait_until(lambda: len(admin.list_topics(name).topics[name].partitions) == 2)
    produced(name, [b"{}"], partition=1)
    found = []
    wait_until(lambda: found.extend(one.read(0.1)) or found, 30)
    assert [shown(batch.partition) for batch in found] == [f"{name}-1"]
    assert one.state() in (State.ACTIVE, State.IDLE)


def test_nothing_is_known_from_when_a_partition_was_added_until_it_is_read(topic, broker, produced, source):
    from confluent_kafka.admin import AdminClient, NewPartitions

    name, began = topic(), now_ms()
    one = source(name)
    one.open({}, False)
    known_after(one, lambda known: known > began)
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_partitions([NewPartitions(name, 2)])[name].result(30)
    wait_until(lambda: len(admin.list_topics(name).topics[name].partitions) == 2)
    added, known = now_ms(), []
    produced(name, [b"{}"], partition=1)

    def found():
        known.append(one.known_to() // 1_000)
        return one.read(0.05)

    wait_until(found, 60)
    assert max(known) <= added
    assert known_after(one, lambda known: known > added) <= now_ms()


def failing(source, monkeypatch, *calls):
    """At these calls from now on it gets no answer to where a partition begins and ends."""
    bounds, counted = source._bounds, itertools.count(1)

    def asked(partition):
        if next(counted) in calls:
            raise UnavailableError("no answer")
        return bounds(partition)

    monkeypatch.setattr(source, "_bounds", asked)


def read_until(source, done):
    """Partition -> the numbers of its records, of reads that are repeated whatever they raise."""
    numbers = {}

    def read():
        with contextlib.suppress(UnavailableError):
            for batch in source.read(0.1):
                of_it = numbers.setdefault(shown(batch.partition), [])
                of_it += [number for first, count in batch.runs for number in range(first, first + count)]
        return done(numbers)

    wait_until(read, 30)
    return numbers


def test_new_partitions_that_are_found_in_trouble_are_read(topic, broker, produced, source, monkeypatch):
    from confluent_kafka.admin import AdminClient, NewPartitions

    monkeypatch.setattr("photon.connect.kafka.PARTITIONS_EVERY_S", 0.2)
    name = topic()
    one = source(name)
    one.open({}, False)
    failing(one, monkeypatch, 2)
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_partitions([NewPartitions(name, 4)])[name].result(30)
    wait_until(lambda: len(admin.list_topics(name).topics[name].partitions) == 4)
    for partition in range(1, 4):
        produced(name, [b"{}"], partition=partition)
    found = read_until(one, lambda numbers: len(numbers) == 3)
    assert found == {f"{name}-{partition}": [0] for partition in range(1, 4)}


def delete_before(broker, topic, offset):
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": broker.address})
    for future in admin.delete_records([TopicPartition(topic, 0, offset)]).values():
        future.result(30)


def test_what_retention_took_before_it_was_read_is_told_by_number(topic, broker, produced, source):
    name = topic()
    produced(name, [b'{"n":%d}' % n for n in range(10)])
    delete_before(broker, name, 7)
    one = source(name)
    assert drained(one, {f"{name}-0": 2})[1] == {f"{name}-0": [7, 8, 9]}
    (loss,) = one.losses()
    assert (shown(loss.partition), loss.first, loss.count) == (f"{name}-0", 3, 4)
    assert (one.losses(), drained(one)[1]) == ([], {f"{name}-0": [7, 8, 9]})
    assert one.losses() == [], "what was deleted before anybody wanted it is no loss"


@pytest.mark.parametrize("failures", [(), (1,)])
def test_what_retention_takes_while_it_is_followed_is_told_too(
    topic, broker, produced, source, monkeypatch, failures
):
    name = topic()
    for _ in range(40):
        produced(name, [b"{%s}" % (b" " * 20_000)])  # each is a batch, and a mark of its end
    one = source(name, "?queued.max.messages.kbytes=1&max.partition.fetch.bytes=1000")
    one.open({}, False)
    assert one.read(10)[0].runs[0][0] == 0
    delete_before(broker, name, 60)
    failing(one, monkeypatch, *failures)
    (numbers,) = read_until(one, lambda found: [78] in [some[-1:] for some in found.values()]).values()
    (loss,) = one.losses()
    assert loss.first + loss.count == 60
    assert [number for number in numbers if number > loss.first] == list(range(60, 80, 2))


class Amiss:
    """A consumer whose next records have one among them that can't be read, behind `whole` that can."""

    def __init__(self, consumer, whole, partition):
        self._consumer, self._whole, self._partition = consumer, whole, partition

    def __getattr__(self, name):
        return getattr(self._consumer, name)

    def consume(self, count, wait_s):
        found = self._consumer.consume(count, wait_s)
        if self._whole and len(found) > self._whole:
            found.insert(self._whole, self)
            self._whole = 0
        return found

    def partition(self):
        return self._partition

    def error(self):
        from confluent_kafka import KafkaError

        return KafkaError(KafkaError._BAD_MSG)


def test_a_record_that_can_not_be_read_takes_no_other_with_it(topic, produced, source):
    name = topic()
    produced(name, [b'{"n":%d}' % n for n in range(90)])
    one = source(name)
    one.open({}, False)
    one._consumer = Amiss(one._consumer, 7, 0)
    wait_until(lambda: one._error or (one.read(0.5) and False), 30)
    assert one._next == {0: 8}
    with pytest.raises(UnavailableError, match="tried again"):
        one.read(0.1)
    found = read_until(one, lambda numbers: [89] in [some[-1:] for some in numbers.values()])
    assert found == {f"{name}-0": [*range(8, 90)]}


def test_a_topic_that_was_made_anew_is_read_from_its_start_however_long_it_is(
    topic, broker, produced, source
):
    name = topic()
    produced(name, [b"{}"] * 3)
    one = source(name)
    one.open({}, True)
    (first,) = one.read(10)
    made_anew(broker, name)
    produced(name, [b'{"n":%d}' % n for n in range(9)])
    assert drained(one, {first.partition: 2})[1] == {f"{name}-0": [*range(9)]}
    assert drained(one, {f"{name}-0": 2})[1] == {f"{name}-0": [*range(3, 9)]}, "of brokers that knew no ids"
    assert one.losses() == []


def test_a_topic_that_is_made_anew_while_it_is_followed_is_read_from_its_start(
    topic, broker, produced, source
):
    name = topic()
    produced(name, [b"{}"] * 3)
    one = source(name)
    one.open({}, False)
    read_until(one, lambda numbers: numbers)
    made_anew(broker, name)
    produced(name, [b"{}"] * 9)
    found = read_until(one, lambda found: [8] in [some[-1:] for some in found.values()])
    assert found == {f"{name}-0": [*range(9)]}, "none is of the former"


def test_a_topic_that_ends_before_its_place_is_refused(topic, produced, source):
    name = topic()
    produced(name, [b"{}"])
    one = source(name)
    with pytest.raises(UsageError, match="ends before record 51, up to which it was read: its brokers have"):
        drained(one, {f"{name}-0": 50})


def test_the_group_is_told_how_far_it_is(topic, broker, produced, source):
    from confluent_kafka import Consumer, TopicPartition

    name = topic()
    produced(name, [b"{}"] * 5)
    one = source(name, "?group=mine")
    drained(one)
    one.kept({f"{name}-0": 3})
    asked = Consumer({"bootstrap.servers": broker.address, "group.id": "mine"})
    try:
        at = [TopicPartition(name, 0)]
        wait_until(lambda: one.read(0.05) or asked.committed(at, 10)[0].offset == 4, 30)
    finally:
        asked.close()


def test_what_can_not_be_is_told_with_the_mend(broker, source, tmp_path):
    with pytest.raises(UsageError, match="write kafka://HOST:PORT"):
        source("")
    with pytest.raises(UsageError, match="unknown option 'foo'; known are config, group, header, key"):
        source("t", "?foo=1")
    with pytest.raises(UsageError, match="No such configuration property"):
        source("t", "?security.protocl=SSL")
    with pytest.raises(UsageError, match=r"write header\.NAME=FIELD"):
        source("t", "?header=a")
    (tmp_path / "client.properties").write_text("# mine\nsecurity.protocol\n", "utf-8")
    with pytest.raises(UsageError, match=r"client\.properties: line 2 is no name=value"):
        source("t", f"?config={tmp_path}/client.properties")
    for drain, error in ((True, UsageError), (False, UnavailableError)):
        with pytest.raises(error, match="there is no such topic; make it, or mend its name"):
            source("nope").open({}, drain)
    away = make_source("kafka://127.0.0.1:1/t?socket.connection.setup.timeout.ms=1000", FIELDS)
    with pytest.raises(UnavailableError, match=r"kafka://127\.0\.0\.1:1/t: .*tried again"):
        away.open({}, True)
    away.close()
