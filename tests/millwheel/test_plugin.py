"""The plugin for tests of topologies, in a pytest of its own."""

import pytest

from tests.millwheel.running import ROOT

pytest_plugins = "pytester"

TEST = """
from millwheel.testing import in_order, run
from tests.millwheel.topologies import TOPOLOGY

LINES = {"clicks": [{"user": f"u{n % 3}", "ts": n * 300_000, "what": "click"} for n in range(50)]}


def test_the_same_whatever_dies(millwheel_seed):
    found = run(TOPOLOGY, LINES, workers=3, seed=millwheel_seed)
    assert in_order(found) == in_order(run(TOPOLOGY, LINES))


def test_without_a_seed():
    pass
"""


@pytest.fixture(autouse=True)
def with_our_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_test_that_takes_a_seed_runs_once_for_each(pytester):
    pytester.makepyfile(TEST)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=11)


def test_a_seed_at_which_it_fails_is_named(pytester):
    pytester.makepyfile(TEST.replace("in_order(run(TOPOLOGY, LINES))", "millwheel_seed"))
    said = pytester.runpytest_subprocess("--millwheel-seeds", "2")
    said.assert_outcomes(passed=1, failed=2)
    said.stdout.fnmatch_lines(["*test_the_same_whatever_dies[[]1[]]*"])
