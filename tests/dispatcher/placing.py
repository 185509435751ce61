"""Dispatchers that have shares, over a registry of the tests' own that places them by the real rules."""

import threading
import time

from idregistry.rules.commands import Drain, Enter, Leave, Move, Rejected, Write, encode
from idregistry.rules.directory import DirectoryState
from photon.core.errors import UnavailableError, UsageError
from photon.raft.rules import placement
from tests.fake_registry import FakeRegistry

GROUP = "dc0-dispatchers"


class PlacingRegistry(FakeRegistry):
    """`lease_s`: members that were not heard for so long are gone. `unheard`: names whose calls fail."""

    def __init__(self, lease_s=1.0):
        super().__init__()
        self.lease_s = lease_s
        self.state = DirectoryState()
        self.unheard = set()
        self.refuse_rows = False
        self._heard = {}
        self._placing = threading.RLock()
        self.writers = {}

    def _apply(self, command):
        result = self.state.apply(encode(command))
        if isinstance(result, Rejected):
            raise UsageError(result.why)
        return result

    def beat(self, group, name, life, address, shares):
        if name in self.unheard:
            raise UnavailableError("cut off")
        with self._placing:
            self._heard[name] = time.monotonic()
            self._apply(Enter(0, group, name, life, address, shares))
            self.settle(group)
            return self.state.groups[group]

    def settle(self, group):
        now = time.monotonic()
        while True:
            live = {name for name, at in self._heard.items() if now - at <= self.lease_s}
            step = placement.due(self.state.groups[group], live)
            if step is None:
                return
            if isinstance(step, placement.Leave):
                self._apply(Leave(0, group, step.name, step.life))
            else:
                self._apply(Move(0, group, step.share, step.sequencer, step.to))

    def drain(self, group, name, life=0):
        if name in self.unheard:
            raise UnavailableError("cut off")
        with self._placing:
            return self._apply(Leave(0, group, name, life) if life else Drain(0, group, name))

    def write_share(self, group, share, sequencer, rows, removed=(), release=False, read=False):
        with self._placing:
            owner = self.state.groups[group].shares[share].owner
            if owner in self.unheard:
                raise UnavailableError("cut off")
            if self.refuse_rows and rows:
                raise UsageError("too much is to be kept")
            return self._apply(Write(0, group, share, sequencer, dict(rows), tuple(removed), release))

    def owners(self):
        group = self.state.groups.get(GROUP)
        return [] if group is None else [share.owner for share in group.shares]
