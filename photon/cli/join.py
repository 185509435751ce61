"""`photon join`: the whole system embedded on this machine, over existing or growing logs."""

import json
from pathlib import Path
from typing import Any

import click

from photon.cli.options import json_flag, logs_option, path_option
from photon.cluster.statuses import print_summary


@click.command("join")
@logs_option("primary")
@logs_option("foreign")
@path_option("--out", required=True, help="Directory of the output.")
@path_option("--config", help="Settings (photon.toml).")
@path_option("--work", help="State to resume from  [default: OUT/.photon]")
@click.option(
    "--datacenters", type=click.IntRange(1, 5), default=1, show_default=True, help="Pipelines to run."
)
@click.option("--follow", is_flag=True, help="Go on tailing until Ctrl-C or SIGTERM.")
@json_flag("Print the summary as JSON.")
def command(out: Path, follow: bool, as_json: bool, **given: Any) -> int:
    """Join each foreign event with the primary event it names; write it exactly once.

    Output: OUT/joined/<datacenter>/*.jsonl, and OUT/dead-letters/<datacenter>/*.jsonl for the rest.
    A run that was stopped or killed is resumed by the same command.
    """
    from photon.cluster.run import join

    summary = join(out=out, follow=follow, **given)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        print_summary(summary)
        click.echo(f"joined logs:   {out / 'joined'}")
        click.echo(f"dead letters:  {out / 'dead-letters'}")
    incomplete = summary["unread_files"] or summary["lost_bytes"]
    return 1 if incomplete or (summary["unlisted_files"] and not follow) else 0
