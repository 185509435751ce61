"""Which seeds a test is played with, and by whom."""

import pytest


def seeds(few, more, most):
    """`few` in make test, from there to `more` in make test-long, and to `most` in make soak."""
    long = [pytest.param(seed, marks=pytest.mark.long) for seed in range(few, more)]
    soak = [pytest.param(seed, marks=[pytest.mark.long, pytest.mark.soak]) for seed in range(more, most)]
    return pytest.mark.parametrize("seed", [*range(few), *long, *soak])
