"""The checks and the summary at the end of `photon dev`: what is wrong, what could not be checked."""

import dataclasses
import json

import pytest

from photon.cluster.dead_letters import REPLAYED, Filter, replay
from photon.cluster.topology import Topology
from photon.core.fates import Fate
from photon.core.settings import Adapter, Joiner, Settings
from photon.dev import checks as dev_checks
from photon.dev.checks import Check, Course, Ended, checks_of, count_lines, print_dev_summary, summary_of
from photon.dev.run import Outage, OutagePlay
from photon.logs.writer import DeadLetter, dead_letter_lines
from tests.system import write_lines


def ledger(events, joined, duplicate=0, pending=None, filtered=0):
    return {
        "foreign_events": events,
        "fates": {"joined": joined, "duplicate": duplicate, "filtered": filtered},
        "pending": events - joined - duplicate - filtered if pending is None else pending,
    }


@pytest.fixture
def run(tmp_path):
    """Three clicks, one of them logged twice; east has joined two and west one."""
    clicks = [{"id": f"c{n}", "primary_id": f"q{n}"} for n in range(3)]
    for name in ("logs-east", "logs-west"):
        write_lines(tmp_path / name / "clicks" / "a.jsonl", [*clicks, clicks[0]])
        write_lines(tmp_path / name / "queries" / "a.jsonl", [{"id": f"q{n}"} for n in range(3)])
    joined = [{**click, "primary": {"id": click["primary_id"]}} for click in clicks]
    write_lines(tmp_path / "joined" / "east" / "joiner-east-000000.jsonl", joined[:2])
    write_lines(tmp_path / "joined" / "west" / "joiner-west-000000.jsonl", joined[2:])
    return tmp_path


ENDED = {
    "east": Ended(ledger(4, 2, 2), killed=False, written=4),
    "west": Ended(ledger(4, 1, 3), killed=False, written=4),
}


def results(run, ended=ENDED, lines=3, settings=None, fed=True, waited=True):
    logs = {name: run / f"logs-{name}" for name in ended} if fed else {}
    found = checks_of(run, settings or Settings(), ended, lines, logs, waited)
    return [check.ok for check in found], "\n".join(check.text for check in found)


def changed(name, **changes):
    return ENDED | {name: dataclasses.replace(ENDED[name], **changes)}


def test_all_is_well(run):
    oks, text = results(run)
    assert oks == [True] * 5
    assert "the 3 pairs are the true ones" in text
    assert count_lines(run / "logs-east" / "clicks") == 4


def test_an_event_that_is_joined_in_both_datacenters_is_found(run):
    line = {"id": "c0", "primary_id": "q0", "primary": {"id": "q0"}}
    write_lines(run / "joined" / "west" / "joiner-west-000001.jsonl", [line])
    oks, text = results(run, lines=4)
    assert oks == [True, True, True, False, False]
    assert "1 lines joined twice" in text and "joiner-west-000001.jsonl: 'c0' is joined again" in text


def test_an_event_with_a_query_that_it_does_not_name_is_found(run):
    line = {"id": "c2", "primary_id": "q2", "primary": {"id": "q1"}}
    write_lines(run / "joined" / "west" / "joiner-west-000000.jsonl", [line])
    assert results(run)[0] == [True, True, True, False, False]


def test_a_click_that_nobody_joined_is_found(run):
    (run / "joined" / "west" / "joiner-west-000000.jsonl").write_text("")
    oks, text = results(run, lines=2)
    assert oks == [True, False, True, True, False]
    assert "1 events are told to be joined and are not in the output" in text
    assert "2 joined lines instead of 3" in text


def test_counts_that_do_not_add_up_are_found(run):
    oks, text = results(run, changed("west", ledger=ledger(4, 1, 3, pending=1)))
    assert oks[0] is False and "the fates of west do not add up" in text


def test_events_that_were_not_read_are_found_unless_their_datacenter_is_down(run):
    oks, text = results(run, changed("west", written=9))
    assert oks[2] is False and "west 5 events are missing" in text
    oks, text = results(run, changed("west", written=9, killed=True))
    assert oks == [True, True, True, True, None]
    assert "west, which is down, has 5 to read yet" in text and "west may have joins to finish" in text


def test_more_events_than_were_written_are_found_even_in_a_datacenter_that_is_down(run):
    oks, text = results(run, changed("west", written=3, killed=True))
    assert oks[2] is False and "west counts 1 events more than were written" in text


def test_events_that_wait_when_all_is_written_and_nobody_is_down_are_found(run):
    oks, text = results(run, changed("west", ledger=ledger(4, 1, 2)))
    assert oks == [True, True, True, True, False]
    assert "1 events wait yet, though all is written and nobody is down" in text


def test_a_system_that_joined_nothing_is_not_well(run):
    for path in (run / "joined").rglob("*.jsonl"):
        path.write_text("")
    nothing = {name: dataclasses.replace(one, ledger=ledger(4, 0)) for name, one in ENDED.items()}
    oks, text = results(run, nothing, lines=0)
    assert oks == [True, True, True, True, False] and "8 events wait yet" in text


@pytest.mark.parametrize("ended", [{"killed": True}, {"ledger": ledger(4, 1, 2)}])
def test_pairs_that_were_not_written_are_found_while_events_wait_or_a_datacenter_is_down(run, ended):
    line = {"id": "c2", "primary_id": "q9", "primary": {"id": "q9"}}
    write_lines(run / "joined" / "west" / "joiner-west-000000.jsonl", [line])
    oks, text = results(run, changed("west", **ended))
    assert oks[4] is False and "1 pairs are joined that were not written" in text
    assert "not among the true pairs: q9\tc2" in text


def test_what_was_not_waited_for_is_not_held_against_the_run(run):
    oks, text = results(run, changed("west", ledger=ledger(3, 1, 1)), waited=False)
    assert oks == [True, True, None, True, None]
    assert "west 1 events are missing, which were not waited for" in text and "1 events wait yet" in text


def test_clicks_on_queries_that_a_killed_generator_held_back_may_wait_and_torn_lines_are_not_counted(run):
    with (run / "logs-west" / "clicks" / "a.jsonl").open("a") as file:
        file.write('{"id": "c7", "primary_id": "q7"}\n{"id": "c8", "prim')
    oks, text = results(run, changed("west", ledger=ledger(5, 1, 3), written=5))
    assert oks == [True, True, True, True, None]
    assert "1 events wait for queries that a killed generator held back" in text
    oks, _ = results(run, changed("west", ledger=ledger(5, 1, 2), written=5))
    assert oks[4] is False


def test_of_given_logs_only_what_can_be_known_is_checked(run):
    oks, text = results(run, fed=False)
    assert oks == [True, True, None, True] and "the logs repeat them, or a joiner that is not here" in text
    once = {
        "east": Ended(ledger(3, 2, 1), killed=False, written=None),
        "west": Ended(ledger(3, 1, 2), killed=False, written=None),
    }
    assert results(run, once, fed=False)[0] == [True] * 4


def test_events_that_count_as_duplicates_everywhere_and_are_in_no_line_are_told(run):
    nobody = {name: Ended(ledger(9, 2, 7), killed=False, written=None) for name in ENDED}
    oks, text = results(run, nobody, lines=4, fed=False)
    assert oks == [True, True, None, True] and text.count("5 events more than there are joined lines") == 1


def test_events_in_hand_at_the_end_that_are_not_decided_are_told(run):
    oks, text = results(run, changed("west", seen=11), fed=False)
    assert oks[0] is None and "7 events were in hand and not decided (west 7)" in text
    assert results(run, changed("west", seen=4))[0] == [True] * 5  # they were decided while it stopped


@pytest.mark.parametrize(
    "settings",
    [
        Settings(joiner=Joiner(output_format="parquet")),
        Settings(adapter=Adapter(use="half:Half")),
        dataclasses.replace(Settings(), foreign=dataclasses.replace(Settings().foreign, id="ctx.id")),
    ],
)
def test_logs_of_another_form_are_left_to_photon_verify(run, settings):
    oks, text = results(run, settings=settings)
    assert oks == [True, True, True, None] and "photon verify" in text


def test_lines_that_hold_the_primary_event_in_a_field_of_another_name_are_well(run):
    for path in (run / "joined").rglob("*.jsonl"):
        path.write_text(path.read_text().replace('"primary"', '"query"'))
    assert results(run, settings=Settings(adapter=Adapter(field="query")))[0] == [True] * 5
    assert results(run)[0] == [True, True, True, False, False]


def replayed(run, name):
    letter = DeadLetter(Fate.FILTERED, "odd", b'{"id":"c2","primary_id":"q2"}', "a.jsonl", 7)
    letters = run / "dead-letters" / name
    letters.mkdir(parents=True)
    (letters / "foreign-000000.jsonl").write_bytes(dead_letter_lines([letter]))
    assert replay(letters, run / "inbox", "replay.jsonl", Filter(REPLAYED)) == 1


def test_events_that_were_replayed_are_no_more_than_were_written(run):
    replayed(run, "west")
    oks, text = results(run, changed("west", ledger=ledger(5, 1, 3, filtered=1)))
    assert oks == [True, True, None, True, True] and "dead letters of west were replayed" in text
    oks, text = results(run, changed("east", ledger=ledger(5, 2, 3)))
    assert oks[2] is False and "east counts 1 events more than were written" in text
    oks, text = results(run, changed("west", written=9))  # fewer than were written are too few all the same
    assert oks[2] is False and "west 5 events are missing" in text


def test_events_that_an_adapter_skipped_before_are_not_held_against_the_run(run):
    (run / "joined" / "west" / "joiner-west-000000.jsonl").write_text("")
    skipped = {
        "east": Ended(ledger(4, 2, 1, filtered=1), killed=False, written=4),
        "west": Ended(ledger(4, 0, 3, filtered=1), killed=False, written=4),
    }
    oks, text = results(run, skipped, lines=2)
    assert oks == [True, True, True, True, None] and "2 of 3 clicks are joined" in text
    assert "an adapter skipped events before" in text


def test_more_events_than_there_is_memory_for_are_left_to_photon_verify(run, monkeypatch):
    for most in (2, 3):  # joined lines, written clicks
        monkeypatch.setattr(dev_checks, "LINES_MAX", most)
        oks, text = results(run)
        assert oks == [True, True, True, None] and "too many to compare; `photon verify` can" in text
    assert results(run, fed=False)[0] == [True, True, None, True]


def test_an_outage_kills_and_restores_once_each_when_their_times_have_come():
    done = []
    outage = Outage("east", 20.0, 10.0)
    play = OutagePlay(
        outage, lambda name: done.append(("kill", name)), lambda name: done.append(("up", name))
    )
    said = [play.step(at) for at in (0.0, 19.9, 20.0, 20.1, 29.9, 30.0, 31.0)]
    assert done == [("kill", "east"), ("up", "east")]
    assert [text is not None for text in said] == [False, False, True, False, False, True, False]
    assert not play.killed and outage.ends_s == 30.0


def test_an_outage_without_an_end_leaves_the_datacenter_down():
    play = OutagePlay(Outage("east", 1.0, None), lambda _: None, lambda _: pytest.fail("restored"))
    assert [play.step(at) is None for at in (1.0, 100.0)] == [False, True]
    assert play.killed


def test_json_of_the_checks_is_plain(run):
    found = checks_of(run, Settings(), ENDED, 3, {name: run / f"logs-{name}" for name in ENDED}, True)
    assert json.loads(json.dumps([dataclasses.asdict(check) for check in found]))[0]["ok"] is True


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "in 0.0 s (-)"), (2.0, "in 2.0 s (500/s)")])
def test_a_run_of_no_time_has_no_rate(seconds, shown, capsys):
    print_dev_summary(
        {
            "datacenters": {},
            "joined": 1000,
            "seconds": seconds,
            "joined_per_s": 12_577_825.0 if not seconds else 500.0,
            "restarts": 0,
            "killed": [],
            "checks": [],
        }
    )
    assert f"joined 1,000 {shown}" in capsys.readouterr().out


def test_a_feeder_that_failed_is_a_check_that_is_not_ok_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(dev_checks, "checks_of", lambda *_: [Check(True, "every event is read")])
    (tmp_path / "joined").mkdir()
    topology = Topology(Settings(), [], [], str(tmp_path), "", True, [], [])
    assert summary_of(topology, tmp_path, 0, Course(6.0))["ok"]
    failed = summary_of(topology, tmp_path, 0, Course(6.0, feeder_failed="the feeder was killed by signal 9"))
    assert not failed["ok"]
    assert [(one["ok"], one["text"]) for one in failed["checks"]] == [
        (True, "every event is read"),
        (False, "the feeder was killed by signal 9"),
    ]
