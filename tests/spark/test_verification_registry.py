"""What the registry adds, on a real one: every kind of fault planted."""

import json
import random
import time
from collections import Counter
from contextlib import closing

import pytest

from photon.core.errors import UsageError
from photon.core.ids import Token
from photon.core.settings import Settings
from tests.spark.kit import RealRegistry, WrittenLogs, engine, foreign, joined, letter, primary

T = 1_700_000_000_000_000
DEAD = Token("10.0.0.9:7009", (1 << 63) + 9, T)
ALIVE = Token("10.0.0.1:7001", 1, T + 1)
BACKFILL, GONE_BACKFILL = Token("backfill/old", (1 << 64) - 2, T), Token("backfill/older", 3, T)
KINDS = (
    *("joined", "joined", "joined", "repeated", "twice", "twice_in_two", "lost", "lost_line"),
    *("in_flight", "unregistered", "wrong", "altered", "filtered", "expired", "unjoinable", "pending"),
    *("joinable", "lost_though_letter", "malformed"),
    *("in_backfill", "lost_by_backfill", "lost_unjoinable", "joined_elsewhere", "two_letters"),
)
UNREGISTERED = ("unregistered", "filtered", "expired", "unjoinable", "pending", "joinable")
UNREGISTERED += ("lost_unjoinable", "two_letters")


class Planted:
    """A run with `count` events, one fault after the other; `expected`: the verdict of each id."""

    def __init__(self, directory, registry, count, dice):
        self.logs = WrittenLogs(directory)
        self.expected = {}
        self.lines, self.outputs = [], {"east": [], "west": []}
        self.letters = {"east": [], "west": []}
        self.queries = [primary(f"{directory.name}-q{n}", note=dice.random()) for n in range(50)]
        self.held = {name: [] for name in ("old", "live", "now", "backfill", "over")}
        for n in range(count):
            self._plant(n, KINDS[n % len(KINDS)], dice)
        dice.shuffle(self.lines)
        for part in range(2):
            self.logs.foreign(*self.lines[part::2], name=f"clicks-{part}.jsonl")
        self.logs.primary(*self.queries)
        for datacenter in self.outputs:
            self.logs.joined(datacenter, *self.outputs[datacenter])
            self.logs.letters(datacenter, *self.letters[datacenter])
        now = Token(ALIVE.address, ALIVE.incarnation, time.time_ns() // 1000)
        tokens = {"old": DEAD, "live": ALIVE, "now": now}
        tokens |= {"backfill": BACKFILL, "over": GONE_BACKFILL}
        for name, events in self.held.items():
            registry.commit([e["id"] for e in events], tokens[name], *[e["ts_us"] for e in events])

    def _plant(self, n, kind, dice):
        query = dice.choice(self.queries)
        time_us = T + n * 1_000_000
        id_ = f"{self.logs.directory.name}-{n}" if n % 2 else f"10.0.{n % 7}.1:{n % 3}:{time_us}"
        event = foreign(id_, query["id"], ts_us=time_us)
        if kind in ("pending", "unjoinable"):
            event["primary_id"] = "gone"
        if kind == "malformed":
            self.lines.append(b'{"id":"%d","primary_id":' % n)
            return
        self.lines += [event] * (3 if kind == "repeated" else 1)
        self.expected[id_] = {
            "repeated": "joined",
            "joined_elsewhere": "joined",
            "two_letters": "expired",
            "twice": "joined_twice",
            "twice_in_two": "joined_twice",
            "lost_line": "lost",
            "lost_though_letter": "lost",
            "in_backfill": "in_flight",
            "lost_by_backfill": "lost",
            "wrong": "wrong_primary",
            "altered": "altered_primary",
            "joinable": "pending_joinable",
        }.get(kind, kind)
        here, there = dice.sample(["east", "west"], 2)
        line = joined(event, query)
        if kind in ("joined", "repeated", "joined_elsewhere", "twice", "twice_in_two", "unregistered"):
            self.outputs[here].append(line)
        if kind in ("twice", "twice_in_two"):
            self.outputs[here if kind == "twice" else there].append(line)
        if kind == "wrong":
            self.outputs[here].append(joined(event, primary("another")))
        if kind == "altered":
            self.outputs[here].append(joined(event, {**query, "note": 2.5}))
        if kind in ("lost_though_letter", "lost_unjoinable", "joined_elsewhere", "two_letters"):
            self.letters[there].append(letter("unjoinable", event))
        if kind in ("filtered", "expired", "unjoinable", "two_letters"):
            self.letters[here].append(letter("expired" if kind == "two_letters" else kind, event))
        if kind in ("lost", "lost_line"):
            self.held["old"].append(event)
        elif kind in ("in_backfill", "lost_by_backfill"):
            self.held["backfill" if kind == "in_backfill" else "over"].append(event)
        elif kind == "in_flight":
            self.held["now"].append(event)
        elif kind not in UNREGISTERED:
            self.held["live"].append(event)

    def ask(self, place, registry=None, **more):
        """-> the report and {id: row of the details}."""
        more = {"settle_s": 3600.0, "registry": registry and registry.at, **more}
        report, _ = self.logs.ask(place, **more)
        return report, self.logs.details


@pytest.fixture(scope="module")
def planted(tmp_path_factory, registry):
    return Planted(tmp_path_factory.mktemp("planted"), registry, 240, random.Random(5))


@pytest.fixture(scope="module")
def answer(place, planted, registry):
    for runs in (ALIVE, BACKFILL):
        registry.client.keep_alive(runs.address, runs.incarnation, 600.0)
    return planted.ask(place, registry)


def test_each_planted_fault_gets_its_verdict(planted, answer):
    verdicts = {id_: row.verdict for id_, row in answer[1].items()}
    assert verdicts == planted.expected
    of_expected = Counter(planted.expected.values())
    assert len(of_expected) == 13
    counts = answer[0].counts
    assert {name: counts[name] for name in of_expected} == of_expected
    assert (counts["foreign_events"], counts["other_registered"]) == (len(planted.lines), 0)


def test_details_name_the_joiner_that_lost_an_event_and_its_lease(planted, answer):
    rows = answer[1]
    lost = [rows[event["id"]] for event in planted.held["old"]]
    assert {(r.joiner, r.incarnation, r.token_us, r.lease) for r in lost} == {
        (DEAD.address, f"{DEAD.incarnation:016x}", DEAD.time_us, "over")
    }
    flying = [rows[event["id"]] for event in planted.held["now"]]
    assert {(r.joiner, r.incarnation, r.lease) for r in flying} == {(ALIVE.address, f"{1:016x}", "runs")}
    times = {e["id"]: e["ts_us"] for e in planted.held["old"]}
    assert {id_: rows[id_].time_us for id_ in times} == times


def test_the_report_tells_which_joiners_lost_most_and_what_is_broken(planted, answer):
    report = answer[0]
    document = report.as_document()
    assert document["registry"] == "asked"
    by = {entry["joiner"]: entry for entry in document["lost_by"]}
    lost = sum(verdict == "lost" for verdict in planted.expected.values())
    assert by[DEAD.address]["incarnation"] == "8000000000000009"
    assert sum(entry["lost"] for entry in document["lost_by"]) == lost
    assert by[ALIVE.address]["in_flight"] == len(planted.held["now"])
    assert {"lost", "unregistered", "joined_twice"} <= set(report.broken)
    assert "in_flight" not in report.broken
    json.dumps(document)


@pytest.mark.spark
def test_an_export_tells_the_same_but_for_what_only_the_registry_knows(
    session, place, planted, registry, tmp_path
):
    from spark.registered import write_export

    write_export(session, registry.at, str(tmp_path / "export"))
    report, rows = planted.ask(place, export=str(tmp_path / "export"))
    expected = {
        id_: "not_in_export" if verdict == "unregistered" else verdict
        for id_, verdict in planted.expected.items()
    }
    # Which leases run it does not know.
    expected |= {event["id"]: "lost" for event in planted.held["backfill"]}
    assert {id_: row.verdict for id_, row in rows.items()} == expected
    assert "not_in_export" not in report.broken
    assert report.as_document()["registry"] == "export"


def test_only_events_of_the_time_range_are_judged_and_what_settles_sooner_is_lost(place, planted, registry):
    """But for those of a backfill that runs."""
    from spark.options import Span

    start, end = T + 100_000_000, T + 180_000_000
    report, rows = planted.ask(place, registry, span=Span(start, end), settle_s=0.0)
    times = {e["id"]: e["ts_us"] for e in planted.lines if isinstance(e, dict)}
    expected = planted.expected | {event["id"]: "lost" for event in planted.held["now"]}
    inside = {id_: v for id_, v in expected.items() if start <= times[id_] < end}
    assert inside.keys() & {event["id"] for event in planted.held["now"]}
    assert "in_flight" in inside.values()
    assert {id_: row.verdict for id_, row in rows.items()} == inside
    bad = sum(isinstance(line, bytes) for line in planted.lines)
    lines = sum(isinstance(e, dict) and start <= e["ts_us"] < end for e in planted.lines)
    assert report.counts["foreign_events"] == lines + bad
    assert report.counts["alien"] == 0


def test_an_event_joined_after_the_scan_is_not_called_unregistered(place, tmp_path, monkeypatch):
    from spark.verification import facts as sources

    logs = WrittenLogs(tmp_path)
    logs.foreign(foreign("late", "q", ts_us=T))
    joined_logs = sources.joined_logs

    def and_before(*arguments, **more):
        registry.commit(["late"], ALIVE, T)
        logs.joined("east", joined(foreign("late", "q", ts_us=T), primary("q")))
        return joined_logs(*arguments, **more)

    # The files were listed when this is called: it must be one that was there.
    logs.joined("east")
    monkeypatch.setattr(sources, "joined_logs", and_before)
    with closing(RealRegistry(tmp_path / "registry")) as registry:
        registry.client.keep_alive(ALIVE.address, ALIVE.incarnation, 600.0)
        report, _ = logs.ask(place, primary=(), registry=registry.at)
    assert (report.broken, report.counts["joined"]) == ([], 1)


def test_what_the_registry_has_forgotten_is_not_called_unregistered(place, tmp_path):
    old, new = T, time.time_ns() // 1000
    logs = WrittenLogs(tmp_path)
    events = [foreign("old", "q", ts_us=old), foreign("new", "q", ts_us=new)]
    logs.foreign(*events)
    logs.joined("east", *(joined(event, primary("q")) for event in events))
    with closing(RealRegistry(tmp_path / "registry", retention_days=1.0)) as registry:
        registry.commit(["any"], ALIVE, new)
        report, _ = logs.ask(place, primary=(), registry=registry.at)
    assert (report.counts["joined"], report.counts["unregistered"]) == (1, 1)
    assert report.examples["unregistered"] == "new"
    assert report.counts["other_registered"] == 1


def test_two_outputs_are_one_and_mirrors_of_one_are_refused(place, tmp_path):
    from spark.verification.verify import Question, verify

    east, west = WrittenLogs(tmp_path / "e"), WrittenLogs(tmp_path / "w")
    event = foreign("a", "q")
    east.foreign(event)
    east.joined("east", joined(event, primary("q")))
    west.joined("west", joined(event, primary("q")))
    clicks = (str(tmp_path / "e" / "clicks"),)
    with engine(place, tmp_path) as chosen:
        report = verify(chosen, Question(clicks, (str(east.out), str(west.out))), Settings())
    assert report.broken == ["joined_twice"]
    west.joined("east", joined(event, primary("q")))
    with pytest.raises(UsageError, match="two datacenters of one name"):
        Question(clicks, (str(east.out), str(west.out))).check()
