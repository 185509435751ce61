"""The dataflow of the peer `bytewax` (benchmarks.millwheel_peers), which its own runner imports."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.connectors.files import DirSink, DirSource
from bytewax.dataflow import Dataflow
from bytewax.operators import windowing as w

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def _read(line: str) -> tuple[str, int]:
    event = json.loads(line)
    return event["key"], event["ts_us"]


def _written(counted: tuple[str, tuple[int, int]]) -> tuple[str, str]:
    key, (window, count) = counted
    return key, json.dumps({"key": key, "start_us": window * 1_000_000, "count": count})


def _time(event: tuple[str, int]) -> datetime:
    return _EPOCH + timedelta(microseconds=event[1])


def _key(event: tuple[str, int]) -> str:
    return event[0]


# Its files are read unevenly, and what comes behind the clock of its key would be dropped.
_CLOCK: Any = w.EventClock(_time, wait_for_system_duration=timedelta(hours=1))

flow = Dataflow("counts")
lines = op.input("lines", flow, DirSource(Path(os.environ["LOGS"]), "*.jsonl"))
events = op.map("read", lines, _read)
windows = w.count_window("count", events, _CLOCK, w.TumblingWindower(_SECOND, _EPOCH), _key)
op.output("out", op.map("written", windows.down, _written), DirSink(Path(os.environ["COUNTS"]), 2))
