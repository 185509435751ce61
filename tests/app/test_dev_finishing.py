"""A `photon dev` that was told to stop lets what was written get its fate, and does not wait for ever."""

import signal

from photon.app import dev_run
from photon.app.dev_figures import PipelineFigures
from photon.app.dev_finishing import FED_SETTLED_S, FINISH_S_MAX, SETTLED_S, Finishing
from photon.app.topology import Topology


def row(name, events, pending=0, silent=()):
    return PipelineFigures(name, "", list(silent), foreign_events=events, pending=pending)


def test_it_is_over_when_all_that_was_written_is_read_and_nothing_waits():
    finishing = Finishing({"east": 10, "west": 10}, 0.0)
    assert not finishing.is_over([row("east", 10), row("west", 9)], 1.0)
    assert not finishing.is_over([row("east", 10), row("west", 10, pending=1)], 2.0)
    assert finishing.is_over([row("east", 10), row("west", 10)], 3.0)


def test_events_that_wait_for_what_never_comes_are_not_waited_for():
    finishing = Finishing({"east": 10}, 0.0)
    assert not finishing.is_over([row("east", 10, pending=1)], 1.0)
    assert not finishing.is_over([row("east", 10, pending=1)], FED_SETTLED_S)
    assert finishing.is_over([row("east", 10, pending=1)], FED_SETTLED_S + 1.0)


def test_a_datacenter_that_is_starting_is_waited_for_but_not_for_ever():
    finishing = Finishing({"east": 10}, 0.0)
    starting = [row("east", None, None, silent=["dispatcher-east"])]
    assert not any(finishing.is_over(starting, float(at)) for at in range(int(FINISH_S_MAX)))
    assert finishing.is_over(starting, FINISH_S_MAX)


def test_of_given_logs_it_is_over_when_nothing_waits_and_nothing_more_was_read():
    finishing = Finishing({}, 0.0)
    assert not finishing.is_over([row("east", 10)], 0.5)
    assert not finishing.is_over([row("east", 12)], 1.0)
    assert finishing.is_over([row("east", 12)], 1.5)
    waiting = Finishing({}, 0.0)
    assert not waiting.is_over([row("east", 12, pending=2)], 0.0)
    assert waiting.is_over([row("east", 12, pending=2)], SETTLED_S)


class WaitsForEver(dev_run._Run):
    """A run whose processes never have anything new to say."""

    def __init__(self, tmp_path, told_to_stop):
        topology = Topology({}, [], [], str(tmp_path), "", False, [], [])
        job = dev_run.DevJob(tmp_path, tmp_path, seconds=0.0)
        super().__init__(job, topology, None, None, told_to_stop)
        self.turns = 0

    def _turn(self, _sampler, phase):
        self.turns += phase == "finishing"
        if self.turns == 3:
            self._told_to_stop.append(signal.SIGINT)
        return False


def test_the_first_ctrl_c_after_the_end_of_for_cuts_the_wait_short(tmp_path):
    run = WaitsForEver(tmp_path, [])
    run._watch(None)
    run._finish(None)
    assert run.cut_short and run.turns == 3
