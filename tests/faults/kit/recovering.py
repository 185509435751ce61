"""Recovery of what a fenced joiner has lost, in a running system: production's, but for Spark.

`photon.recovery.recover` reads registry, joined logs and inputs through a port; here that is plain Python,
and the inputs are the feeder's truth.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from photon.core.clock import SystemClock
from photon.core.columns import split_ids
from photon.core.ids import IdPacker, parse_token
from photon.recovery.recover import Job, recover
from photon.recovery.rules import Report
from tests.faults.kit.checkers import read_joined
from tests.faults.kit.system import FaultSystem
from tests.recovery.recovering import PlainLost, PlainReading


class _Named(msgspec.Struct):
    id: str
    ts_us: int


_named: Final = msgspec.json.Decoder(_Named)


class Reading(PlainReading):
    """photon.recovery.recover.Reading of a system under faults."""

    def __init__(self, system: FaultSystem) -> None:
        addresses = [replica.grpc for replica in system.topology.replicas]
        super().__init__(addresses, [system.out], Path())
        self._truth = system.feeder.truth
        self._out = system.out

    def lost(self, incarnations: Sequence[int]) -> PlainLost:
        wanted = {*incarnations}
        held = {k: t for k, t in self._registered().items() if t and parse_token(t).incarnation in wanted}
        joined = self._joined()
        clicks = self._truth.clicks
        times = (_named.decode(line).ts_us for line in clicks.values())
        lines = dict(zip(_keys(clicks), zip(times, clicks.values(), strict=True), strict=True))
        return PlainLost({key: token for key, token in held.items() if key not in joined}, lines)

    def _joined(self) -> set[bytes]:
        return {*_keys([line.id for line in read_joined(self._out, grows=True) if line.id is not None])}


def _keys(texts: Collection[str]) -> tuple[bytes, ...]:
    return split_ids(IdPacker().pack([*texts]))


def recover_into(system: FaultSystem, datacenter: str) -> Report:
    """Release what fenced incarnations have lost, and put it into the inbox of a datacenter's dispatcher."""
    inbox = Path(system.topology.pipeline(datacenter).directory) / "dispatcher" / "inbox"
    job = Job([system.out], system.work, inbox, system.work / "recovery", apply=True)
    return recover(job, system.registry(), Reading(system), SystemClock())
