"""What a user whose code is type-checked writes; mypy reads it twice (test_types.py)."""

import msgspec

from millwheel import Computation, Context, Input, Logs, LogSink, Record, Stream, Timer, Topology, node


class Visit(msgspec.Struct):
    pages: int = 0
    end: int = 0


VISITS = Stream("visits", Visit)
BY_USER = Stream("by-user", dict[str, int])


class Visits(Computation[Visit]):
    state = Visit

    def process_record(self, record: Record, ctx: Context[Visit]) -> None:
        ctx.state.pages += 1
        ctx.state.end = max(ctx.state.end, record.time)
        ctx.set_timer("end", ctx.state.end + 1_800_000_000)

    def process_timer(self, timer: Timer, ctx: Context[Visit]) -> None:
        ctx.produce(VISITS, ctx.state)
        ctx.produce(BY_USER, {ctx.key: ctx.state.pages}, ctx.time)
        ctx.produce("untyped", "by its name")
        ctx.forget()


INPUT = Input("clicks", key="user", value=None)
TOPOLOGY = Topology(
    injectors={"clicks": Logs("logs/*", "ts")},
    computations={"visits": node(Visits(), INPUT, VISITS, BY_USER, Stream("untyped"))},
    sinks={stream: LogSink(f"out/{stream}") for stream in ("visits", "by-user", "untyped")},
)
