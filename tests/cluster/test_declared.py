"""What is joined is never called unmatched, and the other way round, whoever is quicker or killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.computation import NEVER
from millwheel.ready import Unmatched
from millwheel.testing import Bench
from photon import Declared
from photon.cli import backfill
from photon.core.columns import pack_times
from photon.core.errors import SettingsMismatchError, UsageError
from photon.core.fates import Committed
from photon.core.ids import MATCHED, IdPacker, Token, mark_ids
from photon.core.settings import identity_digest, load_settings
from spark.registered import scan_of
from tests.spark.kit import ROOT
from tests.system import join_arguments, read_lines, start_photon
from tests.waiting import wait_until

SECOND = 1_000_000
SETTINGS = "[joiner]\nmark_matched = true\n"


def bench_of(config):
    shown, clicks = Input("shown", key="id"), Input("clicks", key="of", value=None)
    computations = {
        "waited": node(Unmatched("waited", "shown", 10), shown, clicks, Stream("waited")),
        "declared": node(Declared("out", config=config), Input("waited"), Stream("out"), tries=1),
    }
    logs = {name: Logs(f"{name}/*", "ts_us") for name in ("shown", "clicks")}
    return Bench(Topology(logs, computations, {"out": LogSink("out")}))


def marks(*names):
    return mark_ids(IdPacker().pack(list(names)))


def test_only_what_no_joiner_has_matched_is_called_unmatched_and_stays_so(registry, config):
    times = {f"i{n}": n * SECOND for n in range(6)}
    matched = ("i1", "i4")
    at = pack_times([times[name] for name in matched])
    assert set(registry.client.commit(marks(*matched), at, MATCHED)) == {Committed.WON}
    for _ in range(2):  # again from the start, as after a crash before the commit
        bench = bench_of(config)
        bench.send("shown", *({"id": name, "ts_us": at} for name, at in times.items()))
        bench.send("clicks", {"of": "i2", "ts_us": 5 * SECOND})
        bench.watermark(NEVER)
        assert sorted(line["id"] for line in bench.lines("out")) == ["i0", "i3", "i5"]
    at = pack_times([times["i0"]])
    assert registry.client.commit(marks("i0"), at, MATCHED) == bytes([Committed.DUPLICATE])
    # No event's: who reads what joiners registered finds none of them.
    registry.commit(["click"], Token("joiner:1", 7, 1))
    (rows,) = scan_of(registry.at, 10.0, 0)
    assert rows["address"].to_pylist() == ["joiner:1"]


def test_what_can_not_be_marked_is_a_dead_letter_and_the_rest_goes_on(registry, config):
    bench = bench_of(config)
    bench.send("shown", {"id": "a", "ts_us": 1}, {"id": "b", "ts_us": 2})
    config.write_text(config.read_text() + '[primary]\ntime = "shown_at"\n')
    bench.watermark(NEVER)
    assert bench.lines("out") == []
    assert {letter["reason"] for letter in bench.dead_letters} == {
        "ValueError: the primary event's time is missing (an opaque id needs its event's time)"
    }


def test_joiners_that_do_not_mark_or_mark_otherwise_are_told_of(registry, config):
    bench = bench_of(config)
    bench.send("shown", {"id": "a", "ts_us": 1})
    config.write_text(config.read_text().replace(SETTINGS, ""))
    with pytest.raises(UsageError, match=r"set joiner\.mark_matched = true for all joiners"):
        bench.watermark(NEVER)
    settings = load_settings(config)
    registry.client.keep_alive("joiner:1", 7, 1.0, identity_digest(settings))  # of joiners that do not
    config.write_text(config.read_text() + SETTINGS)
    bench = bench_of(config)
    bench.send("shown", {"id": "a", "ts_us": 1})
    with pytest.raises(SettingsMismatchError):
        bench.watermark(NEVER)
    with pytest.raises(UsageError, match="one of work= "):
        Declared("out")
    with pytest.raises(UsageError, match="a backfill marks nothing"):
        backfill._settings(config, None)


TOPOLOGY = """
from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.ready import Unmatched
from photon import Declared

LOGS = {name: Logs(f"logs/{name}/*", "ts_us", lateness_s=0.2) for name in ("queries", "clicks")}
SHOWN, CLICKS = Input("queries", key="id"), Input("clicks", key="primary_id", value=None)
TOPOLOGY = Topology(
    LOGS,
    {
        "waited": node(Unmatched("waited", "queries", 1.0), SHOWN, CLICKS, Stream("waited")),
        "declared": node(Declared("out", work="out/.photon"), Input("waited"), Stream("out")),
    },
    {"out": LogSink("unmatched")},
)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_each_query_is_matched_or_unmatched_though_clicks_come_at_that_very_moment(tmp_path):
    """Live, two workers, two joiners, kills on both sides."""
    rng = random.Random(23)
    (tmp_path / "topology.py").write_text(TOPOLOGY)
    (tmp_path / "photon.toml").write_text(f"{SETTINGS}processes = 2\n")
    for name in ("queries", "clicks"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    joins = start_photon(
        *join_arguments(
            tmp_path / "logs", tmp_path / "out", "--follow", "--config", tmp_path / "photon.toml"
        ),
        stderr=subprocess.DEVNULL,
    )
    command = [sys.executable, "-m", "photon", "millwheel", "run", "topology:TOPOLOGY", "--work", "wheel"]
    wheel = subprocess.Popen(
        [*command, "--workers", "2", "--follow"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (tmp_path / "out" / ".photon" / "topology.json").exists())
        clicks = write_live(tmp_path / "logs", rng, lambda: kill_one(rng, joins.pid, wheel.pid))

        def found():
            unmatched = Counter(line["id"] for line in read_lines(tmp_path / "unmatched", growing=True))
            joined = Counter(line["id"] for line in read_lines(tmp_path / "out" / "joined", growing=True))
            late = {
                line["event"]["id"]: line["fate"]
                for line in read_lines(tmp_path / "out" / "dead-letters", growing=True)
            }
            return unmatched, joined, late

        def given_up():
            return [query for query in found()[0] if not clicks[query]]

        wait_until(lambda: len(given_up()) > 20, 60)
        for query in given_up():
            clicks[query] = f"c{query[1:]}"
            write_now(tmp_path / "logs" / "clicks", {"id": clicks[query], "primary_id": query})
        wait_until(lambda: len(found()[1]) + len(found()[2]) == sum(map(bool, clicks.values())), 60)
        wait_until(lambda: len(found()[0]) + len(found()[1]) == len(clicks), 60)
    finally:
        for run in (wheel, joins):
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=100)
    unmatched, joined, late = found()
    assert {*unmatched.values(), *joined.values()} == {1}
    assert set(late.values()) <= {"late"}
    for query, click in clicks.items():
        assert (query in unmatched) != (click in joined), (query, click)
        assert click is None or (click in joined) != (click in late)
    assert len(late) > 20 and len(joined) > len(clicks) / 4


def write_now(logs, event):
    with (logs / "log.jsonl").open("a") as file:
        file.write(json.dumps({**event, "ts_us": round(time.time() * SECOND)}) + "\n")


def write_live(logs, rng, halfway):
    """Query -> its click or None; most clicks come about the moment when their query is given up."""
    began = time.time()
    events, clicks = [], {}
    for number in range(300):
        shown = rng.uniform(0.5, 6.0)
        events.append((shown, "queries", {"id": f"q{number}"}))
        clicks[f"q{number}"] = f"c{number}" if rng.random() < 0.8 else None
        if clicks[f"q{number}"]:
            event = {"id": f"c{number}", "primary_id": f"q{number}"}
            events.append((shown + rng.uniform(0.6, 1.5), "clicks", event))
    for number, (at, kind, event) in enumerate(sorted(events, key=lambda one: one[0])):
        while time.time() < began + at:
            time.sleep(0.001)
        write_now(logs / kind, event)
        if number in (150, 300):
            halfway()
    return clicks


def kill_one(rng, *runs):
    """A worker, or a joiner, of each run, once there is one."""
    for run in runs:
        rng.choice(wait_until(lambda run=run: those_of(run))).kill()


def those_of(run):
    children = psutil.Process(run).children(recursive=True)
    return [child for child in children if {"joiner", "worker"} & {*child.cmdline()}]
