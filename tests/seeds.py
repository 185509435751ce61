"""Which seeds a test is played with, and by whom."""

import os

import pytest


def seeds(few, more, most):
    """`few` in make test, from there to `more` in make test-long, and to `most` in make soak, for which alone
    there are so many tests: to collect them takes seconds."""
    long = [pytest.param(seed, marks=pytest.mark.long) for seed in range(few, more)]
    soak = [pytest.param(seed, marks=[pytest.mark.long, pytest.mark.soak]) for seed in range(more, most)]
    if "PHOTON_SOAK" not in os.environ:
        soak.clear()
    return pytest.mark.parametrize("seed", [*range(few), *long, *soak])
