"""The command in this process, which costs no start of an interpreter."""

from typing import NamedTuple

import pytest

from photon.cli.main import main


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys, monkeypatch):
    """`photon` with these arguments -> status, stdout, stderr."""
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
