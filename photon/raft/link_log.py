"""What the transport says of its connections in the log: each thing once, lest strangers fill the disk."""

import logging
from collections.abc import Callable, Container

_log = logging.getLogger(__name__)

# Complaints about strangers: at most one line in so long, and the same line again after so long.
COMPLAINT_S = 1.0
_AGAIN_S = 600.0
_REMEMBERED_MAX = 256


class LinkLog:
    """Lines about peers are told once until they are connected again; about strangers, seldom."""

    def __init__(self, node: str, clock: Callable[[], float]) -> None:
        self._node = node
        self._clock = clock
        self._away: set[str] = set()
        self._refused: dict[str, str] = {}  # by peer, why
        self._complained_at = -COMPLAINT_S
        self._complaints: dict[str, float] = {}  # when each was told

    def connected(self, peer: str) -> None:
        self._away.discard(peer)
        self._refused.pop(peer, None)
        _log.info("raft %s: connected to %s", self._node, peer)

    def away(self, peer: str, why: str) -> None:
        if peer not in self._away:
            self._away.add(peer)
            _log.warning("raft %s: no connection to %s: %s", self._node, peer, why)

    def refused(self, peer: str, why: str) -> None:
        """A peer and this node know each other's secret, and one will not speak to the other."""
        if self._refused.get(peer) != why:
            self._refused[peer] = why
            _log.error("raft %s: no connection to %s: %s", self._node, peer, why)

    def only(self, peers: Container[str]) -> None:
        """Forget what was told of all others."""
        self._away = {peer for peer in self._away if peer in peers}
        self._refused = {peer: why for peer, why in self._refused.items() if peer in peers}

    def stranger(self, what: str) -> None:
        now = self._clock()
        if now - self._complained_at < COMPLAINT_S:
            return
        if now - self._complaints.get(what, -_AGAIN_S) < _AGAIN_S:
            return
        if len(self._complaints) >= _REMEMBERED_MAX:
            self._complaints.clear()
        self._complained_at = self._complaints[what] = now
        _log.warning("raft %s: %s", self._node, what)
