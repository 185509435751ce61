"""How tests are shared among the workers of pytest-xdist (`-n 2`), and what holds of all of them."""

from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from photon.cli.main import main

# A machine that is busy with the other worker makes examples slowly: that is no fault of what is tested.
settings.register_profile("photon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("photon")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # The longest single tests are on Spark: none of them should begin when the other worker is done.
    items.sort(key=lambda item: item.get_closest_marker("spark") is None)


@cache
def _together(root, path):
    """What a file shares with others that run in the same worker; none: its tests run anywhere."""
    if path.startswith("tests/spark/test_cluster"):
        return "one cluster"
    if path.startswith("tests/fuzz/"):
        return "the systems that strangers come to"
    # What the fixture of a module starts, it starts once.
    return path if 'scope="module"' in (root / path).read_text("utf-8") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # Its own groups (--dist loadgroup) do nothing with pytest 9.2 and pytest-xdist 3.8.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _together(config.rootpath, nodeid.partition("::")[0]) or nodeid

    return Scheduling(config, log)


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys, monkeypatch):
    """`photon` with these arguments -> status, stdout, stderr; in this process: none is started."""
    for name in ("GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT"):  # the command sets them for its process
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments)])
        return Done(end.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def refused(command):
    """The one line that bad usage and bad settings are told in."""

    def line(*arguments):
        done = command(*arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done
        return done.err

    return line
