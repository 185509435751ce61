"""Benchmarks, which only a checkout has: `photon bench` (join, registry) and `make results` (figures)."""
