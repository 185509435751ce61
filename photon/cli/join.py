"""`photon join`: the whole system embedded on this machine, over existing or growing logs."""

import json
from pathlib import Path

import click

from photon.cluster.statuses import print_summary


@click.command("join")
@click.option(
    "--primary", "primary", multiple=True, required=True, metavar="GLOB", help="Primary logs; repeatable."
)
@click.option(
    "--foreign", "foreign", multiple=True, required=True, metavar="GLOB", help="Foreign logs; repeatable."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory of the output.")
@click.option("--config", type=click.Path(path_type=Path), help="Settings (photon.toml).")
@click.option("--work", type=click.Path(path_type=Path), help="State to resume from  [default: OUT/.photon]")
@click.option(
    "--datacenters", type=click.IntRange(1, 5), default=1, show_default=True, help="Pipelines to run."
)
@click.option("--follow", is_flag=True, help="Go on tailing until Ctrl-C or SIGTERM.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    primary: tuple[str, ...],
    foreign: tuple[str, ...],
    out: Path,
    config: Path | None,
    work: Path | None,
    datacenters: int,
    follow: bool,
    as_json: bool,
) -> int:
    """Join each foreign event with the primary event it names; write it exactly once.

    Output: OUT/joined/<datacenter>/*.jsonl, and OUT/dead-letters/<datacenter>/*.jsonl for the rest.
    A run that was stopped or killed is resumed by the same command.
    """
    from photon.cluster.run import join

    summary = join(primary, foreign, out, config=config, work=work, datacenters=datacenters, follow=follow)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        print_summary(summary)
        click.echo(f"joined logs:   {out / 'joined'}")
        click.echo(f"dead letters:  {out / 'dead-letters'}")
    return 1 if summary["unread_files"] or (summary["unlisted_files"] and not follow) else 0
