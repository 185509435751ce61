"""A system of several machines, as its settings name it: who runs where, by which addresses, on which logs.

Every process of it is started with the same photon.toml; `photon join` plans its own.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click

from photon.cluster.roles import PIPELINE_ROLES, ROLES
from photon.cluster.topology import (
    Pipeline,
    Replica,
    Topology,
    absolute,
    read_topology,
    with_absolute_paths,
)
from photon.core.addresses import joined, split_address
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import DatacenterPlace, ReplicaPlace, Settings, load_settings, reading_fingerprint

SECRET_BYTES_MIN: Final = 16
_PLACES: Final = tuple(ROLES[role].places for role in PIPELINE_ROLES)
_OWN_NAMES: Final = frozenset({"borrowed", "lock", "logs", "recovery", "registry", "run"})
"""Files of a work directory and of the joined logs: the directories of a datacenter lie beside them."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def read_system(config: Path | None, topology: Path | None) -> Topology:
    """Of one of the two files. UsageError, SettingsError."""
    if (config is None) == (topology is None):
        raise UsageError("name one of --config (photon.toml) and --topology (topology.json)")
    if topology is not None:
        return read_topology(topology)
    return topology_of(load_settings(config), str(config))


def topology_of(settings: Settings, source: str = "settings") -> Topology:
    """SettingsError for a system that can't be; `source`: where the settings are from, for the message."""
    try:
        return _topology_of(settings)
    except SettingsError as error:
        raise SettingsError(f"{source}: {error}") from error


def _topology_of(settings: Settings) -> Topology:
    _check(settings)
    own = settings.system
    work, out = Path(own.work).absolute(), Path(own.out).absolute()
    topology = Topology(
        settings=with_absolute_paths(settings),
        primary=[],
        foreign=[],
        output=str(out),
        secret=_secret(own.secret_file).hex(),
        drain=own.drain,
        replicas=[_replica(name, place, work) for name, place in settings.replicas.items()],
        pipelines=[
            _pipeline(name, place, work) for name, place in settings.datacenters.items() if place.joiners
        ],
        regions={name: place.region or name for name, place in settings.datacenters.items()},
    )
    if settings.metrics.serve:
        topology.metrics.update(_metrics(topology, settings))
    check_processes(topology)
    return topology


def check_processes(topology: Topology) -> None:
    """SettingsError: the third joiner of `east` is `joiner-east-2`, and so is the first of `east-2`."""
    names = topology.titles()
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingsError(
            f"two processes would be named {min(twice)}; run fewer of a role, or rename a datacenter"
        )


def _replica(name: str, place: ReplicaPlace, work: Path) -> Replica:
    return Replica(**dataclasses.asdict(place), name=name, directory=str(work / "registry" / name))


def _pipeline(name: str, place: DatacenterPlace, work: Path) -> Pipeline:
    primary, foreign = (tuple(map(absolute, patterns)) for patterns in (place.primary, place.foreign))
    here = dataclasses.replace(place, primary=primary, foreign=foreign)
    return Pipeline(**dataclasses.asdict(here), datacenter=name, directory=str(work / name))


def _metrics(topology: Topology, settings: Settings) -> dict[str, str]:
    """Process -> the advertised host, and the port that is so far above the gRPC port."""
    found = {}
    for process, address in ((each.title, each.address) for each in topology.processes()):
        host, port = split_address(address, process)
        if port + settings.metrics.port_offset >= 1 << 16:
            raise SettingsError(f"'metrics.port_offset' leads {process} past port 65535; set a smaller one")
        found[process] = joined(host, port + settings.metrics.port_offset)
    return found


def _secret(file: str) -> bytes:
    if not file:
        return b""  # which the replicas refuse beyond loopback
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise SettingsError(
            f"'system.secret_file': {file} cannot be read ({error.strerror}); make one of "
            f"{SECRET_BYTES_MIN} random bytes or more, the same on all machines"
        ) from error
    if len(secret) < SECRET_BYTES_MIN:
        raise SettingsError(f"'system.secret_file': {file} must hold {SECRET_BYTES_MIN} bytes or more")
    return secret


def _check(settings: Settings) -> None:
    if not settings.replicas:
        raise SettingsError(
            "the settings name no registry replica: add [replicas.NAME] with datacenter, grpc and raft"
        )
    if len(settings.replicas) % 2 == 0:
        raise SettingsError(
            "[replicas] names an even number of replicas: one more or less tolerates as many failures"
        )
    _check_names("replicas", settings.replicas)
    _check_names("datacenters", settings.datacenters)
    for name in settings.datacenters:
        if name in _OWN_NAMES or name.startswith("logs-"):  # of generated logs
            raise SettingsError(
                f"[datacenters.{name}]: Photon has files of that name beside its directories; rename it"
            )
    for name, replica in settings.replicas.items():
        where = f"replicas.{name}"
        if settings.datacenters and replica.datacenter not in settings.datacenters:
            raise SettingsError(
                f"'{where}.datacenter': there is no [datacenters.{replica.datacenter}]; there are: "
                f"{', '.join(settings.datacenters)}"
            )
        for key in ("grpc", "raft", "listen_grpc", "listen_raft"):
            address = getattr(replica, key)
            if address or not key.startswith("listen"):
                split_address(address, f"'{where}.{key}'")
    for name, datacenter in settings.datacenters.items():
        _check_pipeline(name, datacenter)
    _check_apart(settings)
    _check_via(settings)


def _check_pipeline(name: str, place: DatacenterPlace) -> None:
    where = f"datacenters.{name}"
    needed = {key: getattr(place, key) for key in (*_PLACES, "primary", "foreign")}
    missing = [key for key, values in needed.items() if not values]
    if missing and len(missing) < len(needed):
        raise SettingsError(
            f"[{where}] lacks {', '.join(missing)}: a pipeline has all of {', '.join(needed)}"
        )
    for key in _PLACES:
        for address in needed[key]:
            split_address(address, f"'{where}.{key}'")


def _check_via(settings: Settings) -> None:
    known = [address for _, address in _servers(settings)]
    for name, dialed in settings.via.items():
        if name not in settings.datacenters:
            raise SettingsError(f"[via.{name}]: there is no [datacenters.{name}]")
        for advertised, there in dialed.items():
            split_address(advertised, f"[via.{name}]")
            split_address(there, f"'via.{name}.{advertised}'")
            if advertised not in known:
                (nearest,) = get_close_matches(advertised, known, n=1, cutoff=0)
                raise SettingsError(
                    f"[via.{name}]: {advertised} is the address of no process; did you mean '{nearest}'?"
                )


def _check_names(section: str, names: Iterable[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"[{section}.{name!r}]: a name has lower-case letters, digits, '-' and '_', 63 at most"
            )


def _check_apart(settings: Settings) -> None:
    """Two servers at one address, by whatever name: one of them would never be reached."""
    seen: dict[tuple[str, int], str] = {}
    for where, address in _servers(settings):
        at = _same_host(address)
        if at in seen:
            raise SettingsError(f"{where} and {seen[at]} have the same address {address}; set another")
        seen[at] = where
    if not settings.metrics.serve:
        return
    for where, address in _grpc_servers(settings):
        host, port = _same_host(address)
        at = host, port + settings.metrics.port_offset
        if at in seen:
            raise SettingsError(
                f"'metrics.port_offset' leads the metrics of {where} to {at[0]}:{at[1]}, where "
                f"{seen[at]} is; set another"
            )
        seen[at] = f"the metrics of {where}"


def _same_host(address: str) -> tuple[str, int]:
    """The same for all spellings of a host that can be known without asking anybody."""
    host, port = split_address(address, "address")
    host = host.lower()
    try:
        found = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return host, port
    return str(found), port


def _servers(settings: Settings) -> Iterable[tuple[str, str]]:
    yield from _grpc_servers(settings)
    for name, replica in settings.replicas.items():
        yield f"'replicas.{name}.raft'", replica.raft


def _grpc_servers(settings: Settings) -> Iterable[tuple[str, str]]:
    """Each has a port of metrics, too."""
    for name, replica in settings.replicas.items():
        yield f"'replicas.{name}.grpc'", replica.grpc
    for name, place in settings.datacenters.items():
        for key in _PLACES:
            for address in getattr(place, key):
                yield f"'datacenters.{name}.{key}'", address


def system_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--work and --config, of which one must be given."""
    with_config = click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="Settings (photon.toml) that name the system's processes: [replicas], [datacenters].",
    )(command)
    return click.option(
        "--work",
        type=click.Path(path_type=Path),
        help="Work directory of a `photon join` or `photon dev` (OUT/.photon).",
    )(with_config)


def find_system(work: Path | None, config: Path | None) -> Topology:
    """UsageError unless one of the two is given, and it tells of a system."""
    from photon.cluster.topology import read_topology
    from photon.core.settings import load_settings

    if (work is None) == (config is None):
        raise UsageError("name the system by one of --work (of a run here) and --config (its photon.toml)")
    if work is not None:
        return read_topology(work / "topology.json")
    settings = load_settings(config)
    # Replicas alone prove to each other that they have the secret; who asks need not be able to read it.
    asked = dataclasses.replace(settings, system=dataclasses.replace(settings.system, secret_file=""))
    return topology_of(asked, str(config))


def check_reads_alike(settings: Settings, config: Path, runs: Settings, work: Path) -> None:
    """SettingsError where `settings`, of the file `config`, read events otherwise than those of the run in
    `work`: they would be taken for other ones, and joined twice."""
    if reading_fingerprint(settings) != reading_fingerprint(runs):
        raise SettingsError(
            f"{config}: [foreign], [primary], ids.key and logs.line_bytes_max must be those of the run in "
            f"{work}, or events would be joined twice; leave --config out to use them"
        )
