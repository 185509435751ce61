import random
import threading

from dispatcher.driver import WaitingBatches
from dispatcher.rules.events import NO_EVENTS, RetryBatch


def filled(rng_seed, fresh, retries=0, in_order=False):
    waiting = WaitingBatches(random.Random(rng_seed))
    waiting.in_order = in_order
    for batch in fresh:
        waiting.put(batch)
    for number in range(retries):
        waiting.put(RetryBatch([b"%d" % number], NO_EVENTS))
    waiting.close()
    return waiting


def taken(waiting):
    batches = []
    while (batch := waiting.take()) is not None:
        batches.append(batch)
    return batches


def test_every_batch_is_taken_once_and_retries_come_first_and_in_order():
    fresh = [object() for _ in range(20)]
    order = taken(filled(1, fresh, retries=3))
    assert [batch.keys for batch in order[:3]] == [[b"0"], [b"1"], [b"2"]]
    assert sorted(map(id, order[3:])) == sorted(map(id, fresh))


def test_two_datacenters_send_the_same_batches_in_different_orders():
    fresh = [object() for _ in range(20)]
    assert taken(filled(1, fresh)) != taken(filled(2, fresh))


def test_batches_go_in_order_while_their_primaries_are_still_being_read():
    fresh = [object() for _ in range(20)]
    assert taken(filled(1, fresh, in_order=True)) == fresh


def test_a_taker_waits_until_there_is_something_and_ends_when_closed():
    waiting = WaitingBatches(random.Random(0))
    got = []
    thread = threading.Thread(target=lambda: got.extend(taken(waiting)))
    thread.start()
    batch = object()
    waiting.put(batch)
    waiting.close()
    thread.join(10)
    assert not thread.is_alive()
    assert got == [batch]
