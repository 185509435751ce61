"""Systems of real replica processes for the tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.idregistry.cluster import Cluster


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
