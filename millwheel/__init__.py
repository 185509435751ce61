"""MillWheel: computations with keys, timers and low watermarks over streams, exactly once (VLDB 2013)."""

from millwheel.computation import (
    Batch,
    BatchComputation,
    BatchContext,
    Computation,
    Context,
    Fired,
    Record,
    Stream,
    Timer,
)
from millwheel.errors import TopologyError
from millwheel.topology import Input, JoinedLogs, Logs, LogSink, Node, Push, Topology, node
from photon.core.settings import Tls

__all__ = [
    "Batch",
    "BatchComputation",
    "BatchContext",
    "Computation",
    "Context",
    "Fired",
    "Input",
    "JoinedLogs",
    "LogSink",
    "Logs",
    "Node",
    "Push",
    "Record",
    "Stream",
    "Timer",
    "Tls",
    "Topology",
    "TopologyError",
    "node",
]
