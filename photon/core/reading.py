"""Whether two processes read a line as the same event. Pure."""

import hashlib
from typing import Final

import msgspec

from photon.core.settings import Settings

_DIGEST_BYTES: Final = 12


def reading_fingerprint(settings: Settings) -> str:
    """Hex; equal where the same line has the same ids and the same time, and is an event in both or neither.

    An event that reached the registry under another id or time than its log line has would be joined twice.
    """
    facts = (
        settings.primary.id,
        settings.foreign.id,
        settings.foreign.primary_id,
        settings.foreign.time,
        settings.foreign.time_unit,
        settings.ids.key,
        settings.logs.line_bytes_max,
    )
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=_DIGEST_BYTES).hexdigest()
