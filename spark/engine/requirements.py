"""What this machine must have before Spark is started: PySpark, and a Java that can run it."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from photon.core.errors import UsageError

JAVA_MIN: Final = 17
JAVA_ASK_S_MAX: Final = 30.0

_JAVA_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')


def check_requirements() -> None:
    """UsageError, with the mend, where PySpark or a Java that can run it is missing."""
    if find_spec("pyspark") is None:
        raise UsageError("this command needs PySpark; install it with: pip install 'pyspark>=4,<5' pyarrow")
    java = _java()
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


def _java() -> str | None:
    """The java that Spark will start: the one of JAVA_HOME, else the first on the PATH."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def _java_version(java: str) -> int:
    """Its major version (1.8 counts as 8); 0 if it can't be run or says none."""
    try:
        asked = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_ASK_S_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _JAVA_VERSION.search(asked.stderr)
    if found is None:
        return 0
    return int(found[2] or 0) if found[1] == "1" else int(found[1])
