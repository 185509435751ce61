"""A port that another program takes between its choice and its use: other ones are chosen."""

import socket
from functools import partial
from random import Random

import pytest

from photon.cluster import local_cluster as placing
from photon.cluster.local_cluster import PORT_TRIES_MAX, free_ports
from photon.cluster.registry_access import Named, asked_registry
from photon.cluster.run import join
from photon.cluster.supervisor import PortTakenError
from tests.system import joined_pairs, write_lines

pytestmark = pytest.mark.cluster

RAFT, ANOTHER_RAFT, DISPATCHER = 1, 3, 8  # places in the plan of one datacenter


@pytest.fixture
def job(tmp_path):
    write_lines(tmp_path / "q.jsonl", [{"id": "q", "ts_us": 1}])
    write_lines(tmp_path / "c.jsonl", [{"id": "c", "primary_id": "q", "ts_us": 2}])
    return partial(join, str(tmp_path / "q.jsonl"), str(tmp_path / "c.jsonl"), tmp_path / "out")


class TakenAt:
    """Chooses ports of which these are taken by the time they are used, so many times."""

    def __init__(self, *places, times):
        self._places, self.left = places, times
        self._taken = []

    def __call__(self, count, rng):
        ports = free_ports(count, Random())
        if self.left:
            self.left -= 1
            self._taken += [socket.create_server(("127.0.0.1", ports[place])) for place in self._places]
        return ports

    def close(self):
        for one in self._taken:
            one.close()


@pytest.mark.parametrize("place", [RAFT, DISPATCHER])
def test_a_run_whose_port_is_taken_when_it_starts_chooses_again(job, tmp_path, monkeypatch, capfd, place):
    chooser = TakenAt(place, times=1)
    monkeypatch.setattr(placing, "free_ports", chooser)
    try:
        summary = job()
    finally:
        chooser.close()
    assert (summary["joined"], joined_pairs(tmp_path / "out")) == (1, {("q", "c"): 1})
    assert "starting again on other ports" in capfd.readouterr().err


def test_it_does_not_choose_for_ever(job, monkeypatch):
    chooser = TakenAt(RAFT, times=9)
    monkeypatch.setattr(placing, "free_ports", chooser)
    try:
        with pytest.raises(PortTakenError):
            job()
    finally:
        chooser.close()
    assert chooser.left == 9 - PORT_TRIES_MAX


@pytest.mark.long
def test_a_borrowed_registry_whose_port_is_taken_when_it_starts_chooses_again(
    job, tmp_path, monkeypatch, capfd
):
    job()
    chooser = TakenAt(RAFT, ANOTHER_RAFT, times=1)  # a majority would be enough for what is asked
    monkeypatch.setattr(placing, "free_ports", chooser)
    try:
        with (
            asked_registry(Named(tmp_path / "out" / ".photon")) as asked,
            asked.registry.client(10.0) as client,
        ):
            scanned = list(client.scan(0, fresh=True))  # by the shard's leader, whoever knows of it by now
    finally:
        chooser.close()
    assert sum(len(piece.times) for piece in scanned) == 8  # the one click's
    assert chooser.left == 0 and "starting again on other ports" in capfd.readouterr().err
