"""Fixtures of the tests of links."""

from tests.faults.conftest import nursery

__all__ = ["nursery"]
