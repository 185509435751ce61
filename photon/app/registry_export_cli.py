"""`photon registry export`: what the registry holds, as Parquet, for `photon verify --export` (3.3.3)."""

from pathlib import Path

import click

from photon.app.borrowed_registry import registry_addresses
from spark.engine.options import SparkOptions, scan_timeout_option, spark_options


@click.command("export")
@click.argument("directory", metavar="DIR")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Work directory of the run (OUT/.photon); of one that is over the replicas are started meanwhile.",
)
@click.option("--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas.")
@scan_timeout_option
@spark_options
def export(
    directory: str, work: Path | None, addresses: str | None, scan_timeout: float, spark: SparkOptions
) -> None:
    """Keep what all shards hold now as Parquet in DIR, a new directory or a URI for Spark (needs Java)."""
    from spark.engine.session import check_requirements, open_session, spark_failures

    check_requirements()
    from spark.reading.paths import check_new
    from spark.registered import write_export

    check_new(directory, "DIR")
    with registry_addresses(work, addresses) as known, open_session(spark) as session, spark_failures():
        ids = write_export(session, known, directory, scan_timeout)
    click.echo(f"{ids:,} ids in {directory}")
