"""What a command on Spark takes, and what is told in a line before anything starts."""

import logging
import os
import signal
import warnings
from contextlib import suppress
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from photon.core.errors import UsageError
from spark import options
from spark.options import SparkOptions, check_requirements, parse_conf, spark_options
from spark.session import ended_by_signals, map_in_arrow, open_session


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


def test_a_command_gets_its_options_as_one_argument_beside_its_own_and_without_any_runs_on_this_machine():
    given = taken("--out", "o", "--master", "spark://h:7077", "--conf", "spark.executor.memory=2g", "--json")
    expected = SparkOptions("spark://h:7077", "1g", {"spark.executor.memory": "2g"})
    assert given == {"out": "o", "as_json": True, "spark": expected}
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
    given = SparkOptions(master)
    given.check()
    assert given.master_addresses == addresses
    assert given.is_local == master.startswith("local")


@pytest.fixture
def java(monkeypatch, tmp_path):
    """Installs a Java that says its version so, or none, beside a PySpark."""
    monkeypatch.setattr(options, "find_spec", lambda name: object())

    def java(says):
        if says is None:
            monkeypatch.delenv("JAVA_HOME", raising=False)
            monkeypatch.setenv("PATH", str(tmp_path))
            return
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/java").write_text(f"#!/bin/sh\necho '{says}' >&2\n")
        (tmp_path / "bin/java").chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    return java


def test_a_missing_pyspark_is_a_usage_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'pyspark"):
        check_requirements()


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (None, "Java 17 or newer and found none"),
        ('openjdk version "11.0.2" 2019-01-15', "bin/java is 11"),
        ('java version "1.8.0_292"', "bin/java is 8"),
        ("segmentation fault", "bin/java is none that answers"),
    ],
)
def test_a_missing_or_an_old_java_is_a_usage_error_that_names_it(java, says, told):
    java(says)
    with pytest.raises(UsageError, match=told):
        check_requirements()


@pytest.mark.parametrize(
    "says", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "21-ea" 2023-09-19']
)
def test_a_new_java_will_do_and_options_are_checked_before_anything_starts(java, says):
    java(says)
    with pytest.raises(UsageError, match="--master"), open_session(SparkOptions("lokal")):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_libraries_tell_of_a_jvm_that_a_signal_ends_is_not_shown(number, caplog, recwarn):
    with pytest.raises(SystemExit) as ended, ended_by_signals() as arm:
        arm(SimpleNamespace(terminate=lambda: None))
        try:
            signal.raise_signal(number)
        finally:
            logging.error("Exception while sending command.")
            warnings.warn("Unable to cleanly shutdown Spark JVM process.", RuntimeWarning, stacklevel=1)
    assert (ended.value.code, caplog.records, recwarn.list) == (128 + number, [], [])
    logging.error("shown again")
    assert len(caplog.records) == 1


@pytest.mark.spark
def test_a_python_of_a_local_session_that_is_killed_fails_no_job(session, tmp_path):
    def dies_once(batches):
        with suppress(FileExistsError):
            (tmp_path / "died").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        yield from batches

    assert map_in_arrow(session.range(3), dies_once, "id long").count() == 3
    assert (tmp_path / "died").exists()
