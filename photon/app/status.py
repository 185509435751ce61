"""`photon status`: what every process of a running system says of itself."""

import json
from pathlib import Path

import click


@click.command("status")
@click.option(
    "--work", type=click.Path(path_type=Path), required=True, help="Work directory of the run (OUT/.photon)."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(work: Path, as_json: bool) -> None:
    """Show the registry, event stores, joiners and dispatchers of a run. Status 1 if one does not answer."""
    from photon.app.statuses import StatusReader
    from photon.app.topology import read_topology

    reader = StatusReader(read_topology(work / "topology.json"))
    reader.read(("registry", "eventstore", "joiner", "dispatcher"))
    statuses = dict(reader.named())
    if as_json:
        click.echo(json.dumps({**statuses, **dict.fromkeys(reader.silent())}))
    else:
        for name, status in statuses.items():
            click.echo(f"{name:<24}{_line(status)}")
        for name in reader.silent():
            click.echo(f"{name:<24}does not answer")
    raise SystemExit(1 if reader.silent() else 0)


def _directory(directory: dict[str, object]) -> list[str]:
    """The registry's directory: only what is out of the ordinary, but for its leader."""
    shown = [f"directory: leader {directory['leader']}" + ("" if directory["has_quorum"] else ", NO QUORUM")]
    resharding, replacing = directory["resharding"], directory["replacing"]
    if isinstance(resharding, list):
        shown.append(f"resharding to {resharding[1]}")
    if isinstance(replacing, list):
        shown.append(f"replacing {replacing[0]} by {replacing[1]}")
    return shown


def _line(status: dict[str, object]) -> str:
    """The plain values of a status in one line."""
    shown = []
    for key, value in status.items():
        if key == "directory" and isinstance(value, dict):
            shown += _directory(value)
        elif key == "shards" and isinstance(value, list):
            shown += [
                f"shard {s['shard']}: leader {s['leader']}, {s['ids']:,} ids"
                + ("" if s["has_quorum"] else ", NO QUORUM")
                for s in value
            ]
        elif key == "fates" and isinstance(value, dict):
            shown += [f"{fate} {count:,}" for fate, count in value.items() if count]
        elif isinstance(value, bool):
            shown.append(key.replace("_", " ") if value else f"not {key.replace('_', ' ')}")
        elif isinstance(value, int):
            shown.append(f"{key.replace('_', ' ')} {value:,}")
        elif key == "storage_error" and value:
            shown.append(str(value))
    return ", ".join(shown)
