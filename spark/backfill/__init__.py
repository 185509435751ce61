"""`photon backfill`: the whole join of old logs, beside live pipelines (paper 3.3)."""
