"""Histories of real processes, through the same checkers as those of the simulation."""

import random
import threading
from pathlib import Path

import pytest

from tests.seeds import seeds
from tests.simulation.checkers import check
from tests.simulation.history import Told
from tests.simulation.processes import Chaos, ClientThread, Recorder, Servers, ended
from tests.waiting import wait_until

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
        servers.start()
        for client in clients:
            client.start()
        wait_until(lambda: _told(recorder) > 10, 20.0)
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
