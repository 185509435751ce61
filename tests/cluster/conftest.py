"""A registry of one replica, and settings that name it."""

import pytest

from tests.spark.kit import RealRegistry


@pytest.fixture
def registry(tmp_path):
    made = RealRegistry(tmp_path / "registry")
    made.client.identity()  # it has started
    yield made
    made.close()


@pytest.fixture
def config(request, registry, tmp_path):
    """With what a module has as SETTINGS."""
    path = tmp_path / "photon.toml"
    place = f'datacenter = "east"\ngrpc = "{registry.address}"\nraft = "127.0.0.1:1"\n'
    path.write_text(f"[replicas.r0]\n{place}{getattr(request.module, 'SETTINGS', '')}")
    return path
