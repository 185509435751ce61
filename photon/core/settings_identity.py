"""By which settings an event is the same event on two machines. Pure.

Ids are digests under `ids.key` of what the fields of [foreign] hold. Where two processes of a system differ
in any of that, the registry takes one event for two, and it is joined twice.
"""

import hashlib
import json
from typing import Any, Final

from photon.core.settings import Settings, to_document

IDENTITY_DIGEST_BYTES: Final = 16
_KEY_DIGEST_BYTES: Final = 8


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
