"""The fast path beside the log path, in real processes: nothing doubled and nothing lost."""

import json
import random
import signal
from collections import Counter

import pytest

from photon.core.settings import parse_settings
from tests.fastpath.kit import Run, click, join_by_fast_path, query
from tests.system import fates_add_up, read_lines
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture
def run_of(request, tmp_path):
    def start(*options):
        run = Run(tmp_path, *options)
        request.addfinalizer(run.kill)
        return run

    return start


def test_a_click_is_joined_before_its_lines_are_read_and_the_log_path_finds_it_registered(run_of):
    """The lines come into the logs later here, to be sure who joined; else write them first."""
    run = run_of()
    path = run.fast_path()
    join_by_fast_path(run, path, click("c", "q"), "c", asked=query("q"))
    assert run.pairs() == {("q", "c"): 1}
    run.queries.write(query("q"))
    run.clicks.write(click("c", "q"))
    run.queries.write(query("q2"))
    run.clicks.write(click("c2", "q2"))
    wait_until(lambda: len(run.pairs()) == 2)
    summary = run.stop()
    assert run.pairs() == {("q", "c"): 1, ("q2", "c2"): 1}
    assert (summary["foreign_events"], summary["joined"], summary["duplicate"]) == (2, 2, 0)
    (line,) = [e for e in read_lines(run.out / "joined") if e["id"] == "c"]
    assert line == {**json.loads(click("c", "q")), "primary": json.loads(query("q"))}
    assert fates_add_up(summary)


@pytest.mark.long
def test_an_event_whose_log_line_never_comes_stands_in_the_output_and_the_counts_still_add_up(run_of):
    """A server that broke the contract, or lost its log: docs/fast-path.md says what that means."""
    run = run_of()
    path = run.fast_path()
    run.queries.write(query("q"))
    join_by_fast_path(run, path, click("lost", "q"), "lost")
    run.clicks.write(click("c", "q"))
    wait_until(lambda: len(run.pairs()) == 2)
    summary = run.stop()
    assert summary["joined"] == 2
    assert fates_add_up(summary)


@pytest.mark.long
def test_what_the_adapter_filters_is_left_to_the_log_path_which_writes_one_dead_letter(
    run_of, tmp_path, monkeypatch
):
    (tmp_path / "fastads.py").write_text(
        "from photon import Adapter, Skip\n"
        "class Paid(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        return None if primary.data['paid'] else Skip('not paid')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    (tmp_path / "photon.toml").write_text("[adapter]\nuse = 'fastads:Paid'\n")
    run = run_of("--config", tmp_path / "photon.toml")
    path = run.fast_path()
    run.queries.write(query("q", paid=True))
    run.queries.write(query("free", paid=False))
    join_by_fast_path(run, path, click("c", "q"), "c")
    before = path.foreigns.left
    path.foreign(click("skipped", "free"))
    assert path.flush(10)
    assert path.foreigns.left == before + 1
    assert read_lines(run.out / "dead-letters") == []
    run.clicks.write(click("c", "q"))
    run.clicks.write(click("skipped", "free"))
    wait_until(lambda: read_lines(run.out / "dead-letters", growing=True))
    summary = run.stop()
    assert (summary["joined"], summary["filtered"], summary["foreign_events"]) == (1, 1, 2)
    (letter,) = read_lines(run.out / "dead-letters")
    assert (letter["fate"], letter["reason"]) == ("filtered", "not paid")


def test_a_server_with_another_key_of_ids_joins_nothing_a_second_time(run_of):
    """Its ids would be others, so the registry could not know them."""
    run = run_of()
    run.queries.write(query("q"))
    run.clicks.write(click("c", "q"))
    wait_until(run.pairs)
    path = run.fast_path(settings=parse_settings({"ids": {"key": "another"}}))
    path.primary(query("q"))
    path.foreign(click("c", "q"))
    assert path.flush(10)
    assert (path.foreigns.left, path.foreigns.sent) == (1, 0)
    assert "other settings" in path.notices[0]
    run.stop()
    assert run.pairs() == {("q", "c"): 1}


@pytest.mark.long
def test_with_two_datacenters_and_kills_every_click_is_joined_once(run_of, tmp_path):
    """Fast path and log path race for every click, in any order; some are handed in twice, to both sides."""
    (tmp_path / "photon.toml").write_text("[registry]\nshards = 2\n")
    run = run_of("--datacenters", 2, "--config", tmp_path / "photon.toml")
    paths = [run.fast_path(name) for name in ("east", "west")]
    rng = random.Random(11)
    run.queries.write(query("first"))
    run.clicks.write(click("first", "first"))
    wait_until(run.pairs)
    expected = {("first", "first")}
    orphans = repeats = 0
    kills = {4: "joiner", 8: "registry", 12: "eventstore", 16: "dispatcher", 20: "joiner"}
    for round_number in range(24):
        for number in range(50):
            name = f"{round_number}-{number}"
            asked, clicked = query(f"q{name}"), click(f"c{name}", f"q{name}")
            run.queries.write(asked)
            rng.choice(paths).primary(asked)
            sides = [path for path in paths if rng.random() < 0.6]
            log_first = rng.random() < 0.5
            if log_first:
                run.clicks.write(clicked)
            for path in sides:
                path.foreign_many([clicked] * rng.randint(1, 2))
            if not log_first:
                run.clicks.write(clicked)
            if rng.random() < 0.02:
                run.clicks.write(clicked)
                repeats += 1
            expected.add((f"q{name}", f"c{name}"))
        if rng.random() < 0.3:
            orphan = click(f"o{round_number}", "nobody")
            run.clicks.write(orphan)
            paths[0].foreign(orphan)
            orphans += 1
        if round_number in kills:
            run.signal(kills[round_number], signal.SIGKILL)
        for path in paths:
            path.flush(0.2)
    wait_until(lambda: len(run.pairs()) >= len(expected))
    for path in paths:
        path.close()
    summary = run.stop()
    assert run.pairs() == Counter(dict.fromkeys(expected, 1))
    assert summary["joined"] == len(expected)
    assert fates_add_up(summary)
    assert summary["restarts"] >= 3
    by_fast_path = sum(path.foreigns.joined for path in paths)
    assert 0 < by_fast_path <= len(expected)
    for path in paths:
        counts = path.foreigns
        assert counts.waiting == 0
        assert counts.offered == counts.joined + counts.duplicate + counts.left + counts.dropped
