"""Fixtures of the fault tests."""

import pytest

from photon.app.nursery import Nursery
from tests.faults.kit.system import seed_for


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
