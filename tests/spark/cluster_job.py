"""A small command on Spark, for what holds for all of them: `python -m tests.spark.cluster_job`."""

import json
import os
import sys
import time
from pathlib import Path

import click

from photon.core.errors import PhotonError
from spark import session as spark_session
from spark.options import spark_options
from spark.session import open_session, spark_failures

TASKS = 12


def places(_rows):
    """Where an executor has Photon from."""
    import photon.logs.formats
    import spark.session

    yield photon.logs.formats.__file__, spark.session.__file__


def slow_squares(directory, seconds):
    def squares(numbers):
        for number in numbers:
            Path(directory, f"began-{number}-{os.getpid()}").touch()
            time.sleep(seconds)
            yield number % 3, number * number

    return squares


@click.command()
@click.argument("job", type=click.Choice(["places", "squares"]))
@click.option("--began", default=".", help="Each task that begins leaves a file there.")
@click.option("--seconds", default=0.0, help="How long a task takes.")
@click.option("--wait", type=float, help="How long an executor is waited for.")
@spark_options
def command(job, began, seconds, wait, spark):
    if wait is not None:
        spark_session.EXECUTOR_WAIT_S_MAX = wait
    with open_session(spark) as session:
        context = session.sparkContext
        numbers = context.parallelize(range(TASKS), TASKS)
        with spark_failures():
            if job == "places":
                found = sorted(set(numbers.mapPartitions(places).collect()))
            else:
                sums = numbers.mapPartitions(slow_squares(began, seconds)).reduceByKey(lambda a, b: a + b)
                found = dict(sorted(sums.collect()))
    click.echo(json.dumps(found))


if __name__ == "__main__":
    try:
        command.main(standalone_mode=False)
    except PhotonError as error:
        click.echo(f"photon: {error}", err=True)
        sys.exit(error.exit_status)
