"""What most tests of the joiner work with."""

import pytest

from photon.core.clock import ManualClock
from tests.joiner.fakes import FakeEventStore, FakeRegistry


@pytest.fixture
def registry():
    return FakeRegistry()


@pytest.fixture
def store():
    return FakeEventStore()


@pytest.fixture
def clock():
    return ManualClock()
