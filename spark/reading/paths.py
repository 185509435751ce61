"""Which files a command reads, as paths that Spark takes. Checked before Spark starts: a typo costs no time.

On remote file systems (s3a://, hdfs://, gs://) Hadoop's own client finds the files of a pattern.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from joiner.joined_lines import joined_files
from joiner.output_files import LINES, PARQUET
from photon.core.errors import UsageError
from photon.logs.files import named_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_WILDCARDS: Final = re.compile(r"([\\*?\[\]{}])")
_LOCAL: Final = "file:///"
_ESCAPED: Final = re.compile(r"\\(.)")


def input_paths(patterns: Sequence[str]) -> list[str]:
    """Globs, directories and URIs -> paths for spark.reading.events.

    Local ones as `photon join` reads them (`**` works, a file with several names counts once); a URI goes to
    Spark as it is. UsageError where nothing matches.
    """
    local = [pattern for pattern in patterns if not is_uri(pattern)]
    files = named_files(local)
    remote = [pattern for pattern in patterns if is_uri(pattern)]
    if not files and not remote:
        raise UsageError(f"no file matches {', '.join(map(repr, local))}; check the pattern")
    return [*(_spark_path(file.name) for file in files), *remote]


def output_paths(out: str, kind: str) -> list[str]:
    """The files of one kind (`joined` or `dead-letters`) under the --out of `photon join`; may be none.

    For a URI these are patterns (spark.reading.paths.existing).
    """
    if is_uri(out):
        return [f"{out.rstrip('/')}/{kind}/*/*{ending}" for ending in (LINES, PARQUET)]
    return [_spark_path(str(path)) for path in joined_files(Path(out, kind))]


def check_output(out: str) -> None:
    """UsageError if no run of `photon join` ever wrote there: everything would seem to be pending."""
    if not is_uri(out) and not any(Path(out, kind).is_dir() for kind in ("joined", "dead-letters")):
        raise UsageError(
            f"--out {out}: neither joined/ nor dead-letters/ in it; name the --out of photon join"
        )


def check_new(directory: str, option: str = "--details") -> None:
    """UsageError if something is there: nothing is ever overwritten."""
    if not is_uri(directory) and Path(directory).exists():
        raise UsageError(f"{option} {directory}: is there already; name a new directory")


def check_name(name: str) -> None:
    """UsageError for a log whose name can't be kept as text."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name!r}: the name is no UTF-8; rename the log") from error


def is_uri(path: str) -> bool:
    """Whether it is for Spark alone to understand."""
    return _SCHEME.match(path) is not None


def local_name(path: str) -> str | None:
    """The file that a path of `input_paths` names on this machine; None where only Spark can tell."""
    if not path.startswith(_LOCAL) or _WILDCARDS.search(_ESCAPED.sub("", path)):
        return None
    return _ESCAPED.sub(r"\1", path.removeprefix(_LOCAL.removesuffix("/")))


def escaped(name: str) -> str:
    """With what Spark's globs would take for a wildcard escaped."""
    return _WILDCARDS.sub(r"\\\1", name)


def _spark_path(name: str) -> str:
    return "file://" + escaped(str(Path(name).absolute()))


def existing(session: "SparkSession", paths: Sequence[str]) -> list[str]:
    """Paths of output_paths or input_paths -> the same without patterns, sorted; those without a match go.

    Spark itself fails on a pattern without a match. Raises what Spark raises where the file system can't be
    asked (spark_failures).
    """
    known = [path for path in paths if local_name(path) is not None or not is_uri(path)]
    remote = [path for path in paths if path not in set(known)]
    return [*known, *sorted({found for path in remote for found in _matches(session, path)})]


def _matches(session: "SparkSession", pattern: str) -> list[str]:
    context: Any = session.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(pattern)
    statuses = path.getFileSystem(context._jsc.hadoopConfiguration()).globStatus(path)
    return [str(status.getPath().toString()) for status in statuses or () if status.isFile()]
