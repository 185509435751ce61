"""For tests of topologies: an argument `millwheel_seed` runs a test once for each of --millwheel-seeds.

def test_whatever_dies_visits_are_the_same(millwheel_seed):
    found = run(TOPOLOGY, lines, workers=3, seed=millwheel_seed)
    assert in_order(found) == in_order(run(TOPOLOGY, lines))
"""

import pytest

_OPTION = "--millwheel-seeds"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("millwheel")
    group.addoption(
        _OPTION, type=int, default=10, metavar="N", help="Run tests that take a millwheel_seed N times."
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "millwheel_seed" in metafunc.fixturenames:
        metafunc.parametrize("millwheel_seed", range(metafunc.config.getoption(_OPTION)))
