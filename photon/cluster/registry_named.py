"""Which registry a command means: that of a run here, the one at some addresses, or that of the settings."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from photon.core.errors import UsageError
from photon.core.settings import Settings, load_settings

# The registry's modules take 0.2 s to import: they are, where there is something to be asked.
if TYPE_CHECKING:
    from idregistry.client import RegistryAt
    from photon.cluster.topology import Topology

_Result = TypeVar("_Result")

_WHICH: Final = (
    "say which registry: either --work DIR or --registry HOST:PORT,..., or a --config that names [replicas]"
)


@dataclass(frozen=True, slots=True)
class Named:
    """`work`: a run's work directory. `addresses`: comma-separated; else the [replicas] of `settings`, whose
    [tls] goes for both. Of a run it is its own that counts."""

    work: Path | None = None
    addresses: str | None = None
    settings: Settings = field(default_factory=Settings)

    def check(self) -> None:
        """UsageError if it names none, or two."""
        given = (self.work is not None) + (self.addresses is not None)
        if given > 1 or not (given or self.settings.replicas):
            raise UsageError(_WHICH)

    def at(self) -> "RegistryAt":
        """UsageError; SettingsError for TLS files that can't be used."""
        from idregistry.client import RegistryAt
        from photon.cluster.topology import network_of, read_topology

        self.check()
        if self.work is not None:
            return registry_of(read_topology(self.work / "topology.json"))
        if self.addresses is None:
            known = tuple(replica.grpc for replica in self.settings.replicas.values())
        else:
            known = tuple(address for address in self.addresses.split(",") if address)
        if not known:
            raise UsageError("--registry names no address; give HOST:PORT,...")
        return RegistryAt(known, network_of(self.settings, ""))


def registry_of(topology: "Topology") -> "RegistryAt":
    """The topology's. SettingsError for TLS files that can't be used."""
    from idregistry.client import RegistryAt

    return RegistryAt(tuple(replica.grpc for replica in topology.replicas), topology.network(""))


def registry_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorator of a click command: --work, --registry and --config become one argument, `named`."""

    @click.option(
        "--work",
        type=click.Path(path_type=Path),
        help="Work directory of the run (OUT/.photon).",
    )
    @click.option("--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas.")
    @click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="Settings (photon.toml): [replicas] that are asked without --registry, [tls] to ask them with.",
    )
    @functools.wraps(command)
    def with_options(
        *arguments: Any, work: Path | None, addresses: str | None, config: Path | None, **others: Any
    ) -> _Result:
        if work is not None and config is not None:
            raise UsageError("--work has the settings of its run; leave --config out")
        named = Named(work, addresses, load_settings(config))
        named.check()
        return command(*arguments, named=named, **others)

    return with_options
