"""What settings must fulfil together. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from photon.core.errors import SettingsError
from photon.core.formats_fields import parse_path

if TYPE_CHECKING:
    from photon.core.settings import Settings


def check_together(settings: "Settings", source: str) -> None:
    """SettingsError for settings that are each in range and can't hold together."""
    dispatcher = settings.dispatcher
    if dispatcher.retry_delay_ms_max < dispatcher.retry_delay_ms_min:
        raise SettingsError(
            f"{source}: 'dispatcher.retry_delay_ms_max' is below 'dispatcher.retry_delay_ms_min'"
        )
    if settings.registry.replicas % 2 == 0:
        raise SettingsError(
            f"{source}: 'registry.replicas' must be odd: an even one more tolerates no more failures"
        )
    _check_files(settings, source)
    if len({bool(settings.tls.cert), bool(settings.tls.key), bool(settings.tls.ca)}) > 1:
        raise SettingsError(f"{source}: 'tls.cert', 'tls.key' and 'tls.ca' go together: set all or none")
    names = {
        f"foreign.{f.name}": getattr(settings.foreign, f.name) for f in dataclasses.fields(settings.foreign)
    }
    del names["foreign.time_unit"]
    if len(set(names.values())) < len(names):
        raise SettingsError(f"{source}: {', '.join(map(repr, names))} must name different fields")
    names |= {"primary.id": settings.primary.id, "primary.time": settings.primary.time}
    for where, name in names.items():
        if not name.isprintable() or '"' in name or "\\" in name:
            raise SettingsError(f"{source}: '{where}' must have no quotes, backslashes or control characters")
    _check_paths(names, settings.adapter.field, source)
    if len(settings.ids.key.encode()) > 64:
        raise SettingsError(f"{source}: 'ids.key' must be at most 64 bytes")


def _check_files(settings: "Settings", source: str) -> None:
    names = {f"tls.{name}": [value] for name, value in dataclasses.asdict(settings.tls).items()}
    for where, values in {**names, "joiner.output_roots": settings.joiner.output_roots}.items():
        if any("\0" in value for value in values):
            raise SettingsError(f"{source}: '{where}' must have no NUL character")


def _check_field(field_name: str, foreign: Mapping[str, tuple[str, ...]], source: str) -> None:
    """An object with two fields of one name is read in as many ways as there are readers."""
    for where, path in foreign.items():
        if path[0] == field_name:
            raise SettingsError(
                f"{source}: 'adapter.field' is {field_name!r}, which is the field of '{where}'; "
                "name another for the primary event"
            )


def _check_paths(names: Mapping[str, str], field_name: str, source: str) -> None:
    paths: dict[str, tuple[str, ...]] = {}
    for where, name in names.items():
        try:
            paths[where] = parse_path(name)
        except SettingsError as error:
            raise SettingsError(f"{source}: '{where}': {error}") from error
    foreign = {where: path for where, path in paths.items() if where.startswith("foreign.")}
    for outer, path in foreign.items():
        for inner, longer in foreign.items():
            if inner != outer and longer[: len(path)] == path:
                raise SettingsError(f"{source}: '{inner}' lies within '{outer}': one can't be in the other")
    _check_field(field_name, foreign, source)
