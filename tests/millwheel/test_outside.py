"""What is asked outside is asked only of what will not come out otherwise after a crash."""

import random

import pytest

from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node
from millwheel.testing import Bench, run
from tests.millwheel.topologies import SECOND, clicks
from tests.seeds import seeds


class Lasting(Computation[dict]):
    """Visits that hang on how far the low watermark was when a record came."""

    def process_record(self, record, ctx):
        ctx.state["pages"] = ctx.state.get("pages", 0) + 1
        ctx.set_timer("end", record.time + SECOND)

    def process_timer(self, timer, ctx):
        ctx.produce("visits", {"user": ctx.key, "at": timer.time, "pages": ctx.state["pages"]})
        ctx.forget()


class Telling(Computation[dict]):
    """Tells somebody, and hands it on."""

    asks_outside = True

    def __init__(self):
        self.told = set()

    def process_record(self, record, ctx):
        self.told.add((ctx.key, record.value["at"], record.value["pages"]))
        ctx.produce("said", record.value)


def topology(telling):
    return Topology(
        {"clicks": Logs("*", "ts")},
        {
            "visits": node(Lasting(), Input("clicks", "user", None), Stream("visits")),
            "telling": node(telling, Input("visits"), Stream("said")),
        },
        {"said": LogSink("out")},
    )


@seeds(6, 20, 400)
@pytest.mark.parametrize("workers", [1, 3])
def test_all_that_was_told_comes_out_though_turns_are_done_again_otherwise(seed, workers):
    telling = Telling()
    lines = clicks(random.Random(seed), 120)
    said = run(topology(telling), {"clicks": lines}, workers=workers, seed=seed, kills=20)["said"]
    assert {(one["user"], one["at"], one["pages"]) for one in said} == telling.told
    assert len(said) == len(telling.told) > 0


def test_a_bench_has_it_too():
    telling = Telling()
    bench = Bench(topology(telling))
    bench.send("clicks", {"user": "ann", "ts": 0}, {"user": "bob", "ts": 5})
    bench.watermark(2 * SECOND)
    assert len(telling.told) == len(bench.lines("said")) == 2
