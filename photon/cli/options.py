"""What several commands have in common: their options, how a time is read and shown."""

import functools
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from photon.core.errors import UsageError

_PLAN: Final = "topology.json"
_CONFIG: Final = "PHOTON_CONFIG"
_UNITS_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
TIME_FORM: Final = "ISO 8601 (without a zone: local time) or seconds since 1970"
"""Of a TIME, as parse_time_us reads it."""
_Result = TypeVar("_Result")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def path_option(*names: str, **given: Any) -> Callable[[_Command], _Command]:
    """An option that is a path, or None."""
    return click.option(*names, type=click.Path(path_type=Path), **given)


def work_option(text: str) -> Callable[[_Command], _Command]:
    """--work of a run that there is; its OUT does as well."""

    def of_run(_: click.Context, __: click.Parameter, work: Path | None) -> Path | None:
        if work is None or (work / _PLAN).exists():
            return work
        return run_in(work) or work

    return path_option("--work", help=text, callback=of_run)


def config_option(text: str) -> Callable[[_Command], _Command]:
    """--config, or PHOTON_CONFIG, of a system that is asked or has its processes started. The variable's is
    passed over where the command line names a run (--work, --out), which has settings of its own."""

    def named(context: click.Context, parameter: click.Parameter, config: Path | None) -> Path | None:
        # What the command line gives is processed before what the environment gives.
        if context.get_parameter_source(parameter.name or "") is not ParameterSource.ENVIRONMENT:
            return config
        given = context.params
        outs = given.get("out") or ()
        outs = outs if isinstance(outs, tuple) else (outs,)
        of_run = given.get("work") or given.get("topology") or any(map(run_in, outs))
        return None if of_run else config

    return path_option("--config", help=text, envvar=_CONFIG, show_envvar=True, callback=named)


def run_in(out: str | Path) -> Path | None:
    """The work directory of the run whose output it is, if that is there."""
    work = Path(out, ".photon")
    return work if (work / _PLAN).exists() else None


def json_flag(text: str) -> Callable[[_Command], _Command]:
    """--json, the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def logs_option(kind: str, sources: str = "") -> Callable[[_Command], _Command]:
    """--primary or --foreign: patterns, at least one. `sources`: what it may be that is no log file."""
    more = f"; or {sources} (docs/connectors.md)" if sources else ""
    metavar = "GLOB|URI" if sources else "GLOB"
    text = f"{kind.capitalize()} logs{more}; repeatable."
    return click.option(f"--{kind}", multiple=True, required=True, metavar=metavar, help=text)


def system_options(command: _Command) -> _Command:
    """--work and --config, of which one must be given (photon.cluster.topology.find_system)."""
    config = config_option(
        "Settings (photon.toml) that name the system's processes: [replicas], [datacenters]."
    )
    work = work_option("Work directory of a `photon join` or `photon dev` (OUT/.photon).")
    return work(config(command))


def registry_options(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """--work, --registry and --config become one argument, `named`."""

    @work_option("Work directory of the run (OUT/.photon).")
    @click.option("--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas.")
    @config_option(
        "Settings (photon.toml): [replicas] that are asked without --registry, [tls] to ask them with."
    )
    @functools.wraps(command)
    def with_options(
        *arguments: Any, work: Path | None, addresses: str | None, config: Path | None, **others: Any
    ) -> _Result:
        # Here: most commands have other options of this module, and some are to be quick (photon.cli.health).
        from photon.cluster.registry_access import Named
        from photon.core.settings import load_settings

        if work is not None and config is not None:
            raise UsageError("--work has the settings of its run; leave --config out")
        named = Named(work, addresses, load_settings(config))
        named.check()
        return command(*arguments, named=named, **others)

    return with_options


def duration(_ctx: click.Context | None, _param: click.Parameter | None, value: str | None) -> float | None:
    """`500ms`, `20s`, `5m`, `1h`, `7d` -> seconds; a bare number is seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is no duration; write 20s, 500ms, 5m, 1h or 7d")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def parse_time_us(text: str, option: str = "--at") -> int:
    """TIME_FORM -> us. UsageError."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError as error:
            raise UsageError(
                f"{option} {text}: give a time as 2026-01-31T12:00:00+00:00, or in seconds since 1970"
            ) from error
    if not 0 < seconds < 1e11:
        raise UsageError(
            f"{option} {text}: {seconds:g} seconds since 1970 can't be; are these micro- or milliseconds?"
        )
    return round(seconds * 1e6)


def show_time(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6).astimezone().isoformat(timespec="milliseconds")
