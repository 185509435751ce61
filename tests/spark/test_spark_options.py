"""--master, --driver-memory and --conf: what is taken, and what is told before anything starts."""

import click
import pytest
from click.testing import CliRunner

from photon.core.errors import UsageError
from spark.options import SparkOptions, parse_conf, spark_options


def taken(*arguments):
    """What a command with these options is called with."""
    calls = []

    @click.command()
    @click.option("--out")
    @spark_options
    @click.option("--json", "as_json", is_flag=True)
    def command(**given):
        """What it does."""
        calls.append(given)

    done = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return calls[0]


def test_a_command_gets_its_options_as_one_argument_beside_its_own():
    given = taken("--out", "o", "--master", "spark://h:7077", "--conf", "spark.executor.memory=2g", "--json")
    options = given.pop("spark")
    assert given == {"out": "o", "as_json": True}
    assert (options.master, options.driver_memory) == ("spark://h:7077", "1g")
    assert options.conf == {"spark.executor.memory": "2g"}


def test_without_options_it_runs_on_this_machine():
    assert taken()["spark"] == SparkOptions("local[*]", "1g", {})


def test_a_value_may_hold_equals_signs_and_the_last_of_a_key_counts():
    assert parse_conf(("spark.a=1", "spark.a=b=c", "spark.empty=")) == {"spark.a": "b=c", "spark.empty": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--conf", "spark.executor.memory"], "must be KEY=VALUE"),
        (["--conf", "=1"], "must be KEY=VALUE"),
        (["--conf", "spark.master=yarn"], "use --master"),
        (["--conf", "spark.driver.memory=9g"], "use --driver-memory"),
        (["--conf", "fs.s3a.access.key=k"], "spark.hadoop.fs.s3a.access.key"),
        (["--conf", "executor.memory=1g"], "begin with 'spark.'"),
        (["--driver-memory", "lots"], "512m or 2g"),
        (["--driver-memory", "0g"], "512m or 2g"),
        (["--master", "lokal"], "--master 'lokal' is none"),
        (["--master", "spark://host"], "--master 'spark://host' is none"),
        (["--master", "local[2"], "is none"),
    ],
)
def test_what_is_wrong_is_told_with_its_mend(arguments, message):
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        taken(*arguments)


@pytest.mark.parametrize(
    ("master", "addresses"),
    [
        ("spark://a:7077", [("a", 7077)]),
        ("spark://a:7077,b:7078", [("a", 7077), ("b", 7078)]),
        ("local[2]", []),
        ("yarn", []),
        ("k8s://https://h:443", []),
    ],
)
def test_the_masters_of_a_standalone_cluster_are_known_by_their_addresses(master, addresses):
    options = SparkOptions(master)
    options.check()
    assert options.master_addresses == addresses
    assert options.is_local == master.startswith("local")
