"""Names and times as strangers give them, and as messages show them."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from photon.core.addresses import mistake as address_mistake

NAME_CHARS_MAX: Final = 64

_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
"""A name is a directory's too: none is `..`, and none begins as an option does."""
_SHOWN_CHARS_MAX: Final = 300
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def name_mistake(name: str) -> str | None:
    """What is wrong with the name of a replica or a dispatcher, or None."""
    if _NAME.fullmatch(name):
        return None
    shown = name if len(name) <= _SHOWN_CHARS_MAX else f"{name[:_SHOWN_CHARS_MAX]}..."
    return (
        f"{shown!r} is no name of a process: give 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' or "
        "'-', the first a letter or digit"
    )


def iso_utc(time_us: int) -> str:
    """us since 1970 -> ISO 8601 in UTC. The same on every machine, for any number."""
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat()
    except OverflowError:
        return f"{time_us} us since 1970"


def replica_mistake(name: str, raft_address: str, grpc_address: str) -> str | None:
    """What is wrong with a replica's name or addresses, or None."""
    return name_mistake(name) or address_mistake(raft_address) or address_mistake(grpc_address)
