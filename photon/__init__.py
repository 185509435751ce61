"""Photon: a geo-replicated joiner of continuous streams (Ananthanarayanan et al., SIGMOD 2013).

This is the public API (docs/api.md). What is imported from here stays; all other modules may move.
Each name is loaded when it is first used, so `import photon` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from joiner.adapter import Adapter, Event, Result, Skip, splice
    from joiner.output_files import complete_files, count_joined, read_lives
    from photon.cluster.declared import Decided, Declared
    from photon.cluster.run import join
    from photon.connect.ports import Batch, Fields, Guarantee, Loss, Sink, Source, State
    from photon.connect.uris import Uri
    from photon.core.clock import Clock, SystemClock
    from photon.core.errors import (
        AdapterError,
        OverloadedError,
        PhotonError,
        SettingsError,
        SkewError,
        StorageError,
        UnavailableError,
        UsageError,
    )
    from photon.core.id_generator import EventIdGenerator, FileMark, TimeReading, system_time
    from photon.core.settings import Settings, load_settings
    from photon.fastpath import FastPath, ForeignCounts, Limits, PrimaryCounts
    from photon.logs.writer import LogPosition
    from photon.rpc.network import Network, Tls, load_tls

__version__ = "0.1.0"

_HOMES: Final = {
    "joiner.adapter": ("Adapter", "Event", "Result", "Skip", "splice"),
    "joiner.output_files": ("complete_files", "count_joined", "read_lives"),
    "photon.cluster.declared": ("Decided", "Declared"),
    "photon.cluster.run": ("join",),
    "photon.connect.ports": ("Batch", "Fields", "Guarantee", "Loss", "Sink", "Source", "State"),
    "photon.connect.uris": ("Uri",),
    "photon.core.clock": ("Clock", "SystemClock"),
    "photon.core.errors": (
        "AdapterError",
        "OverloadedError",
        "PhotonError",
        "SettingsError",
        "SkewError",
        "StorageError",
        "UnavailableError",
        "UsageError",
    ),
    "photon.core.id_generator": ("EventIdGenerator", "FileMark", "TimeReading", "system_time"),
    "photon.core.settings": ("Settings", "load_settings"),
    "photon.fastpath": ("FastPath", "ForeignCounts", "Limits", "PrimaryCounts"),
    "photon.logs.writer": ("LogPosition",),
    "photon.rpc.network": ("Network", "Tls", "load_tls"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter",
    "AdapterError",
    "Batch",
    "Clock",
    "Decided",
    "Declared",
    "Event",
    "EventIdGenerator",
    "FastPath",
    "Fields",
    "FileMark",
    "ForeignCounts",
    "Guarantee",
    "Limits",
    "LogPosition",
    "Loss",
    "Network",
    "OverloadedError",
    "PhotonError",
    "PrimaryCounts",
    "Result",
    "Settings",
    "SettingsError",
    "Sink",
    "SkewError",
    "Skip",
    "Source",
    "State",
    "StorageError",
    "SystemClock",
    "TimeReading",
    "Tls",
    "UnavailableError",
    "Uri",
    "UsageError",
    "complete_files",
    "count_joined",
    "join",
    "load_settings",
    "load_tls",
    "read_lives",
    "splice",
    "system_time",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'photon' has no attribute '{name}'")
    found = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
