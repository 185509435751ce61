"""Topologies with one ready-made computation each: what `photon millwheel windows` and its like run.

Arguments are plain values, so that a command line can name the topology to its workers (`load_topology`).
`logs`: the arguments of `Logs`; `sink`: those of `LogSink`; the others are the computation's own.
"""

from typing import Any

import msgspec

from millwheel.computation import Stream
from millwheel.ready.pairs import Attribution, Unmatched
from millwheel.ready.windows import Sessions, WindowCounts
from millwheel.ready.zeitgeist import Zeitgeist
from millwheel.topology import Input, Late, Logs, LogSink, Topology, node

Given = dict[str, Any]


def windows(
    logs: Given, key: str, sink: Given, late: Late, length_s: float, every_s: float | None = None
) -> Topology:
    """Records of each key in tumbling or sliding windows."""
    counts = WindowCounts("windows", length_s, every_s)
    made = node(counts, Input("records", key, None), Stream("windows"), late=late)
    return _topology({"records": logs}, {"count": made}, "windows", sink)


def sessions(logs: Given, key: str, sink: Given, late: Late, gap_s: float) -> Topology:
    """Records of each key with less than a gap between them."""
    made = node(Sessions("sessions", gap_s), Input("records", key, None), Stream("sessions"), late=late)
    return _topology({"records": logs}, {"session": made}, "sessions", sink)


def zeitgeist(
    logs: Given, key: str, sink: Given, late: Late, length_s: float, learn: int, sigmas: float, row: int
) -> Topology:
    """Spikes and dips of each key (paper 2)."""
    counts = WindowCounts("windows", length_s)
    detector = Zeitgeist("anomalies", length_s, learn, sigmas, row)
    made = {
        "count": node(counts, Input("records", key, None), Stream("windows"), late=late),
        "detect": node(detector, Input("windows"), Stream("anomalies"), late=late),
    }
    return _topology({"records": logs}, made, "anomalies", sink)


def unmatched(
    asking: Given,
    answers: Given,
    asking_key: str,
    answer_key: str,
    sink: Given,
    late: Late,
    after_s: float,
) -> Topology:
    """Asking records without an answer of the same key in time."""
    made = node(
        Unmatched("unmatched", "asking", after_s),
        Input("asking", asking_key),
        Input("answers", answer_key, None),
        Stream("unmatched"),
        late=late,
    )
    return _topology({"asking": asking, "answers": answers}, {"wait": made}, "unmatched", sink)


def attribution(
    touches: Given,
    conversions: Given,
    touch_key: str,
    conversion_key: str,
    sink: Given,
    late: Late,
    lookback_s: float,
) -> Topology:
    """The last touch of a key before each conversion."""
    made = node(
        Attribution("attributed", "touches", lookback_s),
        Input("touches", touch_key),
        Input("conversions", conversion_key),
        Stream("attributed"),
        late=late,
    )
    return _topology(
        {"touches": touches, "conversions": conversions}, {"attribute": made}, "attributed", sink
    )


def _topology(logs: dict[str, Given], computations: dict[str, Any], stream: str, sink: Given) -> Topology:
    injectors = {name: msgspec.convert(given, Logs) for name, given in logs.items()}
    return Topology(injectors, computations, {stream: msgspec.convert(sink, LogSink)})
