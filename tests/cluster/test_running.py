"""The loop that `photon join` and `photon dev` share, and the join that Python code calls."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from photon.cluster import run
from photon.cluster.roles import ROLES
from photon.cluster.run import RunLoop, join
from photon.cluster.statuses import Sample
from photon.core.errors import UsageError
from tests.system import write_lines


class Reader:
    """Processes that answer once the gate is open."""

    def __init__(self):
        self.gate, self.asked = threading.Event(), []

    def read(self, roles):
        self.asked.append(roles)
        assert self.gate.wait(60.0)
        said = {"in_flight": 7, "notices": ["it goes on"]}
        return Sample(0.0, {"joiner-east": said, "dispatcher-east": None})


@pytest.fixture
def site():
    """A loop over processes that are asked once a phase; what it told; how often it looked for the dead."""
    polls, told, reader = [], [], Reader()
    supervisor = SimpleNamespace(notices=[])
    cluster = SimpleNamespace(poll=lambda: polls.append(1), supervisor=supervisor)
    with ThreadPoolExecutor(1) as pool:
        loop = RunLoop(cluster, reader, pool, [], told.append, every_s=1e9)
        yield SimpleNamespace(loop=loop, polls=polls, told=told, reader=reader)
        reader.gate.set()


def test_a_process_that_stands_still_does_not_keep_others_from_being_restarted(site):
    site.loop.until(lambda sample: len(site.polls) == 4)
    assert site.reader.asked == [tuple(ROLES)] and not site.told
    site.reader.gate.set()
    seen = []
    site.loop.until(lambda sample: sample is not None and not seen.append(sample))
    (sample,) = seen
    assert sample.of("joiner") == [{"in_flight": 7, "notices": ["it goes on"]}]
    assert sample.silent() == sample.silent(("dispatcher",)) == ["dispatcher-east"]
    assert sample.silent(("joiner",)) == [] and site.told == ["joiner-east: it goes on"]


def test_a_phase_asks_at_once_whom_it_needs_and_only_news_are_looked_at(site):
    site.reader.gate.set()
    for roles in (("dispatcher", "joiner"), ("joiner",)):
        news = []
        before = len(site.polls)
        site.loop.until(lambda sample, news=news: news.append(sample) or len(news) == 3, roles)
        assert [sample is not None for sample in news].count(True) == 1  # every_s is far
        assert len(site.polls) - before == 3
    assert site.reader.asked == [("dispatcher", "joiner"), ("joiner",)]


def test_a_run_that_follows_asks_less_often_while_nothing_is_read_and_nobody_watches(site, tmp_path):
    def tell(loop, *events):
        for some in events:
            status = None if some is None else {"foreign_events": some}
            loop._tell(Sample(0.0, {"dispatcher-east": status}))
        return loop.asks_every_s

    cluster = SimpleNamespace(topology=None, supervisor=SimpleNamespace(notices=[]))
    reader = SimpleNamespace(why_silent={})
    following, draining = (RunLoop(cluster, reader, None, [], site.told.append, s) for s in (1.0, 0.05))
    assert tell(following, 5) == run.FOLLOWING_S
    assert tell(following, 5) == run.QUIET_S
    assert tell(following, 6) == run.FOLLOWING_S
    assert tell(following, None, None) == run.FOLLOWING_S, "it is not there yet, or died"
    assert tell(draining, 5, 5) == 0.05
    with following.watched(lambda *_: nullcontext(lambda *_: None), tmp_path):
        assert tell(following, 6, 6) == run.FOLLOWING_S


def test_what_ended_for_good_ends_the_loop(site):
    def poll():
        raise RuntimeError("a replica ends again and again")

    site.loop.cluster.poll = poll
    with pytest.raises(RuntimeError, match="again and again"):
        site.loop.until(lambda _: pytest.fail("it goes on"))


@pytest.mark.parametrize("datacenters", [0, 6])
def test_so_many_datacenters_there_are_not(tmp_path, datacenters):
    with pytest.raises(UsageError, match=f"datacenters must be from 1 to 5, not {datacenters}"):
        join("q", "c", tmp_path / "out", datacenters=datacenters)
    assert not (tmp_path / "out").exists()


def test_a_loop_that_is_told_to_stop_asks_once_more_at_once(site):
    site.reader.gate.set()
    told_to_stop: list[int] = []
    site.loop.told_to_stop = told_to_stop
    samples = []

    def over(sample):
        if sample is not None:
            samples.append(sample)
            told_to_stop.append(2)
        return len(samples) == 2

    site.loop.until(over, ("joiner",))
    assert site.reader.asked == [("joiner",)] * 2
    for _ in range(3):
        assert site.loop._look(("joiner",)) is None, "and then as seldom as before"


def test_a_join_that_stalls_says_what_it_did_until_then(tmp_path, command, monkeypatch):
    monkeypatch.setattr("photon.cluster.run.STALL_S", 1.0)
    source = "import time, photon\nclass Slow(photon.Adapter):\n    def join(self, primary, foreign):\n        time.sleep(3600)\n"
    (tmp_path / "stallingadapter.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "photon.toml").write_text("[adapter]\nuse = 'stallingadapter:Slow'\n")
    write_lines(tmp_path / "p.jsonl", [{"id": "p"}])
    write_lines(tmp_path / "f.jsonl", [{"id": "c", "primary_id": "p", "ts_us": 1}, b"no event"])
    logs = ("--primary", tmp_path / "p.jsonl", "--foreign", tmp_path / "f.jsonl")
    done = command("join", *logs, "--out", tmp_path / "out", "--config", tmp_path / "photon.toml", "--json")
    assert done.status == 1 and "nothing has moved for 1 s" in done.err
    told = json.loads(done.out)
    assert (told["stopped"], told["adds_up"], told["joined"]) == (True, True, 0)
    assert told["foreign_events"] == told["pending"] + told["malformed"]


def test_a_join_whose_source_does_not_answer_ends_as_one_that_stalls(tmp_path, command, monkeypatch):
    monkeypatch.setattr("photon.cluster.run.STALL_S", 6.0)  # its importer has to start in less
    write_lines(tmp_path / "p.jsonl", [{"id": "p"}])
    away = "kafka://127.0.0.1:1/t?socket.connection.setup.timeout.ms=1000"
    logs = ("--primary", tmp_path / "p.jsonl", "--foreign", away)
    done = command("join", *logs, "--out", tmp_path / "out", "--json")
    assert done.status == 1 and "s (kafka://127.0.0.1:1/t: " in done.err
    assert (json.loads(done.out)["stopped"], "does not answer" in done.err) == (True, False)


@pytest.mark.parametrize("moves", ["records", "behind", "trouble"])
def test_copies_that_grow_or_are_in_no_trouble_are_waited_for(site, monkeypatch, moves):
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    source = {"records": 0, "behind": 9, "trouble": None if moves == "trouble" else "it is away"}
    answers = [{"importer-east": {"finished": False, "sources": [dict(source)]}} for _ in range(8)]
    for n, answer in enumerate(answers):
        if moves != "trouble":
            answer["importer-east"]["sources"][0][moves] += n
    answers.append({"importer-east": {"finished": True, "sources": [source]}})

    def until(over, roles):
        assert roles == ("importer",)
        assert [over(Sample(0.0, answer)) for answer in answers] == [False] * 8 + [True]

    monkeypatch.setattr(site.loop, "until", until)
    run._await_copies(site.loop)


def test_a_run_that_is_told_to_stop_tells_what_its_sinks_take_nothing_for(tmp_path):
    told = []
    display = SimpleNamespace(update=lambda *_: None, notice=told.append)
    supervisor = SimpleNamespace(restarts=lambda: 0)
    loop = SimpleNamespace(told_to_stop=[15], cluster=SimpleNamespace(supervisor=supervisor))
    sinks = [
        {"sink": "s3://b/p", "published": 0, "behind": True, "trouble": "no bucket"},
        {"sink": "kafka://h/t", "published": 0, "behind": True, "trouble": None},
    ]
    joiner = {"joined": 5, "in_flight": 0, "unresolved": 0, "sinks": sinks}
    draining = run._Draining(drain=False, work=tmp_path, display=display, began=0.0)
    importer = {"sources": [{"lost": 3}, {"lost": 4}]}
    assert draining.is_over(loop, Sample(0.0, {"joiner-east": joiner, "importer-east": importer}))
    assert draining.lost_records == 7
    assert told == ["joiner-east: nothing is published to s3://b/p (no bucket); the next run goes on"]
