"""`photon registry export`: what the registry holds, as Parquet, for `photon verify --export` (3.3.3)."""

import click

from photon.cluster.borrowed_registry import asked_registry
from photon.cluster.registry_named import Named, registry_options
from spark.engine.options import SparkOptions, scan_timeout_option, spark_options


@click.command("export")
@click.argument("directory", metavar="DIR")
@registry_options
@scan_timeout_option
@spark_options
def export(directory: str, named: Named, scan_timeout: float, spark: SparkOptions) -> None:
    """Keep what all shards hold now as Parquet in DIR, a new directory or a URI for Spark (needs Java).

    Of a run that is over (--work) the replicas are started meanwhile.
    """
    from spark.engine.session import check_requirements, open_session, spark_failures

    check_requirements()
    from spark.reading.paths import check_new
    from spark.registered import write_export

    check_new(directory, "DIR")
    with asked_registry(named) as asked, open_session(spark) as session, spark_failures():
        ids = write_export(session, asked.registry, directory, scan_timeout)
    click.echo(f"{ids:,} ids in {directory}")
