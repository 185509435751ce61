"""What the one that leads answers of low watermarks, before any worker has begun."""

from millwheel import Computation, Input, Logs, Stream, Topology, node
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.shares import Shares, even
from millwheel.machines import Machine, Round
from photon.cluster.master import Master


class Relay(Computation):
    def process_record(self, record, ctx):
        ctx.produce("seen", record.value)


TOPOLOGY = Topology(
    {"clicks": Logs("logs/*", "ts")}, {"relay": node(Relay(), Input("clicks", "user"), Stream("seen"))}
)


def master():
    here = Machine("a", "here/a", "", 1)
    running = Round(1, "a", "running", (here,), shares=Shares(even(1)))
    return Master(Plan(TOPOLOGY, numbered(TOPOLOGY, {})), running, lambda *_: None)


def test_why_takes_the_name_of_a_stream_for_the_computation_that_makes_it():
    (held,) = master().why("seen")["chain"]
    assert held["name"] == "relay"
    assert master().why("seen") == master().why("relay")


def test_why_of_what_is_no_name_says_which_there_are():
    assert master().why("sen") == {"error": "'sen' has no low watermark; there are clicks, relay"}
