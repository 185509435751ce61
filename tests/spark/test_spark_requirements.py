"""What is missing is told in one line with its mend, before anything starts."""

import pytest

from photon.core.errors import UsageError
from spark import options as requirements
from spark.options import SparkOptions, check_requirements
from spark.session import open_session


@pytest.fixture
def pyspark_found(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())


def java_saying(tmp_path, version):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    java.chmod(0o755)
    return tmp_path


def test_a_missing_pyspark_is_a_usage_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'pyspark"):
        check_requirements()


def test_a_missing_java_is_a_usage_error(monkeypatch, tmp_path, pyspark_found):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="Java 17 or newer and found none"):
        check_requirements()


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "11"),
        ('java version "1.8.0_292"', "8"),
        ("segmentation fault", "none that answers"),
    ],
)
def test_an_old_java_is_a_usage_error_that_names_it(monkeypatch, tmp_path, pyspark_found, said, found):
    monkeypatch.setenv("JAVA_HOME", str(java_saying(tmp_path, said)))
    with pytest.raises(UsageError, match=f"bin/java is {found}"):
        check_requirements()


@pytest.mark.parametrize(
    "said", ['openjdk version "17.0.15" 2025-04-15', 'openjdk version "21-ea" 2023-09-19']
)
def test_a_new_java_will_do(monkeypatch, tmp_path, pyspark_found, said):
    monkeypatch.setenv("JAVA_HOME", str(java_saying(tmp_path, said)))
    check_requirements()


@pytest.mark.parametrize(
    ("master", "memory", "message"),
    [
        ("local[*]", "lots", "--driver-memory"),
        ("local[*]", "0g", "--driver-memory"),
        ("lokal", "1g", "--master"),
    ],
)
def test_options_are_checked_before_anything_starts(
    monkeypatch, tmp_path, pyspark_found, master, memory, message
):
    monkeypatch.setenv("JAVA_HOME", str(java_saying(tmp_path, 'openjdk version "17"')))
    with pytest.raises(UsageError, match=message), open_session(SparkOptions(master, memory)):
        pass
