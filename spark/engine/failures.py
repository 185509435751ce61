"""What Spark and its JVM raise, as errors of Photon's: in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from photon.core.errors import PhotonError


class SparkFailedError(PhotonError):
    """Spark could not start, or a job of it failed: nothing is known of the logs. Mend it and ask again."""


@contextmanager
def spark_failures(said: Path | None = None) -> Iterator[None]:
    """What Spark and its JVM raise, as SparkFailedError in one line. `said`: what the JVM wrote."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, OSError) as error:
        reason = _gist(str(error))
        if said is not None and (last := _last_line(said)):
            reason += f"; the JVM said: {last}"
        raise SparkFailedError(f"Spark failed: {reason}") from error


def _gist(text: str) -> str:
    """The line that names the condition, and the innermost cause, of a message with its stack."""
    if raised := _raised_by_python(text):
        return raised
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\[[A-Z_.]{6,}\]", line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    first = (named or [line for line in lines if not line.startswith("at ")] or ["no reason given"])[0]
    return first if not causes or causes[-1] in first else f"{first} ({causes[-1]})"


def _raised_by_python(text: str) -> str:
    """What an executor's Python raised: the line after its stack; "" if it was not Python."""
    _, begun, stack = text.rpartition("Traceback (most recent call last):\n")
    raised = next((line for line in stack.splitlines() if begun and line[:1].strip()), "")
    return raised.partition("Error: ")[2] if raised.startswith("photon.core.errors.") else raised


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
