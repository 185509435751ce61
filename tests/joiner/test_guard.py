"""An adapter that hangs or kills its process takes one event with it, and no other."""

import json
import subprocess
import sys

import pytest

from joiner.guard import DEATHS_MAX, Guard

LIFE = """
import ctypes, json, os, re, sys, time
from pathlib import Path
from joiner.adapter import Adapter, BatchAdapter
from joiner.guard import Guard

class Poisoned(Adapter):
    def join(self, primary, foreign):
        what = foreign.data["id"]
        if what == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif what == "sleep":
            time.sleep(1e6)
        elif what == "exit":
            os._exit(3)
        elif what == "segv":
            ctypes.string_at(0)
        elif what == "slow":
            time.sleep(0.2)

guard = Guard(Path(sys.argv[1]), timeout_s=0.5)
if guard.found:
    print(guard.found, file=sys.stderr)
events = sys.argv[2].split()
adapted = BatchAdapter(Poisoned(), guard).join(
    [b"{\\"id\\":1}"] * len(events),
    b"".join(b'{"id":"%s"}\\n' % one.encode() for one in events),
    b"".join(one.encode().ljust(16) for one in events),
)
guard.close()
print(json.dumps([adapted.rows, adapted.failed]))
"""


def live(directory, events):
    return subprocess.run(
        [sys.executable, "-c", LIFE, str(directory), events],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("poison", "told"),
    [
        ("regex", "not back within 0.5 s"),
        ("sleep", "not back within 0.5 s"),
        ("exit", "killed"),
        ("segv", "killed"),
    ],
)
def test_an_event_at_which_its_joiner_ends_again_and_again_is_answered_without_the_adapter(
    tmp_path, poison, told
):
    for _ in range(DEATHS_MAX):
        assert live(tmp_path, f"a {poison} b").returncode != 0
    done = live(tmp_path, f"a {poison} b")
    rows, failed = json.loads(done.stdout)
    assert rows == [0, 2] and "while the adapter worked on this event" in failed["1"]
    assert told in done.stderr and (told == "killed" or "in join" in done.stderr)
    # The adapter may be mended by now: when the event comes again it is asked again.
    assert json.loads(live(tmp_path, "a b").stdout) == [None, {}]
    assert live(tmp_path, f"{poison}").returncode != 0


def test_a_slow_adapter_has_its_time_for_each_event_and_a_single_death_is_forgiven(tmp_path):
    assert json.loads(live(tmp_path, "slow " * 6).stdout) == [None, {}]
    for _ in range(2 * DEATHS_MAX):
        (tmp_path / "adapter.mark").write_bytes(
            b"a".ljust(16)
        )  # killed, by whomever, while it worked on that
        assert json.loads(live(tmp_path, "a b").stdout) == [None, {}]


def test_a_list_of_suspects_that_cannot_be_read_stops_nobody(tmp_path):
    (tmp_path / "adapter.suspects").write_bytes(b"{")
    (tmp_path / "adapter.mark").write_bytes(b"x" * 16)
    guard = Guard(tmp_path, 1.0)
    assert guard.found == (
        f"the joiner ended while its adapter worked on an event (1 of {DEATHS_MAX}): the process was killed"
    )
    guard.close()
