from photon.cluster.statuses import fates_of, merge_fates, percentiles_ms, run_summary, whole


def ledger(events, **fates):
    return {"foreign_events": events, "fates": fates}


def test_one_datacenter_counts_add_up_to_the_events_read():
    counts = merge_fates([ledger(10, joined=6, duplicate=1, unjoinable=2)], joined=6)
    assert counts == {
        "foreign_events": 10, "joined": 6, "duplicate": 1, "unjoinable": 2,
        "filtered": 0, "adapter_error": 0, "expired": 0, "late": 0, "malformed": 0, "pending": 1,
    }  # fmt: skip


def test_two_datacenters_over_the_same_logs_count_each_event_once():
    east = ledger(100, joined=60, duplicate=38, unjoinable=2)
    west = ledger(100, joined=30, duplicate=68, unjoinable=2)
    counts = merge_fates([east, west], joined=90)
    assert (counts["foreign_events"], counts["joined"], counts["duplicate"]) == (100, 90, 8)
    assert (counts["unjoinable"], counts["pending"]) == (2, 0)


def test_an_event_that_one_datacenter_joined_is_not_unjoinable():
    counts = merge_fates([ledger(10, duplicate=9, unjoinable=1), ledger(10, joined=10)], joined=10)
    assert (counts["joined"], counts["unjoinable"], counts["duplicate"], counts["pending"]) == (10, 0, 0, 0)


def test_an_event_joined_before_a_crash_and_read_again_counts_as_joined_not_as_duplicate():
    counts = merge_fates([ledger(10, joined=7, duplicate=3)], joined=10)
    assert (counts["joined"], counts["duplicate"]) == (10, 0)


def test_lines_that_a_consumer_took_away_are_joined_and_no_duplicates():
    after = {**status("east", 10, joined=9, duplicate=1), "wasted_joins": 0}
    after["latency_us"] = {"edges": [], "counts": []}
    summary = run_summary([after], [], joined=2, joined_before=5, seconds=2.0)
    assert (summary["joined"], summary["duplicate"]) == (9, 1)
    assert (summary["joined_this_run"], summary["joined_per_s"]) == (4, 2.0)


def test_lines_that_are_out_before_the_ledger_says_so_are_not_pending():
    counts = merge_fates([ledger(10, joined=4)], joined=6)
    assert (counts["joined"], counts["duplicate"], counts["pending"]) == (6, 0, 4)


def test_lines_of_events_that_no_single_ledger_has_all_leave_nothing_pending_below_zero():
    counts = merge_fates([ledger(4, joined=4), ledger(3, joined=3)], joined=7)
    assert (counts["foreign_events"], counts["joined"], counts["pending"]) == (7, 7, 0)


def test_percentiles_are_taken_over_all_datacenters_together():
    first = {"edges": [1_000, 2_000, 4_000], "counts": [50, 0, 0]}
    second = {"edges": [1_000, 2_000, 4_000], "counts": [0, 45, 5]}
    assert percentiles_ms([first, second]) == {"p50": 1.0, "p90": 2.0, "p99": 4.0}
    assert percentiles_ms([]) == {"p50": None, "p90": None, "p99": None}


def status(datacenter, events, pending=0, **fates):
    return {"datacenter": datacenter, "pending": pending, **ledger(events, **fates)}


def test_what_the_workers_of_a_datacenter_count_is_summed():
    one, other, west = status("east", 5, joined=5), status("east", 9, pending=1, joined=8), status("west", 7)
    (east, alone) = whole([one, west, other])
    assert (east["foreign_events"], east["pending"], east["fates"]) == (14, 1, {"joined": 13})
    assert (east["datacenter"], alone["datacenter"], alone["foreign_events"]) == ("east", "west", 7)
    assert fates_of(east)["adds_up"]


def test_the_fates_of_a_datacenter_add_up_or_it_is_said():
    row = fates_of(status("east", 10, pending=3, joined=6, malformed=1))
    assert (row["adds_up"], row["foreign_events"], row["fates"]["pending"]) == (True, 10, 3)
    assert not fates_of(status("east", 10, pending=2, joined=6, malformed=1))["adds_up"]
    assert not fates_of(status("east", 10, pending=-1, joined=10, malformed=1))["adds_up"]


def test_what_one_datacenter_has_settled_is_not_pending_because_another_has_not_read_it():
    """West is new, or the logs were gone when it came."""
    east = ledger(51, joined=31, unjoinable=10, malformed=10)
    counts = merge_fates([east, ledger(1, duplicate=1)], joined=31)
    assert (counts["foreign_events"], counts["joined"], counts["pending"]) == (51, 31, 0)
    assert (counts["unjoinable"], counts["malformed"]) == (10, 10)
    waits = ledger(53, joined=31, unjoinable=10, malformed=10)
    assert merge_fates([waits, ledger(1, duplicate=1)], joined=31)["pending"] == 2
