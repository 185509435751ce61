"""What a console shows of the last minutes is what the statuses counted."""

from photon.cluster.statuses import Sample
from photon.console.history import EDGES_US, POINTS_MAX, History, gathered
from photon.console.pages import summed_up


def dispatcher(name="east", joined=0, read=0, waiting=0, counts=(), behind=0):
    return {
        "datacenter": name,
        "foreign_events": read,
        "fates": {"joined": joined},
        "pending": waiting,
        "in_flight": 0,
        "wasted_joins": joined // 10,
        "lost_bytes": 0,
        "latency_us": {"edges": [1_000.0, 2_000.0, 300e6], "counts": list(counts)},
        "backlog": {"events": behind, "seconds": behind / 10, "bytes": behind},
    }


def looks(*steps):
    """(monotonic seconds, statuses of dispatchers) -> a history of them, at wall times from 1,000 on."""
    history = History()
    for number, (at_s, statuses) in enumerate(steps):
        named = {f"dispatcher-{n}": status for n, status in enumerate(statuses)}
        history.add(Sample(at_s, named), 1_000.0 + number)
    return history


def test_rates_are_what_was_counted_since_the_last_look_of_all_workers_together():
    told = looks(
        (0.0, [dispatcher(joined=10, read=20), dispatcher(joined=5, read=5)]),
        (2.0, [dispatcher(joined=30, read=60, waiting=3, behind=7), dispatcher(joined=5, read=5, behind=2)]),
    ).told(0.0)
    east = told["datacenters"]["east"]
    assert told["times"] == [1_000.0, 1_001.0]
    assert east["joined_per_s"] == [None, 10.0] and east["read_per_s"] == [None, 20.0]
    assert (east["waiting"][1], east["behind"][1], east["behind_s"][1], east["wasted"][1]) == (3, 9, 0.7, 2)


def test_one_that_did_not_answer_has_a_gap_and_one_that_came_later_none_before():
    told = looks(
        (0.0, [dispatcher(read=1)]),
        (1.0, [dispatcher("west")]),
        (2.0, [dispatcher(read=5), dispatcher("west", read=4)]),
    ).told(0.0)
    assert told["datacenters"]["east"]["read_per_s"] == [None, None, 2.0]
    assert told["datacenters"]["west"]["read_per_s"] == [None, None, 4.0]


def test_a_new_ledger_starts_anew():
    told = looks((0.0, [dispatcher(read=9)]), (1.0, [dispatcher(read=2)]), (2.0, [dispatcher(read=3)])).told(
        0.0
    )
    assert told["datacenters"]["east"]["read_per_s"] == [None, None, 1.0]


def test_a_listener_is_told_what_is_new():
    history = looks(*[(float(n), [dispatcher(read=n)]) for n in range(5)])
    told = history.told(1_002.0)
    assert told["times"] == [1_003.0, 1_004.0]
    assert told["datacenters"]["east"]["read_per_s"] == [1.0, 1.0]


def test_only_so_much_is_kept():
    history = looks(*[(float(n), [dispatcher(read=n)]) for n in range(POINTS_MAX + 9)])
    told = history.told(0.0)
    assert len(told["times"]) == len(told["datacenters"]["east"]["read_per_s"]) == POINTS_MAX


def test_latencies_are_gathered_without_losing_one():
    found = gathered([{"edges": [1_000.0, 1_400.0, 1_500.0, 900e6], "counts": [1, 2, 4, 8, 16]}])
    assert len(found) == len(EDGES_US)
    assert found[:3] == (1, 2, 4) and found[-1] == 24
    assert gathered([{"edges": [1_000.0], "counts": []}]) == (0,) * len(EDGES_US)


EMPTY = {"joined": [], "dead_letters": [], "pending": {"east": None}, "registry": None, "primary": None}
REGISTERED = {"shard": 2, "joiner": "j:1", "process": None, "incarnation": "0", "time_us": 50}
WAITS = {"waiting_since_us": 20, "due_us": 90, "tries": 3, "file": "c.jsonl", "line": "{}"}


def test_what_happened_is_told_in_the_order_of_time():
    told = summed_up(EMPTY | {"registry": REGISTERED, "pending": {"east": WAITS}}, 10)
    assert [(row["time_us"], row["datacenter"]) for row in told["timeline"]] == [
        (10, ""), (20, "east"), (50, "registry"), (90, "east")
    ]  # fmt: skip
    assert told["fate"] == "waits to be tried again"
