"""Histories of real processes, through the same checkers as those of the simulation."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.seeds import seeds
from tests.simulation.checkers import check
from tests.simulation.history import Told
from tests.simulation.processes import NODES, Chaos, ClientThread, Recorder, Servers, ended

_CHAOS_S = 5.0
_CLIENTS = 3
_SETTLE_S = 40.0


@pytest.mark.cluster
@seeds(0, 2, 3)
def test_killed_stopped_and_cut_off_servers_keep_every_promise(seed: int, tmp_path: Path) -> None:
    servers, recorder, over = Servers(tmp_path), Recorder(), threading.Event()
    chaos = Chaos(servers, random.Random(seed))
    clients = [ClientThread(number, servers, recorder, over) for number in range(_CLIENTS)]
    try:
        for node in NODES:
            servers.start(node)
        for client in clients:
            client.start()
        _wait_for(lambda: _told(recorder) > 10, 20.0)
        chaos.run(_CHAOS_S)
        over.set()
        for client in clients:
            client.join(_SETTLE_S)
            client.gave_up.set()
        recorder.history += ended(servers, _SETTLE_S)
        assert check(recorder.history) == {}, chaos.acts
        assert _told(recorder) > 50
        assert len(chaos.acts) > 3
    finally:
        over.set()
        for client in clients:
            client.gave_up.set()
        servers.close()


def _told(recorder: Recorder) -> int:
    return sum(isinstance(event, Told) for event in recorder.history)


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
