"""What can be known to be wrong with a run of MillWheel before it begins."""

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Final

from millwheel.topology import DEAD_LETTERS, Logs, Topology
from photon.cluster.preflight import check_matches, check_published
from photon.connect.uris import make_source
from photon.core.addresses import split_address
from photon.core.errors import UnavailableError, UsageError
from photon.core.settings import load_settings
from photon.rpc.network import Network, network_of

_PORT_MAX: Final = 65_535


def check_start(topology: Topology, follow: bool, begins: bool) -> None:
    """UsageError, of what is read and of where sinks are published."""
    check_published(topology, follow)
    if begins:
        _check_logs(topology.injectors.values(), follow)


def network_among(
    machine: str, workers: int, shared: bool, config: Path | None, topology: Topology
) -> Network:
    """By which machines of a run reach each other. UsageError, SettingsError."""
    if not machine:
        return Network()
    _, port = split_address(machine, "--machine")
    network = network_of(load_settings(config))
    network.bound(machine)
    if not shared:
        raise UsageError("--machine is for a run whose state all its machines reach: name it by --store")
    if port + workers > _PORT_MAX:
        raise UsageError(f"--machine {machine}: the next {workers} ports are its workers': give a lower one")
    for name, injector in topology.injectors.items():
        if injector.listen:
            raise UsageError(
                f"injector '{name}' is pushed to, and keeps that on one machine: leave --machine out"
            )
        if injector.imported and not injector.copies:
            raise UsageError(
                f"injector '{name}' copies its source: give it a directory that all machines reach "
                "(copies=DIRECTORY), or leave --machine out"
            )
    if DEAD_LETTERS not in topology.sinks:
        raise UsageError(
            "dead letters of a run on several machines need a place that all of them reach: add to the "
            f'topology\'s sinks "{DEAD_LETTERS}": LogSink(DIRECTORY)'
        )
    return network


def _check_logs(injectors: Collection[Logs], follow: bool) -> None:
    """Of a run that has not begun. UsageError where there is nothing to be read, or never can be."""
    if not follow and not any(injector.listen or injector.imported for injector in injectors):
        check_matches("log", [pattern for injector in injectors for pattern in injector.patterns])
    for injector in injectors:
        for text in injector.patterns if injector.imported else ():
            with contextlib.closing(make_source(text, injector.fields)) as source:
                if not follow:
                    with contextlib.suppress(UnavailableError):  # it is waited for
                        source.open({}, True)
