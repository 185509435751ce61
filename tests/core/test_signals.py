"""Being asked to end, also at the worst moment."""

import subprocess
import sys

import pytest

CODE = """
import os, signal, sys, threading
from photon.core.signals import on_signals, on_termination
told = threading.Event()
if sys.argv[1] == "on_signals":
    on_signals(told.set, signal.SIGTERM)
else:
    on_termination(told.set)
with told._cond:  # as `wait` has it where it begins and ends
    os.kill(os.getpid(), signal.SIGTERM)
    sum(range(1000))  # the handler has run by now
assert told.wait(60)
"""


@pytest.mark.parametrize("how", ["on_signals", "on_termination"])
def test_a_signal_that_comes_while_its_event_is_locked_is_heard(how):
    assert subprocess.run([sys.executable, "-c", CODE, how], timeout=100).returncode == 0
