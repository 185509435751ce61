"""Kafka as a sink, against a real broker: each line once, whatever becomes of connections and writers."""

import contextlib
import itertools
import random
import struct
import threading
import time
from collections import Counter

import pytest

from photon.connect.uris import make_sink
from photon.core.errors import PhotonError, UnavailableError, UsageError
from photon.logs.writer import LogPosition
from tests.connect.broker import made_anew, start_broker
from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


def committed(broker, topic):
    """What a reader of committed records finds: its key and value, and how often it stands there."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"isolation.level": "read_committed", "enable.partition.eof": True, "group.id": "reader"}
    consumer = Consumer({"bootstrap.servers": broker.address, **settings})
    partitions = list(consumer.list_topics(topic).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    ended, found = set(), Counter()
    while len(ended) < len(partitions):
        for record in consumer.consume(1000, 1.0):
            if record.error() is None:
                found[record.key(), record.value()] += 1
            else:
                ended.add(record.partition())
    consumer.close()
    return found


@pytest.fixture
def sink(broker):
    made = []

    def make(topic, writer="joiner-east.1", options="", address=None):
        made.append(make_sink(f"kafka://{address or broker.address}/{topic}{options}", writer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def lines(*names):
    return b"".join(b'{"id":"%s","n":{"k":%d}}\n' % (name.encode(), len(name)) for name in names)


def once(*names):
    return Counter({(None, line): 1 for line in lines(*names).splitlines()})


def test_a_sink_tells_up_to_where_it_has_the_lines_of_each_writer(topic, broker, sink):
    name = topic(3)
    east, west = sink(name), sink(name, "joiner-west.2")
    assert (east.open(), west.open()) == (None, None)
    east.write(lines("a", "b"), LogPosition(0, 0), LogPosition(0, 44))
    west.write(lines("c"), LogPosition(3, 0), LogPosition(3, 22))
    east.write(lines("d"), LogPosition(1, 0), LogPosition(1, 22))
    assert east.open() == LogPosition(1, 22) == sink(name).open()
    assert west.open() == LogPosition(3, 22)
    assert committed(broker, name) == once(*"abcd")


@pytest.mark.parametrize("again", [True, False])
def test_a_topic_that_was_made_anew_gets_all_again_and_that_is_told(topic, broker, sink, again):
    """While its sink is open, or between two runs."""
    name, told = topic(2), "the topic was made anew; all that stands in .jsonl files is published again"
    one = sink(name)
    assert one.open() is None
    one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
    made_anew(broker, name)
    if again:
        with pytest.raises(UnavailableError):
            one.write(lines("b"), LogPosition(0, 22), LogPosition(0, 44))
    else:
        one = sink(name)
    with pytest.raises(UnavailableError, match=told):
        one.open()
    for _ in range(2):
        assert one.open() is None
    one.write(lines("a", "b"), LogPosition(0, 0), LogPosition(0, 44))
    assert sink(name).open() == LogPosition(0, 44)
    assert committed(broker, name) == once("a", "b")


def test_a_topic_that_is_made_anew_while_lines_are_sent_has_none_of_them(topic, broker, sink, monkeypatch):
    name = topic()
    one = sink(name)
    one.open()
    with monkeypatch.context() as patched, pytest.raises(UnavailableError, match="was made anew"):
        patched.setattr("photon.connect.kafka_sink.id_of", lambda *_: "another")
        one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
    assert one.open() is None
    assert not committed(broker, name)


def test_keys_are_a_fields_values(topic, broker, sink):
    name = topic()
    for field, key in (("id", b"a"), ("n.k", b"1"), ("nope", None), ("id.deeper", None)):
        one = sink(name, options=f"?key={field}")
        one.open()
        one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
        assert (key, lines("a").rstrip()) in committed(broker, name)


def test_a_writer_that_was_taken_over_writes_nothing_more(topic, broker, sink):
    name = topic()
    before, after = sink(name), sink(name)
    before.open()
    before.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
    assert after.open() == LogPosition(0, 22)
    with pytest.raises(UnavailableError):
        before.write(lines("late"), LogPosition(0, 22), LogPosition(0, 50))
    after.write(lines("b"), LogPosition(0, 22), LogPosition(0, 44))
    assert committed(broker, name) == once("a", "b")


def test_a_batch_is_written_when_readers_have_it(topic, broker, sink):
    """Not before a transaction of another writer has ended, behind which it stands."""
    from confluent_kafka import Producer

    name = topic(1)
    one = sink(name)
    one.open()
    other = Producer({"bootstrap.servers": broker.address, "transactional.id": f"before {name}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(name, b"never")
    other.flush()
    before_its_end = threading.Timer(2, other.abort_transaction)
    before_its_end.start()
    one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
    assert committed(broker, name) == once("a")
    before_its_end.join()


def test_the_place_is_not_overlooked_behind_a_transaction_of_another_writer(topic, broker, sink, monkeypatch):
    from confluent_kafka import Producer

    name = topic()
    one = sink(name)
    one.open()
    monkeypatch.setattr(one, "_await_end", lambda stands: None)  # it dies meanwhile
    other = Producer({"bootstrap.servers": broker.address, "transactional.id": f"open {name}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(f"{name}.photon", b'{"file":9,"offset":9}', b"another")
    other.flush()
    one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))  # stands behind the other's
    again = sink(name)

    def end():
        time.sleep(2)
        other.abort_transaction()

    ending = threading.Thread(target=end)
    ending.start()
    assert again.open() == LogPosition(0, 22)
    ending.join()


def test_what_can_not_be_is_told_with_the_mend(broker, sink, topic):
    with pytest.raises(UnavailableError, match="there is no such topic; make it, or mend its name"):
        sink("nope").open()
    with pytest.raises(UsageError, match="unknown option 'foo'; known are config, key"):
        sink("t", options="?foo=1")
    name = topic()
    one = sink(name)
    one.open()
    one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
    mend = r"raise message\.max\.bytes of the sink and max\.message\.bytes of the topic"
    for options in ("", "?message.max.bytes=9000000&compression.type=none"):
        big = sink(topic(), options=options)
        big.open()
        with pytest.raises(UnavailableError, match=mend):
            big.write(lines("a", "b" * 2_000_000), LogPosition(0, 0), LogPosition(0, 2_000_100))
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address})
    producer.produce(f"{name}.photon", b"mine", b"joiner-east.1")
    producer.flush()
    with pytest.raises(UsageError, match=r"\.photon holds what is no place of Photon's"):
        sink(name).open()


@pytest.fixture
def behind(tmp_path):
    """A broker whose clients reach it through a proxy, and the proxy."""
    proxy = ToxiproxyServer(need_toxiproxy())
    with contextlib.ExitStack() as closing:
        closing.callback(proxy.close)
        one = start_broker(tmp_path / "broker", lambda here: proxy.create({"kafka": here})["kafka"])
        closing.callback(one.close)
        yield one, proxy


@pytest.mark.faults
@pytest.mark.timeout(500)
def test_no_line_is_missing_or_twice_when_answers_are_late_or_lost(behind, sink):
    from confluent_kafka.admin import AdminClient, NewTopic

    broker, proxy = behind
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic("t", 2, 1)])["t"].result(30)
    impatient = "?socket.timeout.ms=1000&request.timeout.ms=1000&delivery.timeout.ms=1500"
    one = sink("t", options=impatient, address=broker.address)
    dice, names = random.Random(3), [f"n{number:03}" for number in range(120)]
    column = [lines(name) for name in names]
    ends = list(itertools.accumulate(map(len, column)))
    place, failures, until = None, 0, time.monotonic() + 400
    while place is None or place.offset < ends[-1]:
        assert time.monotonic() < until, place
        try:
            if place is None:
                place = one.open() or LogPosition(0, 0)
                assert place.offset in (0, *ends)
            done = ends.index(place.offset) + 1 if place.offset else 0
            upto = min(len(names), done + dice.randint(1, 12))
            toxic = dice.random()
            if toxic < 0.15:  # what is sent arrives, and the answer does not
                proxy.add("kafka", "latency", "downstream", {"latency": 5_000, "jitter": 0}, 1.0)
            elif toxic < 0.25:
                proxy.add("kafka", "limit_data", "downstream", {"bytes": dice.randint(1, 400)}, 1.0)
            elif toxic < 0.35:
                proxy.add("kafka", "limit_data", "upstream", {"bytes": dice.randint(1, 900)}, 1.0)
            elif toxic < 0.4:
                broker.kill()
                broker.start()
            end = LogPosition(0, ends[upto - 1])
            one.write(b"".join(column[done:upto]), place, end)
            place = end
        except PhotonError:
            failures += 1
            place = None
        proxy.clear("kafka")
    assert failures >= 5
    assert committed(broker, "t") == once(*names)


def batches(log):
    """(offset of the next one, bytes) of each batch of records."""
    data, at = log.read_bytes(), 0
    while data[at + 8 : at + 12].strip(b"\0"):  # a log ends with zeros
        base, length = struct.unpack_from(">qi", data, at)
        (last,) = struct.unpack_from(">i", data, at + 23)
        yield base + last + 1, data[at : at + 12 + length]
        at += 12 + length


def test_what_a_broker_that_was_killed_forgot_to_end_is_ended(tmp_path, sink):
    """Kafka 4.4 starts, finds a transaction that is to be committed, takes its partitions, which have no
    leader yet, for deleted, and notes that it is done. So its log of transactions is here."""
    from confluent_kafka.admin import AdminClient, NewTopic

    broker = start_broker(tmp_path / "broker")
    try:
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)
        one = sink("t", address=broker.address)
        one.open()
        one.write(lines("a"), LogPosition(0, 0), LogPosition(0, 22))
        (log,) = tmp_path.glob("broker/data/__transaction_state-0/*.log")
        committed(broker, "t")
        *_, (_, done) = batches(log)
        one._producer.begin_transaction()
        for name in ("t", "t.photon"):
            one._producer.produce(name, b"forgotten", b"joiner-west.1")
        assert one._producer.flush(30) == 0
        broker.kill()
        *_, (after, begun) = batches(log)
        assert begun != done
        with log.open("r+b") as file:
            file.seek(sum(len(batch) for _, batch in batches(log)))
            file.write(struct.pack(">q", after) + done[8:])
        broker.start()
        again = sink("t", address=broker.address)
        assert again.open() == LogPosition(0, 22)
        again.write(lines("b"), LogPosition(0, 22), LogPosition(0, 44))
        assert committed(broker, "t") == once("a", "b")
    finally:
        broker.close()


def cut_marker(directory, partition):
    """Of a broker that is down: the marker that the log of this partition ends with."""
    (log,) = directory.glob(f"broker/data/{partition}/*.log")
    *before, (_, marker) = batches(log)
    (attributes,) = struct.unpack_from(">h", marker, 21)
    assert attributes & 0x20  # a batch of control
    with log.open("r+b") as file:
        file.seek(sum(len(batch) for _, batch in before))
        file.write(bytes(len(marker)))


def die_while_writing(sink, name, address):
    one = sink(name, options="?key=id", address=address)
    one.open()
    one._producer.begin_transaction()
    for partition in (0, 1):
        one._producer.produce(name, b"never", b"key", partition)
    assert one._producer.flush(30) == 0


@pytest.mark.soak
def test_a_transaction_that_a_killed_broker_ended_in_part_is_there_whole_and_once(tmp_path, sink):
    """Kafka 4.4 forgets the partitions that have no leader yet when it starts. So their markers are gone."""
    from confluent_kafka.admin import AdminClient, NewTopic

    parts = ("{}-0", "{}-1", "{}.photon-0")
    cuts = [some for n in (0, 1, 2, 3) for some in itertools.combinations(parts, n)]
    cases = [(f"t{n}", some, n % 2 == 1) for n, some in enumerate(cuts)]
    names = [f"n{number:02}" for number in range(40)]
    broker = start_broker(tmp_path / "broker")
    try:
        admin = AdminClient({"bootstrap.servers": broker.address})
        for made in admin.create_topics([NewTopic(topic, 2, 1) for topic, _, _ in cases]).values():
            made.result(30)
        for topic, _, _ in cases:
            one = sink(topic, options="?key=id", address=broker.address)
            assert one.open() is None
            one.write(lines(*names[:20]), LogPosition(0, 0), LogPosition(0, 20))
            one.write(lines(*names[20:30]), LogPosition(0, 20), LogPosition(0, 30))
            wait_until(lambda topic=topic: committed(broker, topic).total() == 30)
        for _ in range(2):  # what mends it is not ended either
            broker.kill()
            for topic, some, _ in cases:
                for partition in some:
                    cut_marker(tmp_path, partition.format(topic))
            broker.start()
            for topic, some, dies in cases:
                if dies:
                    die_while_writing(sink, topic, broker.address)
                again = sink(topic, options="?key=id", address=broker.address)
                assert again.open() == LogPosition(0, 20 if some == parts else 30), some
        for topic, some, _ in cases:
            again = sink(topic, options="?key=id", address=broker.address)
            place = again.open()
            again.write(lines(*names[place.offset :]), place, LogPosition(0, 40))
            found = Counter(line for _, line in committed(broker, topic).elements())
            assert found == Counter(lines(*names).splitlines()), some
    finally:
        broker.close()
