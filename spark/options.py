"""The options that every command on Spark has, and what this machine needs: PySpark and a Java for it."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from photon.core.errors import UsageError

DRIVER_MEMORY: Final = "1g"
MASTER: Final = "local[*]"
SCAN_TIMEOUT_S: Final = 600.0
"""Of the scan of one shard of the registry, what Spark does with the rows meanwhile included."""
SCAN_TIMEOUT_S_MAX: Final = 3600.0
"""As the registry has it (idregistry.rules.packing), whose modules take their time to import."""
JAVA_MIN: Final = 17
JAVA_ASK_S_MAX: Final = 30.0

_JAVA_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_MEMORY: Final = re.compile(r"[1-9]\d*[kmgt]b?", re.ASCII | re.IGNORECASE)
_STANDALONE: Final = re.compile(r"spark://(?P<addresses>[^/\s:,]+:\d{1,5}(,[^/\s:,]+:\d{1,5})*)", re.ASCII)
_MASTER: Final = re.compile(rf"local(\[.+\])?|k8s://.+|yarn|{_STANDALONE.pattern}", re.ASCII)
_SAID_ELSEWHERE: Final = {"spark.master": "--master", "spark.driver.memory": "--driver-memory"}

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Span:
    """Event times (us) from `start` on and before `end`."""

    start: int = -(1 << 62)
    end: int = 1 << 62


ALL: Final = Span()


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """Where Spark runs (`master`), the memory of its driver (`1g`, `512m`), more settings of Spark's own."""

    master: str = MASTER
    driver_memory: str = DRIVER_MEMORY
    conf: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def with_defaults(self, conf: Mapping[str, str]) -> "SparkOptions":
        """With these settings where others are not given."""
        return replace(self, conf={**conf, **self.conf})

    @property
    def is_local(self) -> bool:
        """Whether all of it runs in one JVM of this machine; else there are executors elsewhere."""
        return self.master.startswith("local")

    @property
    def master_addresses(self) -> list[tuple[str, int]]:
        """Host and port of each master of a standalone cluster; none for what is no such cluster."""
        found = _STANDALONE.fullmatch(self.master)
        pairs = [address.rpartition(":") for address in found["addresses"].split(",")] if found else []
        return [(host, int(port)) for host, _, port in pairs]

    def check(self) -> None:
        """UsageError for a bad memory size or a master that is none."""
        if not _MEMORY.fullmatch(self.driver_memory):
            raise UsageError(
                "--driver-memory must be a whole number with a unit, such as 512m or 2g, "
                f"not '{self.driver_memory}'"
            )
        if not _MASTER.fullmatch(self.master):
            raise UsageError(
                f"--master '{self.master}' is none; use local[*], local[N], spark://HOST:PORT, yarn or k8s://"
            )


def spark_options(command: Callable[..., _Result], optional: bool = False) -> Callable[..., _Result]:
    """Decorator of a click command: --master, --driver-memory and --conf, checked, as argument `spark`.

    `optional`: None where --master is not given.
    """
    import click  # executors import this module too, and need none

    @click.option(
        "--master",
        default=None if optional else MASTER,
        show_default=not optional,
        metavar="MASTER",
        help="Where Spark runs" + (f", such as {MASTER}." if optional else "."),
    )
    @click.option(
        "--driver-memory", default=DRIVER_MEMORY, show_default=True, help="Memory of Spark's driver (JVM)."
    )
    @click.option(
        "--conf",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _option, texts: parse_conf(texts),
        help="A setting of Spark's own, such as spark.executor.memory=4g; repeatable.",
    )
    @functools.wraps(command)
    def with_options(
        *arguments: object, master: str | None, driver_memory: str, conf: Mapping[str, str], **others: object
    ) -> _Result:
        options = SparkOptions(master or MASTER, driver_memory, conf)
        options.check()
        return command(*arguments, spark=None if master is None else options, **others)

    return with_options


def scan_timeout_option(command: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorator of a click command that scans the registry: --scan-timeout, an argument `scan_timeout`."""
    import click

    return click.option(
        "--scan-timeout",
        type=click.FloatRange(min=0, min_open=True, max=SCAN_TIMEOUT_S_MAX),
        default=SCAN_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long the scan of one shard of the registry may take.",
    )(command)


def parse_conf(texts: tuple[str, ...]) -> Mapping[str, str]:
    """KEY=VALUE, each -> the settings; the last of a key counts. UsageError."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(f"--conf '{text}' must be KEY=VALUE, such as spark.executor.memory=4g")
        if key in _SAID_ELSEWHERE:
            raise UsageError(f"--conf {key}: use {_SAID_ELSEWHERE[key]}")
        if not key.startswith("spark."):
            hint = f"; a setting of Hadoop's is spark.hadoop.{key}" if key.startswith("fs.") else ""
            raise UsageError(f"--conf {key}: Spark's settings begin with 'spark.'{hint}")
        settings[key] = value.strip()
    return MappingProxyType(settings)


def check_requirements() -> None:
    """UsageError, with the mend, where PySpark or a Java that can run it is missing."""
    if find_spec("pyspark") is None:
        raise UsageError("this command needs PySpark; install it with: pip install 'pyspark>=4,<5' pyarrow")
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")  # as Spark finds it
    if java is None:
        raise UsageError(
            f"this command needs Java {JAVA_MIN} or newer and found none; "
            "install one (Debian: openjdk-17-jre-headless) or set JAVA_HOME"
        )
    version = _java_version(java)
    if version < JAVA_MIN:
        raise UsageError(
            f"this command needs Java {JAVA_MIN} or newer, and {java} is {version or 'none that answers'}; "
            "install a newer one or set JAVA_HOME to it"
        )


def _java_version(java: str) -> int:
    """Its major version (1.8 counts as 8); 0 if it can't be run or says none."""
    try:
        asked = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_ASK_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    major, minor = found.groups() if (found := _JAVA_VERSION.search(asked.stderr)) else ("0", None)
    return int(minor or 0) if major == "1" else int(major)
