"""A parsed TOML document -> dataclasses, each value checked by its type and its field's limits. Pure.

An unknown key is an error that names the nearest known one; a value out of range says what it may be.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Final

from photon.core.errors import SettingsError

_MAY_BE_EMPTY: Final = (
    "adapter.use'",
    "tls.cert'",
    "tls.key'",
    "tls.ca'",
    "tls.name'",
    "network.bind'",
    "system.secret_file'",
    ".listen_grpc'",
    ".listen_raft'",
    ".region'",
)


def build(cls: Any, document: Mapping[str, Any], source: str, section: str = "") -> Any:
    """An instance of the dataclass. `source` and `section`: where the document stands, for the message."""
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for name, value in document.items():
        where = f"{section}.{_shown(name)}" if section else _shown(name)
        if name not in known:
            raise SettingsError(
                f"{source}: unknown {_kind(section)} '{where}'{_nearest(name, known, section)}"
            )
        values[name] = _value(hints[name], value, known[name].metadata, source, where)
    for name, field in known.items():
        missing = field.default is field.default_factory is dataclasses.MISSING
        if missing and name not in values:
            raise SettingsError(f"{source}: [{section}] lacks '{name}'; set it")
    return cls(**values)


def _value(hint: Any, value: Any, limits: Mapping[str, Any], source: str, where: str) -> Any:
    """A value, a section, or a section of sections that the user names."""
    of_names = typing.get_origin(hint) is dict
    if not of_names and not dataclasses.is_dataclass(hint):
        return _check_value(value, hint, limits, f"{source}: '{where}'")
    if not isinstance(value, Mapping):
        raise SettingsError(f"{source}: '{where}' must be a section: write [{where}]")
    if not of_names:
        return build(hint, value, source, where)
    _, inner = typing.get_args(hint)
    return {name: _value(inner, one, {}, source, f"{where}.{_shown(name)}") for name, one in value.items()}


def _shown(name: str) -> str:
    return name if name.isprintable() else repr(name)[1:-1]


def _kind(section: str) -> str:
    return "setting" if section else "section"


def _nearest(name: str, known: Mapping[str, Any], section: str) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    prefix = f"{section}." if section else ""
    return f"; did you mean '{prefix}{matches[0]}'?" if matches else f"; known are: {', '.join(known)}"


def _check_value(value: Any, hint: Any, limits: Mapping[str, Any], where: str) -> Any:
    if isinstance(hint, types.UnionType):
        raise TypeError(f"{where}: unions are not settings")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if hint == tuple[str, ...]:
        return _check_names(value, where)
    if type(value) is not hint:
        raise SettingsError(f"{where} must be {_type_name(hint)}, not {value!r}")
    if hint is str and not value and "choices" not in limits and not where.endswith(_MAY_BE_EMPTY):
        raise SettingsError(f"{where} must not be empty")
    if "choices" in limits and value not in limits["choices"]:
        raise SettingsError(f"{where} must be one of {', '.join(limits['choices'])}, not {value!r}")
    if "low" in limits and not limits["low"] <= value <= limits["high"]:
        raise SettingsError(f"{where} must be from {limits['low']} to {limits['high']}, not {value!r}")
    return value


def _check_names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise SettingsError(f"{where} must be a list of names, not {value!r}")
    return tuple(value)


def _type_name(hint: Any) -> str:
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]
