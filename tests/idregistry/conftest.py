"""Replicas for the tests of this folder: real processes, or on fake logs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.idregistry.cluster import Cluster
from tests.idregistry.nodes import Ensemble


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster with these settings; all are killed when the test is over."""
    clusters: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, **settings))
        clusters[-1].start()
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.fixture
def ensemble() -> Iterator[Ensemble]:
    made = Ensemble()
    yield made
    made.close()
