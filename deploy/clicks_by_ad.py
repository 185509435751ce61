"""Clicks of each ad in ten seconds: the topology of docker-compose's profile `millwheel`."""

from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.ready import WindowCounts

TOPOLOGY = Topology(
    injectors={"clicks": Logs("/logs/clicks/*.jsonl", time="ts_us", lateness_s=2)},
    computations={
        "counts": node(
            WindowCounts("counts", 10), Input("clicks", key="payload.ad", value=None), Stream("counts")
        )
    },
    sinks={"counts": LogSink("/logs/counts"), "dead-letters": LogSink("/logs/dead-letters")},
)
