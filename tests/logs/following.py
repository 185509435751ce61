"""A follower that is driven step by step over real files."""

import os

from photon.core.clock import ManualClock
from photon.core.settings import Logs
from photon.logs.follow import LogFollower


class Following:
    """A follower on a manual clock; `read` scans and hands out all there is, as name -> bytes."""

    def __init__(self, *patterns, spool, drain=False, states=(), settings=Logs(), **options):
        self.clock = ManualClock()
        self.notices = []
        self.states = {state.number: state for state in states}
        self.follower = LogFollower(
            [str(p) for p in patterns],
            spool,
            settings,
            self.clock,
            states,
            drain,
            self.notices.append,
            **options,
        )

    def read(self, scan=True, scans=2):
        """Two scans: what the first finds to have been replaced is read after the second."""
        if not scan:
            self.follower.poll()
            return self.rest()
        read = {}
        for _ in range(scans):
            self.clock.advance(20.0)
            self.keep(self.follower.scan_if_due())
            self.follower.poll()
            read |= self.rest()
        return read

    def rest(self):
        read = {}
        while (found := self.follower.next_chunk()) is not None:
            state, chunk = found
            name = os.path.basename(state.name)
            read[name] = read.get(name, b"") + chunk.data
            self.keep([self.follower.advanced(state.number, chunk.end)])
        return read

    def keep(self, states):
        self.states |= {state.number: state for state in states}


def append(path, data=b"x\n"):
    with open(path, "ab") as file:
        file.write(data)
