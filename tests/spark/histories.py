"""Topologies that histories are made of, and what Spark's tasks make of lines, here in this process."""

import random
from pathlib import Path

import msgspec
import pyarrow as pa

from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node
from millwheel.computation import NEVER
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.watermarks import of_inputs
from millwheel.ready import Attribution, Sessions, Unmatched, WindowCounts
from millwheel.topology import load_topology
from photon.cluster.declared import Declared
from photon.logs.files import Chunk
from spark.history.tasks import ROW, TOLD, Work, compute, input_rows, parsing, told
from spark.options import ALL

ROOT = str(Path(__file__).parents[2])
NAME = "tests.spark.histories:"
SECOND = 1_000_000


class Visits(Computation[dict]):
    """Hangs on each timer being called between the records before and after it."""

    def __init__(self, wall=False):
        self.wall = wall

    def process_record(self, record, ctx):
        ctx.state["pages"] = ctx.state.get("pages", 0) + 1
        if record.value == "boom":
            raise ValueError("boom")
        ctx.set_timer("end", record.time + 2 * SECOND)
        if self.wall:
            ctx.set_timer("soon", record.time + SECOND // 2, clock="wall")

    def process_timer(self, timer, ctx):
        if timer.tag == "soon":
            ctx.state["soon"] = timer.time
            return
        ctx.produce("visits", {"user": ctx.key, **ctx.state})
        ctx.forget()


class Latest(Computation[dict]):
    """Two inputs; holds what it is still to say."""

    def process_record(self, record, ctx):
        if record.stream == "clicks":
            ctx.hold(record.time)
            ctx.state["click"] = record.time
            ctx.set_timer("tell", record.time + 3 * SECOND)
        else:
            ctx.state["visits"] = ctx.state.get("visits", 0) + record.value["pages"]

    def process_timer(self, timer, ctx):
        ctx.produce("latest", {"user": ctx.key, **ctx.state}, ctx.state["click"])
        ctx.release()


CLICKS = Logs("logs/*.jsonl*", "ts", lateness_s=2)
USER = Input("clicks", key="user", value="what")


def of(computations, *sinks, **more):
    return Topology(
        {"clicks": CLICKS}, computations, {name: LogSink(f"out/{name}", **more) for name in sinks}
    )


VISITS = of({"visits": node(Visits(), USER, Stream("visits"))}, "visits", with_time=True)
WALL = of({"visits": node(Visits(wall=True), USER, Stream("visits"))}, "visits")
CHAIN = of(
    {
        "visits": node(Visits(), USER, Stream("visits")),
        "latest": node(
            Latest(), USER, Input("visits", key=lambda value: value["user"] or None), Stream("latest")
        ),
    },
    "visits",
    "latest",
)
COUNTS = of(
    {
        "windows": node(WindowCounts("windows", 3, 1), Input("clicks", "user", None), Stream("windows")),
        "sessions": node(Sessions("sessions", 1.5), Input("clicks", "user", None), Stream("sessions")),
        "lengths": node(
            WindowCounts("lengths", 5),
            Input("sessions", lambda value: str(value["count"])),
            Stream("lengths"),
        ),
    },
    "windows",
    "sessions",
    "lengths",
    with_time=True,
)
PAIRS = of(
    {
        "attributed": node(Attribution("attributed", "clicks", 4), USER, USER, Stream("attributed")),
        "unmatched": node(Unmatched("unmatched", "clicks", 3), USER, Stream("unmatched")),
    },
    "attributed",
    "unmatched",
)
TWICE = Topology(
    {"clicks": CLICKS, "again": CLICKS},
    {
        "windows": node(WindowCounts("windows", 3, 1), Input("clicks", "user", None), Stream("windows")),
        "sessions": node(Sessions("sessions", 1.5), Input("again", "user", None), Stream("sessions")),
    },
    {name: LogSink(f"out/{name}") for name in ("windows", "sessions")},
)
DECLARED = of({"declared": node(Declared("out", work="w"), USER, Stream("out"))}, "out")


def clicks(dice, count, users=5, seconds=30):
    """By time, with some that make trouble."""
    times = sorted(dice.randrange(seconds * SECOND) for _ in range(count))
    return [
        {
            "user": "" if dice.random() < 0.02 else f"user{dice.randrange(users)}",
            "ts": time,
            "what": "boom" if dice.random() < 0.05 else "click",
        }
        for time in times
    ]


def made_here(name, chunks, low=None, parts=3, dice=None):
    """What the tasks make of chunks of lines: their rows by what they are, the marks, what they tell.

    `low`: of the injector; None is the end of time.
    """
    dice = dice or random.Random(1)
    topology = load_topology(NAME + name)
    numbers = numbered(topology, {})
    plan = Plan(topology, numbers)
    work = Work(NAME + name, ROOT, numbers, parts, low is not None, ALL, ALL)
    made = []

    def keep(batches):
        for batch in batches:
            assert batch.schema == ROW
            made.extend(batch.to_pylist())

    for injector in plan.injectors:
        for chunk in chunks:
            data = b"".join(msgspec.json.encode(line) + b"\n" for line in chunk)
            keep(parsing(work, injector, NEVER)("a.jsonl", "", Chunk(0, len(data), data)))
    marks = dict.fromkeys(plan.injectors, NEVER if low is None else low)
    for computation in plan.order:
        wanted = {input_rows(number) for number, one in plan.inputs.items() if one[0] == computation}
        rows = [row for row in made if row["what"] in wanted]
        rows.sort(key=lambda row: (row["part"], row["low"], row["blob"]))
        batches = []
        while rows:
            size = dice.randint(1, 5)
            batches.append(pa.RecordBatch.from_pylist(rows[:size], ROW))
            del rows[:size]
        lowest = of_inputs(plan.makers[computation], marks)
        keep(compute(work, computation, lowest, batches))
        works = [one.oldest for one in told_of(made) if one.name == computation]
        marks[computation] = min([lowest, *works])
    return made, marks, told_of(made)


def told_of(rows):
    return [told(row["blob"]) for row in rows if row["what"] == TOLD]


def lines_of(rows, sink):
    blobs = [row["blob"] for row in rows if row["what"] == f"sink-{sink}"]
    return [msgspec.json.decode(line) for blob in blobs for line in blob.split(b"\n")]
