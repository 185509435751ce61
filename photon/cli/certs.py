"""`photon certs`: certificates for [tls]."""

import datetime
import json
from pathlib import Path

import click

from photon.cluster.certificates import CA_DAYS, DAYS_MAX, Authority, check_name
from photon.core.settings import Tls


@click.command("certs")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory of the CA; one that is there signs, and is never replaced.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    default=("node",),
    show_default=True,
    help="Host or address of a node; once for each.",
)
@click.option(
    "--days",
    type=click.IntRange(1, DAYS_MAX),
    default=365,
    show_default=True,
    help="How long the certificates are good.",
)
def command(out: Path, names: tuple[str, ...], days: int) -> None:
    """Make a CA and certificates by it, each for servers and for clients.

    Every machine gets its own certificate and key, and ca.pem; ca.key stays where you keep secrets.
    """
    for name in names:
        check_name(name)
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority(out, now)
    if authority.made:
        click.echo(f"# a new CA, good for {CA_DAYS} days: {out / 'ca.pem'}; keep ca.key away from the nodes")
    for name in names:
        files = authority.issue(name, Tls().name, days)
        good = (files.ends - now).days
        click.echo(f"\n# {name}, good for {good} days{', as long as its CA' if good < days else ''}\n[tls]")
        for key in ("cert", "key", "ca"):
            click.echo(f"{key} = {json.dumps(str(getattr(files, key).resolve()), ensure_ascii=False)}")
