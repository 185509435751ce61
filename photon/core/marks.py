"""Marks: what the IdRegistry remembers of primary events, beside the foreign events joined with them.

*Matched* and *unmatched* exclude each other in all datacenters: both are registered under the same id, which
is the primary event's own with its bits turned, and the first wins. A token of each kind is the same for all,
so a mark that is set is set for whoever sets it again, at any time, from anywhere.
"""

from typing import Final

import numpy as np

from photon.core.ids import Token

MATCHED: Final = Token("matched", 1, 0).pack()
"""A joiner sets it before it registers an event that it joined with the primary event."""
UNMATCHED: Final = Token("unmatched", 2, 0).pack()
"""Set by whoever says that the primary event has no match, and never will."""
ADDRESSES: Final = frozenset({"matched", "unmatched"})
"""In place of a joiner's: tokens of these hold marks, not events."""

_TURNED: Final = np.frombuffer(bytes.fromhex("9e3779b97f4a7c15f39cc0605cedc834"), np.uint8)


def mark_ids(ids: bytes) -> bytes:
    """16 x N ids of primary events -> those of their marks, no event's."""
    return (np.frombuffer(ids, np.uint8).reshape(-1, 16) ^ _TURNED).tobytes()
