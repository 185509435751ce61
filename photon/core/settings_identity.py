"""By which settings an event is the same event on two machines, and a line the same event. Pure.

Ids are digests under `ids.key` of what the fields of [foreign] hold. Where two processes of a system differ
in any of that, the registry takes one event for two, and it is joined twice.
"""

import hashlib
import json
from typing import Any, Final

import msgspec

from photon.core.settings import Settings, to_document

IDENTITY_DIGEST_BYTES: Final = 16
_KEY_DIGEST_BYTES: Final = 8
_READING_DIGEST_BYTES: Final = 12


def identity_settings(settings: Settings) -> dict[str, Any]:
    """Their names and values; the digest of the key in its place."""
    key = hashlib.blake2b(settings.ids.key.encode(), digest_size=_KEY_DIGEST_BYTES)
    return {
        "ids.key (digest)": key.hexdigest(),
        **{f"foreign.{name}": value for name, value in to_document(settings)["foreign"].items()},
    }


def identity_digest(settings: Settings) -> bytes:
    """16 bytes, the same only where the settings are, in every version of this program.

    A registry keeps it for its whole life: a setting that is ever added to [foreign] must be left out here
    while it has its default.
    """
    facts = json.dumps(identity_settings(settings), sort_keys=True, ensure_ascii=False).encode()
    return hashlib.blake2b(facts, digest_size=IDENTITY_DIGEST_BYTES).digest()


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
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=_READING_DIGEST_BYTES).hexdigest()
