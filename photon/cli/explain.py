"""`photon explain EVENT_ID`: where an event is, and why it is not joined yet."""

import json
import os
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import click

from photon.cli.options import json_flag, show_time, system_options
from photon.cluster.explain import explain, verdict
from photon.cluster.registry_access import RESUME, Named, asked_registry, has_ended, notice
from photon.cluster.topology import find_system
from photon.connect.rows import place_of
from photon.core.errors import UsageError


@click.command("explain")
@click.argument("event_ids", metavar="EVENT_ID...", nargs=-1, required=True)
@system_options
@click.option("--primary-id", help="Of the primary event it names, where no log tells it yet.")
@json_flag("Print JSON, an object a line for each event.")
def command(
    event_ids: tuple[str, ...],
    work: Path | None,
    config: Path | None,
    primary_id: str | None,
    as_json: bool,
) -> None:
    """Say all that is known of each foreign event EVENT_ID: joined, given up, waiting, or unseen, and why.

    Works on a running system, and on a run that has ended, whose registry is started for the question. Joined
    logs and dead letters are looked through where they are on this machine.
    """
    if primary_id is not None and len(event_ids) > 1:
        raise UsageError("--primary-id is of one event; ask after each by itself")
    for name, given in (*(("EVENT_ID", one) for one in event_ids), ("--primary-id", primary_id)):
        _check_id(name, given)
    topology = find_system(work, config)
    with ExitStack() as held:
        of_ended = None
        if work is not None and has_ended(work):
            notice(f"the run in {work} has ended; {RESUME}")
            of_ended = cache(lambda: held.enter_context(asked_registry(Named(work))).registry)
        for event_id in event_ids:
            found = explain(topology, event_id, primary_id, of_ended)
            click.echo(json.dumps(found) if as_json else "\n".join(told(found)))


def _check_id(name: str, given: str | None) -> None:
    if given == "":
        raise UsageError(f"{name} is empty; name the id of an event")
    try:
        (given or "").encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(given or "").decode("utf-8", "backslashreplace")
        raise UsageError(f"{shown}: not UTF-8, and no event has such an id; check {name}") from error


def told(found: dict[str, Any]) -> list[str]:
    """What `explain` found, for a person."""
    lines = [f"{found['id']}: {verdict(found)}"]
    registry = found["registry"]
    if registry is not None and "silent" in registry:
        lines.append(f"  registry       does not answer ({registry['silent']})")
    elif registry is None:
        lines.append("  registry       not registered")
    else:
        who = f"{registry.get('process') or 'the joiner'} at {registry['joiner']}"
        life = f"incarnation {registry['incarnation']}"
        when = show_time(registry["time_us"])
        lines.append(f"  registry       registered in shard {registry['shard']} by {who} ({life}), {when}")
    for row in found["joined"]:
        place = f"offset {row['offset']}" if "offset" in row else f"row {row['row']}"
        lines.append(f"  joined         {row['file']}, {place}")
    for row in found["dead_letters"]:
        lines.append(f"  dead letter    {row['datacenter']}: {row['fate']}: {row['reason']}")
        lines.append(f"                 from {place_of(row['file'], row['offset'])}")
    for datacenter, row in found["pending"].items():
        if row is not None and "silent" in row:
            lines.append(f"  dispatcher     {datacenter}: does not answer")
        elif row is not None:
            facts = ", ".join(f"{_words(k)} {_value(k, value)}" for k, value in row.items() if k != "line")
            lines.append(f"  pending        {datacenter}: {facts}")
    lines += [f"  not readable   {file}: {why}" for file, why in found["unreadable"].items()]
    lines += [f"  not here       {directory}: is not on this machine" for directory in found["not_here"]]
    return lines + _primary(found["primary"])


def _primary(primary: dict[str, Any] | None) -> list[str]:
    if primary is None:
        return ["  primary        its id is not known here (--primary-id)"]
    rows = []
    for datacenter, answer in primary["datacenters"].items():
        outcome = "does not answer" if "silent" in answer else answer["outcome"]
        rows.append(f"  primary        {primary['id']}: {outcome} in {datacenter}")
        if answer.get("line"):
            rows.append(f"                 {answer['line']}")
    return rows


def _words(key: str) -> str:
    return key.removesuffix("_us").replace("_", " ")


def _value(key: str, value: Any) -> str:
    is_time = key.endswith("_us") and isinstance(value, int) and value > 1 << 40
    return show_time(value) if is_time else str(value)
