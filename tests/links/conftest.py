"""Fixtures of the tests of links."""

from tests.faults.conftest import nursery, ports_of_this_worker

__all__ = ["nursery", "ports_of_this_worker"]
