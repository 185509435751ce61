"""What replicas may be called, and how times are told. Pure."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

NAME_CHARS_MAX: Final = 64

_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
"""A name is a directory's too: none is `..`, and none begins as an option does."""
_SHOWN_CHARS_MAX: Final = 300
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def name_mistake(name: str) -> str | None:
    """What is wrong with the name of a replica, or None."""
    if _NAME.fullmatch(name):
        return None
    return (
        f"{_shown(name)} is no name for a replica: give 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or "
        "'-', the first a letter or digit"
    )


def _shown(text: str) -> str:
    """A stranger's may be of any length."""
    return repr(text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}...")


def iso_utc(time_us: int) -> str:
    """us since 1970 -> ISO 8601 in UTC. The same on every machine, for any number."""
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat()
    except OverflowError:
        return f"{time_us} us since 1970"
