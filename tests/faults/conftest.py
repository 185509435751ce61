"""Fixtures of the fault tests."""

import pytest

from photon.cluster import local_cluster as placing
from photon.cluster.nursery import Nursery
from tests.faults.kit.system import seed_for
from tests.ports import free_ports


@pytest.fixture(autouse=True)
def ports_of_this_worker(monkeypatch):
    """Systems that start at the same time in two workers never choose the same ones."""
    monkeypatch.setattr(placing, "free_ports", lambda count, rng: free_ports(count))


@pytest.fixture(scope="session")
def nursery():
    """Has imported everything once; the systems of one run of pytest start from it in milliseconds."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def seed(request):
    """Printed; PHOTON_FAULT_SEED sets it."""
    return seed_for(request.node.name)
